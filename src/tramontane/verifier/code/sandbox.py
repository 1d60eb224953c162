"""Run a program on its inputs in the best sandbox that works here, found by trying once.

The rungs, best first: `bubblewrap`; `namespaces`, the same by `unshare`, `mount` and `setpriv`;
`landlock`, for where no namespaces may be made; `rlimits`, which is no sandbox: it bounds
accidents, and needs the user's consent. Behind the first three a program reads the system's
programs and libraries and its own source, and writes to a small private directory; it has no
network, reaches no other process, gains no capability, and, where we are root, is a user that
nobody else is.

One sandbox serves all tests of a program (`inside.runner`). The judge outside is told what each
printed and compares: expected outputs never enter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tramontane.placement.orphans import die_with_parent
from tramontane.verifier.code.inside import lockdown, runner

Rung = Literal["bubblewrap", "namespaces", "landlock", "rlimits"]
RUNGS: tuple[Rung, ...] = ("bubblewrap", "namespaces", "landlock", "rlimits")
OUTPUT_BYTES = 16 * 1024 * 1024
BOX_MB = 64  # the private directory
PROCESSES = 64  # and threads
GRACE_SECONDS = 2.0  # for the sandbox itself, beyond a test's own limit
COMPILE_SECONDS = 10.0
COMPILE_MB = 2048
CPP_FLAGS = ("-std=c++20", "-O2")
# The interpreter beneath a virtual environment, started without `site`: programs have the standard
# library and no package, on every rung and machine alike.
INTERPRETER = getattr(sys, "_base_executable", None) or sys.executable
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
_DEVICES = ["null", "zero", "full", "urandom", "random"]
_SETTINGS = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
# What is beside the folder `inside` must not shadow the standard library for programs.
_START = (
    "import sys; sys.path.append({where!r}); import inside.runner as r; sys.path.pop(); r.main()"
)
TOOL_SECONDS = 120.0  # for a compiler that is asked for its version, or to compile one header
_NEXT_USER = itertools.count()


@dataclass
class Job:
    """A program and what to feed it. `folder` holds its source, and is all of ours that it sees.

    `source` is a Python file of the folder; or `compiler` makes the program `{box}/main` from the
    folder's `main.cpp`, with `headers` in sight. Each input is one execution; with `keep_going` a
    failed one is not the last. With a `channel`, the execution is one half of a function test: the
    program if there is a source, else its tests.
    """

    folder: Path
    inputs: list[bytes]
    seconds: float
    memory_mb: int
    source: str | None = None
    compiler: list[str] = field(default_factory=list)
    headers: Path | None = None
    keep_going: bool = False
    channel: int | None = None  # a socket's descriptor, which the program gets as `runner.CHANNEL`

    def compile(self, *flags: str) -> None:
        """Make the program from `main.cpp`, under these flags of g++."""
        self.headers = precompiled(flags)
        headers = ["-I", "{headers}"] if self.headers else []
        gpp = shutil.which("g++") or "g++"
        self.compiler = [gpp, *flags, *headers, "-pipe", "-o", "{box}/main", "{folder}/main.cpp"]


class Ended(NamedTuple):
    """How one execution ended: its output, or in `failure` why it does not count."""

    output: bytes
    failure: str
    code: int | None = None  # the exit code, negative for a signal


@functools.cache
def probe() -> Rung:
    """The best rung on which a program runs here; tried once a process."""
    for rung in RUNGS[:-1]:
        if sys.platform == "linux" and not why_not(rung):
            return rung
    warnings.warn(
        "NO SANDBOX: neither bubblewrap nor namespaces nor Landlock work here. Programs that "
        "models write are run only with verifier.allow_unsandboxed=true, under rlimits alone: "
        "they can then read your files and use the network. `tramontane doctor` says how to mend "
        "it.",
        RuntimeWarning,
        stacklevel=2,
    )
    return "rlimits"


_PROBE = """
import os, threading, heapq
threading.Thread(target=int).start()
def look(what):
    try: return what()
    except OSError: return "hidden"
