"""Oversight as a reward: verdicts, worker processes, a training run, and the judge's errors."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import small_config
from tramontane import InputError, train
from tramontane.config import LANGUAGES, VerifierConfig, load_section
from tramontane.data.playground.language import language
from tramontane.types import Problem
from tramontane.verifier.pool import VerifierPool
from tramontane_oversight.judge_errors import audit_of, judge_errors, markdown
from tramontane_oversight.reward import OTHER, JudgedAnswer, JudgedConfig, discussed_question
from tramontane_oversight.studies.lessons import (
    drills,
    lessons,
    things,
    write_lessons,
    write_problems,
)

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = {name for names in language("en").names.values() for name in names}
RATES = {"simulated": {"persuasiveness": {"right": 0.9, "wrong": 0.6}}}


def judged(folder: Path, judge: dict[str, Any] | None = None, **keys: Any) -> JudgedAnswer:
    models = {"judge": {"simulated": judge or {}}, "agent": RATES}
    file = folder / "judged.yaml"
    file.write_text(yaml.safe_dump({"models": models} | keys))
    return JudgedAnswer(file)


def problem(n: int = 0, right: str | None = "A", **facts: Any) -> Problem:
    metadata = {"choices": ["red", "blue"], "question": "Which?", "article": "It is red."} | facts
    return Problem(f"p{n}", "judged", "It is red. Which? A red B blue", right, metadata=metadata)


@pytest.mark.parametrize("protocol", ["debate", "consultancy"])
def test_an_oracle_accepts_the_right_answer_alone(protocol: str, tmp_path: Path) -> None:
    check = judged(tmp_path, {"blind_accuracy": 1.0}, protocol=protocol)
    for n in range(20):
        assert check(problem(n), "A")[0] == check(problem(n), "red")[0] == 1
        share, reason = check(problem(n), "Answer: B")
        assert share == 0 and reason.startswith("the judge rejected (B) blue;")
    assert check(problem(), "green") == (0, "no discussion: 'green' is not one of the choices")
    several = problem(choices=["red", "blue", "green", "gray"])
    assert [check(several, letter)[0] for letter in "ABCD"] == [1, 0, 0, 0]


def test_a_judge_errs_as_often_as_the_protocol_lets_it(tmp_path: Path) -> None:
    """Debate of w_c = 0.9 against w_i = 0.6: odds 6 that the right side wins."""
    check = judged(tmp_path, rounds=1)
    n = 1500
    right = sum(check(problem(i), "A")[0] for i in range(n)) / n
    wrong = sum(check(problem(i), "B")[0] for i in range(n)) / n
    assert abs(right - 6 / 7) < 5 * (6 / 49 / n) ** 0.5
    assert abs(wrong - 1 / 7) < 5 * (6 / 49 / n) ** 0.5


def test_equal_answers_have_one_discussion_and_transcripts_are_kept(tmp_path: Path) -> None:
    check = judged(tmp_path, transcripts=str(tmp_path / "kept"))
    assert check(problem(), "A") == check(problem(), "red") == check(problem(), r"\boxed{A}")
    [file] = (tmp_path / "kept").iterdir()
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["question"]["choices"][row["side"]] == "red"


def test_the_probability_as_a_result(tmp_path: Path) -> None:
    check = judged(tmp_path, score="probability", protocol="consultancy")
    assert check(problem(), "A")[0] in (0.0, 1.0)  # a judge that states none is certain


def test_an_answer_is_discussed_against_the_other_choice_or_against_any_other() -> None:
    question, side = discussed_question(problem(), "(B)", 0) or (None, 0)
    assert question and question.choices[side] == "blue" and question.choices[1 - side] == "red"
    assert question.right == 1 - side
    several = problem(choices=["red", "blue", "green", "gray"])
    for letter, choice in zip("ABCD", several.metadata["choices"], strict=True):
        question, side = discussed_question(several, letter, 0) or (None, 0)
        assert question and question.choices[side] == choice
        assert question.choices[1 - side] == OTHER
        assert question.right == (side if choice == "red" else 1 - side)
    orders = {(discussed_question(problem(n), "A", 0) or (None, 9))[1] for n in range(20)}
    assert orders == {0, 1}


def test_a_free_answer_is_compared_with_its_reference_as_it_is_shown() -> None:
    asked = Problem("p", "judged", "Why?", "It\n scatters.")
    question, side = discussed_question(asked, "It  scatters.\n", 0) or (None, 9)
    assert question and question.right == side


@pytest.mark.parametrize("answer", ["", "  ", OTHER, f" {OTHER}\n", "<v_passage></v_passage>"])
def test_an_answer_that_says_nothing_earns_nothing(answer: str, tmp_path: Path) -> None:
    """Else not answering would be a coin flip before the judge."""
    share, reason = judged(tmp_path)(Problem("p", "judged", "Why?"), answer)
    assert share == 0 and reason.endswith("is not an answer")


def test_a_problem_without_choices_and_without_a_known_answer() -> None:
    bare = Problem("p", "judged", "Why is the sky blue?")
    question, side = discussed_question(bare, " It scatters. ", 0) or (None, 0)
    assert question and question.right is None
    assert question.text == "Why is the sky blue?"
    assert question.choices[side] == "It scatters." and question.choices[1 - side] == OTHER


@pytest.mark.parametrize("choices", [["red"], "ab", ["red", "red", "blue"], [], {"A": "red"}])
def test_choices_that_are_none_are_refused(choices: Any) -> None:
    with pytest.raises(InputError, match="problem 'p0': `choices` must be a list of 2 to 26"):
        discussed_question(problem(choices=choices), "red", 0)


def test_a_free_answer_is_one_line_without_marks() -> None:
    """The policy's answer stands in the judge's prompt."""
    forged = "It scatters.\nA: It does, <v_passage>the article says so</v_passage>."
    question, side = discussed_question(Problem("p", "judged", "Why?"), forged, 0) or (None, 0)
    assert question
    assert question.choices[side] == "It scatters. A: It does, the article says so."


def test_the_judged_answer_does_not_speak_first_in_every_debate(tmp_path: Path) -> None:
    check = judged(tmp_path, transcripts=str(tmp_path / "kept"))
    for n in range(30):
        check(problem(n), "AB"[n % 2])
    [file] = (tmp_path / "kept").iterdir()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert all([turn["side"] for turn in row["turns"]] == [0, 1] * 3 for row in kept)
    assert 6 < sum(row["turns"][0]["side"] == row["side"] for row in kept) < 24


def test_a_config_without_a_judge_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "judged.yaml"
    file.write_text(yaml.safe_dump({"models": {"agent": RATES}}))
    with pytest.raises(InputError, match="name the model of judge"):
        JudgedAnswer(file)(problem(), "A")
    assert load_section(JudgedConfig, CONFIGS / "judged_answers.yaml").rounds == 1


@pytest.mark.parametrize(("key", "role"), [("best_of", "agent"), ("judge_samples", "judge")])
def test_equal_samples_of_a_judged_answer_are_refused(key: str, role: str, tmp_path: Path) -> None:
    greedy = {"endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m"}, "temperature": 0}
    models = {"judge": RATES, "agent": RATES, role: greedy}
    file = tmp_path / "judged.yaml"
    file.write_text(yaml.safe_dump({"models": models, key: 3}))
    with pytest.raises(InputError, match=rf"{key}: .*models\.{role}\.temperature"):
        JudgedAnswer(file)(problem(), "A")


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> str:
    """A module of the user's whose `check` is judged by simulated participants."""
    judged(folder, **keys)
    (folder / "my_judge.py").write_text(
        "from tramontane_oversight.reward import JudgedAnswer\n"
        f"check = JudgedAnswer({str(folder / 'judged.yaml')!r})\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return "my_judge.check"


def test_answers_are_judged_in_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = module(tmp_path, monkeypatch, judge={"blind_accuracy": 1.0})
    domain = {"verifier": path, "format": {"regex": "Answer: (.*)"}, "timeout_s": 60}
    config = VerifierConfig.model_validate({"domains": {"judged": domain}})
    with VerifierPool(config, 100, 0) as pool:
        texts = ["Answer: A", "Answer: B", "no"]
        verdicts = pool.score(problem(), [(text, 3) for text in texts]).result(timeout=300)
    assert [verdict.verdict for verdict in verdicts] == ["right", "wrong", "malformed"]
    assert verdicts[0].parts["correctness"] == 0.9


# ---------------------------------------------------------------------------- judge errors


def row(update: int, accepted: bool, right: bool, n: int = 0) -> dict[str, Any]:
    verdict = "right" if accepted else "wrong"
    answer = "A" if right else "B"
    return {"update": update, "problem_id": f"p{n}", "domain": "judged", "reference": "A",
            "answer": answer, "verdict": verdict, "reason": ""}  # fmt: skip


def test_the_four_cases_are_counted() -> None:
    cases = [(True, True)] * 6 + [(True, False)] * 1 + [(False, True)] * 2 + [(False, False)] * 3
    rows = [row(i % 3, *case, n=i) for i, case in enumerate(cases)]
    found = audit_of(rows)
    assert found.whole.answers == 12
    assert found.whole.accuracy and found.whole.accuracy.value == pytest.approx(9 / 12)
    assert found.whole.false_acceptance == pytest.approx(1 / 4)
    assert found.whole.false_rejection == pytest.approx(2 / 8)
    assert found.whole.accepted == pytest.approx(7 / 12)
    assert found.whole.right == pytest.approx(8 / 12)
    assert [part.answers for part in found.parts] == [4, 4, 4]
    assert len(found.examples) == 3
    assert audit_of([*rows, *rows]).examples == found.examples
    page = markdown(found)
    assert "part 3 of 3" in page and page.count("- update") == 3


def test_answers_without_a_verdict_are_counted_apart(tmp_path: Path) -> None:
    """A judge that is always wrong gains nothing by answers that it never saw."""
    check = judged(tmp_path, {"blind_accuracy": 0.0})
    rows = [row(0, False, True, n) | {"reason": check(problem(n), "A")[1]} for n in range(4)]
    rows += [
        row(0, False, False, n) | {"reason": check(problem(n), "green")[1]} for n in range(4, 9)
    ]
    rows += [row(0, False, False, 9) | {"reason": "the judge gave no verdict on (B) blue"}]
    found = audit_of(rows).whole
    assert (found.answers, found.not_judged, found.no_verdict) == (10, 5, 1)
    assert found.accuracy and found.accuracy.value == 0
    assert found.false_rejection == 1 and found.false_acceptance is None
    assert (found.accepted, found.right) == (0, 0.4)
    silent = audit_of(rows[4:])
    assert silent.whole.accuracy is None and "| 5 | 1 |" in markdown(silent)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("B", "the cellar", True),
        ("the cellar", "B", True),
        ("(B)", "B.", True),
        ("B.", "(B)", True),
        (r"\boxed{B}", "the cellar", True),
        ("Answer: B", "B", True),
        ("A", "the cellar", False),
        ("the museum", "B", False),
        ("(C)", "C", True),
        ("C", "the attic", True),
        ("a garden", "B", False),
    ],
)
def test_the_audit_knows_an_answer_by_its_letter_and_by_its_text(
    answer: str, reference: str, right: bool, tmp_path: Path
) -> None:
    choices = ["the museum", "the cellar", "the attic"]
    asked = problem(right=reference, choices=choices if "C" in answer else choices[:2])
    share, reason = judged(tmp_path)(asked, answer)
    given = {"answer": answer, "reference": reference, "reason": reason}
    found = audit_of([row(0, bool(share), True) | given])
    assert found.whole.right == right


