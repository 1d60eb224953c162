"""The environment `repair`: the model writes a program, and repairs it until the shown tests pass.

What Leanstral trains on: an attempt, the compiler's answer, a repair, until it compiles or the
budget ends. Any problem with tests will do, in any language that the verifier runs.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from tramontane.config import Config, VerifierConfig
from tramontane.environments.protocol import Turn
from tramontane.environments.tools import cut
from tramontane.types import Judgment, Problem
from tramontane.verifier.code.shown import try_program

_AT_ONCE = threading.Semaphore(os.cpu_count() or 1)  # sandboxes of a process


class _Attempt(NamedTuple):
    """An answer; the conversations of a group often write the same program."""

    text: str
    problem: Problem
    config: VerifierConfig

    def __hash__(self) -> int:
        return hash((self.text, self.problem.id))


@lru_cache(maxsize=1024)
def _tried(attempt: _Attempt) -> Judgment | str:
    with _AT_ONCE:
        return try_program(*attempt)


class Repair:
    """Answers a program with its first failed test among those shown (`verifier.code.shown`), or
    the compiler's message. A program that passes them is judged by the hidden tests, which end the
    conversation with the reward: 1 or 0, or the share passed (`reward.code: fraction`)."""

    deterministic = True  # an answer depends on its message alone

    def start(self, problem: Problem, config: Config) -> None:
        if not problem.tests:
            raise ValueError(f"{problem.where or problem.id}: repair needs problems with tests")
        self._problem, self._config = problem, config

    def step(self, message: dict[str, Any]) -> Turn:
        found = _tried(_Attempt(message["content"], self._problem, self._config.verifier))
        if isinstance(found, str):
            return Turn(cut(found, self._config.conversation.answer_bytes))
        if found.outcome == "unscorable":
            _tried.cache_clear()  # the machine's fault: the next conversation tries again
            raise RuntimeError(found.reason)
        return Turn(reward=found.share, done=True)