power = lambda: [int(x.split()[1], 16) for x in open("/proc/self/status") if x.startswith("CapEff")]
print(input(), look(power), look(lambda: sum(x.isdigit() for x in os.listdir("/proc"))))
"""


def why_not(rung: Rung) -> str:
    """Try a rung on a small program; what went wrong, "" if nothing did."""
    needs = {"bubblewrap": ["bwrap"], "namespaces": ["unshare", "mount", "chroot", "setpriv"]}
    if missing := [
        tool
        for tool in needs.get(rung, [])
        if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None
    ]:
        return f"{', '.join(missing)} not found"
    if rung == "landlock":
        if not lockdown.supported():
            return f"no table of system calls for {os.uname().machine}"
        if (version := lockdown.landlock_version()) < lockdown.LANDLOCK_NEEDED:
            return f"the kernel has Landlock {max(version, 0)}, 3 is needed (Linux 6.2)"
    with tempfile.TemporaryDirectory(prefix="tramontane-probe-") as name:
        folder = Path(name)
        (folder / "main.py").write_text(_PROBE)
        job = Job(folder, [b"in\n"], 5.0, 300, source="main.py")
        with Execution(job, rung) as execution:
            ended = next(execution)
        expected = b"in hidden hidden\n" if rung == "landlock" else b"in [0] 2\n"
        if not ended.failure and ended.output != expected:
            return f"gave {ended.output!r}"
        return ended.failure and f"{ended.failure} {execution.complaint()}".strip()


class Execution(Iterator[Ended]):
    """A running sandbox, as an iterator: what each execution did, the compiler first if any.

    A context manager: at its end nothing of the program is left. Iteration ends with the first
    failure (where the job does not keep going), or the sandbox's end.
    """

    def __init__(self, job: Job, rung: Rung) -> None:
        self.job, self.rung = job, rung
        self.namespaces = rung in ("bubblewrap", "namespaces")
        self.box = Path("/tmp" if self.namespaces else tempfile.mkdtemp(dir=job.folder))
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._limits: list[tuple[float, int]] = [(job.seconds, job.memory_mb)] * len(job.inputs)
        if job.compiler:
            self._limits.insert(0, (COMPILE_SECONDS, COMPILE_MB))
        self._process, self._results = self._start()

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.namespaces:  # it has to see to the program's processes itself
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        killpg_quietly(self._process.pid)
        self._process.wait()
        # The sandbox's first process dies a moment after its parent; the pipe closes with it.
        end = time.monotonic() + GRACE_SECONDS
        while self._readable(end) and os.read(self._results, 1 << 20):
            pass
        os.close(self._results)
        self.errors.close()
        if not self.namespaces:  # the runner may have ended before it came to this
            runner.empty(str(self.box), keep=None)

    def __next__(self) -> Ended:
        if not self._limits:
            raise StopIteration
        return self.next(self._limits[0][0] + GRACE_SECONDS)

    def next(self, patience: float) -> Ended:
        """The next execution's end, if it comes within so many seconds."""
        seconds, memory_mb = self._limits.pop(0)
        end = time.monotonic() + patience
        head = self._read(runner.RECORD.size, end)
        if head is None:
            self._limits.clear()
            late = time.monotonic() >= end
            return Ended(b"", f"timed out after {seconds:g} s" if late else "killed the sandbox")
        status, n_output, n_errors = runner.RECORD.unpack(head)
        output = self._read(min(n_output, OUTPUT_BYTES), end)
        errors = self._read(min(n_errors, runner.ERROR_BYTES), end)
        if status == 0 and output is not None:
            return Ended(output, "", 0)
        if not self.job.keep_going:
            self._limits.clear()
        n_output = min(n_output, OUTPUT_BYTES)
        failure = _failure(status, seconds, memory_mb, n_output, errors or b"")
        code = None if status < 0 else _exit_code(status)
        return Ended(b"", failure, code)

    def complaint(self) -> str:
        """What the sandbox's own tools said, last line; only before the end."""
        if self.errors.closed:
            return ""
        self.errors.seek(0)
        return (self.errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        uid = 0
        if self.rung != "rlimits" and os.geteuid() == 0:
            # A few users a worker: sandboxes that run at once must not share one.
            uid = 0x70000000 + 8 * os.getpid() + next(_NEXT_USER) % 8
        if self.rung == "landlock" and uid:
            os.chown(self.box, uid, uid)
        self.job.folder.chmod(0o755)  # that user must read it
        with tempfile.TemporaryFile() as stdin:
            for block in (self._settings(uid), *self.job.inputs):
                stdin.write(len(block).to_bytes(8, "big") + block)
            stdin.seek(0)
            ours, theirs = os.pipe()
            process = subprocess.Popen(
                self._command(uid),
                stdin=stdin,
                stdout=theirs,
                stderr=self.errors,
                cwd="/" if self.namespaces else self.box,
                env=_ENVIRONMENT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                pass_fds=[] if self.job.channel is None else [self.job.channel],
            )
        os.close(theirs)
        return process, ours

    def _settings(self, uid: int) -> bytes:
        folder = Path("/program") if self.namespaces else self.job.folder
        compiler = [
            part.format(
                box=self.box,
                folder=folder,
                headers="/headers" if self.namespaces else self.job.headers,
            )
            for part in self.job.compiler
        ]
        settings = {
            "keep_going": self.job.keep_going,
            "uid": 0 if self.rung == "namespaces" else uid,  # there `setpriv` sees to it
            "namespaces": self.namespaces,
            "filter": self.rung != "rlimits" and lockdown.supported(),
            "files": self._in_reach() if self.rung == "landlock" else None,
            "box": str(self.box),
            "box_bytes": BOX_MB << 20,
            "limits": self._limit(self.job.seconds, self.job.memory_mb),
            "compile": (compiler, self._limit(COMPILE_SECONDS, COMPILE_MB)) if compiler else None,
            "command": [str(self.box / "main")] if compiler else None,
            "source": str(folder / self.job.source) if self.job.source else None,
            "inputs": len(self.job.inputs),
            "channel": self.job.channel,
        }
        return marshal.dumps(settings)

    def _in_reach(self) -> tuple[list[str], list[str]]:
        """What Landlock lets a program read, and the devices."""
        headers = [str(self.job.headers)] if self.job.headers else []
        system = _readable_paths(own=_interpreter("landlock") == INTERPRETER)
        readable = [*system, str(self.job.folder), str(Path(runner.__file__).parent), *headers]
        return readable, [f"/dev/{name}" for name in _DEVICES]

    def _limit(self, seconds: float, memory_mb: int) -> dict[str, float]:
        alone = self.namespaces or (self.rung == "landlock" and os.geteuid() == 0)
        processes = PROCESSES + (0 if alone and _own_count() else _threads_of_user())
        limits = {"seconds": seconds, "memory_mb": memory_mb, "output_bytes": OUTPUT_BYTES}
        return limits | {"processes": processes}

    def _command(self, uid: int) -> list[str]:
        inside = Path(runner.__file__).parent
        start = _START.format(where="/" if self.namespaces else str(inside.parent))
        command = [_interpreter(self.rung), "-I", "-S", "-B", "-c", start]
        if not self.namespaces:
            return command
        shown = [("/program", str(self.job.folder)), ("/inside", str(inside))]
        if self.job.headers:
            shown.append(("/headers", str(self.job.headers)))
        make = _bubblewrap if self.rung == "bubblewrap" else _unshare
        return make(shown, uid, command)

    def _readable(self, end: float) -> bool:
        poll = select.poll()  # `select` knows no descriptor above 1,023
        poll.register(self._results, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, end - time.monotonic())))

    def _read(self, size: int, end: float) -> bytes | None:
        """So many bytes of the results, or None: late, or the sandbox is gone."""
        data = b""
        while len(data) < size:
            if not self._readable(end):
                return None
            part = os.read(self._results, size - len(data))
            if not part:
                return None
            data += part
        return data