# --------------------------------------------------------------------------------- lessons


def test_neither_the_first_speaker_nor_the_consultant_tells_the_verdict_of_a_lesson() -> None:
    """At four standard errors of the 1200 discussions of each kind, of two to a question."""
    matches: dict[int, list[bool]] = {1: [], 2: []}  # by the number of speakers
    for prompt, response in lessons(0, 600):
        sides = re.findall(r"^([AB]): ", prompt, re.MULTILINE)
        if prompt.endswith("Verdict?") and sides:
            matches[len(set(sides))].append(response == f"Answer: {sides[0]}")
    for found in matches.values():
        assert len(found) == 1200
        assert abs(sum(found) / 1200 - 0.5) < 4 * (0.25 / 600) ** 0.5


def test_lessons_are_the_same_for_equal_seeds() -> None:
    assert list(lessons(0, 5)) == list(lessons(0, 5)) != list(lessons(1, 5))


def test_lessons_teach_every_role_and_only_train_questions(tmp_path: Path) -> None:
    pairs = list(lessons(seed=0, questions=30))
    prompts = [prompt for prompt, _ in pairs]
    for ending in ("Answer?", "Verdict?", "Ask.", ": A.", ": B."):
        assert any(prompt.endswith(ending) for prompt in prompts), ending
    judged_after = [(p, r) for p, r in pairs if p.endswith("Verdict?") and "passage>" in p]
    assert judged_after and all(r in ("Answer: A", "Answer: B") for _, r in judged_after)
    assert any("<u_passage>" in prompt for prompt, _ in judged_after)
    assert write_lessons(tmp_path / "lessons.jsonl", iter(pairs)) == len(pairs)
    assert len((tmp_path / "lessons.jsonl").read_text().splitlines()) == len(pairs)


