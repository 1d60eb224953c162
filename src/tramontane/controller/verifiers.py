"""Verdicts on whole groups, from verifiers that may hang; and verifiers as workers of a placement:
actors, each with one grading process of its own.

The `VerifierPool` inside each actor kills a grading process that is late; an actor that dies or
hangs is replaced by the `WorkerPool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tramontane.config import (
    Config,
    PipelineConfig,
    RewardSource,
    TimeoutsConfig,
    VerifierConfig,
)
from tramontane.controller.workers import Call, WorkerPool
from tramontane.placement.handle import Handle, Limit, WaitTimeout, WorkerLost
from tramontane.types import Group, Problem, Verdict
from tramontane.verifier import custom
from tramontane.verifier.correctness import group_time_limit
from tramontane.verifier.custom import NO_PROGRESS, GroupResult, Progress, Response
from tramontane.verifier.pool import PoolStats, Responses, VerifierPool

if TYPE_CHECKING:
    from tramontane.placement.place import Placement

T = TypeVar("T")


class Verifiers(Protocol):
    """Grades the completions of one problem; see `VerifierPool`."""

    def score(
        self,
        problem: Problem,
        responses: Responses,
        lengths: tuple[int, int] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Future[list[Verdict]]: ...

    def judge(self, problem: Problem, answers: Sequence[str]) -> Future[GroupResult]: ...

    def time_limit(self, problem: Problem, completions: int) -> float: ...

    def stats(self) -> PoolStats: ...


class Grading:
    """Sends groups to the verifiers, which grade several at once; `reward` is
    `conversation.reward`."""

    def __init__(
        self,
        verifiers: Verifiers,
        timeouts: TimeoutsConfig,
        reward: RewardSource = "verifier",
    ) -> None:
        self._verifiers, self._reward = verifiers, reward
        self._limit = Limit.of(timeouts, "verification", "start")
        self._longest = 0.0  # seconds that the verdicts on a group may take

    async def verdicts(self, group: Group, sizes: PipelineConfig, version: int) -> list[Verdict]:
        """Wait for a group's verdicts; `version` is the number of updates done.

        Raises:
            WaitTimeout: see `wait`.
        """
        responses = [Response.of(c, self._reward) for c in group.completions]
        lengths, progress = (sizes.l_max, sizes.l_cache), (version, sizes.updates)
        score = self._verifiers.score(group.problem, responses, lengths, progress)
        return await self.wait(score, group.problem, len(responses))

    async def wait(self, score: Future[T], problem: Problem, completions: int) -> T:
        """Wait for a result as long as the verifiers return any verdict at all.

        The pool detects a hanging verifier `verification` seconds after its verdicts' own limits,
        and the replacement may take `start` seconds. A verdict is late only after all of this.

        Raises:
            WaitTimeout: no verdict on any group within that time.
        """
        # A group with more work may be graded first.
        work = self._verifiers.time_limit(problem, completions)
        self._longest = max(self._longest, work)
        future = asyncio.wrap_future(score)
        limit, seen = self._limit.plus(self._longest, "the limits of a group's verdicts"), -1
        while not future.done():
            if (graded := self._verifiers.stats().progress) == seen:
                raise WaitTimeout(f"no verdict within {limit.seconds:g} s ({limit.key})")
            seen = graded
            await asyncio.wait({future}, timeout=limit.seconds)
        return future.result()


class Grader:
    """The worker in each actor."""

    def __init__(self, config: VerifierConfig, l_max: int, l_cache: int) -> None:
        self._pool = VerifierPool(config.share(), l_max, l_cache)

    def call(self, method: str, *arguments: Any) -> tuple[Any, PoolStats]:
        """The result of a method of `VerifierPool`, and its statistics since it was started."""
        return getattr(self._pool, method)(*arguments).result(), self._pool.stats()


class VerifierActors(WorkerPool):
    """A pool with the interface of `VerifierPool`, over verifiers that a placement runs.

    Args:
        make: starts the verifier with a given number, a `Grader`.
        workers: number of actors.
        timeouts: `start` and `verification` are read.
        config: limits of the verdicts, from which a group's limit follows.
        replaced: see `WorkerPool`.
    """

    def __init__(
        self,
        make: Callable[[int], Handle],
        workers: int,
        timeouts: TimeoutsConfig,
        config: VerifierConfig,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        self._config, self._limit = config, Limit.of(timeouts, "verification")
        self._stats: dict[Handle, PoolStats] = {}  # the newest of each actor, also of lost ones
        super().__init__(make, workers, Limit.of(timeouts, "start"), replaced)

    def score(
        self,
        problem: Problem,
        responses: Responses,
        lengths: tuple[int, int] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Future[list[Verdict]]:
        """Grade the completions of one group; see `VerifierPool.score` and `submit`."""
        if not any(custom.of_group(reward) for reward in self._config.reward.custom):
            responses = [Response(*r)._replace(token_ids=None) for r in responses]
        return self._call("score", problem, responses, lengths, progress)

    def judge(self, problem: Problem, answers: Sequence[str]) -> Future[GroupResult]:
        """Have the judge grade answers; see `VerifierPool.judge` and `submit`."""
        return self._call("judge", problem, answers)

    def time_limit(self, problem: Problem, completions: int) -> float:
        """Longest time that the verdicts on a group may take, in seconds."""
        return group_time_limit(problem, completions, self._config)

    def stats(self) -> PoolStats:
        """Sums over all actors, lost ones included; `restarts` counts replaced actors too."""
        stats = [*self._stats.values()]
        total = {f.name: sum(getattr(s, f.name) for s in stats) for f in fields(PoolStats)}
        total["restarts"] += self.losses
        return PoolStats(**total)

    def __enter__(self) -> VerifierActors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, method: str, problem: Problem, answers: Sequence[Any], *more: Any
    ) -> Future[Any]:
        # A healthy verifier may use all its verdicts' limits, plus `verification`.
        work = self.time_limit(problem, len(answers))
        limit = self._limit.plus(work, "the limits of its verdicts")
        return self.submit(limit, "call", method, problem, answers, *more)

    def _answer(self, handle: Handle, call: Call) -> Any:
        answer, self._stats[handle] = super()._answer(handle, call)
        return answer


def start_verifiers(
    config: Config, placement: Placement, replaced: Callable[[WorkerLost], None]
) -> VerifierPool | VerifierActors:
    """The verifiers of a placement, with the sizes of `config.pipeline`; training passes its
    stage's sizes with every group.

    Args:
        config: of the last stage.
        placement: where they run.
        replaced: called with every verifier that was lost.
    """
    sizes = config.pipeline
    if not config.placement.replaces_workers:  # the pool itself replaces its processes
        return VerifierPool(config.verifier, sizes.l_max, sizes.l_cache)
    make = partial(Grader, config.verifier, sizes.l_max, sizes.l_cache)
    return VerifierActors(
        lambda number: placement.judge(f"verifier {number}", make),
        config.verifier.workers,
        config.timeouts,
        config.verifier,
        replaced,
    )
