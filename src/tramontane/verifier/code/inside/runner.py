"""One program's tests, each forked from this warm interpreter.

`sandbox` starts it with a bare interpreter: standard library only, and little of it, since every
import is paid for by every program. The job comes on stdin (see `sandbox.Job`);
a record goes to stdout as each test ends. Expected outputs are never here.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import lockdown

RECORD = struct.Struct("!iII")  # wait status or one of these, bytes of output, of errors
LATE, MEMORY, DISK, CROWD = -1, -2, -3, -4  # killed for its time, memory, files, processes
CHANNEL = 3  # where a function test finds its other half
ERROR_BYTES = 4000
_PDEATHSIG, _DUMPABLE, _SUBREAPER = 1, 4, 36
_GLANCE_SECONDS = 0.05  # between looks at what a test uses
_FILES = 20_000
MAX_PROCESSES = 256


def main() -> None:
    job, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    settings = marshal.loads(read_block(job))
    confine(settings)
    if settings["compile"] is not None:
        command, limits = settings["compile"]
        if send(results, Test(settings, limits, -1).run(b"", lambda: execute(command))) != 0:
            return
    command, source = settings["command"], settings["source"]
    for number in range(settings["inputs"]):
        test = Test(settings, settings["limits"], number)
        # Python is compiled in each test: what its compiler says is about the program.
        record = test.run(
            read_block(job), lambda: execute(command) if command else python(source, settings)
        )
        if send(results, record) != 0 and not settings["keep_going"]:
            return


def read_block(descriptor: int) -> bytes:
    """Unbuffered: what a later test is given must not lie in the memory that this one inherits."""
    size = int.from_bytes(os.read(descriptor, 8), "big")
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(results: int, record: tuple[int, bytes, bytes]) -> int:
    """Write one record; its status."""
    status, output, errors = record
    data = RECORD.pack(status, len(output), len(errors)) + output + errors
    while data:
        data = data[os.write(results, data) :]
    return status


def confine(settings: dict[str, Any]) -> None:
    """Become the sandbox's own user, out of reach of the programs, and die with the judge."""
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    if sys.platform == "linux":
        # After the change of user, which undoes the first two.
        prctl(_PDEATHSIG, signal.SIGKILL if settings["namespaces"] else signal.SIGTERM)
        prctl(_DUMPABLE, 0)
        prctl(lockdown.NO_NEW_PRIVS, 1)
        prctl(_SUBREAPER, 1)
    if not settings["namespaces"]:  # whose end would end all within them
        signal.signal(signal.SIGTERM, lambda *_: leave_nothing(settings))


def leave_nothing(settings: dict[str, Any]) -> None:
    kill_rest(settings)
    os._exit(1)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Test:
    """One execution: its files, its limits, and the end of all that it started."""

    def __init__(self, settings: dict[str, Any], limits: dict[str, float], number: int) -> None:
        self.settings, self.limits = settings, limits
        self.home = os.path.join(settings["box"], f"home{number}")
        self.writable = settings["box"] if number < 0 else self.home  # the compiler's goes there
        self.channel = settings["channel"] if number >= 0 else None  # not the compiler's

    def run(self, stdin: bytes, action: Callable[[], int]) -> tuple[int, bytes, bytes]:
        os.mkdir(self.home)
        files = [memory_file() for _ in range(3)]
        write_all(files[0], stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            self._child(files, action)
        if self.channel is not None:
            os.close(self.channel)  # so that the other end sees the program's end
        status = wait(pid, self.limits["seconds"], self._excess)
        quietly(os.killpg, pid)
        kill_rest(self.settings)
        output, errors = (read_file(f, int(self.limits["output_bytes"])) for f in files[1:])
        for descriptor in files:
            os.close(descriptor)
        empty(self.settings["box"], keep=self.settings["command"])
        return status, output, errors[-ERROR_BYTES:]

    def _excess(self) -> int:
        """MEMORY, DISK or CROWD if the test as a whole uses too much; each process's own limit is
        the system's to keep."""
        pids = descendants(self.settings["namespaces"])
        if len(pids) > MAX_PROCESSES:  # by then the system may have let it
            return CROWD
        if len(pids) > 1 and memory_of(pids) > int(self.limits["memory_mb"]) << 20:
            return MEMORY
        # In namespaces it is a file system of that size.
        if not self.settings["namespaces"] and size_of(self.home) > self.settings["box_bytes"]:
            return DISK
        return 0

    def _child(self, files: list[int], action: Callable[[], int]) -> None:
        code = 1
        try:  # whatever happens, this process must not go on as a second runner
            os.setsid()
            for descriptor, file in enumerate(files):
                os.dup2(file, descriptor)
            if self.channel is not None:
                os.dup2(self.channel, CHANNEL)
            os.closerange(3 if self.channel is None else CHANNEL + 1, 256)
            if sys.platform == "linux":
                prctl(_PDEATHSIG, signal.SIGKILL)
            os.chdir(self.home)
            os.environ["HOME"] = os.environ["TMPDIR"] = self.home
            restrict(self.limits)
            if self.settings["files"] is not None:
                readable, devices = self.settings["files"]
                lockdown.hide_files(readable, devices, self.writable)
            if self.settings["filter"]:
                # A linker makes its output executable.
                lockdown.filter_calls(self.settings["namespaces"] or self.writable != self.home)
            code = action()
        except BaseException:  # of ours: the program's own are shown where it runs
            show()
        finally:
            os._exit(code)


def memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("test")
    import tempfile  # elsewhere than on Linux

    return os.dup(tempfile.TemporaryFile().fileno())


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_file(descriptor: int, limit: int) -> bytes:
    size = min(os.fstat(descriptor).st_size, limit)
    return os.pread(descriptor, size, 0) if size else b""


def restrict(limits: dict[str, float]) -> None:
    wanted = [
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 2),
        (resource.RLIMIT_AS, int(limits["memory_mb"]) << 20),
        (resource.RLIMIT_FSIZE, int(limits["output_bytes"])),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, int(limits["processes"])),
        (resource.RLIMIT_CORE, 0),
    ]
    for which, amount in wanted:
        hard = resource.getrlimit(which)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(which, (amount, amount))


