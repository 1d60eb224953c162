"""The math verifier: known repairs, known false positives, policies (docs/math-answers.md)."""

import gzip
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import DATA
from tests.verifier import processor
from tests.verifier.math.math_cases import RIGHT, WRONG
from tramontane.config import MathConfig, VerifierConfig
from tramontane.statistics import maj_at_k
from tramontane.types import Problem
from tramontane.verifier.math.grade import is_unevaluated, judge_answer
from tramontane.verifier.math.normalize import normalize, vote
from tramontane.verifier.math.numbers import to_number
from tramontane.verifier.math.units import split_unit
from tramontane.verifier.reward import grade

HOSTILE = [
    "9^{9^{9^9}}",
    "9^9^9^9",
    "9^{9^{9}}",
    "((((9^9)^9)^9)^9)^9",
    "10^{1000000}",
    "1" + "0" * 900,
    "100000!",
    "((3!)!)!",
    "9!!!!",
    "(" * 5000 + "1" + ")" * 5000,
    "(" * 200 + "1" + ")" * 200,
    "{" * 100 + "1" + "}" * 100,
    "(1," * 300 + "1" + ")" * 300,
    r"\sqrt{" * 30 + "2" + "}" * 30,
    r"\binom{1000000}{500000}",
    r"\sum_{k=1}^{100000000} k",
    r"\begin{pmatrix}" + r"\\".join("&".join("1" * 60) for _ in range(60)) + r"\end{pmatrix}",
    "1" * 100_000,
    "1e999999999",
    "0.(" + "3" * 300 + ")",
    "1=" * 300 + "1",
    "a " * 450,
    ",".join("1" * 400),
    "x" * 900,
    "__import__('os').system('true')",
    r"\input{/etc/passwd}",
    "\x00\x01",
    "√" * 500,
    "²" * 500,
    "\\" * 999,
    "$" * 999,
    r"\text{" * 100,
    "=",
    "a = ==",
    "x r^2 (esp)! (esy)!",
]


@pytest.mark.parametrize(("reference", "prediction"), RIGHT)
def test_right(reference, prediction):
    assert judge_answer(prediction, reference)[:2] == ("right", "")


@pytest.mark.parametrize(("reference", "prediction"), WRONG)
def test_wrong(reference, prediction):
    assert judge_answer(prediction, reference).outcome == "wrong"


@pytest.mark.parametrize("prediction", HOSTILE, ids=lambda p: p[:20].encode().hex())
@pytest.mark.parametrize("reference", ["5", "x+1", "x = 5"])
def test_hostile_answers_are_wrong_and_quick(reference, prediction):
    with processor.at_most(3, prediction):
        assert judge_answer(prediction, reference).outcome == "wrong"


def test_a_chosen_letter_is_one_vote_in_all_its_spellings():
    spellings = ["D", "(D)", r"\text{(D)}", "D. 10 m/s", "D) 10", "Option D", "D Cecile"]
    judged = [judge_answer(spelling, "D") for spelling in spellings]
    assert {(j.outcome, j.answer) for j in judged} == {("right", "D")}
    assert {judge_answer(spelling, "A").answer for spelling in spellings} == {"D"}
    votes = [vote(judge_answer(answer, "D").answer) for answer in ("D", "(D)", "D. 10 m/s", *"AA")]
    assert maj_at_k(votes, [True] * 3 + [False] * 2, 5) == 1.0
    for reference, answer in (("D", "C or D"), ("D", "x + 1"), ("5", "(D)")):
        assert judge_answer(answer, reference).answer == normalize(answer)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.fractions(-2, 2, max_denominator=12),
    st.fractions(Fraction(1, 6), 3, max_denominator=6),
    st.lists(st.integers(-5, 5), min_size=2, max_size=5),
)
def test_a_family_is_the_same_in_parts(first, step, turns):
    def member(f, s, k):
        offset = rf"\frac{{{f.numerator}\pi}}{{{f.denominator}}}"
        return rf"{offset} + {k} \cdot \frac{{{s.numerator}\pi}}{{{s.denominator}}}"

    count = len(turns)
    parts = [
        member(first + step * (n + turn * count), step * count, "k") for n, turn in enumerate(turns)
    ]
    reference = rf"{member(first, step, 'n')}, n \in \mathbb{{Z}}"
    for members, verdict in ((parts, "right"), (parts[1:], "wrong"), ([*parts, "k"], "wrong")):
        prediction = rf"{', '.join(members)}, k \in \mathbb{{Z}}"
        assert judge_answer(prediction, reference).outcome == verdict
        assert judge_answer(reference, prediction).outcome == verdict


