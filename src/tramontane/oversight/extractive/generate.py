"""The extractive task: short articles of facts in seven languages, and questions whose answer needs
two of them.

An article holds chains of two facts, in a drawn order: someone has a key, and the key opens a room.
The question names the person and asks for the room, so that neither fact alone gives the answer,
and no question can be answered without the article. The other chains are distractors: the wrong
answers are their rooms. Everything is drawn from a seed, as in the playground.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from random import Random
from typing import Any, Literal

import yaml

from tramontane.config import LANGUAGES
from tramontane.data.playground.generate import split_of
from tramontane.data.playground.language import language as playground_language
from tramontane.data.playground.language import pick
from tramontane.oversight.questions import Question

Split = Literal["train", "test"]
FRAMES = ("keys", "trains")
NUMBERS = range(10, 100)  # of keys and trains


@dataclass(frozen=True)
class Frame:
    """The sentences about one kind of things in one language.

    Args:
        first: phrasings of the first fact, with {name} and {n}; the first one begins with the name.
        second: phrasings of the second fact, with {n} and {goal}; the first one ends with the goal.
        question: phrasings of the question, with {name}.
        goals: answers, in the form that the second fact needs.
    """

    first: list[str]
    second: list[str]
    question: list[str]
    goals: list[str]


@dataclass(frozen=True)
class Chain:
    """Two facts that together lead from a name to a goal, and their sentences."""

    name: str
    goal: str
    first: str
    second: str


@lru_cache
def load_frames(code: str) -> dict[str, Frame]:
    """The frames of `templates/<code>.yaml`, by name."""
    path = files(__package__) / "templates" / f"{code}.yaml"
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: Frame(**frame) for name, frame in raw.items()}


def extractive_questions(
    split: Split,
    seed: int,
    levels: tuple[int, int] = (2, 4),
    languages: Sequence[str] = LANGUAGES,
    frames: Sequence[str] = FRAMES,
    phrasings: int | None = None,
) -> Iterator[Question]:
    """An endless stream of distinct questions from one split.

    A question's `choices` are the goals of all chains, the right one among them; its `metadata` has
    the chains (name, goal, first and second sentence), the right one first.

    Args:
        split: a hash of article and question determines it, as in the playground.
        seed: of the stream.
        levels: fewest and most chains in an article.
        languages: ISO 639-1 codes, drawn uniformly.
        frames: names of frames, drawn uniformly.
        phrasings: number of phrasings of every sentence that are drawn from, the first of its
            frame; None: all.
    """
    rng, seen = Random(f"extractive/{split}/{seed}"), set[str]()
    while True:
        level = levels[0] + int(rng.random() * (levels[1] - levels[0] + 1))
        question = _draw(rng, pick(rng, languages), pick(rng, frames), level, phrasings)
        canonical = f"{question.article}\n{question.text}"
        if split_of(canonical) == split and canonical not in seen:
            seen.add(canonical)
            yield question


def _draw(rng: Random, code: str, frame_name: str, level: int, phrasings: int | None) -> Question:
    def phrase(sentences: list[str], **facts: Any) -> str:
        return pick(rng, sentences[:phrasings]).format(**facts)

    frame, lang = load_frames(code)[frame_name], playground_language(code)
    names = rng.sample([*lang.names["m"], *lang.names["f"]], level)
    numbers, goals = rng.sample(NUMBERS, level), rng.sample(frame.goals, level)
    chains = [
        Chain(
            name=name,
            goal=goal,
            first=phrase(frame.first, name=name, n=n),
            second=phrase(frame.second, n=n, goal=goal),
        )
        for name, n, goal in zip(names, numbers, goals, strict=True)
    ]
    sentences = [sentence for chain in chains for sentence in (chain.first, chain.second)]
    rng.shuffle(sentences)
    text = phrase(frame.question, name=chains[0].name)
    article = lang.joiner.join(sentences)
    digest = hashlib.sha256(f"{article}\n{text}".encode()).hexdigest()[:16]
    choices = tuple(chain.goal for chain in chains)
    metadata = {"frame": frame_name, "level": level, "chains": [vars(chain) for chain in chains]}
    return Question(f"extractive-{digest}", text, choices, 0, article, code, metadata)
