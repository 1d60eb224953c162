"""A running sandbox: starts the runner on a rung of the ladder, and kills everything at the end."""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tramontane.placement.orphans import die_with_parent
from tramontane.verifier.code.inside import files, lockdown
from tramontane.verifier.code.sandbox import bubblewrap, landlock, namespaces
from tramontane.verifier.code.sandbox.job import (
    BOX_MB,
    COMPILER_LIMITS,
    GRACE_SECONDS,
    OUTPUT_BYTES,
    Job,
    Limits,
    Rung,
)
from tramontane.verifier.code.sandbox.processes import kill_group, new_user, process_limit
from tramontane.verifier.code.sandbox.results import Results
from tramontane.verifier.code.sandbox.system import (
    ENVIRONMENT,
    INSIDE,
    INTERPRETER,
    runner_command,
)


def _prepare() -> None:
    """Give the new process an ordinary shell's settings, whatever the judge's are."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o022)
    # The memory limit also limits the stack. A finite stack limit would apply to every thread.
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))


class Sandbox:
    """A running sandbox. `results` gives the result of each execution, the compiler's first.

    A context manager: at its end, no process or file of the program is left.
    """

    def __init__(self, job: Job, rung: Rung) -> None:
        self.job, self.rung = job, rung
        self.has_namespaces = rung in ("bubblewrap", "namespaces")
        self.box = Path("/tmp" if self.has_namespaces else tempfile.mkdtemp(dir=job.folder))
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        limits = [COMPILER_LIMITS] * bool(job.compiler) + [job.limits] * len(job.inputs)
        self.process, pipe = self._start()
        self.results = Results(pipe, limits, job.keep_going)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_namespaces:  # the runner itself must kill the program's processes
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        kill_group(self.process.pid)
        self.process.wait()
        # The namespaces' first process dies a moment after its parent; the pipe closes with it.
        self.results.drain(GRACE_SECONDS)
        self.errors.close()
        if not self.has_namespaces:  # the runner may have been killed before doing this
            files.empty(str(self.box), keep=None)

    def last_error(self) -> str:
        """The last line that the sandbox's own tools printed; only while the sandbox is open."""
        self.errors.seek(0)
        return (self.errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        uid = new_user() if self.rung != "rlimits" and os.geteuid() == 0 else 0
        if self.rung == "landlock" and uid:
            os.chown(self.box, uid, uid)
        with tempfile.TemporaryFile() as stdin:
            for block in (self._settings(uid), *self.job.inputs):
                stdin.write(len(block).to_bytes(8, "big") + block)
            stdin.seek(0)
            reading, writing = os.pipe()
            process = subprocess.Popen(
                self._command(uid),
                stdin=stdin,
                stdout=writing,
                stderr=self.errors,
                cwd="/" if self.has_namespaces else self.box,
                env=ENVIRONMENT,
                start_new_session=True,
                preexec_fn=_prepare,
                pass_fds=[] if self.job.channel is None else [self.job.channel],
            )
        os.close(writing)
        return process, reading

    def _command(self, uid: int) -> list[str]:
        if not self.has_namespaces:
            # A rung that mounts can show any interpreter; Landlock cannot.
            program = landlock.interpreter() if self.rung == "landlock" else INTERPRETER
            return runner_command(program, str(INSIDE.parent))
        shown = [("/program", str(self.job.folder)), ("/inside", str(INSIDE))]
        if self.job.headers:
            shown.append(("/headers", str(self.job.headers)))
        wrap = bubblewrap.wrap if self.rung == "bubblewrap" else namespaces.wrap
        return wrap(runner_command(INTERPRETER, "/"), shown, uid)

    def _settings(self, uid: int) -> bytes:
        """The job's settings for `inside.runner`."""
        job, spaces = self.job, self.has_namespaces
        folder = Path("/program") if spaces else job.folder
        headers = "/headers" if spaces else job.headers
        compiler = [x.format(box=self.box, folder=folder, headers=headers) for x in job.compiler]
        settings = {
            "keep_going": job.keep_going,
            "uid": 0 if self.rung == "namespaces" else uid,  # `setpriv` changes the user there
            "namespaces": spaces,
            "filter": self.rung != "rlimits" and lockdown.supported(),
            "keep": [str(self.box / "main")],
            "prelude": job.prelude,
            "has_files": job.has_files,
            "files": landlock.reachable_files(job) if self.rung == "landlock" else None,
            "box": str(self.box),
            "box_bytes": BOX_MB << 20,
            "limits": self._limits(job.limits),
            "compile": (compiler, self._limits(COMPILER_LIMITS)) if compiler else None,
            "command": [str(self.box / "main")] if compiler else None,
            "source": str(folder / job.source) if job.source else None,
            "inputs": len(job.inputs),
            "channel": job.channel,
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
