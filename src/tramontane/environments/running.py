"""Runs what a user wrote for a conversation: coroutines in the event loop, functions in threads.

An object is made and used in one thread alone, since connections to SQLite, drivers of browsers and
thread-local state work nowhere else: in the event loop's if any method that is called is a
coroutine, otherwise in its conversation's. Context variables are a conversation's too: what `start`
sets, `step` and tools find, and no other conversation. A function without an object has a new
context for each call.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache, partial
from typing import Any

from tramontane.verifier.functions import ending_forks, place_of, said

# Functions without an object that run at once in a process, or one for each conversation if these
# are more; others wait.
THREADS = 256


# A remedy for objects that belong to a thread.
SHARED = (
    "; what a module makes is shared by the threads of all conversations: make it in `__init__` or "
    "`start` of an environment or a toolbox; and an environment with asynchronous tools needs an "
    "asynchronous `step`"
)
# Methods of environments and harnesses that are called; of other classes, all that are public.
_CALLED = ("start", "step", "run", "close")


class EnvironmentFailed(Exception):
    """An environment or a tool raised an exception, or returned an unusable value; the message
    names it, and the file and line."""


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """A block whose exceptions are failures of the function `name`."""
    try:
        yield
    except (EnvironmentFailed, asyncio.CancelledError):
        raise
    except BaseException as error:  # a user's code may raise anything
        text = said(error)
        text += SHARED if re.search("(same|different) thread", text) else ""
        raise EnvironmentFailed(f"{name}: {text} ({place_of(error)})") from error


def _called(name: str, function: Callable[[], Any]) -> Any:
    with blaming(name), ending_forks():
        try:
            result = function()
            return list(result) if inspect.isgenerator(result) else result
        except asyncio.CancelledError as error:  # nobody cancels a thread
            raise RuntimeError("CancelledError") from error


async def _awaited(name: str, value: Awaitable[Any]) -> Any:
    with blaming(name), ending_forks():
        return await value


@lru_cache
def lives_in_event_loop(owner: type | None) -> bool:
    """True if objects of a class must be used in the event loop's thread: a method that is called
    is a coroutine."""
    serves = hasattr(owner, "step") or hasattr(owner, "run")
    names = _CALLED if serves else [name for name in dir(owner) if not name.startswith("_")]
    methods = (inspect.getattr_static(owner, name, None) for name in names)
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(kind(_plain(method)) for method in methods for kind in kinds)


def _plain(method: Any) -> Any:
    """The function behind a method, a static method or a decorator."""
    return inspect.unwrap(method) if callable(method) else method


async def _listed(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


class Runner:
    """Calls functions of one process, or of one conversation.

    Attributes:
        environment: the class of the conversation's environment.
        stuck: functions still running whose conversation has given up on them; a thread cannot be
            stopped.
        shared: functions that a conversation's runner calls in the threads of the process.
    """

    def __init__(self, threads: int = THREADS, process: Runner | None = None) -> None:
        self.stuck = 0
        self.environment: Callable[..., Any] | None = None
        self.shared: list[Callable[..., Any]] = []
        self._n_threads, self._process = threads, process
        self._made: list[Any] = []
        self._context = copy_context()  # of the event loop's part; a thread has its own
        self._threads = self._started()

    def of_conversation(self) -> Runner:
        """A runner with one thread, for objects that work only in the thread that made them."""
        return Runner(1, self)

    def end(self) -> None:
        """End the threads, once they have no more to do."""
        self._threads.shutdown(wait=False)

    async def run(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The result of a function of any kind.

        Raises:
            EnvironmentFailed: it raised an exception, which is the cause.
        """
        if self._process is not None and any(function is each for each in self.shared):
            return await self._process.run(function, *arguments, **named)
        name = getattr(function, "__qualname__", type(function).__name__)
        result: Any = partial(function, *arguments, **named)
        if inspect.iscoroutinefunction(function):
            result = result()
        elif self._in_event_loop(function):
            result = self._context.run(_called, name, result)
        else:
            call = partial(_called, name, result)
            if self._process is None:
                call = partial(copy_context().run, call)
            with blaming(name):  # there may be no room for another thread
                future = self._threads.submit(call)
            try:
                result = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                self._abandon(future)
                raise
        if inspect.isasyncgen(result):
            result = _listed(result)
        if inspect.isclass(function):
            self._made.append(result)
        if not inspect.isawaitable(result):
            return result
        task = self._task(_awaited(name, result))
        try:  # not awaited itself: a function that cancels itself must not cancel this
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise EnvironmentFailed(f"{name}: it was cancelled")
        return task.result()

    def _task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        if self._process is None or sys.version_info < (3, 11):  # sees the context, in a copy
            return self._context.run(asyncio.create_task, coroutine)
        return asyncio.create_task(coroutine, context=self._context)

    def _in_event_loop(self, function: Callable[..., Any]) -> bool:
        """True for a function of an object that lives there. Closures, and methods of objects that
        were not made here, belong to the environment."""
        bound = getattr(function, "__self__", None)
        is_plain = bound is None or inspect.ismodule(bound)
        owner: Any = self.environment
        if inspect.isclass(function):
            owner = function
        elif any(bound is made for made in self._made):
            owner = type(bound)
        elif is_plain and not getattr(function, "__closure__", None):
            return False
        return lives_in_event_loop(owner)

    def _abandon(self, future: Future[Any]) -> None:
        if future.done():  # or was not begun, and is canceled with what waited for it
            return
        self._count(1)
        future.add_done_callback(lambda _: self._count(-1))
        if self._process is not None:  # a `close` must not wait for what hangs
            self.end()
            self._threads = self._started()

    def _count(self, change: int) -> None:
        self.stuck += change
        if self._process is not None:
            self._process._count(change)

    def _started(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._n_threads, "environment")
