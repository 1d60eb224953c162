"""Lessons for models too small to discuss on their own: prompts and replies of each role.

A teacher that knows the chains of facts behind the generated questions plays the protocols, and
each of its replies is an example for `tramontane sft`. Arguments for the right answer quote its two
facts, or only the first. Arguments for the wrong answer make up the missing fact (an unverified
quote), quote another name's facts, or also quote only the first fact, so that not every argument
decides the question. The teacher's verdicts are right, or random if nothing was said. Every side is
argued for with equal probability in all protocols, so that only the quotes determine the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tramontane.oversight.episode import Episode, Rules
from tramontane.oversight.extractive import extractive_questions
from tramontane.oversight.play import Game, play
from tramontane.oversight.protocols import PROTOCOLS
from tramontane.oversight.questions import LETTERS, Question, two_choices
from tramontane.oversight.transcript import Call, Reply, Transcript
from tramontane.oversight.wording import Wording, load_wording

Pair = tuple[str, str]  # prompt, response


class Teacher:
    """A participant that answers with the lesson's response, and keeps it with its prompt.

    Args:
        wording: templates of the prompts.
        seed: of arguments, and of verdicts where nothing was said.

    Attributes:
        pairs: (prompt, response) of every call so far.
    """

    computes = True

    def __init__(self, wording: Wording, seed: int) -> None:
        self.wording, self.seed = wording, seed
        self.pairs: list[Pair] = []
        self._done: list[tuple[int, Reply]] = []

    @property
    def waiting(self) -> int:
        return len(self._done)

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """See `Agent`. The call's question is a generated one."""
        rng = Random(f"{self.seed}/{key}")
        text = _RESPONSES[call.task](call, rng)
        self.pairs.append((self.wording.prompt(call, examples), text))
        if call.task == "answer":
            # The lesson is right; but if agents always argued for the right answer, the judge would
            # learn to believe them.
            text = f"Answer: {rng.choice(LETTERS)}"
        self._done.append((ticket, Reply(text)))

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """See `Agent`."""
        done, self._done = self._done, []
        return done


def lessons(
    seed: int, questions: int, rounds: int = 2, wording: str = "brief", **drawn: Any
) -> Iterator[Pair]:
    """(prompt, response) pairs of all protocols on questions of the train split.

    Args:
        seed: of questions, sides and arguments.
        questions: number of questions; each is played in every protocol.
        rounds: rounds of the discussions are drawn from 1 to this number.
        wording: templates of the prompts.
        drawn: options of `extractive_questions`.
    """
    teacher = Teacher(load_wording(wording), seed)
    rng = Random(f"lessons/{seed}")
    for question in islice(extractive_questions("train", seed, **drawn), questions):
        asked = two_choices(question, seed)
        games = []
        for name, protocol in PROTOCOLS.items():
            episode = Episode(asked, name, Rules(rounds=rng.randint(1, rounds)), seed)
            cast = dict.fromkeys(("judge", "agent", "opponent"), teacher)
            games.append(Game(f"{name}/{asked.id}", episode, protocol(episode), cast))  # type: ignore[arg-type]
        for _ in play(games, concurrent=len(games)):
            pass
        yield from teacher.pairs
        teacher.pairs.clear()


def write_lessons(path: Path, pairs: Iterator[Pair]) -> int:
    """Write pairs as JSONL rows of `prompt` and `response`, for `tramontane sft`; returns their
    number."""
    written = 0
    with path.open("w", encoding="utf-8") as rows:
        for prompt, response in pairs:
            row = {"prompt": prompt, "response": response}
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
    return written


def _chain(question: Question, side: int) -> dict[str, str]:
    """The chain of facts that ends at one of the two answers."""
    chains: list[dict[str, str]] = question.metadata["chains"]
    return next(chain for chain in chains if chain["goal"] == question.choices[side])


def _answer(call: Call, rng: Random) -> str:
    """The two facts, the letter of the goal, and the answer."""
    right = call.question.right
    assert right is not None
    chain, letter = _chain(call.question, right), LETTERS[right]
    return f"{chain['first']} {chain['second']} {chain['goal']}: {letter}. Answer: {letter}"


def _argue(call: Call, rng: Random) -> str:
    right, side = call.question.right, call.side
    assert right is not None
    assert side is not None
    chain, other = _chain(call.question, right), _chain(call.question, 1 - right)
    ways = {
        "whole": [chain["first"], chain["second"]],
        "left out": [chain["first"]],
        "made up": [chain["first"], chain["second"].replace(chain["goal"], other["goal"])],
        "of another": [other["first"], other["second"]],
    }
    known = ("whole", "left out") if side == right else ("made up", "of another", "left out")
    quotes = ways[rng.choice(known)]
    return "".join(f"<quote>{quote}</quote> " for quote in quotes) + f"So {LETTERS[side]}."


def _ask(call: Call, rng: Random) -> str:
    return "Which two facts?"


def _judge(call: Call, rng: Random) -> str:
    if call.article:
        return _answer(call, rng)
    right = call.question.right
    assert right is not None
    if call.turns:
        return f"Answer: {LETTERS[right]}"
    return f"Answer: {rng.choice(LETTERS)}"


_RESPONSES: dict[str, Callable[[Call, Random], str]] = {
    "answer": _answer,
    "argue": _argue,
    "ask": _ask,
    "judge": _judge,
}


def problem_row(question: Question, wording: str) -> dict[str, Any]:
    """A question as a row for training: a model reads the article and answers with a letter, as in
    the lessons of the same wording.

    `answer` is the right letter, used to audit the judge; a judged domain does not read it.
    """
    asked = Call("agent", "answer", question, article=question.article)
    return {
        "id": question.id,
        "domain": "judged",
        "problem": load_wording(wording).prompt(asked),
        "answer": None if question.right is None else LETTERS[question.right],
        "language": question.language,
        "question": question.text,
        "choices": list(question.choices),
        "article": question.article,
        "facts": question.metadata,
    }


def write_problems(
    path: Path, split: Any, seed: int, count: int, wording: str = "brief", **drawn: Any
) -> None:
    """Write generated questions as rows for training or evaluation (`problem_row`)."""
    stream = extractive_questions(split, seed, **drawn)
    with path.open("w", encoding="utf-8") as rows:
        for question in islice(stream, count):
            row = problem_row(two_choices(question, seed), wording)
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")