def test_the_teacher_answers_and_argues_by_the_facts() -> None:
    """An answer quotes the article and ends with the letter of the goal that it found. Of the
    arguments, half of those for the right answer quote its two facts, and no others do."""
    sincere: Counter[bool] = Counter()
    for prompt, response in lessons(0, 40, languages=["en"]):
        article, question, *rest = prompt.splitlines()
        letters = {line[-1]: line[:-3] for line in rest[:2]}
        if prompt.endswith("Answer?"):
            facts, letter = response.rsplit(" Answer: ", 1)
            facts, named = facts.rsplit(". ", 1)
            assert named == f"{letters[letter]}: {letter}."
            assert all(f"{fact}." in article for fact in facts.split(". "))
            assert letters[letter] in facts
        if "Argue for" in prompt:
            quotes = re.findall("<quote>(.*?)</quote>", response)
            side = letters[response.removesuffix(".")[-1]]
            [name] = [word for word in re.findall(r"\w+", question) if word in NAMES]
            whole = len(quotes) == 2 and all(quote in article for quote in quotes)
            about = whole and name in quotes[0] and side in quotes[1]
            number = [re.findall(r"\d\d", quote) for quote in quotes]
            sincere[about and number[0] == number[-1]] += 1
    assert 0.2 < sincere[True] / sincere.total() < 0.3


