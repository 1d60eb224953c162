"""One execution of a program: a child process in its own folder, under its limits and locks."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from . import lockdown, processes, records

FEW = 4  # so few processes cannot have too many sockets
FORK_SECONDS = 2.0  # for the host to have a process again
HANG_UP_SECONDS = 0.5  # for a program to end by itself when its tests have ended


def fork() -> int:
    """`os.fork`, retried for FORK_SECONDS; -1 if the host has no process or memory left."""
    deadline = time.monotonic() + FORK_SECONDS
    while time.monotonic() < deadline:
        try:
            return os.fork()
        except OSError:  # EAGAIN, ENOMEM
            time.sleep(0.1)
    return -1


class Execution:
    """One execution: its files, its limits, and the termination of every process it started.

    Args:
        settings: the job's settings, from `sandbox.Sandbox`.
        limits: seconds, asleep_seconds, clock_seconds, memory_mb, output_bytes, processes.
        number: the input's number; -1 for the compiler.
        program: the descriptor of the compiled program's file, if there is one.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        limits: dict[str, float],
        number: int,
        program: int | None = None,
    ) -> None:
        compiles = number < 0
        self.settings, self.limits = settings, limits
        self.home = os.path.join(settings["box"], f"home{number}")
        self.writable = settings["box"] if compiles else self.home  # the program is made there
        self.channel = None if compiles else settings["channel"]
        self.program = program
        self.files: dict[str, bytes] = {}  # put into the home, by name
        self.streams: list[int] = []  # files in memory: standard input, output and errors
        self.hidden: set[str] = set()  # processes that hid what they hold open
        self.times = processes.Times()
        self.hung_up: float | None = None  # when the other half of a function test ended

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.times.processor, self.times.asleep, self.times.clock

    def run(self, stdin: bytes, action: Callable[[list[str]], int]) -> tuple[int, bytes, bytes]:
        """Run `action` in a child, with the names of its files; returns its record (status,
        output, errors)."""
        pid = self.begin(stdin, action)
        if pid < 0:
            return records.HOST, b"", b""
        return self.end(
            pid,
            processes.wait_for(pid, self.limits, self.times, self._processes, self._excess),
        )

    def begin(self, stdin: bytes, action: Callable[[list[str]], int]) -> int:
        """Run `action` in a child; returns its process id, -1 if the host has no process left."""
        os.mkdir(self.home)
        self.streams = [records.memory_file() for _ in range(3)]
        records.write_all(self.streams[0], stdin)
        os.lseek(self.streams[0], 0, os.SEEK_SET)
        self.times = processes.Times()
        ready, unready = os.pipe()
        pid = fork()
        if pid == 0:
            self._child(self.streams, action)
        os.close(unready)
        if pid > 0:
            os.read(ready, 1)  # until `_enter` closes the other end, before the program begins
        os.close(ready)
        if pid < 0:
            self._close_streams()
        return pid

    def end(self, pid: int, status: int) -> tuple[int, bytes, bytes]:
        """Kill what is left of the child and its processes, and remove their files; returns the
        record."""
        if self.channel is not None:
            records.hang_up(self.channel)  # so that the other half sees the end of the program
        processes.kill_quietly(os.killpg, pid)
        processes.kill_rest(self.settings)
        limit = int(self.limits["output_bytes"])
        output, errors = (records.read_file(f, limit) for f in self.streams[1:])
        self._close_streams()
        processes.empty(self.settings["box"], keep=self.settings["keep"])
        return status, output, errors[-records.ERROR_BYTES :]

    def _close_streams(self) -> None:
        for descriptor in self.streams:
            os.close(descriptor)

    def _processes(self) -> list[str]:
        return processes.descendants(self.settings["namespaces"])

    def _excess(self, pids: list[str]) -> int:
        """Why the execution as a whole must end, or 0; `restrict` limits each process."""
        if self.channel is not None and records.has_hung_up(self.channel):
            self.hung_up = self.hung_up or self.times.clock
            if self.times.clock - self.hung_up > HANG_UP_SECONDS:
                return records.ALONE
        if len(pids) > records.MAX_PROCESSES:  # the system's limit is not enforced everywhere
            return records.CROWD
        if len(pids) > 1 and processes.memory_of(pids) > int(self.limits["memory_mb"]) << 20:
            return records.MEMORY
        if sys.platform != "linux":
            return records.DISK if processes.size_of(self.home) > self.settings["box_bytes"] else 0
        spaces = self.settings["namespaces"]
        held = processes.Held(pids if len(pids) > FEW or not spaces else [], with_maps=not spaces)
        if held.hidden & self.hidden:  # twice, so it is not merely about to end
            return records.HIDDEN
        self.hidden = held.hidden
        if held.sockets > records.MAX_SOCKETS:
            return records.MEMORY
        # In namespaces the box is a file system of limited size, but not of limited inodes.
        if spaces:
            return records.DISK if processes.inodes_of(self.home) > records.MAX_FILES else 0
        size = processes.size_of(self.home) + held.unnamed_bytes
        return records.DISK if size > self.settings["box_bytes"] else 0

    def _child(self, files: list[int], action: Callable[[list[str]], int]) -> None:
        code = 1
        try:  # whatever happens, this process must not continue as a second runner
            self._enter(files)
            code = action(list(self.files))
        except BaseException:  # the runner's own error; a program's is handled where it runs
            show_error()
        finally:
            os._exit(code)

    def _enter(self, files: list[int]) -> None:
        os.setsid()
        if sys.platform == "linux":
            processes.prctl(processes.PDEATHSIG, signal.SIGKILL)
            processes.prctl(processes.DUMPABLE, 1)  # an ordinary process, which may inspect itself
        for name, content in self.files.items():
            with open(os.path.join(self.home, name), "wb") as file:
                file.write(content)
        for descriptor, file_descriptor in enumerate(files):
            os.dup2(file_descriptor, descriptor)
        if self.channel is not None:
            os.dup2(self.channel, records.CHANNEL)
        elif self.program is not None:
            os.dup2(self.program, records.CHANNEL, inheritable=False)
        is_used = self.channel is not None or self.program is not None
        os.closerange(records.CHANNEL + is_used, 256)
        os.chdir(self.home)
        os.environ["HOME"] = os.environ["TMPDIR"] = self.home
        restrict(self.limits)
        if self.settings["files"] is not None:
            readable, devices = self.settings["files"]
            lockdown.hide_files(readable, devices, self.writable)
        if self.settings["filter"]:
            # Without namespaces chmod is closed, but a linker must make its output executable.
            compiles = self.writable != self.home
            lockdown.filter_calls(self.settings["namespaces"] or compiles)


def restrict(limits: dict[str, float]) -> None:
    """Set the resource limits of this process and its children."""
    amounts = [
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 2),  # `wait_for` is more exact
        (resource.RLIMIT_AS, int(limits["memory_mb"]) << 20),
        (resource.RLIMIT_FSIZE, int(limits["output_bytes"])),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, int(limits["processes"])),
        (resource.RLIMIT_CORE, 0),
    ]
    for which, amount in amounts:
        hard = resource.getrlimit(which)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(which, (amount, amount))


def show_error() -> None:
    """Print the current exception's traceback, without the frame of this package."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    trace = trace.tb_next if trace else None
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
