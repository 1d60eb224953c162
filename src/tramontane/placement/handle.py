"""What every placement offers the pipeline."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from tramontane.config import TimeoutsConfig


class WorkerLost(RuntimeError):
    """A worker that nothing more can be expected of; the message names it and what it was at."""


class WorkerDied(WorkerLost):
    """Its process is gone."""


class WorkerStalled(WorkerLost):
    """A wait lasted longer than its timeout; the message names both."""


class Limit(NamedTuple):
    """How long a wait may last, and the config keys that say so."""

    seconds: float
    key: str

    @classmethod
    def of(cls, timeouts: TimeoutsConfig, *keys: str) -> Limit:
        seconds = sum(getattr(timeouts, key) for key in keys)
        return cls(seconds, " + ".join(f"timeouts.{key}" for key in keys))


class Handle(Protocol):
    """A worker somewhere, called by method name; calls run in order, one at a time.

    `started` is done when the worker is ready to be called.
    """

    name: str
    started: Future[None]

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call of the worker's `method`."""

    def close(self) -> None:
        """Let the worker go; calls under way are abandoned."""


async def call(handle: Handle, method: str, *args: Any, limit: Limit) -> Any:
    """Await one call.

    Raises:
        WorkerStalled: it took longer than `limit`.
    """
    return await answer(handle, method, handle.submit(method, *args), limit=limit)


async def answer(handle: Handle, method: str, future: Future[Any], *, limit: Limit) -> Any:
    """Await a call that was made before.

    Raises:
        WorkerStalled: it takes longer than `limit` from now on.
        WorkerLost: the handle was closed before the call's turn came.
    """
    waiting = asyncio.wrap_future(future)
    try:
        if not (await asyncio.wait({waiting}, timeout=limit.seconds))[0]:
            raise WorkerStalled(
                f"{handle.name}.{method} did not return within {limit.seconds:g} s ({limit.key})"
            )
        if waiting.cancelled():
            raise WorkerLost(f"{handle.name} was closed before its {method}")
        return waiting.result()
    finally:
        waiting.cancel()


async def started(handle: Handle, limit: Limit) -> None:
    """Wait until a worker can be called.

    Raises:
        WorkerStalled: it took longer than `limit`.
    """
    try:
        await asyncio.wait_for(asyncio.wrap_future(handle.started), limit.seconds)
    except asyncio.TimeoutError:
        raise WorkerStalled(
            f"{handle.name} did not start within {limit.seconds:g} s ({limit.key})"
        ) from None