def _exit_code(status: int) -> int:
    """As `os.waitstatus_to_exitcode`, but of any number: what a sandbox says may be broken."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _failure(status: int, seconds: float, memory_mb: int, n_output: int, errors: bytes) -> str:
    if status == runner.LATE:
        return f"timed out after {seconds:g} s"
    if status == runner.MEMORY:
        return f"needed more than {memory_mb} MB"
    if status == runner.CROWD:
        return f"started more than {runner.MAX_PROCESSES} processes"
    if status == runner.DISK:
        return f"wrote more than {BOX_MB} MB"
    code = _exit_code(status)
    if code == -signal.SIGXFSZ or n_output >= OUTPUT_BYTES:
        return f"printed more than {OUTPUT_BYTES >> 20} MB"
    said = errors.decode(errors="replace").strip().splitlines()
    line = next((x for x in said if "error:" in x), said[-1] if said else "")
    if "MemoryError" in line or "bad_alloc" in line:
        return f"needed more than {memory_mb} MB"
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}: {line[:200]}" if line else ended


# -------------------------------------------------------------------------------- the rungs


def _interpreter(rung: Rung) -> str:
    """Ours, unless the user that programs run as cannot reach it, as in root's own folder; a
    rung that mounts can show it all the same."""
    if rung != "landlock" or os.geteuid() != 0:
        return INTERPRETER
    open_to_all = all(parent.stat().st_mode & 1 for parent in Path(INTERPRETER).resolve().parents)
    path = _ENVIRONMENT["PATH"]
    return INTERPRETER if open_to_all else shutil.which("python3", path=path) or INTERPRETER


def _readable_paths(own: bool = True) -> list[str]:
    """What every program may read: the system's programs, and our interpreter."""
    prefix = sys.base_prefix
    own = own and not (prefix.startswith("/usr/") or prefix == "/usr")
    return [path for path in (*_SYSTEM, *_SETTINGS, *[prefix] * own) if os.path.exists(path)]


