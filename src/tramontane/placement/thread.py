"""A worker in a thread of the controller's own process: laptops, one GPU, debugging, tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

CLOSE_SECONDS = 30.0


class ThreadHandle:
    """Runs `make()` and then every call in a thread of its own, with one torch thread.

    On a CUDA device the thread has a stream of its own, so that workers that share a GPU do not
    wait for each other's kernels. A call returns after all its kernels have run: what it returns,
    or leaves behind, can be used on any stream.

    Two such workers train and decode side by side on two cores: torch releases the interpreter
    lock. The thread is a daemon, so a worker that hangs does not keep the process alive. `close`
    waits up to `CLOSE_SECONDS` for a running call, since torch must not be cut off in the middle.
    """

    def __init__(self, name: str, make: Callable[[], Any], device: str = "cpu") -> None:
        self.name, self._device = name, device
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
        with _separate_stream(self._device) as synchronize:
            self._serve(make, synchronize)

    def _serve(self, make: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self.started.set_running_or_notify_cancel()
        try:
            worker = make()
            synchronize()
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
                result = getattr(worker, method)(*args)
                synchronize()
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)


@contextmanager
def _separate_stream(device: str) -> Iterator[Callable[[], None]]:
    """Within this block, the thread's work for a CUDA device goes to a new stream; yields a
    function that waits until the stream's work is done. Other devices have no streams."""
    if not device.startswith("cuda"):
        yield lambda: None
        return
    stream = torch.cuda.Stream(torch.device(device))
    with torch.cuda.stream(stream):  # also makes the stream's device the thread's current one
        yield stream.synchronize
