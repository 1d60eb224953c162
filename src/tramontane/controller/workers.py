"""Workers that take calls from one queue, and are replaced when they die or hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from typing import Any

from tramontane.placement.handle import Handle, Limit, WaitTimeout, WorkerLost

MAX_TRIES = 5  # attempts at one call before it fails
CLOSE_POLL_SECONDS = 0.05


@dataclass
class Call:
    """A call of a worker's method, with the limit of each attempt."""

    method: str
    arguments: tuple[Any, ...]
    limit: Limit
    future: Future[Any] = field(default_factory=Future)
    tries: int = 0


class WorkerPool:
    """One thread per worker sends it one call at a time. A call whose worker is lost goes to the
    first free one.

    Args:
        make: starts the worker with a given number.
        workers: number of workers.
        start: limit of a worker's start.
        replaced: called, in a worker's thread, with each loss before its replacement starts. None:
            the workers are threads, which cannot be replaced; a loss fails the call.
    """

    def __init__(
        self,
        make: Callable[[int], Handle],
        workers: int,
        start: Limit,
        replaced: Callable[[WorkerLost], None] | None,
    ) -> None:
        self._make, self._start, self._replaced = make, start, replaced
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.handles = [make(number) for number in range(workers)]
        self.losses, self._closing = 0, False
        self._error: Exception | None = None  # of a failed replacement; no caller awaits it
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"calls {h.name}", daemon=True)
            for n, h in enumerate(self.handles)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, limit: Limit, method: str, *arguments: Any) -> Future[Any]:
        """Have the first free worker make a call, which may take `limit` each time it is tried.

        Raises:
            RuntimeError: the pool is closed.
            Exception: the error with which the replacement of a worker failed.
        """
        if self._closing:
            raise RuntimeError("the workers are closed")
        if self._error:
            raise self._error
        call = Call(method, arguments, limit)
        call.future.set_running_or_notify_cancel()
        self._calls.put(call)
        return call.future

    def close(self) -> None:
        """End the workers; unfinished calls fail."""
        self._closing = True
        for _ in self._threads:
            self._calls.put(None)
        for number, thread in enumerate(self._threads):
            while self._replaced and thread.is_alive():  # it may be replacing its worker right now
                self.handles[number].close()
                thread.join(CLOSE_POLL_SECONDS)
            self.handles[number].close()
        self._fail_waiting(RuntimeError("the workers were closed"))

    def _serve(self, number: int) -> None:
        """The loop of one worker's thread. Waits for a call; unblocked by `submit`, by the loss of
        another worker, whose call comes back, and by `close`."""
        while (call := self._calls.get()) is not None:
            try:
                call.future.set_result(self._answer(self.handles[number], call))
            except WorkerLost as lost:
                call.tries += 1
                if self._replaced is None or call.tries == MAX_TRIES:
                    call.future.set_exception(lost)
                else:  # any free worker may take it: replacing this one takes seconds
                    self._calls.put(call)
                if self._replaced and not self._closing:
                    try:
                        self.losses += 1
                        self._replaced(lost)
                        self.handles[number].close()
                        self.handles[number] = self._make(number)
                    except Exception as error:
                        self._error = error
                        self._fail_waiting(error)
            except Exception as error:
                # Only this thread waits for the call: pass its error on to the caller.
                call.future.set_exception(error)

    def _answer(self, handle: Handle, call: Call) -> Any:
        _wait(handle.started, handle.name, "start", self._start)
        future = handle.submit(call.method, *call.arguments)
        return _wait(future, handle.name, call.method, call.limit)

    def _fail_waiting(self, error: Exception) -> None:
        """Fail the calls that no worker has begun."""
        while not self._calls.empty():
            if (call := self._calls.get_nowait()) is not None:
                call.future.set_exception(error)


def _wait(future: Future[Any], worker: str, method: str, limit: Limit) -> Any:
    try:
        return future.result(limit.seconds)
    except TimeoutError:
        raise WaitTimeout(
            f"{worker}.{method} took over {limit.seconds:g} s ({limit.key})", worker
        ) from None
