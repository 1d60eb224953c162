"""Runs what a user wrote for a conversation: coroutines in the event loop, functions in threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from tramontane.verifier.functions import MAX_ERROR, place_of

THREADS = 256  # most functions that run at once in a process; further ones wait


class EnvironmentFailed(Exception):
    """An environment or a tool raised an exception, or returned an unusable value; the message
    names it, and the file and line."""


class Runner:
    """Calls functions of one process.

    Attributes:
        stuck: functions still running whose conversation has given up on them; a thread cannot be
            stopped.
    """

    def __init__(self) -> None:
        self.stuck = 0
        self._threads = ThreadPoolExecutor(THREADS, "environment")

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function of any kind.

        Raises:
            EnvironmentFailed: it raised an exception, which is the cause.
        """
        with self.blaming(getattr(function, "__qualname__", type(function).__name__)):
            if inspect.iscoroutinefunction(function):
                return await function(*arguments, **named)
            future = self._threads.submit(partial(function, *arguments, **named))
            try:
                result = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                self._abandon(future)
                raise
            return await result if inspect.isawaitable(result) else result

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """A block whose exceptions are failures of the function `name`."""
        try:
            yield
        except EnvironmentFailed:
            raise
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
            raise EnvironmentFailed(f"{name}: {text} ({place_of(error)})") from error

    def _abandon(self, future: Future[Any]) -> None:
        if not future.cancel() and not future.done():
            self.stuck += 1
            future.add_done_callback(self._ended)

    def _ended(self, _: Future[Any]) -> None:
        self.stuck -= 1
