"""The environment `repair`, and the playground's traces for it."""

import asyncio
from random import Random

import pytest

from tramontane.config import Config, DataConfig, MixtureConfig
from tramontane.data.playground import conversation, examples, problems
from tramontane.data.playground.traces import Style
from tramontane.environments.calls import Parsed
from tramontane.environments.repair import _tried
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.session import Session
from tramontane.evaluation.conversed import right_by_turn
from tramontane.types import Problem
from tramontane.verifier.code import sandbox

needs_sandbox = pytest.mark.skipif(sandbox.probe() == "rlimits", reason="needs root and a sandbox")
DATA = DataConfig(train="playground:", environment="repair")


def some(count=8, levels=(1, 3)):
    return list(problems("train", 3, levels, ("en",), ("repairs",), count=count))


def played(problem, *texts, config=None):
    """(answers, rewards) of a conversation in which the model says these texts."""

    async def play():
        session = Session(DATA, 1000, Runner())
        try:
            await session.start(problem, 0, config or Config())
            replies = [await session.step(Parsed(text, "", text, [])) for text in texts]
        finally:
            await session.close()
        return replies

    return asyncio.run(asyncio.wait_for(play(), 100))


def fenced(program):
    return f"```python\n{program}```"


@needs_sandbox
@pytest.mark.slow
def test_programs_are_answered_until_they_pass():
    problem = some(1)[0]
    wrong, right = problem.metadata["wrong"][0], problem.metadata["solution"]
    first, second, third = played(problem, "no program", fenced(wrong), fenced(right))
    assert "There is no program" in first.messages[0]["content"]
    told = second.messages[0]["content"]
    assert told.startswith("Test 1 of 3 failed.\nInput:\n") and "It printed:" in told
    assert [(reply.reward, reply.done) for reply in (first, second)] == [(None, False)] * 2
    assert (third.reward, third.done, third.messages) == (1.0, True, [])


@needs_sandbox
@pytest.mark.slow
def test_what_was_learned_by_heart_earns_nothing():
    problem = some(1)[0]
    known = {case["input"].strip(): case["output"].strip() for case in problem.tests["cases"][:3]}
    (reply,) = played(problem, fenced(f"print({known!r}.get(input().strip(), 0))\n"))
    assert (reply.reward, reply.done) == (0.0, True)


def test_what_cannot_be_run_is_told_or_fails():
    tests = {"type": "stdio", "cases": [{"input": "1", "output": "1"}]}
    problem = Problem("told", "code", "?", tests=tests)
    none, other = played(problem, "no program", "```cobol\n1\n```")
    assert [reply.done or reply.reward for reply in (none, other)] == [None, None]
    assert none.messages[0]["content"].startswith("There is no program: write it")
    assert other.messages[0]["content"].startswith("cannot run cobol: only Python")
    brief = Config(conversation={"answer_bytes": 64})
    (cut,) = played(problem, "no program", config=brief)
    assert cut.messages[0]["content"].endswith(" bytes]")
    before = _tried.cache_info()
    played(problem, "no program")
    assert _tried.cache_info().hits == before.hits + 1  # the group's others wrote the same
    broken = Problem("broken", "code", "?", tests={"type": "stdio", "cases": []})
    with pytest.raises(EnvironmentFailed, match="RuntimeError: the tests "):
        played(broken, fenced("print(1)\n"))
    assert _tried.cache_info().currsize == 0  # the next conversation tries again


def test_a_row_without_tests_is_named():
    with pytest.raises(EnvironmentFailed, match="row 7: repair needs problems with tests"):
        played(Problem("p", "code", "?", where="row 7"), "")


@needs_sandbox
@pytest.mark.slow
def test_traces_hold_what_the_environment_answers():
    flaws = dict.fromkeys(("ramble", "no_box", "unclosed", "unopened"), 0)
    mixture = MixtureConfig(work=0.5, guess=0.5, slip=0.8, **flaws)
    seen = 0
    for example in examples(5, 12, mixture, (1, 3), ("en",), ("repairs",)):
        _, *messages = example["messages"]
        said = [m["content"].partition("</think>")[2] for m in messages if m["role"] != "user"]
        replies = played(example["problem"], *said)
        told = [m["content"] for m in messages if m["role"] == "user"]
        answers = [reply.messages[0]["content"] for reply in replies if reply.messages]
        assert answers[: len(told)] == told
        seen += len(told)
    assert seen > 4


def test_work_repairs_and_guesses_try_again():
    rng = Random(1)
    for problem in some(20):
        worked = conversation(problem, rng, Style(right=False))
        if len(worked) > 1:
            assert "It should print" in worked[-1]["content"]
            assert problem.metadata["solution"] in worked[-1]["content"]
        guessed = conversation(problem, rng, Style(manner="guess", right=False))
        assert all("just write" in m["content"] for m in guessed if m["role"] == "assistant")
        assert len(guessed) <= 5 and guessed[-1]["role"] == "assistant"


def test_right_by_turn_is_pass_after_each_turn():
    rows = [("right", 1), ("right", 3), ("wrong", 3), ("right", 2), ("unscorable", 1)]
    made = [{"verdict": verdict, "turns": [{}] * turns} for verdict, turns in rows]
    assert right_by_turn(made) == [0.25, 0.5, 0.75]
    assert right_by_turn(made[-1:]) == []
    assert right_by_turn([{"turns": [{}]}]) == []  # of a batch, before its verdicts are joined
