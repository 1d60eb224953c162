"""Verdicts on whole groups, from verifiers that may hang."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol

from tramontane.config import PipelineConfig, TimeoutsConfig
from tramontane.controller.groups import OpenGroup
from tramontane.placement import Limit, WorkerStalled
from tramontane.types import Problem, Verdict
from tramontane.verifier.custom import Progress, Response
from tramontane.verifier.pool import PoolStats, Responses


class Verifiers(Protocol):
    """Grades the completions of one problem; see `VerifierPool`."""

    def score(
        self,
        problem: Problem,
        responses: Responses,
        lengths: tuple[int, int],
        progress: Progress,
    ) -> Future[list[Verdict]]: ...

    def time_limit(self, problem: Problem, completions: int) -> float: ...

    def stats(self) -> PoolStats: ...


class Grading:
    """Sends groups to the verifiers, which grade several at once."""

    def __init__(self, verifiers: Verifiers, timeouts: TimeoutsConfig) -> None:
        self._verifiers = verifiers
        self._limit = Limit.of(timeouts, "verification", "start")
        self._longest = 0.0  # seconds that the verdicts on a group may take

    async def verdicts(
        self, group: OpenGroup, sizes: PipelineConfig, version: int
    ) -> list[Verdict]:
        """Wait for a group's verdicts for as long as the verifiers return any verdict at all;
        `version` is the number of updates done.

        The pool detects a hanging verifier `verification` seconds after its verdicts' own limits,
        and the replacement may take `start` seconds. A verdict is late only after all of this.

        Raises:
            WorkerStalled: no verdict on any group within that time.
        """
        completions = group.group().completions
        responses = [Response.of(c) for c in completions]
        # A group with more work may be graded first.
        work = self._verifiers.time_limit(group.problem, len(responses))
        self._longest = max(self._longest, work)
        lengths, progress = (sizes.l_max, sizes.l_cache), (version, sizes.updates)
        score = self._verifiers.score(group.problem, responses, lengths, progress)
        future = asyncio.wrap_future(score)
        limit, seen = self._limit.plus(self._longest, "the limits of a group's verdicts"), -1
        while not future.done():
            if (graded := self._verifiers.stats().verdicts) == seen:
                raise WorkerStalled(f"no verdict within {limit.seconds:g} s ({limit.key})")
            seen = graded
            await asyncio.wait({future}, timeout=limit.seconds)
        return future.result()
