"""Drills and lessons for models too small to discuss on their own: prompts and responses.

Lessons: a teacher that knows the chains of facts behind generated questions plays the protocols,
and each of its replies is an example for `tramontane sft`. Arguments for the right answer quote its
two facts, or only the first. Arguments for the wrong answer make up the missing fact (an unverified
quote), quote another name's facts, or also quote only the first fact, so that not every argument
decides the question. The teacher's verdicts are right, or random if nothing was said. Every side is
argued for with equal probability in all protocols, so that only the quotes determine the verdict.

Drills: meaningless facts to repeat in a different order, which teach a tiny model to look up. An
answer to a generated question has two lookups in thirty tokens, which a model can guess half right
from the two choices; a drill has one in six tokens, and none can be guessed. Its sentences have the
forms of the questions' facts, with names, numbers and goals at any position, so that only the
preceding words determine what follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tramontane.data.playground.language import language as playground_language
from tramontane.data.playground.language import pick
from tramontane.data.playground.tasks import NUMBERED
from tramontane_oversight.agents import Immediate
from tramontane_oversight.config import Rules
from tramontane_oversight.extractive import extractive_questions
from tramontane_oversight.play import Game, play
from tramontane_oversight.protocols import PROTOCOLS, Episode
from tramontane_oversight.questions import two_choices
from tramontane_oversight.transcript import LETTERS, Call, Question, Reply, Transcript
from tramontane_oversight.wording import Wording, load_wording

Pair = tuple[str, str]  # prompt, response
FACTS = range(2, 9)  # in a drill
_TWO_SLOTS = re.compile(r"(.*?)\{\w+\}(.*)\{\w+\}(.*)")


class Teacher(Immediate):
    """A participant that answers with the lesson's response, and keeps it with its prompt.

    Args:
        wording: templates of the prompts.
        seed: of arguments, and of verdicts where nothing was said.

    Attributes:
        pairs: (prompt, response) of every call so far.
    """

    def __init__(self, wording: Wording, seed: int) -> None:
        super().__init__()
        self.wording, self.seed = wording, seed
        self.pairs: list[Pair] = []

    def reply(self, key: str, call: Call, examples: Sequence[Transcript]) -> Reply:
        rng = Random(f"{self.seed}/{key}")
        text = _response(call, rng)
        self.pairs.append((self.wording.prompt(call, examples), text))
        if call.task == "answer":
            # The lesson is right; but if agents always argued for the right answer, the judge would
            # learn to believe them.
            text = f"Answer: {rng.choice(LETTERS)}"
        return Reply(text)


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
            cast: dict[Any, Teacher] = dict.fromkeys(("judge", "agent", "opponent"), teacher)
            games.append(Game(f"{name}/{asked.id}", episode, protocol(episode), cast))
        for _ in play(games, concurrent=len(games)):
            pass
        yield from teacher.pairs
        teacher.pairs.clear()


def _response(call: Call, rng: Random) -> str:
    right = call.question.right
    assert right is not None
    if call.task == "ask":
        return "Which two facts?"
    if call.task == "argue":
        return _argument(call, right, rng)
    if call.task == "judge" and not call.article:
        return f"Answer: {LETTERS[right] if call.turns else rng.choice(LETTERS)}"
    # The two facts, the letter of the goal, and the answer.
    chain, letter = _chain(call.question, right), LETTERS[right]
    return f"{chain['first']} {chain['second']} {chain['goal']}: {letter}. Answer: {letter}"


def _argument(call: Call, right: int, rng: Random) -> str:
    assert call.side is not None
    chain, other = _chain(call.question, right), _chain(call.question, 1 - right)
    ways = {
        "whole": [chain["first"], chain["second"]],
        "left out": [chain["first"]],
        "made up": [chain["first"], chain["second"].replace(chain["goal"], other["goal"])],
        "of another": [other["first"], other["second"]],
    }
    known = ("whole", "left out") if call.side == right else ("made up", "of another", "left out")
    quotes = ways[rng.choice(known)]
    return "".join(f"<quote>{quote}</quote> " for quote in quotes) + f"So {LETTERS[call.side]}."


def _chain(question: Question, side: int) -> dict[str, str]:
    """The chain of facts that ends at one of the two answers."""
    chains: list[dict[str, str]] = question.metadata["chains"]
    return next(chain for chain in chains if chain["goal"] == question.choices[side])


@lru_cache
def _forms(code: str) -> list[tuple[str, ...]]:
    """The text before, between and after the two places of a fact: the first phrasings of a
    language's facts, and a bare pair."""
    sentences = [
        s for f in playground_language(code).articles.values() for s in (f.first[0], f.second[0])
    ]
    matches = [_TWO_SLOTS.fullmatch(sentence) for sentence in sentences]
    found = [match.groups() for match in matches if match]
    return [*found, ("", ": ", found[1][2])]


@lru_cache
def things(code: str) -> list[list[str]]:
    """The names, the numbers and the goals of a language."""
    names = playground_language(code).names
    goals = [goal for frame in playground_language(code).articles.values() for goal in frame.goals]
    return [[*names["m"], *names["f"]], [str(n) for n in NUMBERED], goals]


def drills(seed: int, count: int, languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`count` pairs of a prompt with facts, and the facts in another order.

    The first places of a drill's facts differ. Half of the drills have a single sentence form, so
    that the first place alone determines the second; in the others, the form has to be looked up
    too.

    Args:
        seed: of all that is drawn.
        count: number of drills.
        languages: ISO 639-1 codes, drawn uniformly.
    """
    rng = Random(f"oversight drills/{seed}")
    for _ in range(count):
        code = pick(rng, languages)
        forms, kinds = _forms(code), things(code)
        form = pick(rng, forms) if rng.random() < 0.5 else None
        places = rng.sample(pick(rng, kinds), pick(rng, FACTS))
        facts = []
        for first in places:
            before, between, after = form or pick(rng, forms)
            facts.append(f"{before}{first}{between}{pick(rng, pick(rng, kinds))}{after}")
        joiner = playground_language(code).joiner
        prompt = f"{joiner.join(facts)}\nAgain?"
        rng.shuffle(facts)
        yield prompt, joiner.join(facts)


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
    questions = islice(extractive_questions(split, seed, **drawn), count)
    write_rows(path, (problem_row(two_choices(q, seed), wording) for q in questions))


def write_lessons(path: Path, pairs: Iterable[Pair]) -> int:
    """Write pairs as rows for `tramontane sft`; returns their number."""
    return write_rows(path, ({"prompt": prompt, "response": text} for prompt, text in pairs))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write a line of JSON for each row; returns their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
