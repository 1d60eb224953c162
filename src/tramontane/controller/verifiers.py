"""Verifiers as workers of a placement: actors, each with one grading process of its own.

Inside each is a `VerifierPool` of one, which kills what is late; here, an actor that dies or hangs
is replaced, and its group graded by whoever is free first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, fields
from typing import Any

from tramontane.config import TimeoutsConfig, VerifierConfig
from tramontane.placement.handle import Handle, Limit, WorkerLost, WorkerStalled
from tramontane.types import Problem, Verdict
from tramontane.verifier.pool import PoolStats, Response, VerifierPool

TRIES = 5  # of one group, before the run gives up


class Grader:
    """The worker in each actor."""

    def __init__(self, config: VerifierConfig, l_max: int, l_cache: int) -> None:
        self._pool = VerifierPool(config.model_copy(update={"workers": 1}), l_max, l_cache)

    def score(
        self, problem: Problem, responses: list[Response], lengths: tuple[int, int] | None
    ) -> tuple[list[Verdict], PoolStats]:
        """A group's verdicts, and what this grader did in all its life."""
        return self._pool.score(problem, responses, lengths).result(), self._pool.stats()


@dataclass
class _Task:
    problem: Problem
    responses: list[Response]
    lengths: tuple[int, int] | None
    future: Future[list[Verdict]]
    tries: int = 0


class VerifierActors:
    """What `VerifierPool` is to its callers, over `config.workers` actors.

    Args:
        make: a handle on a verifier of a given number, whose worker is a `Grader`.
        workers: how many.
        timeouts: `start` and `verification` are used here.
        replaced: told of each that is lost and about to be replaced, from a thread of its own.
    """

    def __init__(
        self,
        make: Callable[[int], Handle],
        workers: int,
        timeouts: TimeoutsConfig,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        self._make, self._timeouts, self._replaced = make, timeouts, replaced
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._handles = [make(number) for number in range(workers)]
        self._stats = [PoolStats() for _ in range(workers)]  # of those at work
        self._before: list[PoolStats] = []  # of those lost
        self._closing = False
        self._error: Exception | None = None  # of a replacement, which no caller waits for
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"verifier {n}", daemon=True)
            for n in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def score(
        self, problem: Problem, responses: list[Response], lengths: tuple[int, int] | None = None
    ) -> Future[list[Verdict]]:
        """Grade the completions of one group; see `VerifierPool.score`.

        Raises:
            Exception: why a verifier could not be replaced.
        """
        if self._closing:
            raise RuntimeError("the verifiers are closed")
        if self._error:
            raise self._error
        future: Future[list[Verdict]] = Future()
        future.set_running_or_notify_cancel()
        self._tasks.put(_Task(problem, responses, lengths, future))
        return future

    def stats(self) -> PoolStats:
        """Summed over all that there are and were; `restarts` counts actors too."""
        every = [*self._before, *self._stats]
        total = {f.name: sum(getattr(s, f.name) for s in every) for f in fields(PoolStats)}
        total["restarts"] += len(self._before)
        return PoolStats(**total)

    def close(self) -> None:
        """Kill the actors; groups that are not finished fail."""
        self._closing = True
        for _ in self._threads:
            self._tasks.put(None)
        for number, thread in enumerate(self._threads):
            while thread.is_alive():  # again and again: it may be replacing one right now
                self._handles[number].close()
                thread.join(0.05)
            self._handles[number].close()
        self._give_up(RuntimeError("the verifiers were closed"))

    def __enter__(self) -> VerifierActors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, number: int) -> None:
        """Waits for a group; unblocked by `score`, by a verifier that is lost, and by `close`."""
        while (task := self._tasks.get()) is not None:
            try:
                task.future.set_result(self._ask(number, task))
            except WorkerLost as lost:
                task.tries += 1
                if task.tries == TRIES:
                    task.future.set_exception(lost)
                else:  # to whoever is free first, which this one will not be for seconds
                    self._tasks.put(task)
                if not self._closing:
                    try:
                        self._replace(number, lost)
                    except Exception as error:
                        self._error = error
                        self._give_up(error)
            except Exception as error:
                # This thread is the only one who waits for the group's end: hand the error on.
                task.future.set_exception(error)

    def _ask(self, number: int, task: _Task) -> list[Verdict]:
        handle = self._handles[number]
        self._wait(handle.started, "start", f"{handle.name}'s start")
        future = handle.submit("score", task.problem, task.responses, task.lengths)
        verdicts, self._stats[number] = self._wait(future, "verification", f"{handle.name}.score")
        return list(verdicts)

    def _wait(self, future: Future[Any], key: str, what: str) -> Any:
        limit = Limit.of(self._timeouts, key)
        try:
            return future.result(limit.seconds)
        except TimeoutError:
            raise WorkerStalled(f"{what} took over {limit.seconds:g} s ({limit.key})") from None

    def _give_up(self, error: Exception) -> None:
        """Fail the groups that nobody has begun."""
        while not self._tasks.empty():
            if (task := self._tasks.get_nowait()) is not None:
                task.future.set_exception(error)

    def _replace(self, number: int, lost: WorkerLost) -> None:
        self._replaced(lost)
        self._before.append(self._stats[number])
        self._stats[number] = PoolStats()
        self._handles[number].close()
        self._handles[number] = self._make(number)
