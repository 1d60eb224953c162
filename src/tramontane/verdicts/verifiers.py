"""Rewards of `verifiers`, and so of prime-rl.

In version 0.4, a task's config plugs them in by name: `rewards: {right: {fn:
tramontane.verdicts.verifiers:math}}`. For the `Rubric` of earlier versions, `rubric` makes
functions of its call shape: `vf.Rubric(funcs=[rubric("math")])`.

A completion that cannot be judged raises `Unscorable`, which both record as an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tramontane.types import Verdict
from tramontane.verdicts.grader import Grader, Kind, Sample
from tramontane.verdicts.trl import text


class Unscorable(Exception):
    """The completion cannot be judged; the message says why."""


def reward(kind: Kind, **options: Any) -> Callable[..., Awaitable[float]]:
    """A reward of version 0.4, with the task's fields `answer` and `tests`; `options` are those of
    `Grader`."""
    grader = Grader(kind, **options)

    async def function(task: Any, trace: Any) -> float:
        answer = getattr(task, "answer", None)
        sample = Sample(
            trace.last_reply,
            None if answer is None else str(answer),
            getattr(task, "tests", None),
            task.prompt_text,
        )
        return _reward((await grader.grade_async([sample]))[0])

    function.__name__ = kind
    return function


def rubric(kind: Kind, **options: Any) -> Callable[..., Awaitable[float]]:
    """A reward function of a `Rubric`: the dataset has a column `answer`, or `tests` in `info`."""
    grader = Grader(kind, **options)

    async def function(
        prompt: Any, completion: Any, answer: str = "", info: Any = None, **_: Any
    ) -> float:
        tests = (info or {}).get("tests")
        sample = Sample(text(completion), answer, tests, text(prompt))
        return _reward((await grader.grade_async([sample]))[0])

    function.__name__ = kind
    return function


def _reward(verdict: Verdict) -> float:
    if verdict.verdict == "unscorable":
        raise Unscorable(verdict.reason)
    return verdict.reward


math = reward("math")
code = reward("code")
language = reward("language")
format = reward("format")
