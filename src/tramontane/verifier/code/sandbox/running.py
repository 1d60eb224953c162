"""A running sandbox: starts the runner on a rung of the ladder, reads the results of executions
from its records, and kills everything at the end. Also finds the best rung that works, by trying.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.temporary import temporary_folder
from tramontane.verifier.code.inside import lockdown, processes, records
from tramontane.verifier.code.sandbox import rungs, server
from tramontane.verifier.code.sandbox.job import (
    ANSWER_SECONDS,
    BOX_MB,
    COMPILER_LIMITS,
    GRACE_SECONDS,
    OUTPUT_BYTES,
    PROCESSES,
    RUNGS,
    Job,
    Limits,
    Rung,
)


class Times(NamedTuple):
    """Seconds of an execution: of processor time, asleep, and by the clock."""

    processor: float = 0.0
    asleep: float = 0.0
    clock: float = 0.0


class Result(NamedTuple):
    """The end of one execution: its output, or in `failure` why the output is not used.

    If `is_unjudged`, the failure is the host's fault: it was too busy or had no process left. If
    `is_clock`, the execution was stopped while asleep, or by the clock.
    """

    output: bytes
    failure: str
    code: int | None = None  # exit code, negative for a signal; None if the runner killed it
    is_unjudged: bool = False
    is_clock: bool = False
    times: Times = Times()
    errors: str = ""  # the end of what a failed one wrote to standard error


class Results(Iterator[Result]):
    """Iterates over the results of a sandbox's executions, as they end.

    Ends after the first failure, unless `keep_going`, and when the sandbox ends.

    Args:
        descriptor: the pipe with the runner's records, which are not trusted.
        limits: limits of each execution, the compiler's first if there is one.
        keep_going: continue after a failed execution.
        is_served: False once the sandbox's server has ended, and the sandbox with it.
    """

    def __init__(
        self,
        descriptor: int,
        limits: list[Limits],
        keep_going: bool,
        is_served: Callable[[], bool] = lambda: True,
    ) -> None:
        self._descriptor, self._limits, self._keep_going = descriptor, limits, keep_going
        self._is_served = is_served
        self._ready = False  # the runner has begun

    def __next__(self) -> Result:
        if not self._limits:
            raise StopIteration
        return self.wait(self._limits[0].clock_seconds + ANSWER_SECONDS)

    def expect(self, limits: Limits) -> None:
        """Expect one more result."""
        self._limits.append(limits)

    def wait(self, seconds: float) -> Result:
        """The next result; one without a judgment if it does not come within `seconds`."""
        limits = self._limits.pop(0)
        deadline = time.monotonic() + seconds
        head = self._read(records.RECORD.size, deadline)
        if head is not None and not self._ready:
            self._ready = records.RECORD.unpack(head)[0] == records.READY
            head = self._read(records.RECORD.size, deadline) if self._ready else head
        if head is None:
            self._limits.clear()
            late = time.monotonic() >= deadline
            reason = "killed the sandbox" if self._ready else "the sandbox did not start"
            if late:
                reason = f"the sandbox gave no result within {seconds:g} s"
            elif self._ready and not self._is_served():
                reason = server.ENDED
                return Result(b"", reason, is_unjudged=True)
            return Result(b"", reason, is_unjudged=late or not self._ready, is_clock=late)
        status, n_output, n_errors, *seconds_of = records.RECORD.unpack(head)
        times = Times(*seconds_of)
        n_output = min(n_output, OUTPUT_BYTES)
        output = self._read(n_output, deadline)
        errors = self._read(min(n_errors, records.ERROR_BYTES), deadline)
        if status == 0 and output is not None:
            return Result(output, "", 0, times=times)
        if not self._keep_going:
            self._limits.clear()
        failure = _describe_failure(status, limits, n_output, errors or b"")
        code = None if status < 0 else _exit_code(status)
        is_clock = status in (records.ASLEEP, records.BUSY)
        is_unjudged = status in (records.BUSY, records.HOST)
        said = (errors or b"").decode(errors="replace")
        return Result(b"", failure, code, is_unjudged, is_clock, times, said)

    def drain(self, seconds: float) -> None:
        """Read until the sandbox has closed the pipe, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while self._readable(deadline) and os.read(self._descriptor, 1 << 20):
            pass

    def close(self) -> None:
        os.close(self._descriptor)

    def _readable(self, deadline: float) -> bool:
        poll = select.poll()  # `select.select` accepts only descriptors below 1,024
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))

    def _read(self, size: int, deadline: float) -> bytes | None:
        """`size` bytes, or None if the deadline passes or the sandbox ends before."""
        data = b""
        while len(data) < size:
            if not self._readable(deadline):
                return None
            part = os.read(self._descriptor, size - len(data))
            if not part:
                return None
            data += part
        return data


