"""Worker processes that grade groups, killed from outside when late, replaced when they die.

One socket and one supervising thread a worker; verdicts travel one by one, so that the completion
that hangs or kills is named `unscorable` and its siblings keep their verdicts. A worker that dies
without being late (killed from outside, say) is replaced, and the completion that it was at is
tried once more before it is blamed.

Why not pebble, which does most of this: its workers share one pipe, and a worker killed while
writing leaves half a message on it, on which the whole pool waits for ever (measured, 5.2.3:
random SIGKILLs under load hang it within seconds, with one worker as with two).
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tramontane.config import VerifierConfig
from tramontane.types import Problem, Verdict
from tramontane.verifier import code, custom
from tramontane.verifier.reward import unscorable

START_SECONDS = 120.0
TRANSFER_SECONDS = 30  # for one message, once it has begun
STARTS = 5  # in a row, before a worker is given up
Response = tuple[str, int]


@dataclass
class _Group:
    """The completions of one problem and the verdicts that are in; or, without a problem, a
    program to be run and what it printed."""

    problem: Problem | None
    items: Sequence[Response | code.Trial]
    future: Future[Any]
    lost: Callable[[str, float], Any]  # the result, by reason and seconds, of what gave none
    lengths: tuple[int, int] = (0, 0)  # l_max and l_cache; a program has none
    results: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Task:
    """Some items of a group, for one worker, with a time limit for each of them."""

    group: _Group
    indices: list[int]
    limit_s: float
    retried: set[int] = field(default_factory=set)


@dataclass
class PoolStats:
    """What a pool did so far; `busy_seconds` is summed over its workers."""

    verdicts: int = 0
    busy_seconds: float = 0.0
    unscorable: int = 0
    timeouts: int = 0
    restarts: int = 0


def _limit_transfers(connection: Connection) -> None:
    """A worker that stops in the middle of a message fails the transfer (`OSError`), as one that is
    gone does: a pipe's buffer is soon full, and half a message may have been read."""
    limit = struct.pack("ll", int(TRANSFER_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class VerifierPool:
    """Grades groups of completions in `config.workers` processes.

    Args:
        config: workers, limits and reward weights.
        l_max: the length penalty's upper end, in tokens.
        l_cache: how far below `l_max` the penalty starts.

    Raises:
        InputError: a custom reward cannot be imported.
    """

    def __init__(self, config: VerifierConfig, l_max: int, l_cache: int) -> None:
        custom.check(config.reward.custom)
        self.config = config
        self._lengths = l_max, l_cache
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stats = PoolStats()
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="tramontane-verifier-")
        os.chmod(self._folder.name, 0o711)  # programs may run as a user of their own
        self._workers = [_Worker(self, number) for number in range(config.workers)]
        for worker in self._workers:
            worker.thread.start()

    def score(
        self, problem: Problem, responses: list[Response], lengths: tuple[int, int] | None = None
    ) -> Future[list[Verdict]]:
        """Grade the completions of one group, (text, number of tokens) each; `lengths` are l_max
        and l_cache, where they are not the pool's.

        The future gives their verdicts in order; it fails only when no worker can be started.
        """
        if self._closing:
            raise RuntimeError("the verifier pool is closed")
        future: Future[list[Verdict]] = Future()
        future.set_running_or_notify_cancel()
        parts = self.config.reward.parts
        group = _Group(
            problem,
            responses,
            future,
            lambda why, s: unscorable(why, s, parts),
            lengths or self._lengths,
        )
        if not responses:
            future.set_result([])
        elif problem.domain == "code":  # slow: a program a worker
            limit = code.time_limit(problem, self.config)
            for index in range(len(responses)):
                self._tasks.put(_Task(group, [index], limit))
        else:
            self._tasks.put(_Task(group, list(range(len(responses))), self.config.timeout_s))
        return future

    def run(self, trial: code.Trial) -> Future[list[code.TrialOutput]]:
        """Run a program, for what it prints on each input.

        The future fails only when no worker can be started.
        """
        if self._closing:
            raise RuntimeError("the verifier pool is closed")
        future: Future[list[code.TrialOutput]] = Future()
        future.set_running_or_notify_cancel()
        group = _Group(
            None, [trial], future, lambda why, _: [code.TrialOutput("", why)] * len(trial.inputs)
        )
        self._tasks.put(_Task(group, [0], trial.time_limit(self.config)))
        return future

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(**vars(self._stats))

    def close(self) -> None:
        """Kill the workers; groups that are not finished fail with `RuntimeError`."""
        if self._closing:
            return
        self._closing = True
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            while worker.thread.is_alive():  # again and again: it may be starting one right now
                worker.kill()
                worker.thread.join(0.05)
        self._folder.cleanup()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _done(self, task: _Task, result: Any) -> None:
        """Take the result of the first of the task's items."""
        group = task.group
        with self._lock:
            group.results[task.indices.pop(0)] = result
            if isinstance(result, Verdict):
                self._stats.verdicts += 1
                self._stats.unscorable += result.verdict == "unscorable"
            complete = len(group.results) == len(group.items)
        if complete and group.problem is None:
            group.future.set_result(result)
        elif complete:
            group.future.set_result([group.results[i] for i in range(len(group.items))])

    def _fail(self, group: _Group, error: Exception) -> None:
        with self._lock:
            if not group.future.done():
                group.future.set_exception(error)

    def _count(self, *, timeouts: int = 0, restarts: int = 0, busy: float = 0.0) -> None:
        with self._lock:
            self._stats.timeouts += timeouts
            self._stats.restarts += restarts
            self._stats.busy_seconds += busy


class _Worker:
    """One process and the thread that feeds, watches, kills and replaces it."""

    def __init__(self, pool: VerifierPool, number: int) -> None:
        self.pool = pool
        self.folder = Path(pool._folder.name) / str(number)
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self._warm = False
        self.thread = threading.Thread(target=self._serve, name=f"verifier-{number}", daemon=True)

    def kill(self) -> None:
        if (process := self.process) is not None:
            process.kill()

    def _serve(self) -> None:
        """Waits for a task; unblocked by `score` and by `close`."""
        while (task := self._next()) is not None:
            started = time.perf_counter()
            try:
                self._run(task)
            except Exception as error:
                # This thread is the only one who waits for the group's end: hand the error on.
                self.pool._fail(task.group, error)
            self.pool._count(busy=time.perf_counter() - started)
        self._stop()

    def _next(self) -> _Task | None:
        """The next task; a process is made ready, or replaced, before there is one."""
        if not self.pool._closing and self.process is None:
            with contextlib.suppress(OSError):  # said to the group that needs it, by `_ready`
                self._start()
        return self.pool._tasks.get()

    def _run(self, task: _Task) -> None:
        """Get a result for each of the task's items, through however many processes."""
        while task.indices:
            if self.pool._closing:
                raise RuntimeError("the verifier pool was closed")
            connection = self._ready()
            items = [task.group.items[i] for i in task.indices]
            try:
                connection.send((task.group.problem, items, *task.group.lengths))
                while task.indices:
                    if not connection.poll(task.limit_s):
                        self._stop()
                        self.pool._count(timeouts=1, restarts=1)
                        reason = f"timed out after {task.limit_s:g} s"
                        self.pool._done(task, task.group.lost(reason, task.limit_s))
                        break
                    self.pool._done(task, connection.recv())
            except (EOFError, OSError):  # the worker is gone
                how = self._stop()
                if self.pool._closing:
                    continue
                self.pool._count(restarts=1)
                if task.indices[0] in task.retried:
                    reason = f"the worker died ({how})"
                    self.pool._done(task, task.group.lost(reason, 0.0))
                else:
                    task.retried.add(task.indices[0])

    def _start(self) -> None:
        """Start a process; it warms up while this thread waits for a task."""
        shutil.rmtree(self.folder, ignore_errors=True)  # what a killed one left behind
        self.folder.mkdir()
        ours, theirs = Pipe()
        # A plain interpreter rather than multiprocessing: nobody's __main__ is imported again.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tramontane.verifier.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the controller's to handle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        _limit_transfers(ours)
        self.connection = ours
        with contextlib.suppress(BrokenPipeError):  # dead already: `_ready` will see
            ours.send((self.pool.config, str(self.folder)))

    def _ready(self) -> Connection:
        """The connection to a process that has warmed up."""
        for _ in range(STARTS):
            if self.process is not None and self.process.poll() is not None:
                self._stop()  # killed while it was idle
                self.pool._count(restarts=1)
            if self.process is None:
                self._start()
            assert self.connection is not None
            if self._warm:
                return self.connection
            try:
                if self.connection.poll(START_SECONDS) and self.connection.recv() == "ready":
                    self._warm = True
                    return self.connection
            except (EOFError, OSError):
                pass
            how = self._stop()
            if self.pool._closing:
                raise RuntimeError("the verifier pool was closed")
        raise RuntimeError(f"a verifier worker could not be started ({how}); see stderr for why")

    def _stop(self) -> str:
        """Kill the process, if any, and say how it ended."""
        if self.process is None:
            return "not running"
        self.process.kill()
        status = self.process.wait()
        if self.connection is not None:
            self.connection.close()
        self.process = self.connection = None
        self._warm = False
        if status < 0:
            return f"signal {-status} ({signal.strsignal(-status)})"
        return f"exit code {status}"