def _bubblewrap(shown: list[tuple[str, str]], uid: int, command: list[str]) -> list[str]:
    if uid:
        # As root the user that the runner becomes is a real one: limits on processes bind it.
        apart = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        apart += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        apart += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # lost by using them
    else:
        apart = ["--unshare-all", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    line = ["bwrap", "--die-with-parent", "--as-pid-1", "--clearenv", *apart]
    for name, value in _ENVIRONMENT.items():
        line += ["--setenv", name, value]
    # In this order: an interpreter may itself live under /tmp.
    line += ["--perms", "0777", "--size", str(BOX_MB << 20), "--tmpfs", "/tmp"]
    for path in _readable_paths():
        if os.path.islink(path) and path in _SYSTEM:
            line += ["--symlink", os.readlink(path), path]
            continue
        for parent in reversed(Path(path).parents[:-1]):  # by itself bwrap closes them to others
            line += ["--perms", "0755", "--dir", str(parent)]
        line += ["--ro-bind", path, path]
    for inside, outside in shown:
        line += ["--ro-bind", outside, inside]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*line, "--chdir", "/", *command]


def _unshare(shown: list[tuple[str, str]], uid: int, command: list[str]) -> list[str]:
    """The same by hand: a root directory of bind mounts on a tmpfs, in namespaces of its own."""
    lines = ["set -e", "root=/sys", "mount -t tmpfs -o size=1m,mode=755 tmpfs $root", "cd $root"]
    lines += ["mkdir -p proc dev tmp", "ln -s /proc/self/fd dev/fd"]
    lines += [f"ln -s fd/{n} dev/{name}" for n, name in enumerate(("stdin", "stdout", "stderr"))]
    lines += [f"mount -t tmpfs -o size={BOX_MB}m,mode=777,nosuid,nodev tmpfs tmp"]
    lines += ["mount -t proc -o nosuid,nodev,noexec proc proc"]
    devices = [(f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    for inside, outside in [*((p, p) for p in _readable_paths()), *devices, *shown]:
        target = _quote(inside.lstrip("/"))
        if os.path.islink(outside) and outside in _SYSTEM:
            lines.append(f"ln -s {_quote(os.readlink(outside))} {target}")
            continue
        folder = _quote(os.path.dirname(inside).lstrip("/") or ".")
        lines.append(f"mkdir -p {folder}")
        lines.append(f"mkdir -p {target}" if os.path.isdir(outside) else f": > {target}")
        lines.append(f"mount --rbind {_quote(outside)} {target}")
        if not outside.startswith("/dev/"):
            lines.append(f"mount -o remount,bind,ro {target}")
    lines.append("mount -o remount,bind,ro $root")
    # `setpriv` has no capability left to leave the new root with.
    user = f"--reuid {uid} --regid {uid} --clear-groups " if uid else ""
    run = " ".join(_quote(part) for part in command)
    lines.append(
        f"exec chroot . setpriv {user}--no-new-privs --bounding-set=-all --inh-caps=-all {run}"
    )
    apart = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    if not uid:
        apart += ["--user", "--map-root-user"]
    return ["unshare", *apart, "sh", "-c", "\n".join(lines)]


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@functools.cache
def precompiled(flags: tuple[str, ...]) -> Path | None:
    """A folder with `bits/stdc++.h` compiled under these flags, made once and kept in the cache:
    the user's; root's is the system's, since programs run as another user."""
    version = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, timeout=TOOL_SECONDS
    ).stdout
    beside = "#include_next <bits/stdc++.h>\n"  # for a program that includes it a second time
    kind = (flags, version, os.uname().machine, beside)
    key = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path("/var/cache" if os.geteuid() == 0 else users)
    folder = cache / "tramontane" / f"headers-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    (made / "bits").mkdir()
    (made / "bits" / "stdc++.h").write_text(beside)
    (made / "empty.hpp").write_text("#include <bits/stdc++.h>\n")
    target = str(made / "bits" / "stdc++.h.gch")
    command = ["g++", *flags, "-x", "c++-header", "-o", target, str(made / "empty.hpp")]
    if subprocess.run(command, capture_output=True, timeout=TOOL_SECONDS).returncode != 0:
        shutil.rmtree(made)
        return None  # a library without that header: programs that ask for it do not compile
    made.chmod(0o755)
    try:
        made.rename(folder)  # whole, or not at all
    except OSError:  # another worker was first
        shutil.rmtree(made)
    return folder


@functools.cache
def _own_count() -> bool:
    """Whether limits on processes count by namespace and user, not by user alone (Linux 5.14)."""
    if os.geteuid() == 0:
        return True  # a user that nobody else is
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (5, 14)


def _threads_of_user() -> int:
    """Outside namespaces the system counts all threads of a user, and so must a limit."""
    if sys.platform != "linux":
        return 4096  # not told: more than a user runs
    total, uid = 0, os.geteuid()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if entry.stat().st_uid == uid:
                total += len(os.listdir(entry / "task"))
    return total


def killpg_quietly(group: int) -> None:
    """Kill what is left of a process group, if anything."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
