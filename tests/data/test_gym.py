"""Reasoning Gym: problems drawn the same everywhere, and judged by their own scorers."""

import ast
import io
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice

import pytest

from tramontane.config import DataConfig, VerifierConfig
from tramontane.data import gym, playground
from tramontane.data.gym import gym_problems
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.verifier.gym import answer_of, is_harmless, score
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade

if find_spec("reasoning_gym") is None:  # its import takes a moment, and where no test runs, too
    pytest.skip("could not import 'reasoning_gym'", allow_module_level=True)

SECONDS = 200.0


def load(name, limit=6, split="train", seed=0):
    source = f"reasoning_gym:{name}"
    return load_problems(
        source, DataConfig(train="playground:"), split=split, limit=limit, seed=seed
    )


def graded(problem, answer, **reward):
    config = VerifierConfig(reward=reward) if reward else VerifierConfig()
    return grade(problem, f"<think>I think.</think>\\boxed{{{answer}}}", 9, config, 100, 50)


# Comma lists in another order, digits reversed, the target itself, a zero for a grid: what a
# comparison as mathematics takes for the same.
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("countdown", lambda p: ast.literal_eval(p.metadata["entry"])["metadata"]["target"]),
        ("number_sorting", lambda p: repr(ast.literal_eval(p.answer)[::-1])),
        ("number_sorting", lambda p: repr(["nan"] * len(ast.literal_eval(p.answer)))),
        ("number_sorting", lambda p: repr([x + "1" for x in ast.literal_eval(p.answer)])),
        ("complex_arithmetic", lambda p: "nan"),
        ("complex_arithmetic", lambda p: "NaN + nani"),
        ("spell_backward", lambda p: p.answer + p.answer[-1]),
        ("chain_sum", lambda p: p.answer[::-1] + "1"),
        ("spiral_matrix", lambda p: " ".join(p.answer.split()[::-1])),
        ("mini_sudoku", lambda p: "0"),
        ("rotate_matrix", lambda p: "\n".join(p.answer.split("\n")[::-1])),
        ("tower_of_hanoi", lambda p: p.answer.split("\n")[0]),
    ],
)
def test_a_generators_own_answer_is_right_and_its_neighbor_is_not(name, wrong):
    for problem in load(name, 3):
        bad = wrong(problem)
        assert problem.domain == "reasoning_gym"
        assert graded(problem, problem.answer).verdict == "right"
        assert graded(problem, bad).verdict == "wrong", (problem.answer, bad)


def test_a_stream_has_every_item_once_whatever_is_drawn_at_a_time():
    drawn = [item["question"].strip() for item in gym._draw("chain_sum", 0, 0, 200)]
    train = [text for text in drawn if playground.split_of(text) == "train"]
    problems = islice(gym.gym_problems("chain_sum", "train", 0), len(train))
    assert [problem.problem for problem in problems] == train


def test_another_form_of_a_right_answer_is_right():
    [problem] = load("countdown", 1)
    flipped = f"({problem.answer})"
    assert graded(problem, flipped).verdict == "right"


def test_partial_scores_are_paid_by_a_key():
    [problem] = load("mini_sudoku", 1)
    rows = problem.answer.split("\n")
    nearly = "\n".join([*rows[:-1], rows[-1][::-1]])
    assert graded(problem, nearly).parts["correctness"] == 0.0
    paid = graded(problem, nearly, reasoning_gym="partial")
    assert 0 < paid.parts["correctness"] < 0.9 and paid.verdict == "wrong"
    assert graded(problem, problem.answer, reasoning_gym="partial").reward == pytest.approx(1.1)


@pytest.mark.parametrize("name", ["game_of_life_halting", "coin_flip", "puzzle24"])
def test_a_scorer_that_a_constant_pleases_is_refused(name):
    with pytest.raises(InputError, match="full marks to the text .* whatever the problem"):
        load(name)


