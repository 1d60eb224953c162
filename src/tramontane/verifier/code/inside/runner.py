"""The first process in a sandbox: forks every execution of a program from a warm interpreter.

`sandbox.Sandbox` starts it in a bare interpreter with only the standard library. It imports as
little as possible, because every program pays for every import. The job arrives on standard input
(see `sandbox.job`); a record is written to standard output as each execution ends. Expected outputs
are never here.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from . import lockdown
from .descriptors import (
    CHANNEL,
    hang_up,
    has_hung_up,
    memory_file,
    read_block,
    read_file,
    sealed_file,
    write_all,
)
from .files import Held, empty, inodes_of, size_of
from .interpreter import run_source, show_error, warm_up
from .processes import (
    DUMPABLE,
    PDEATHSIG,
    SUBREAPER,
    Times,
    descendants,
    kill_quietly,
    kill_rest,
    memory_of,
    prctl,
    wait_for,
)
from .records import (
    ALONE,
    CROWD,
    DISK,
    ERROR_BYTES,
    HIDDEN,
    HOST,
    MAX_FILES,
    MAX_PROCESSES,
    MAX_SOCKETS,
    MEMORY,
    READY,
    send_record,
)

FEW = 4  # so few processes cannot have too many sockets
FORK_SECONDS = 2.0  # for the host to have a process again
HANG_UP_SECONDS = 0.5  # for a program to end by itself when its tests have ended


def main() -> None:
    job, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    settings = marshal.loads(read_block(job))
    confine(settings)
    send_record(results, (READY, b"", b""), (0.0, 0.0, 0.0))
    command, source, program = settings["command"], settings["source"], None
    if settings["compile"] is not None:
        compiler, limits = settings["compile"]
        compilation = Execution(settings, limits, -1)
        record = compilation.run(b"", lambda _: execute(compiler))
        if send_record(results, record, compilation.seconds) != 0:
            return
        program = sealed_file(command[0])
        if program is not None:  # otherwise an execution could replace it in the box
            settings["keep"] = None
            empty(settings["box"], keep=None)
    warm_up(settings["prelude"])

    def run_program(arguments: list[str]) -> int:
        if command:
            return execute([*command, *arguments], program)
        # Compiled in each execution: the compiler's errors are the program's.
        return run_source(source, settings, arguments)

    for number in range(settings["inputs"]):
        execution = Execution(settings, settings["limits"], number, program)
        stdin = read_block(job)
        if settings["has_files"]:
            execution.files, stdin = marshal.loads(stdin), b""
        record = execution.run(stdin, run_program)
        status = send_record(results, record, execution.seconds)
        if status != 0 and not settings["keep_going"]:
            return


def confine(settings: dict[str, Any]) -> None:
    """Become the sandbox's own user, unreachable for the programs; die when the judge dies."""
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    if sys.platform == "linux":
        # After the change of user, which resets the first two.
        prctl(PDEATHSIG, signal.SIGKILL if settings["namespaces"] else signal.SIGTERM)
        prctl(DUMPABLE, 0)
        prctl(lockdown.NO_NEW_PRIVS, 1)
        prctl(SUBREAPER, 1)
    if not settings["namespaces"]:  # the end of a namespace ends all processes in it
        signal.signal(signal.SIGTERM, lambda *_: kill_rest_and_exit(settings))


def kill_rest_and_exit(settings: dict[str, Any]) -> None:
    kill_rest(settings)
    os._exit(1)


def execute(command: list[str], program: int | None = None) -> int:
    """Replace this process by a compiler, or by a compiled program, whose file is then at
    CHANNEL."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execve(command[0] if program is None else CHANNEL, command, os.environ)


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
        self.hidden: set[str] = set()  # processes that hid what they hold open
        self.times = Times()
        self.hung_up: float | None = None  # when the other half of a function test ended

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.times.processor, self.times.asleep, self.times.clock

    def run(self, stdin: bytes, action: Callable[[list[str]], int]) -> tuple[int, bytes, bytes]:
        """Run `action` in a child, with the names of its files; returns its record (status,
        output, errors)."""
        os.mkdir(self.home)
        files = [memory_file() for _ in range(3)]
        write_all(files[0], stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
        self.times = Times()
        ready, unready = os.pipe()
        pid = fork()
        if pid == 0:
            self._child(files, action)
        os.close(unready)
        if pid > 0:
            os.read(ready, 1)  # until `_enter` closes the other end, before the program begins
        os.close(ready)
        if pid < 0:
            for descriptor in files:
                os.close(descriptor)
            return HOST, b"", b""
        status = wait_for(pid, self.limits, self.times, self._processes, self._excess)
        if self.channel is not None:
            hang_up(self.channel)  # so that the other half sees the end of the program
        kill_quietly(os.killpg, pid)
        kill_rest(self.settings)
        output, errors = (read_file(f, int(self.limits["output_bytes"])) for f in files[1:])
        for descriptor in files:
            os.close(descriptor)
        empty(self.settings["box"], keep=self.settings["keep"])
        return status, output, errors[-ERROR_BYTES:]

    def _processes(self) -> list[str]:
        return descendants(self.settings["namespaces"])

    def _excess(self, pids: list[str]) -> int:
        """MEMORY, DISK, CROWD, HIDDEN or ALONE if the execution as a whole uses too much, hides
        what it uses, or continues after the other half of its function test has ended; else 0.

        The limits of each single process are enforced by the system (`restrict`).
        """
        if self.channel is not None and has_hung_up(self.channel):
            self.hung_up = self.hung_up or self.times.clock
            if self.times.clock - self.hung_up > HANG_UP_SECONDS:
                return ALONE
        if len(pids) > MAX_PROCESSES:  # the system's limit is not enforced everywhere
            return CROWD
        if len(pids) > 1 and memory_of(pids) > int(self.limits["memory_mb"]) << 20:
            return MEMORY
        if sys.platform != "linux":
            return DISK if size_of(self.home) > self.settings["box_bytes"] else 0
        spaces = self.settings["namespaces"]
        held = Held(pids if len(pids) > FEW or not spaces else [], with_maps=not spaces)
        if held.hidden & self.hidden:  # twice, so it is not merely about to end
            return HIDDEN
        self.hidden = held.hidden
        if held.sockets > MAX_SOCKETS:
            return MEMORY
        # In namespaces the box is a file system of limited size, but not of limited inodes.
        if spaces:
            return DISK if inodes_of(self.home) > MAX_FILES else 0
        size = size_of(self.home) + held.unnamed_bytes
        return DISK if size > self.settings["box_bytes"] else 0

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
        """Set up the child: session, descriptors, working directory, limits, locks."""
        os.setsid()
        if sys.platform == "linux":
            prctl(PDEATHSIG, signal.SIGKILL)
            prctl(DUMPABLE, 1)  # an ordinary process, which may inspect itself
        for name, content in self.files.items():
            with open(os.path.join(self.home, name), "wb") as file:
                file.write(content)
        for descriptor, file_descriptor in enumerate(files):
            os.dup2(file_descriptor, descriptor)
        if self.channel is not None:
            os.dup2(self.channel, CHANNEL)
        elif self.program is not None:
            os.dup2(self.program, CHANNEL, inheritable=False)
        is_used = self.channel is not None or self.program is not None
        os.closerange(CHANNEL + is_used, 256)
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
