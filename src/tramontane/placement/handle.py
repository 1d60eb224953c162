"""What every placement offers the pipeline."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, Protocol


class WorkerStalled(RuntimeError):
    """A wait lasted longer than its timeout; the message names both."""


class Handle(Protocol):
    """A worker somewhere, called by method name; calls run in order, one at a time."""

    name: str

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call of the worker's `method`."""

    def close(self) -> None:
        """Let the worker go; calls under way are abandoned."""


async def call(handle: Handle, method: str, *args: Any, timeout: float, key: str) -> Any:
    """Await one call.

    Raises:
        WorkerStalled: it took longer than `timeout` seconds; `key` is the config's name for that.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(handle.submit(method, *args)), timeout)
    except asyncio.TimeoutError:
        raise WorkerStalled(
            f"{handle.name}.{method} did not return within {timeout:g} s (timeouts.{key})"
        ) from None
