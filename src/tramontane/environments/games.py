"""Environments that come with the package: games of several turns."""

from __future__ import annotations

import re
from typing import Any

from tramontane.environments.protocol import Turn
from tramontane.types import Problem

_NUMBER = re.compile(r"\d{1,18}")
_BOXED = re.compile(r"\\boxed\{\s*(\d{1,18})\s*\}")


class Guessing:
    """The model guesses a number, and is told whether to go higher or lower.

    The problem's `answer` is the number, and its metadata have the number of `guesses` and the
    texts of the answers, `higher`, `lower` and `unread` (a message without a number). Reward 1 for
    the right guess, 0 once the guesses are used up.
    """

    deterministic = True

    def start(self, problem: Problem) -> None:
        self._number, self._problem = int(problem.answer or ""), problem
        self._left = int(problem.metadata["guesses"])

    def step(self, message: dict[str, Any]) -> Turn:
        guess = guess_of(message["content"])
        self._left -= 1
        if guess == self._number:
            return Turn(reward=1.0, done=True)
        if not self._left:
            return Turn(reward=0.0, done=True)
        hint = "unread" if guess is None else "higher" if guess < self._number else "lower"
        return Turn(self._problem.metadata[hint])


def guess_of(text: str) -> int | None:
    """The number in the last box of a message; without a box, its last number."""
    found = _BOXED.findall(text) or _NUMBER.findall(text)
    return int(found[-1]) if found else None
