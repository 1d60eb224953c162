"""Workers on one machine: threads of the controller's process, and processes for the ranks of a
trainer or teacher that is not such a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tramontane.config import Config
from tramontane.models.weights import CopiedWeights, LocalWeights, Weights
from tramontane.placement.files import Folder, on_this_machine
from tramontane.placement.handle import TRAINER, ConcurrentHandle, Handle
from tramontane.placement.ranks import ProcessRanks
from tramontane.placement.seats import seats

CLOSE_SECONDS = 30.0
DECODING = -1  # priority of a generator's CUDA stream: its short kernels go before a trainer's


class LocalPlacement:
    """Workers as threads of the controller's process. The ranks of the trainer and of teachers are
    processes if there are several, or with `placement.kind: process`.

    Raises:
        InputError: too few GPUs; see `seats`.
    """

    def __init__(self, config: Config, note: Callable[..., None]) -> None:
        self._config, self._note = config, note
        self.seats = seats(config, torch.cuda.device_count())
        others = (*self.seats.ranks, *self.seats.teachers)
        self.generators_first = self.seats.beside_generator(others)
        # A thread that hangs cannot be ended.
        self.replaces_trainer = config.trainer_is_apart

    def reserve(self) -> None: ...

    def model(self, name: str) -> str:
        return name

    def generator(self, number: int, make: Callable[[], Any]) -> ConcurrentHandle:
        # vLLM's engine is in a process of its own, so this one takes no memory of its GPU.
        slots = self._config.generator.kind == "slots"
        device = self.seats.generators[number] if slots else "cpu"
        return ThreadHandle(f"generator {number}", make, device, DECODING)

    def judge(self, name: str, make: Callable[[], Any]) -> ConcurrentHandle:
        return ThreadHandle(name, make)

    def trainer(self, make: Callable[[], Any]) -> Handle:
        config, limit = self._config.trainer, self._config.timeouts.training
        if not self._config.trainer_is_apart:
            return TrainerThread(TRAINER, make, config.device)
        return self._noted(ProcessRanks(TRAINER, make, config.ranks, config.device, limit))

    def teacher(self, name: str, make: Callable[[], Any]) -> Handle:
        config, limit = self._config.teacher, self._config.timeouts.scoring
        assert config is not None
        if not self._config.teachers_are_apart:
            return ThreadHandle(name, make, config.device)
        return self._noted(ProcessRanks(name, make, config.ranks, config.device, limit))

    def _noted(self, worker: ProcessRanks) -> ProcessRanks:
        for rank, process in enumerate(worker.processes):
            self._note(f"{worker.name} rank {rank}", process=process)
        return worker

    def weights(self) -> Weights:
        if not (self._config.trainer_is_apart or self._config.replaces_generators):
            return LocalWeights()
        return CopiedWeights(getattr(torch, self._config.generator.dtype))

    def close(self) -> None: ...


class ThreadHandle:
    """Runs `make()` and then every call in its own thread, with as many torch threads as its
    creator (`torch_threads`). Background calls have a second thread.

    On a CUDA device each thread has its own stream, so that workers on one GPU do not wait for each
    other's kernels; the calls' has the given priority. A call returns after all its kernels have
    run, so its results can be used on any stream.

    Two such workers train and decode side by side on two cores: torch releases the interpreter
    lock. The threads are daemons, so a worker that hangs does not keep the process alive. `close`
    waits up to `CLOSE_SECONDS` for a running call, since torch must not be cut off in the middle.
    """

    def __init__(
        self, name: str, make: Callable[[], Any], device: str = "cpu", priority: int = 0
    ) -> None:
        self.name, self._device = name, device
        self._worker: Any = None
        self._calls = _Calls(name, device, priority)
        self._background: _Calls | None = None
        self.started: Future[None] = self._calls.submit(self._make, make)

    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._calls.submit(self._call, method, args)

    def submit_background(self, method: str, *args: Any) -> Future[Any]:
        if self._background is None:
            self._background = _Calls(f"{self.name} background", self._device)
        return self._background.submit(self._call, method, args)

    def release(self, folder: Folder) -> Future[None]:
        return self._calls.submit(lambda: None)  # the worker uses the folder directly

    def close(self) -> None:
        for calls in (self._calls, self._background):
            if calls is not None:
                calls.close()

    def _make(self, make: Callable[[], Any]) -> None:
        self._worker = on_this_machine(make)()

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        self.started.result()  # the worker may still be being made
        return getattr(self._worker, method)(*map(on_this_machine, args))


class TrainerThread(ThreadHandle):
    """The thread of a trainer, which closes it, too: another thread may be writing its state."""

    def close(self) -> None:
        super().close()
        if self._worker is not None:
            self._worker.close(CLOSE_SECONDS)


class _Calls:
    def __init__(self, name: str, device: str, priority: int = 0) -> None:
        self._device, self._priority, self._closing = device, priority, False
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, partial(function, *args)))
        return future

    def close(self) -> None:
        self._closing = True
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        # A new thread has the number that was set last, but MKL learns of it only here.
        torch.set_num_threads(torch.get_num_threads())
        with _separate_stream(self._device, self._priority) as synchronize:
            while (item := self._queue.get()) is not None:
                future, call = item
                if self._closing:
                    future.cancel()  # so that no caller waits for a dropped call
                if not future.set_running_or_notify_cancel():
                    continue
                # The future carries the error to the caller.
                try:
                    result = call()
                    synchronize()
                    future.set_result(result)
                except BaseException as error:
                    future.set_exception(error)


@contextmanager
def _separate_stream(device: str, priority: int) -> Iterator[Callable[[], None]]:
    """Within this block, the thread's work for a CUDA device goes to a new stream, of higher
    priority if the number is lower; yields a function that waits until the stream's work is done.
    Other devices have no streams."""
    if not device.startswith("cuda"):
        yield lambda: None
        return
    stream = torch.cuda.Stream(torch.device(device), priority=priority)
    with torch.cuda.stream(stream):  # also makes the stream's device the thread's current one
        yield stream.synchronize


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use `number` threads; the previous number is restored at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
