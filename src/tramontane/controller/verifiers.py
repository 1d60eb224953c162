"""Verdicts on whole groups, from verifiers that may hang; and verifiers as workers of a placement:
actors, each with one grading process of its own.

The `VerifierPool` inside each actor kills a grading process that is late. An actor that dies or
hangs is replaced here, and its group goes to the first free actor.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tramontane.config import (
    Config,
    PipelineConfig,
    RewardSource,
    TimeoutsConfig,
    VerifierConfig,
)
from tramontane.placement.handle import Handle, Limit, WaitTimeout, WorkerLost
from tramontane.types import Completion, Problem, Verdict
from tramontane.verifier import custom
from tramontane.verifier.correctness import group_time_limit
from tramontane.verifier.custom import NO_PROGRESS, Answered, GroupResult, Progress, Response
from tramontane.verifier.pool import PoolStats, Responses, VerifierPool

if TYPE_CHECKING:
    from tramontane.placement.place import Placement

MAX_TRIES = 5  # attempts at one group before it fails
CLOSED = "the verifiers were closed"
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

    def judge(self, problem: Problem, answers: Sequence[Answered]) -> Future[GroupResult]: ...

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

    async def verdicts(
        self,
        problem: Problem,
        completions: Sequence[Completion],
        sizes: PipelineConfig | None = None,
        version: int = 0,
    ) -> list[Verdict]:
        """Wait for the verdicts on a problem's completions.

        Args:
            problem: theirs.
            completions: all of them.
            sizes: those of the stage; None: the verifiers' own.
            version: number of updates done.

        Raises:
            WaitTimeout: see `wait`.
        """
        responses = [Response.of(c, self._reward) for c in completions]
        of_run: tuple[Any, ...] = ()
        if sizes:
            of_run = (sizes.l_max, sizes.l_cache), (version, sizes.updates)
        score = self._verifiers.score(problem, responses, *of_run)
        return await self.wait(score, problem, len(responses))

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


@dataclass
class _Call:
    """A call of a method of `VerifierPool`: a problem, completions or answers, and the rest."""

    method: str
    arguments: tuple[Any, ...]
    limit: Limit
    future: Future[Any] = field(default_factory=Future)
    tries: int = 0


class VerifierActors:
    """A pool with the interface of `VerifierPool`, over verifiers that a placement runs. One thread
    per actor sends it one group at a time.

    Args:
        make: starts the verifier with a given number, a `Grader`.
        workers: number of actors.
        timeouts: `start` and `verification` are read.
        config: limits of the verdicts, from which a group's limit follows.
        replaced: called, in an actor's thread, with each loss before its replacement starts.
    """

    def __init__(
        self,
        make: Callable[[int], Handle],
        workers: int,
        timeouts: TimeoutsConfig,
        config: VerifierConfig,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        self._make, self._config, self._replaced = make, config, replaced
        self._start, self._limit = (Limit.of(timeouts, key) for key in ("start", "verification"))
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._handles = [make(number) for number in range(workers)]
        self._stats: dict[Handle, PoolStats] = {}  # the newest from each actor, lost ones included
        self._losses, self._closing = 0, False
        self._error: Exception | None = None  # of a failed replacement; no caller awaits it
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"verifier {n}", daemon=True)
            for n in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def score(
        self,
        problem: Problem,
        responses: Responses,
        lengths: tuple[int, int] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Future[list[Verdict]]:
        """Grade the completions of one group; see `VerifierPool.score` and `_submit`."""
        if not any(custom.of_group(reward) for reward in self._config.reward.custom):
            responses = [Response(*r)._replace(token_ids=None) for r in responses]
        return self._submit("score", problem, responses, lengths, progress)

    def judge(self, problem: Problem, answers: Sequence[Answered]) -> Future[GroupResult]:
        """Have the judge grade answers; see `VerifierPool.judge` and `_submit`."""
        return self._submit("judge", problem, answers)

    def time_limit(self, problem: Problem, completions: int) -> float:
        """Longest time that the verdicts on a group may take, in seconds."""
        return group_time_limit(problem, completions, self._config)

    def stats(self) -> PoolStats:
        """Sums over all actors, lost ones included; `restarts` counts replaced actors too."""
        stats = [*self._stats.values()]
        total = {f.name: sum(getattr(s, f.name) for s in stats) for f in fields(PoolStats)}
        total["restarts"] += self._losses
        return PoolStats(**total)

    def close(self) -> None:
        """Kill the actors; unfinished groups fail."""
        self._closing = True
        for _ in self._threads:
            self._calls.put(None)
        for number, thread in enumerate(self._threads):
            self._handles[number].close()
            thread.join()
            self._handles[number].close()  # the thread may have been replacing its actor
        self._fail_waiting(RuntimeError(CLOSED))

    def __enter__(self) -> VerifierActors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Have the first free actor make a call; raises the error of a failed replacement."""
        if self._closing:
            raise RuntimeError("the verifiers are closed")
        if self._error:
            raise self._error
        # A healthy verifier may use all its verdicts' limits, plus `verification`.
        problem, answers, *_ = arguments
        work = self.time_limit(problem, len(answers))
        call = _Call(method, arguments, self._limit.plus(work, "the limits of its verdicts"))
        call.future.set_running_or_notify_cancel()
        self._calls.put(call)
        return call.future

    def _serve(self, number: int) -> None:
        """The loop of one actor's thread. Waits for a group; unblocked by `score`, by the loss of
        another actor, whose group comes back, and by `close`."""
        while (call := self._calls.get()) is not None:
            if self._closing:  # the actor may be closed already
                call.future.set_exception(RuntimeError(CLOSED))
                continue
            handle = self._handles[number]
            try:
                _wait(handle.started, f"{handle.name}'s start", self._start)
                future = handle.submit("call", call.method, *call.arguments)
                result = _wait(future, f"{handle.name}.{call.method}", call.limit)
                answer, self._stats[handle] = result
                call.future.set_result(answer)
            except WorkerLost as lost:
                call.tries += 1
                if call.tries == MAX_TRIES:
                    call.future.set_exception(lost)
                else:  # any free actor may take it: replacing this one takes seconds
                    self._calls.put(call)
                if not self._closing:
                    try:
                        self._losses += 1
                        self._replaced(lost)
                        handle.close()
                        self._handles[number] = self._make(number)
                    except Exception as error:
                        self._error = error
                        self._fail_waiting(error)
            except Exception as error:
                # Only this thread waits for the call: pass its error on to the caller.
                call.future.set_exception(error)

    def _fail_waiting(self, error: Exception) -> None:
        """Fail the groups that no actor has begun."""
        ends = 0  # which end threads, and are put back
        with suppress(queue.Empty):  # other threads take calls too
            while True:
                if (call := self._calls.get_nowait()) is None:
                    ends += 1
                else:
                    call.future.set_exception(error)
        for _ in range(ends):
            self._calls.put(None)


def _wait(future: Future[Any], name: str, limit: Limit) -> Any:
    try:
        return future.result(limit.seconds)
    except TimeoutError:
        raise WaitTimeout(f"{name} took over {limit.seconds:g} s ({limit.key})") from None


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
