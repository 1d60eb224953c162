"""Playground problems that need a tool, the guessing game, and their traces as conversations."""

import asyncio
import hashlib
import json
import re
from random import Random

import pytest

from tramontane.config import DataConfig, MixtureConfig
from tramontane.data.playground import (
    LANGUAGES,
    conversation,
    examples,
    problems,
    sample_style,
    split_of,
)
from tramontane.data.playground.conversations import UNPARSED
from tramontane.data.playground.tasks import KINDS
from tramontane.data.playground.traces import Style
from tramontane.environments.calls import Parser
from tramontane.environments.running import Runner
from tramontane.environments.session import Session
from tramontane.models.loading import load_tokenizer
from tramontane.types import PAPER_TAGS
from tramontane.verifier.math import judge_answer

TOOLS = {
    "long_sums": ("calculator",),
    "lookups": ("notebook",),
    "articles": ("notebook",),
    "sessions": ("python",),
}
GOOD = Style()
FLAWED = MixtureConfig(work=0.6, guess=0.2, ramble=0.2, no_box=0, unclosed=0, unopened=0, switch=0)


def some(kind, count, split="train", levels=(1, 8), **choices):
    return list(problems(split, 3, levels, kinds=(kind,), count=count, **choices))


def boxed(text):
    return re.findall(r"\\boxed\{([^}]+)\}", text)


@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_disjoint_statements_and_ids_differ_and_rows_are_json(kind):
    drawn = some(kind, 120) + some(kind, 60, "test")
    assert len({p.id for p in drawn}) == len(drawn)
    assert {p.language for p in drawn} == set(LANGUAGES)
    assert json.loads(json.dumps([p.metadata for p in drawn]))
    assert not any("{" in p.problem or "}" in p.problem for p in drawn)
    if kind == "long_sums":
        train, test = ({p.metadata["expression"] for p in d} for d in (drawn[:120], drawn[120:]))
        assert not train & test and {split_of(e) for e in test} == {"test"}


def test_answers_agree_with_an_independent_calculation():
    for problem in some("long_sums", 80):
        assert eval(problem.metadata["expression"]) == int(problem.answer)
        assert len(re.findall(r"\d{3,}", problem.problem)) >= 2
    for problem in some("sessions", 80):
        names = {}
        *first, last = (call.arguments["code"] for call in problem.metadata["calls"])
        exec("\n".join(first), names)
        assert eval(last, names) == int(problem.answer)
        assert all(code in problem.problem for code in (*first, last))
    for problem in some("lookups", 80):
        facts = problem.metadata["facts"]
        (key,) = re.findall(r"[A-Z]\d\d", problem.problem)
        hops = 0
        while key in facts:
            key, hops = facts[key], hops + 1
        assert key == problem.answer and hops >= 2
    for problem in some("articles", 80):
        facts, goals = problem.metadata["facts"], problem.metadata["goals"]
        names = (key for key in facts if not key.isdigit() and key in problem.problem)
        name = max(names, key=len)  # one may begin like another
        (number,) = re.findall(r"\d+", facts[name])
        (goal,) = (goal for goal in goals if goal in facts[number])
        assert goal == problem.answer and goal not in problem.problem
        assert judge_answer(goal, problem.answer).outcome == "right"
        others = {judge_answer(g, problem.answer).outcome for g in goals if g != goal}
        assert others == {"wrong"} and len(facts) == 2 * len(goals)


def test_halving_finds_every_number_and_one_guess_less_would_not():
    for problem in some("guessing", 60):
        (low, high), guesses = problem.metadata["between"], problem.metadata["guesses"]
        assert low < int(problem.answer) < high
        assert 2 ** (guesses - 1) < high - low <= 2**guesses
        turns = conversation(problem, Random(0), GOOD)
        assert boxed(turns[-1]["content"]) == [problem.answer]
        assert len(turns) <= 2 * guesses - 1


@pytest.mark.parametrize("kind", KINDS)
def test_tools_and_the_game_answer_as_in_the_traces(kind):
    """The traces are played against what a run has."""
    parser = Parser(load_tokenizer("tiny"), "auto", PAPER_TAGS)
    runner, rng = Runner(), Random(0)

    async def play(problem, style):
        environment = "guessing" if kind == "guessing" else None
        data = DataConfig(train="playground:", environment=environment, tools=TOOLS.get(kind, ()))
        session = Session(data, 8192, runner)
        await session.start(problem, 0)
        turns = conversation(problem, rng, style)
        for place in range(0, len(turns), 2):
            message = parser.parse(turns[place]["content"], session.toolset.schemas)
            reply = await session.step(message)
            expected = turns[place + 1 : place + 2]
            if expected and expected[0]["content"] == UNPARSED:
                assert not message.calls[0].name and message.calls[0].error
            else:
                assert [dict(m) for m in reply.messages] == expected
                assert reply.done == (not expected)
        await session.close()
        answer = boxed(turns[-1]["content"])
        assert (answer == [problem.answer]) >= (style.manner == "work" and style.use == "right")
        if style.manner != "guess" and style.use in ("broken", "ignored") and kind != "guessing":
            assert answer != [problem.answer]

    async def play_all():
        for problem in some(kind, 12 if kind == "sessions" else 60):
            await play(problem, sample_style(problem, rng, FLAWED))

    asyncio.run(play_all())


def test_a_game_with_a_slip_is_mostly_lost_and_one_without_never():
    drawn = some("guessing", 60)
    for right, fewest, most in ((True, 60, 60), (False, 1, 30)):
        played = [conversation(p, Random(i), Style(right=right)) for i, p in enumerate(drawn)]
        won = sum(
            boxed(turns[-1]["content"]) == [p.answer]
            for turns, p in zip(played, drawn, strict=True)
        )
        assert fewest <= won <= most


def test_a_needless_call_is_followed_by_a_wrong_guess():
    for problem in some("sums", 30):
        call, answer, last = conversation(problem, Random(1), Style(use="needless"))
        assert '"calculator"' in call["content"] and answer["role"] == "tool"
        assert boxed(last["content"]) != [problem.answer]


def test_an_example_is_a_whole_conversation():
    drawn = list(examples(5, 200, kinds=("lookups",)))
    assert drawn == list(examples(5, 200, kinds=("lookups",))) and len(drawn) == 200
    lengths = set()
    for example in drawn:
        asked, *messages = example["messages"]
        assert asked == {"role": "user", "content": example["problem"].problem}
        answered = ["assistant", "tool"] * (len(messages) // 2)
        assert [m["role"] for m in messages] == [*answered, "assistant"]
        lengths.add(len(messages))
    assert {1, 3, 5} <= lengths


def test_the_examples_of_the_tiny_base_are_those_that_it_was_trained_on():
    digest = hashlib.sha256()
    for e in examples(3, 2000, kinds=("sums", "stories", "programs")):
        asked, said = (message["content"] for message in e["messages"])
        digest.update((e["problem"].id + asked + said).encode())
    assert digest.hexdigest()[:16] == "af0a0988ec517408"
