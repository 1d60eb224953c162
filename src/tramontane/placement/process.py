"""A worker process on this machine, with a socket to it: killed from outside, and started again.

pebble does most of this but is not used: its workers share one pipe, and a worker killed while
writing leaves half a message on it, for which the whole pool waits forever (measured, 5.2.3: random
SIGKILLs under load hang it within seconds, with one worker as with two).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

from tramontane.errors import InputError
from tramontane.interrupt import leave_to_controller
from tramontane.placement import warm
from tramontane.placement.printed import Relay, flush, print_by_line

START_SECONDS = 120.0  # limit for a worker to import its libraries
TRANSFER_SECONDS = 30  # limit for one message, once it has begun
MAX_STARTS = 5  # consecutive failed starts of one worker
READY = ""  # the first message of a worker that is ready; any other text is the error


class WorkerProcess:
    """One process that runs `python -m MODULE FD`; after `stop`, another takes its place.

    It is forked from a process that has the imports (`warm`). Its first answer is an empty text if
    it is ready, otherwise what is wrong with its settings.
    Only one thread may use it, apart from `kill`.

    Args:
        name: in messages, e.g. `verifier worker`.
        module: serves the socket FD.
        label: of what it and its children print, e.g. `reward`.
    """

    def __init__(self, name: str, module: str, label: str) -> None:
        self.name, self._module, self._label = name, module, label
        self.process: warm.Forked | None = None
        self._relay: Relay | None = None  # of the process
        self.connection: Connection | None = None
        self.warm = False  # it has said that it is ready
        self.closing = False  # set by another thread, before `kill`
        self._mark = uuid4().hex

    @property
    def died(self) -> bool:
        """True if it ended by itself, or something else killed it."""
        return self.process is not None and self.process.poll() is not None

    def start(self, settings: Any) -> None:
        """Start a process, and send it `settings`; it warms up in the background."""
        ours, theirs = Pipe()
        self._relay = relay = Relay(self._label)
        try:
            # Not multiprocessing's server: its workers import the caller's __main__ again.
            self.process = warm.fork([self._module], self._mark, relay.writing, theirs.fileno())
        finally:
            theirs.close()
            os.close(relay.writing)
        _limit_transfers(ours)
        self.connection = ours
        with contextlib.suppress(BrokenPipeError):  # dead already: `ready` will notice
            ours.send(settings)

    def ready(self, settings: Callable[[], Any]) -> Connection:
        """The connection to a process that has warmed up, started if necessary with `settings()`.

        Raises:
            RuntimeError: MAX_STARTS processes in a row died before they were ready, or this is
                closing.
            InputError: what a process reports about its settings.
        """
        for _ in range(MAX_STARTS):
            if self.died:
                self.stop()
            if self.process is None:
                self.start(settings())
            assert self.connection is not None
            if self.warm:
                return self.connection
            try:
                if self.connection.poll(START_SECONDS):
                    if fault := self.connection.recv():
                        self.stop()
                        raise InputError(fault)
                    self.warm = True
                    return self.connection
            except (EOFError, OSError):
                pass
            ending = self.stop()
            if self.closing:
                raise RuntimeError(f"the {self.name} was closed")
        raise RuntimeError(f"a {self.name} could not be started ({ending}); see stderr for why")

    def kill(self) -> None:
        """Kill the process, and what it started."""
        if (process := self.process) is not None:
            _kill_tree(process)

    def stop(self) -> str:
        """Kill the process, if any, and describe how it ended."""
        if self.process is None:
            return "not running"
        process, connection = self.process, self.connection
        # Forgotten before the wait: an answer that it still sends must not count for another task.
        self.process = self.connection = None
        self.warm = False
        _kill_tree(process)  # before it learns that the connection is closed, and ends
        if connection is not None:
            connection.close()
        status = process.wait(warm.KILL_SECONDS)
        _kill_marked(self._mark)
        assert self._relay
        self._relay.close()
        if status < 0:
            return f"signal {-status} ({signal.strsignal(-status)})"
        return f"exit code {status}"


def limit_memory(beyond: int) -> None:
    """Limit this process, and each of its children, to the memory that it has now plus `beyond`
    bytes. The limit is on data, not on address space: a library may reserve gigabytes on a machine
    with many cores without using them. Without /proc, the limit is `beyond`."""
    status = Path("/proc/self/status")
    used = 0
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
        used = int(line.split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + beyond, used + beyond))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(descriptor: int, prepare: Callable[..., Callable[[Any], Iterable[Any]]]) -> None:
    """The worker's side: serve the socket until the other side closes its end, or dies.

    Args:
        descriptor: of the socket.
        prepare: called with (config, folder for temporary files); returns a function of a task,
            whose results are sent one at a time. Its InputError is sent to the other side.
    """
    leave_to_controller(signal.SIGTERM)
    print_by_line()
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # answers come from this process alone
    with contextlib.suppress(EOFError, ConnectionError):  # it is gone
        config, folder = connection.recv()
        tempfile.tempdir = folder
        try:
            results = prepare(config, Path(folder))
        except InputError as error:
            connection.send(str(error))
            return
        except FileNotFoundError:
            if Path(folder).exists():
                raise
            return  # the other side is ending, and has removed it
        connection.send(READY)
        while True:
            for result in results(connection.recv()):
                flush()
                connection.send(result)


def _kill_tree(process: warm.Forked) -> None:
    started = _descendants(process.pid) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    for each in started:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(each, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """What a process started, and what that started, in whatever session (Linux only)."""
    parents = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            status = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.name)] = int(status[1])
    processes = [process]
    for parent in processes:  # which grows
        processes += [child for child, of in parents.items() if of == parent]
    return processes[1:]


def _kill_marked(mark: str) -> None:
    """Kill what a worker started and no longer is the parent of (Linux only)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _limit_transfers(connection: Connection) -> None:
    """Let a transfer fail with `OSError` when the worker stops in the middle of a message."""
    limit = struct.pack("ll", int(TRANSFER_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