def wait(pid: int, seconds: float, excess: Callable[[], int]) -> int:
    """The child's wait status, or why it was killed: LATE, or what `excess` says."""
    end = time.monotonic() + seconds
    why = 0
    while not why and not ended(pid, min(_GLANCE_SECONDS, end - time.monotonic())):
        why = LATE if time.monotonic() >= end else excess()
    if why:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return why or status


def ended(pid: int, seconds: float) -> bool:
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(pid)
        readable = select.select([descriptor], [], [], max(seconds, 0))[0]
        os.close(descriptor)
        return bool(readable)
    time.sleep(min(max(seconds, 0), 0.002))  # elsewhere than on Linux
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def descendants(namespaces: bool) -> list[str]:
    """Process ids of the running test; none where the system does not tell."""
    if namespaces and os.getpid() == 1:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found: list[str] = []
    left = [str(os.getpid())]
    while left:
        try:
            with open(f"/proc/{left[0]}/task/{left.pop(0)}/children") as file:
                children = file.read().split()
        except OSError:  # ended meanwhile
            continue
        found += children
        left += children
    return found


def memory_of(pids: list[str]) -> int:
    """Bytes that are theirs; pages that forked processes share are shared out among them, or, of
    a process that hides itself, counted in full."""
    total = 0
    for pid in pids:
        try:
            try:
                with open(f"/proc/{pid}/smaps_rollup") as file:
                    total += sum(int(x.split()[1]) for x in file if x.startswith("Pss_Anon")) << 10
            except PermissionError:
                with open(f"/proc/{pid}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
                total += (resident - shared) * resource.getpagesize()
        except OSError:  # ended meanwhile
            continue
    return total


def size_of(folder: str) -> int:
    """Bytes of the files under a folder, a file at least a block; more than `_FILES` are not
    counted to the end."""
    total, seen, left = 0, 0, [folder]
    while left and seen < _FILES:
        try:
            entries = list(os.scandir(left.pop()))
            for entry in entries:
                seen += 1
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # too deep, or closed to us, so that it cannot be counted
            return sys.maxsize
    return total


def kill_rest(settings: dict[str, Any]) -> None:
    """Kill and reap all that a test left behind."""
    if os.getpid() == 1 or (settings["uid"] and not settings["namespaces"]):
        # "All" is then all of the sandbox, or of a user that nobody else is. At one stroke: no
        # process can fork its way out of it.
        quietly(os.kill, -1)
        while reap():
            pass
        return
    # Orphans come to us (see `confine`). A stopped process forks no more, so that each round
    # leaves fewer to stop.
    stopped: set[str] = set()
    while new := set(descendants(False)) - stopped:
        for pid in new:
            quietly(os.kill, int(pid), signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        quietly(os.kill, int(pid))
    while reap():
        pass


def quietly(kill: Callable[[int, int], None], target: int, how: int = signal.SIGKILL) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import
        kill(target, how)
    except ProcessLookupError:
        pass


def reap() -> bool:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def empty(box: str, keep: list[str] | None) -> None:
    """Leave nothing of a test to the next but the compiled program, if any.

    However deep folders lie in one another: what is in one moves up before it goes.
    """
    name = os.path.join(box, os.urandom(8).hex())
    moved = 0
    while entries := [e for e in os.scandir(box) if not keep or e.path != keep[0]]:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)  # else it could not move
                    moved += 1
                    os.rename(inner, f"{name}-{moved}")
                else:
                    os.unlink(inner)
            os.rmdir(entry)


# ------------------------------------------------------------------------------ in the test


def execute(command: list[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(command[0], command)


def python(path: str, settings: dict[str, Any]) -> int:
    """What a test in Python does: run a program, or one half of a function test."""
    if settings["channel"] is None:
        return run_python(path)
    from . import remote

    if path:
        return run_python(path, remote.serve)
    return remote.run_tests(marshal.loads(read_file(0, sys.maxsize)))


def run_python(path: str, then: Callable[[ModuleType], None] | None = None) -> int:
    """Like `python path`, in a process that is up already; the exit code.

    With `then`, like importing it: the module goes to `then` when it is loaded.
    """
    with open(path, "rb") as file:
        source = file.read()
    module = ModuleType("solution" if then else "__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__=path)
    sys.modules[module.__name__] = module
    sys.argv = [path]
    if sys.platform == "linux":
        prctl(_DUMPABLE, 1)  # as an ordinary process, which may look at itself
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` would
    sys.setrecursionlimit(1010)  # ours are not the program's
    code = 0
    try:
        exec(compile(source, path, "exec"), module.__dict__)
        if then:
            then(module)
    except SystemExit as end:
        code = exit_code(end.code)
    except BaseException:
        show()
        code = 1
    return code if leave() else code or 120


def exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def show() -> None:
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    sys.__excepthook__(kind, error, trace.tb_next if trace else None)


def leave() -> bool:
    """What the interpreter does at its end: threads, exit functions, buffers."""
    import atexit

    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        show()
        return False
    return True