def test_unusable_references_are_unscorable():
    for reference in (None, "", "  ", r"\frac{5}{", "9^{9^{9^9}}", "1" * 2000, "="):
        for prediction in ("x+1", "x = 5", "a = ==", "x < 3", r"\{1, 2\}"):
            judgment = judge_answer(prediction, reference)
            assert judgment.outcome != "right"
            if prediction == "x+1":
                assert judgment.outcome == "unscorable", reference
            assert judgment.reason
    assert judge_answer("Any text", "any text").outcome == "right"


@pytest.mark.parametrize("reference", [r"\lim_{x\to 0} f(x)", "t(0,4]", r"x \sim y", "n!!"])
def test_a_reference_that_cannot_be_parsed_is_compared_as_written(reference):
    assert judge_answer(f" ${reference}$.", reference).outcome == "right"
    for prediction in ("x+1", "0", "(n!)!", r"\{1, 2\}"):
        outcomes = [
            judge_answer(prediction, reference, MathConfig(unreadable=verdict)).outcome
            for verdict in ("wrong", "unscorable")
        ]
        assert outcomes in (["wrong", "unscorable"], ["wrong", "wrong"]), prediction
    assert judge_answer("x+1", r"\frac{5}{").outcome == "unscorable"  # nobody can be right


UNEVALUATED = [
    "17+25",
    r"6 \cdot 7",
    r"\frac{84}{2}",
    "84/2",
    "7!/5!",
    r"\binom{42}{1}",
    "50-8",
    r"2(10+11)",
    "x = 17+25",
    r"\sqrt{1764}",
    r"126 \bmod 84",
    r"21\text{ cm} \cdot 2",
]
FINAL = ["42", "42.0", r"4.2\times 10^{1}", r"42\text{ cm}", "x = 42", "17+25 = 42", "42,0", "+42"]


def test_unevaluated_arithmetic_is_refused_where_the_policy_says_so():
    strict = MathConfig(unevaluated="wrong")
    for prediction in UNEVALUATED[:-1]:
        assert judge_answer(prediction, "42").outcome == "right", prediction
        assert judge_answer(prediction, "42", strict).reason == "unevaluated arithmetic", prediction
    for prediction in FINAL[:-2]:
        assert judge_answer(prediction, "42", strict).outcome == "right", prediction
    for final in (
        r"\frac{\sqrt{3}}{2}",
        r"1+\sqrt{2}",
        r"2\sqrt{3}",
        "x^2-3",
        "2^{1/3}",
        r"\log_2 3",
        r"(1, \frac{1}{2})",
        "3+4i",
        r"\frac{2}{3}\pi",
        r"\{1, 2\}",
        "52_8",
    ):
        assert judge_answer(f"${final}$ ", final, strict).outcome == "right", final
        assert not is_unevaluated(final, "42"), final
    assert judge_answer("2^{3} + 1", "1 + 2^{3}", strict).outcome == "right"  # as the reference


def test_policies_with_a_key():
    assert judge_answer(r"\ln 5", r"\log 5").outcome == "wrong"
    assert judge_answer(r"\ln 5", r"\log 5", MathConfig(log="natural")).outcome == "right"
    assert judge_answer(r"\log_{10} 5", r"\log 5", MathConfig(log="natural")).outcome == "wrong"
    for places, right in ((2, ["0.33", "0.333"]), (6, ["0.333333"]), (None, [])):
        policy = MathConfig(rounded_places=places)
        for decimal in ("0.3", "0.33", "0.333333"):
            expected = places is not None and len(decimal) - 2 >= places
            outcome = judge_answer(decimal, "1/3", policy).outcome
            assert (outcome == "right") == expected, (places, decimal)
        assert all(judge_answer(decimal, "1/3", policy).outcome == "right" for decimal in right)
        assert judge_answer("0.34", "1/3", policy).outcome == "wrong"


