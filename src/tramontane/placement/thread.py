"""A worker in a thread of the controller's own process: laptops, one GPU, debugging, tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

CLOSE_SECONDS = 30.0


class ThreadHandle:
    """Runs `make()` and then every call in a thread of its own, with one torch thread.

    Two such workers train and decode side by side on two cores: torch releases the interpreter
    lock. The thread is a daemon, so a worker that hangs does not keep the process alive. `close`
    waits up to `CLOSE_SECONDS` for a running call, since torch must not be cut off in the middle.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self.started: Future[None] = Future()
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, method, args))
        return future

    def close(self) -> None:
        self._closing = True
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self, make: Callable[[], Any]) -> None:
        torch.set_num_threads(1)
        self.started.set_running_or_notify_cancel()
        try:
            worker = make()
        except BaseException as error:
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        while (item := self._calls.get()) is not None:
            future, method, args = item
            if self._closing or not future.set_running_or_notify_cancel():
                continue
            # The future carries the error to the caller.
            try:
                future.set_result(getattr(worker, method)(*args))
            except BaseException as error:
                future.set_exception(error)