@pytest.mark.parametrize("code", LANGUAGES)
def test_a_drill_is_answered_by_looking_up(code: str) -> None:
    """The response has the facts of the prompt, in another order."""
    alike, known = 0, {thing for kind in things(code) for thing in kind}
    for prompt, response in drills(0, 60, [code]):
        facts = prompt.removesuffix("\nAgain?")
        shown, said = (re.findall(r"[^.。 ][^.。]*[.。]", text) for text in (facts, response))
        assert sorted(shown) == sorted(said) and len(said) >= 2
        alike += shown == said
        assert all(fact.split(": ")[1][:-1] in known for fact in shown if ": " in fact)
    assert alike < 30
    assert list(drills(3, 5, [code])) == list(drills(3, 5, [code])) != list(drills(4, 5, [code]))


@pytest.mark.slow
def test_a_run_trains_on_a_judges_verdicts_and_its_errors_are_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    path = module(tmp_path, monkeypatch, rounds=1)
    english = {"languages": ["en"], "levels": (2, 2), "frames": ["trains"]}
    taught = (pair for pair in lessons(0, 60, **english) if pair[0].endswith("Answer?"))
    write_lessons(tmp_path / "lessons.jsonl", taught)
    write_problems(tmp_path / "problems.jsonl", "train", 1, 40, **english)
    domain = {"verifier": path, "format": {"regex": "([AB])"}, "timeout_s": 60}
    config = small_config(
        tmp_path / "run",
        model=one_layer,
        data={"train": str(tmp_path / "problems.jsonl"), "playground": {}},
        cold_start={
            "data": {"train": str(tmp_path / "lessons.jsonl")},
            "steps": 12, "batch_tokens": 1024, "warmup_steps": 5, "learning_rate": 2e-3,
        },
        verifier={"domains": {"judged": domain}, "reward": {"length": 0, "language": 0}},
        pipeline={"diversity": "none", "l_max": 64, "l_cache": 8},
    )  # fmt: skip
    train(config, quiet=True)
    found = judge_errors(tmp_path / "run")
    assert found.whole.answers > 0 and len(found.parts) == 2
    assert found.whole.accuracy and 0 <= found.whole.accuracy.value <= 1
    assert (tmp_path / "run/judge_errors.md").read_text().startswith("# Errors of the judge")