def policies():
    """The rows of the table in docs/math-answers.md: question, reference, right, wrong, key."""
    page = (Path(__file__).parents[3] / "docs" / "math-answers.md").read_text(encoding="utf-8")
    rows = page.partition("## Policies")[2].partition("[The rules in full]")[0].split("\n| ")[2:]
    for row in rows:
        cells = [cell.strip() for cell in row.strip().removesuffix("|").split(" | ")]
        yield cells[0], *(re.findall("`([^`]+)`", cell) for cell in (*cells[1:], "", "")[:4])


@pytest.mark.parametrize(("question", "reference", "right", "wrong", "key"), [*policies()])
def test_each_row_of_the_table_of_policies(question, reference, right, wrong, key):
    problem = Problem("p", "math", "?", reference[0])

    def verdicts(policy):
        config = VerifierConfig(math=policy)
        for answer in (*right, *wrong):
            boxed = answer if "boxed" in answer else f"\\boxed{{{answer}}}"
            text = f"<think>We look at the problem.</think>{boxed}"
            yield grade(problem, text, 9, config, 100, 50).verdict

    judged = [*verdicts(MathConfig())]
    assert judged == ["right"] * len(right) + ["wrong"] * len(wrong)
    for pair in key:
        name, value = pair.split(": ")
        value = int(value) if value.isdigit() else value
        assert [*verdicts(MathConfig(**{name: value}))] != judged


def failures(domain):
    """Minimal cases that an earlier version judged wrongly."""
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    rows = []
    for name in ("verdict_failures.jsonl", "verdicts4.jsonl"):
        rows += map(json.loads, (DATA / name).read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["domain"] == domain]


def test_shared_failures():
    wrong = [
        (row["id"], judgment)
        for row in failures("math")
        if (judgment := judge_answer(row["prediction"], row["answer"])).outcome != row["expected"]
    ]
    assert wrong == []


def test_to_number():
    assert to_number("0.1(6)") == Fraction(1, 6)
    assert to_number(r"-1\frac{1}{2}") == Fraction(-3, 2)
    assert to_number("1,234,567") == 1234567
    assert to_number("10^{-2}") == Fraction(1, 100)
    for text in ("", "x", "1/0", "1,2", "10^{9999}", "1" * 500, "--5", "1,23"):
        assert to_number(text) is None, text


def test_split_unit():
    assert split_unit(normalize(r"15\text{ cm}^2")) == ("15", "cm^2")
    assert split_unit(normalize("3 square feet")) == ("3", "ft^2")
    assert split_unit(normalize(r"\$12.50")) == ("12.50", "usd")
    assert split_unit(normalize("90°")) == ("90", "deg")
    assert split_unit("x") == ("x", "")
    assert split_unit("2x") == ("2x", "")


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_shared_cases():
    """At least 0.99 of the core cases, and no false positive."""
    lines = (DATA / "math_verify_cases.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    core = [row for row in rows if row["core"]]
    outcomes = [judge_answer(row["pred_answer"], row["gold_answer"]).outcome for row in core]
    pairs = list(zip(core, outcomes, strict=True))
    assert [r["id"] for r, o in pairs if o == "right" and not r["expected"]] == []
    agreed = sum(outcome == ("right" if row["expected"] else "wrong") for row, outcome in pairs)
    assert agreed / len(core) >= 0.99


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_references_are_right_for_themselves():
    """References of MATH-500, respelt as models do, are right; their neighbors are wrong."""
    lines = gzip.decompress((DATA / "math500.jsonl.gz").read_bytes()).decode().splitlines()
    answers = [json.loads(line)["answer"] for line in lines][:80]
    for answer, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        respelt = f" ${answer}$. ".replace("\\frac", "\\dfrac")
        assert judge_answer(respelt, answer).outcome == "right", answer
        if normalize(answer) != normalize(other):
            assert judge_answer(other, answer).outcome == "wrong", (answer, other)


@pytest.mark.parametrize("prediction", ["i", "\\log_2 8", "\\pi", "x_1"])
def test_no_answer_makes_a_reference_unscorable_that_others_are_judged_by(prediction: str) -> None:
    """A policy could learn to leave by such answers, since their groups are dropped."""
    assert judge_answer("9^{387420489}", "9^{9^{9}}").outcome == "right"
    assert judge_answer(prediction, "9^{9^{9}}").outcome == "wrong"
