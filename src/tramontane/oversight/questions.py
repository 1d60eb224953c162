"""The questions of oversight: two or more possible answers, one of them right."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

LETTERS = "AB"  # the labels of the two answers, in the order in which they are shown


@dataclass(frozen=True)
class Question:
    """A question, its possible answers, and the article that the answer is in.

    Args:
        id: unique within its source.
        text: the question.
        choices: possible answers; exactly two once it is discussed (`two_choices`).
        right: index of the right answer; None if it is unknown.
        article: text that agents read and the judge does not; None for a closed question.
        language: ISO 639-1 code, when known.
        metadata: other facts of the source, e.g. the sentences that the answer follows from.
    """

    id: str
    text: str
    choices: tuple[str, ...]
    right: int | None
    article: str | None = None
    language: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def two_choices(question: Question, seed: int) -> Question:
    """The question with two answers, as the paper's protocols need (arXiv 2407.04622): the right
    one and one of the wrong ones, in an order; the seed and the question's id determine both. A
    choice with the words of the right one is not wrong.

    With more than two choices and no known right answer, no pair can be drawn.

    Raises:
        ValueError: fewer than two different choices, or more than two and no right one.
    """
    if len(set(question.choices)) < 2:
        raise ValueError(f"question {question.id!r} needs at least two choices that differ")
    rng = Random(f"{seed}/{question.id}/choices")
    if question.right is None:
        if len(question.choices) > 2:
            raise ValueError(
                f"question {question.id!r} has {len(question.choices)} choices and no right one"
            )
        pair = [0, 1]
    else:
        words = question.choices[question.right]
        others = [i for i, choice in enumerate(question.choices) if choice != words]
        pair = [question.right, rng.choice(others)]
    if rng.random() < 0.5:
        pair.reverse()
    right = None if question.right is None else pair.index(question.right)
    return replace(question, choices=tuple(question.choices[i] for i in pair), right=right)