def _exit_code(status: int) -> int:
    """`os.waitstatus_to_exitcode` for any number: a broken sandbox may send an impossible one."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _describe_failure(status: int, limits: Limits, n_output: int, errors: bytes) -> str:
    reasons = {
        records.LATE: f"timed out after {limits.seconds:g} s",
        records.ASLEEP: f"timed out after {limits.asleep_seconds:g} s, most of it asleep",
        records.BUSY: f"the host was too busy to run it within {limits.clock_seconds:g} s",
        records.HOST: "the host had no process or memory left to run it",
        records.ALONE: "continued after the other side of its function test had ended",
        records.MEMORY: f"needed more than {limits.memory_mb} MB",
        records.CROWD: f"started more than {records.MAX_PROCESSES} processes",
        records.DISK: f"wrote more than {BOX_MB} MB, or {records.MAX_FILES:,} files",
        records.HIDDEN: "hid what its processes hold open",
        records.ENDED: "ended its session",
    }
    if status in reasons:
        return reasons[status]
    code = _exit_code(status)
    if code == -signal.SIGXFSZ or n_output >= OUTPUT_BYTES:
        return f"printed more than {OUTPUT_BYTES >> 20} MB"
    lines = errors.decode(errors="replace").strip().splitlines()
    line = next((x for x in lines if "error:" in x), lines[-1] if lines else "")
    if "MemoryError" in line or "bad_alloc" in line:
        return reasons[records.MEMORY]
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{end}: {line[:200]}" if line else end


# -------------------------------------------------------------------------------------- running


def _block(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content


def reserve_user() -> tuple[int, socket.socket]:
    """A user id that no other sandbox on this machine has, until the socket is closed."""
    for user in itertools.count(0x70000000 + 8 * os.getpid()):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0tramontane-user-{user}")  # an abstract name: it ends with its process
        except OSError:
            holder.close()
        else:
            return user, holder
    raise AssertionError("unreachable")


def process_limit(own_user: bool) -> int:
    """The value of RLIMIT_NPROC for a sandbox, with its own user or user namespace or without."""
    return PROCESSES + (0 if own_user and _counts_by_namespace() else _threads_of_user())


@functools.cache
def _counts_by_namespace() -> bool:
    """True if the system counts processes by namespace and user, not by user alone (Linux 5.14)."""
    if os.geteuid() == 0:
        return True  # the user is reserved for the sandbox
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (5, 14)


def _threads_of_user() -> int:
    """Number of the user's threads: outside namespaces, the system's limit counts all of them."""
    if sys.platform != "linux":
        return 4096  # unknown there; more than a user runs
    total, uid = 0, os.geteuid()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if entry.stat().st_uid == uid:
                total += len(os.listdir(entry / "task"))
    return total


class Sandbox:
    """A running sandbox. `results` gives the result of each execution, the compiler's first.

    A context manager: at its end, no process or file of the program is left.
    """

    def __init__(self, job: Job, rung: Rung) -> None:
        self.job, self.rung = job, rung
        self.has_namespaces = rung in ("bubblewrap", "namespaces")
        limits = [COMPILER_LIMITS] * bool(job.compiler) + [job.limits] * len(job.inputs)
        self._input: int | None = None  # to a session
        with contextlib.ExitStack() as opened:
            self.errors = opened.enter_context(tempfile.TemporaryFile())
            self.folder = Path("/program")  # the program's own files
            if rung != "namespaces":
                self.folder = Path(opened.enter_context(temporary_folder("code")), "program")
                self._make_folder()
            self.box = Path("/tmp" if self.has_namespaces else tempfile.mkdtemp(dir=self.folder))
            self._uid = 0
            if rung != "rlimits" and os.geteuid() == 0:
                self._uid, user = reserve_user()
                opened.enter_context(user)  # holds the id
            self.server, self.pid, pipe = self._start()
            self.results = Results(pipe, limits, job.keep_going, self.server.is_alive)
            self._opened = opened.pop_all()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_namespaces:  # the runner itself must kill the program's processes
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.results.drain(GRACE_SECONDS)
        with contextlib.suppress(ConnectionError):  # the sandbox has ended with its server
            self.server.end(self.pid)
        if self.has_namespaces:
            # bubblewrap's processes die a moment after it; the pipe closes with them.
            self.results.drain(GRACE_SECONDS)
        self.results.close()
        if self._input is not None:
            os.close(self._input)
        if not self.has_namespaces:  # the runner may have been killed before doing this
            processes.empty(str(self.box), keep=None)
        self._opened.close()

    def run(self, code: bytes) -> Result:
        """Run code in a session; the output includes errors. A failure ends the session."""
        assert self._input is not None
        self.results.expect(self.job.limits)
        with contextlib.suppress(BrokenPipeError):  # the result says that the sandbox has ended
            os.write(self._input, _block(code))
        return next(self.results)

    def last_error(self) -> str:
        """The last line that the sandbox's own tools printed; only while the sandbox is open."""
        self.errors.seek(0)
        return (self.errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]

    def _make_folder(self) -> None:
        """Write the program's files, readable by every user, whatever the umask: if the judge is
        root, the program runs as another user."""
        self.folder.parent.chmod(0o711)
        self.folder.mkdir()
        self.folder.chmod(0o755)
        for name, content in self.job.files.items():
            (self.folder / name).write_bytes(content)
            (self.folder / name).chmod(0o644)

    def _start(self) -> tuple[server.Server, int, int]:
        if self.rung == "landlock" and self._uid:
            os.chown(self.box, self._uid, self._uid)
        head = _block(marshal.dumps(self._place())) + _block(self._settings())
        if self.job.is_session:
            stdin, self._input = os.pipe()
            os.write(self._input, head)  # a few kB, which a pipe holds
        else:
            with tempfile.TemporaryFile() as file:
                file.write(head)
                file.writelines(map(_block, self.job.inputs))
                file.seek(0)
                stdin = os.dup(file.fileno())
        reading, writing = os.pipe()
        passed = [stdin, writing, self.errors.fileno()]
        passed += [] if self.job.channel is None else [self.job.channel]
        try:
            return *server.fork(self.rung, self.job.hash_seed, passed), reading
        except OSError:
            os.close(reading)
            if self._input is not None:
                os.close(self._input)
            raise
        finally:
            os.close(stdin)
            os.close(writing)

    def _place(self) -> dict[str, Any]:
        """What the server's fork needs, before it runs the job."""
        job, command = self.job, []
        if self.rung == "bubblewrap":
            shown = [("/program", str(self.folder)), ("/inside", str(rungs.INSIDE))]
            if job.headers:
                shown.append(("/headers", str(job.headers)))
            runner = rungs.python_command("runner", rungs.INTERPRETER, "/")
            variables = rungs.environment(job.hash_seed)
            command = rungs.wrap_in_bubblewrap(runner, shown, self._uid, variables)
        return {
            "command": command,
            "box": str(self.box),
            "box_bytes": BOX_MB << 20,
            "files": job.files,
            "headers": str(job.headers) if job.headers else None,
        }

    def _settings(self) -> bytes:
        job, spaces = self.job, self.has_namespaces
        folder = Path("/program") if spaces else self.folder
        headers = "/headers" if spaces else job.headers
        compiler = [x.format(box=self.box, folder=folder, headers=headers) for x in job.compiler]
        is_hidden = self.rung == "landlock"
        settings = {
            "keep_going": job.keep_going,
            "uid": self._uid,
            "namespaces": spaces,
            "filter": self.rung != "rlimits" and lockdown.supported(),
            "keep": [str(self.box / "main")],
            "prelude": job.prelude,
            "has_files": job.has_files,
            "files": rungs.reachable_files(self.folder, job.headers) if is_hidden else None,
            "box": str(self.box),
            "box_bytes": BOX_MB << 20,
            "limits": self._limits(job.limits),
            "compile": (compiler, self._limits(COMPILER_LIMITS)) if compiler else None,
            "command": [str(self.box / "main")] if compiler else None,
            "source": str(folder / job.source) if job.source else None,
            "inputs": len(job.inputs),
            "channel": None if job.channel is None else records.CHANNEL,
            "is_session": job.is_session,
        }
        return marshal.dumps(settings)

    def _limits(self, limits: Limits) -> dict[str, Any]:
        own_user = self.has_namespaces or (self.rung == "landlock" and os.geteuid() == 0)
        processes = process_limit(own_user)
        return {
            "seconds": limits.seconds,
            "asleep_seconds": limits.asleep_seconds,
            "clock_seconds": limits.clock_seconds,
            "memory_mb": limits.memory_mb,
            "output_bytes": OUTPUT_BYTES,
            "processes": processes,
        }


