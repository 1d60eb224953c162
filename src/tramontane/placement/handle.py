"""Handles of workers, and bounded waits for their calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from tramontane.config import TimeoutsConfig
from tramontane.placement.files import Folder

TRAINER = "trainer"  # name of the trainer's handle in every placement


class WorkerLost(RuntimeError):
    """A worker that died or hangs; the message names it and the call it was running.

    `worker` is the name of the worker's handle; empty if the wait was not for a particular worker.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDied(WorkerLost):
    """The worker's process ended."""


class WaitTimeout(WorkerLost):
    """A wait lasted longer than its timeout; the message names both."""


class WeightsLost(RuntimeError):
    """Weights in transfer were lost, since the trainer process that held them ended."""


class Limit(NamedTuple):
    """The longest duration of a wait, and the config keys that set it."""

    seconds: float
    key: str

    @classmethod
    def of(cls, timeouts: TimeoutsConfig, *keys: str) -> Limit:
        seconds = sum(getattr(timeouts, key) for key in keys)
        return cls(seconds, " + ".join(f"timeouts.{key}" for key in keys))

    def plus(self, seconds: float, what: str) -> Limit:
        """A limit extended by the time that known work may take."""
        return Limit(self.seconds + seconds, f"{self.key} + {what}")


class Handle(Protocol):
    """A worker in any placement, called by method name; calls run in order, one at a time.

    The worker gets each `Folder` among a call's arguments as a path on its own machine. `started`
    is done once the worker can be called.
    """

    name: str
    started: Future[None]

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call of the worker's `method`, and return at once. Not to be used after `close`.

        The future holds the result, or the call's own error, or `WorkerDied` or `WaitTimeout` if
        the worker is lost meanwhile. It is cancelled if `close` comes before the call has begun.
        """

    def release(self, folder: Folder) -> Future[None]:
        """End the use of a folder that was an argument of calls: bring what the worker wrote to the
        controller's disk, and delete copies on other machines."""

    def close(self) -> None:
        """End the worker; running and queued calls are abandoned."""


class ConcurrentHandle(Handle, Protocol):
    """A handle of a worker that does two things at once: a generator fetches weights while it
    generates, a process of environments is woken while it waits for answers."""

    def submit_background(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call that runs concurrently with those of `submit`, after earlier background
        calls. The worker must have started."""


async def call(handle: Handle, method: str, *args: Any, limit: Limit) -> Any:
    """Submit one call and await its result.

    Raises:
        WaitTimeout: the call took longer than `limit`.
    """
    return await answer(handle, method, handle.submit(method, *args), limit=limit)


async def release(handle: Handle, folder: Folder, limit: Limit) -> None:
    """Await `handle.release`.

    Raises:
        WaitTimeout: it took longer than `limit`.
    """
    await answer(handle, "release", handle.release(folder), limit=limit)


async def answer(handle: Handle, method: str, future: Future[Any], *, limit: Limit) -> Any:
    """Await a call that is already submitted.

    Raises:
        WaitTimeout: the call takes longer than `limit` from now.
        WorkerLost: the handle was closed before the call began.
    """
    waiting = asyncio.wrap_future(future)
    try:
        if not (await asyncio.wait({waiting}, timeout=limit.seconds))[0]:
            raise WaitTimeout(
                f"{handle.name}.{method} did not return within {limit.seconds:g} s ({limit.key})",
                handle.name,
            )
        if waiting.cancelled():
            raise WorkerLost(f"{handle.name} was closed before its {method}", handle.name)
        return waiting.result()
    finally:
        waiting.cancel()


async def started(handle: Handle, limit: Limit) -> None:
    """Wait until a worker can be called.

    Raises:
        WaitTimeout: the start took longer than `limit`.
    """
    try:
        await asyncio.wait_for(asyncio.wrap_future(handle.started), limit.seconds)
    except asyncio.TimeoutError:
        raise WaitTimeout(
            f"{handle.name} did not start within {limit.seconds:g} s ({limit.key})", handle.name
        ) from None