@pytest.mark.parametrize("name", ["gsm_symbolic", "fraction_simplification", "letter_jumble"])
def test_a_scorer_that_takes_an_answer_beside_another_is_refused(name):
    with pytest.raises(InputError, match="full marks to its own answer beside another one"):
        load(name)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("knights_knaves", lambda own: " ".join(part.strip(" .,") for part in own.split(","))),
        ("quantum_lock", lambda own: own.replace(" → ", "")),
        ("kakurasu", lambda own: own.replace(" ", "")),
        ("sokoban", " ".join),
        ("word_sorting", lambda own: own.replace(", ", ",")),
        ("spell_backward", str.upper),
        ("chain_sum", str),
    ],
)
def test_text_around_an_answer_is_not_ignored(name, other):
    for problem in load(name, 3):
        own = problem.answer
        assert graded(problem, own).verdict == graded(problem, other(own)).verdict == "right"
        for around in ("not {}", "{} zz", "{} or 7", "{}, zz", "I say {}"):
            assert graded(problem, around.format(own)).verdict == "wrong", around


@pytest.mark.slow
def test_draws_are_the_same_in_every_process():
    # Another process, with another order of sets: it checks no generator, so draws nothing before.
    program = (
        "import json, sys\n"
        "from itertools import islice\n"
        "from tramontane.data import gym\n"
        "for name in sys.argv[1:]:\n"
        "    for p in islice(gym._stream(name, 'train', 3), 5):\n"
        "        print(json.dumps([p.id, p.answer]))\n"
    )
    # Of these, items depend on the order of sets, or on the `random` module.
    names = ["group_anagrams", "word_ladder", "graph_color", "jugs", "zebra_puzzles"]
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    there = [json.loads(line) for line in done.stdout.splitlines()]
    drawn = [p for name in names for p in islice(gym_problems(name, "train", 3), 5)]
    here = [[p.id, p.answer] for p in drawn]
    assert here == there and len(here) == 25


@pytest.mark.slow
def test_an_answer_is_never_run_as_a_program():
    """Some scorers evaluate answers."""
    hostile = [
        "print(1)", "[print(1)]", "[x for x in [print(1)]]", "getattr(1, 'x')", "().__class__",
        "(lambda: 1)()", "np.load('x')", "1; import math", "x := 3", "len('a')",
        "x + 1 or x + 2", "x if 1 else 2", "x + 1 and x + 2",
    ]  # fmt: skip
    for text in hostile:
        assert not is_harmless(text), text
    for text in (
        "3 * (4 + 5)",
        "[[1, 0], [0, 1]]",
        "['A', 'B']",
        "x**2/2 + sin(x)",
        '{"a": true}',
        "1.5e3",
        "2x",
    ):
        assert is_harmless(text), text
    for name in ("string_insertion", "countdown", "simple_integration", "binary_matrix"):
        [problem] = load(name, 1)
        entry = ast.literal_eval(problem.metadata["entry"])
        assert [score(name, entry, text) for text in hostile] == [0.0] * len(hostile)


def test_the_answer_is_in_a_box_or_between_tags():
    assert answer_of(r"so \boxed{1 2} it is") == "1 2"
    assert answer_of("<answer>a</answer> no, <answer>b\nc</answer>") == "b\nc"
    assert answer_of(" 1 2\n3 4 ") == "1 2\n3 4"


def test_mistakes_are_named():
    with pytest.raises(InputError, match=r"no such dataset; did you mean one of .*chain_sum"):
        load("chainsum")
    with pytest.raises(InputError, match="composite.*cannot be drawn from"):
        next(gym_problems("composite", "train", 0))


@pytest.mark.slow
def test_the_pool_judges_them_within_its_limits():
    [problem] = load("countdown", 1)
    said = [problem.answer, "9**9**9**9", "no", ""]
    texts = [(f"<think>x</think>\\boxed{{{text}}}", 5) for text in said]
    domains = {"reasoning_gym": {"timeout_s": 4}}
    with VerifierPool(VerifierConfig(domains=domains), 100, 50) as pool:
        verdicts = pool.score(problem, texts).result(timeout=SECONDS)
    assert [v.verdict for v in verdicts] == ["right", "wrong", "wrong", "wrong"], verdicts


def test_a_generator_that_fails_leaves_no_limit_behind():
    """It would end the process while nothing is asked of it."""
    before, answers = signal.getsignal(signal.SIGALRM), io.StringIO()
    request = {"name": "composite", "seed": 0, "first": 0, "count": 0}
    try:
        gym.main(io.StringIO(json.dumps(request)), answers)
        left = signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "cannot be drawn from" in json.loads(answers.getvalue())["fault"] and left == 0
