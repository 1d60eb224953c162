"""The ladder of rungs: finds the best working rung by trying each."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import warnings
from pathlib import Path

from tramontane.temporary import temporary_folder
from tramontane.verifier.code.sandbox import bubblewrap, landlock, namespaces
from tramontane.verifier.code.sandbox.job import RUNGS, Job, Limits, Rung
from tramontane.verifier.code.sandbox.running import Sandbox
from tramontane.verifier.code.sandbox.system import ENVIRONMENT, INSIDE

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
    tools = {"bubblewrap": bubblewrap.TOOLS, "namespaces": namespaces.TOOLS}.get(rung, [])
    path = ENVIRONMENT["PATH"]
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        return f"{', '.join(missing)} not found"
    if rung == "landlock" and (reason := landlock.why_unsupported()):
        return reason
    if reason := _hidden_from_users():
        return reason
    with temporary_folder("probe") as name:
        os.chmod(name, 0o711)
        job = Job(Path(name, "python"), [b"in\n"], Limits(5.0, 300), source="main.py")
        job.write("main.py", _PROBE)
        with Sandbox(job, rung) as sandbox:
            result = next(sandbox.results)
            if result.failure:
                return f"{result.failure} {sandbox.last_error()}".strip()
        expected = b"in hidden hidden\n" if rung == "landlock" else b"in [0] 2\n"
        if result.output != expected:
            return f"gave {result.output!r}"
        # Compiled programs must run too. Any program will do, whatever it prints.
        job = Job(Path(name, "made"), [b""], Limits(5.0, 300))
        job.compiler = [*(shutil.which(tool, path=path) or tool for tool in ("cp", "cat"))]
        job.compiler.append("{box}/main")
        with Sandbox(job, rung) as sandbox:
            failures = [result.failure for result in sandbox.results]
    refused = [x for x in failures[:1] if x] + [x for x in failures[1:] if "Error: [Errno" in x]
    return f"cannot run a compiled program: {refused[0]}" if refused else ""


def _hidden_from_users() -> str:
    """Why programs, which run as another user if the judge is root, cannot read the runner."""
    closed = [p for p in (INSIDE, *INSIDE.glob("*.py")) if not p.stat().st_mode & 0o004]
    if os.geteuid() != 0 or not closed:
        return ""
    return f"{closed[0]} is readable by root only (umask): chmod -R go+rX {INSIDE.parents[2]}"


def _hold_standard_streams() -> None:
    """Open closed ones of the first three descriptors: otherwise a socket or pipe could become a
    program's standard stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one
