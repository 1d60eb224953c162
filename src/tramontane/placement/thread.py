"""A worker in a thread of the controller's own process: laptops, one GPU, debugging, tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


class ThreadHandle:
    """Runs `make()` and then every call in one thread of its own, with one torch thread.

    Two such workers train and decode side by side on two cores: torch releases the interpreter
    lock. The thread is a daemon, so a worker that hangs does not keep the process alive.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self.started: Future[None] = Future()
        threading.Thread(target=self._run, args=(make,), name=name, daemon=True).start()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, method, args))
        return future

    def close(self) -> None:
        self._calls.put(None)

    def _run(self, make: Callable[[], Any]) -> None:
        torch.set_num_threads(1)
        try:
            worker = make()
        except BaseException as error:
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        while (item := self._calls.get()) is not None:
            future, method, args = item
            if not future.set_running_or_notify_cancel():
                continue
            # Not swallowed: the future carries the error to whoever awaits the call.
            try:
                future.set_result(getattr(worker, method)(*args))
            except BaseException as error:
                future.set_exception(error)