# -------------------------------------------------------------------------------- the ladder

_PROBE = """
import os, threading, heapq
threading.Thread(target=int).start()
def look(what):
    try: return what()
    except OSError: return "hidden"
power = lambda: [int(x.split()[1], 16) for x in open("/proc/self/status") if x.startswith("CapEff")]
print(input(), look(power), look(lambda: sum(x.isdigit() for x in os.listdir("/proc"))))
"""


@functools.cache
def probe() -> Rung:
    """The best working rung on this machine; determined once per process."""
    _hold_standard_streams()
    for rung in RUNGS[:-1]:
        if sys.platform == "linux" and not why_not(rung):
            return rung
    warnings.warn(
        "NO SANDBOX: neither bubblewrap nor namespaces nor Landlock work here. Programs that "
        "models write are run only with verifier.allow_unsandboxed=true, under rlimits alone: "
        "they can then read your files and use the network. `tramontane doctor` says how to fix "
        "it.",
        RuntimeWarning,
        stacklevel=2,
    )
    return "rlimits"


def why_not(rung: Rung) -> str:
    """Run a small program on a rung; returns what went wrong, "" if nothing did."""
    path = rungs.ENVIRONMENT["PATH"]
    if missing := [
        tool for tool in rungs.TOOLS.get(rung, []) if shutil.which(tool, path=path) is None
    ]:
        return f"{', '.join(missing)} not found"
    if rung == "landlock" and (reason := rungs.why_no_landlock()):
        return reason
    if reason := _hidden_from_users():
        return reason
    job = Job([b"in\n"], Limits(5.0, 300))
    job.set_program(_PROBE, "python")
    try:
        sandbox = Sandbox(job, rung)
    except OSError as error:  # what the rung needs is missing
        return str(error)
    with sandbox:
        result = next(sandbox.results)
        if result.failure:
            return f"{result.failure} {sandbox.last_error()}".strip()
    expected = b"in hidden hidden\n" if rung == "landlock" else b"in [0] 2\n"
    if result.output != expected:
        return f"gave {result.output!r}"
    # Compiled programs must run too. Any program will do, whatever it prints.
    job = Job([b""], Limits(5.0, 300))
    job.compiler = [*(shutil.which(tool, path=path) or tool for tool in ("cp", "cat"))]
    job.compiler.append("{box}/main")
    with Sandbox(job, rung) as sandbox:
        failures = [result.failure for result in sandbox.results]
    refused = [x for x in failures[:1] if x] + [x for x in failures[1:] if "Error: [Errno" in x]
    return f"cannot run a compiled program: {refused[0]}" if refused else ""


def _hidden_from_users() -> str:
    """Why programs, which run as another user if the judge is root, cannot read the runner."""
    closed = [p for p in (rungs.INSIDE, *rungs.INSIDE.glob("*.py")) if not p.stat().st_mode & 0o004]
    if os.geteuid() != 0 or not closed:
        return ""
    return f"{closed[0]} is readable by root only (umask): chmod -R go+rX {rungs.INSIDE.parents[2]}"


def _hold_standard_streams() -> None:
    """Open closed standard streams: otherwise a socket or pipe could become a program's."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one
