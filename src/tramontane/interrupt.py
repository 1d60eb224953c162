"""Ctrl-C and SIGTERM: work that can be saved ends cleanly, other work immediately.

The first Ctrl-C ends the current work, the second the process. SIGTERM comes from a system that
kills the process `grace` seconds later: it also ends the current work, which is abandoned if it
takes longer than that. A run then ends with `SystemExit(143)`; a command exits with 130 or 143.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

from tramontane.temporary import remove_own

GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL under Slurm and Kubernetes
STOP_SHARE = 0.8  # of the grace; then the current work is abandoned
LEAVE_SHARE = 0.95  # of the grace; then the process ends without closing its workers
EXIT_SECONDS = 20.0  # for a finished command to end its libraries' threads
DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

T = TypeVar("T")

_own: set[Any] = set()  # handlers of this process; those that it forks have the defaults
_mask = threading.local()  # of the signals that a fork's thread had blocked before it


class Interrupt:
    """Handles the two signals within a `with` block of the main thread; does nothing in other
    threads.

    Args:
        grace: seconds from SIGTERM to the end of the process.
        warn: shows a text, by default on standard error; called in a separate thread, since a
            signal may arrive while the main thread prints.

    Attributes:
        requested: the signal that arrived; SIGTERM, if both did.
    """

    def __init__(
        self, grace: float = GRACE_SECONDS, warn: Callable[[str], object] | None = None
    ) -> None:
        self.requested: signal.Signals | None = None
        self._grace, self._warn = grace, warn or partial(print, file=sys.stderr)
        self._stop: tuple[Callable[[], object], Callable[[], str]] | None = None
        self._cancel: Callable[[], object] | None = None  # cancels the coroutine that runs
        self._over = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _own.discard(self._handle)

    def end(self) -> None:
        """End the process if SIGTERM asked for it.

        Raises:
            SystemExit: it did.
        """
        if self.requested is signal.SIGTERM:
            raise SystemExit(EXIT_CODES[self.requested])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; if an event loop is already running, as in a notebook, use
        one in a separate thread.

        Raises:
            KeyboardInterrupt, SystemExit: a signal ended it.
        """
        import asyncio  # not for `--help`

        self._listen()  # again: Ray sets its own handler when it starts
        early = threading.Event()
        self._cancel = early.set  # a signal must not leave an event loop half made
        try:
            return _run(self._cancellable(coroutine, early))
        except asyncio.CancelledError:
            if self.requested is None:
                raise
            self._raise()

    @contextmanager
    def ends_with(self, stop: Callable[[], object], when: Callable[[], str]) -> Iterator[None]:
        """Within this block, the first signal calls `stop`, which must not block and lets the
        current work end; `when()` says when that will be, e.g. `after this update`."""
        self._stop = (stop, when)
        try:
            yield
        finally:
            self._stop = None

    @contextmanager
    def steps(self) -> Iterator[Callable[[], bool]]:
        """A block of steps that can end between two of them: yields a function that tells whether
        to end; the block may then save its state and raise KeyboardInterrupt.

        Raises:
            KeyboardInterrupt, SystemExit: a signal ended it.
        """
        asked = threading.Event()
        with self.ends_with(asked.set, lambda: "after this step"):
            try:
                yield asked.is_set
            except KeyboardInterrupt:
                self.end()
                raise
        if asked.is_set():
            self._raise()

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in EXIT_CODES:
            before = set_handler(number, self._handle)
            self._before.setdefault(number, before)

    async def _cancellable(self, coroutine: Coroutine[Any, Any, T], early: threading.Event) -> T:
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if early.is_set():
            task.cancel()
        try:
            return await coroutine
        finally:
            self._cancel = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two instructions."""
        first = self.requested is None
        if number == signal.SIGTERM:
            if self.requested is signal.SIGTERM:  # systems send it to a process and to its group
                return
            threading.Thread(target=self._keep_to_grace, daemon=True).start()
        if self.requested is not signal.SIGTERM:
            self.requested = signal.Signals(number)
        if self._stop is not None and (first or number == signal.SIGTERM):
            stop, when = self._stop
            if number == signal.SIGTERM:
                limit = STOP_SHARE * self._grace
                self._say(lambda: f"SIGTERM: stopping {when()} (at most {limit:.0f} s)")
            else:
                self._say(lambda: f"stopping {when()}; again to stop now")
            if first:
                stop()
        else:
            self._end_now()

    def _end_now(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is None:
            self._raise()
        self._say(lambda: "stopping now")
        cancel()

    def _raise(self) -> NoReturn:
        if self.requested is signal.SIGTERM:
            raise SystemExit(EXIT_CODES[self.requested])
        raise KeyboardInterrupt

    def _say(self, text: Callable[[], str]) -> None:
        threading.Thread(target=lambda: self._warn(text()), daemon=True).start()

    def _keep_to_grace(self) -> None:
        began = time.monotonic()
        if self._over.wait(STOP_SHARE * self._grace):
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # counts as the second signal
        if not self._over.wait(LEAVE_SHARE * self._grace - (time.monotonic() - began)):
            leave(EXIT_CODES[signal.SIGTERM])


def set_handler(number: int, handler: Any) -> Any:
    """Set a signal's handler in this process, and in none that it forks; returns the one before."""
    _own.add(handler)
    return signal.signal(number, handler)


def leave_to_controller(*numbers: int) -> None:
    """Ignore signals that systems send to every process of a run, in this process alone: programs
    that it starts would inherit SIG_IGN, and those that it forks any handler."""
    for number in numbers:
        set_handler(number, lambda *_: None)


def _before_fork() -> None:
    _mask.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DEFAULTS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.blocked)


def _after_fork_in_child() -> None:
    pending = signal.sigpending()
    for number, default in DEFAULTS.items():
        if number in pending:  # what a handler raises in this hook would be lost
            signal.signal(number, signal.SIG_DFL)
        elif signal.getsignal(number) in _own:
            signal.signal(number, default)
    _after_fork()


# The two are blocked meanwhile, so that a child that is ended at once does end.
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM: open resources are closed, and the process exits with 143."""
    leave_within(LEAVE_SHARE * GRACE_SECONDS, EXIT_CODES[signal.SIGTERM])
    raise SystemExit(EXIT_CODES[signal.SIGTERM])


def leave(code: int) -> NoReturn:
    """End this process without waiting for anything. Worker processes end with it."""
    try:
        remove_own()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def leave_within(seconds: float, code: int, of_exit: bool = False) -> None:
    """`leave`, unless the process ends by itself within `seconds` from now or, with `of_exit`, from
    the end of its main thread, when it waits for libraries' threads and exit handlers, which may
    hang."""

    def wait() -> None:
        if of_exit:
            threading.main_thread().join()
        time.sleep(seconds)
        leave(code)

    threading.Thread(target=wait, name="exit", daemon=True).start()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(asyncio.run(coroutine))
        except BaseException as error:  # the caller's thread raises it
            future.set_exception(error)

    # A daemon, so that the interpreter's exit does not wait for it.
    threading.Thread(target=work, name="run", daemon=True).start()
    return future.result()
