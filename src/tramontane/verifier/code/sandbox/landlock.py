"""The third rung of the sandbox ladder: Landlock hides files, seccomp closes system calls.

It needs no namespaces. The locks are in `inside.lockdown`; the runner's children apply them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tramontane.verifier.code.inside import lockdown
from tramontane.verifier.code.sandbox.job import Job
from tramontane.verifier.code.sandbox.system import (
    DEVICES,
    ENVIRONMENT,
    INSIDE,
    INTERPRETER,
    readable_paths,
)


def why_unsupported() -> str:
    """Why this machine's Landlock is unsuitable; "" if it is suitable."""
    if not lockdown.supported():
        return f"no table of system calls for {os.uname().machine}"
    if (version := lockdown.landlock_version()) < lockdown.LANDLOCK_NEEDED:
        return f"the kernel has Landlock {max(version, 0)}, 3 is needed (Linux 6.2)"
    return ""


def interpreter() -> str:
    """The judge's interpreter, or the system's if the judge is root and the programs' user cannot
    reach the judge's, for example in root's own folder."""
    if os.geteuid() != 0:
        return INTERPRETER
    open_to_all = all(parent.stat().st_mode & 1 for parent in Path(INTERPRETER).resolve().parents)
    path = ENVIRONMENT["PATH"]
    return INTERPRETER if open_to_all else shutil.which("python3", path=path) or INTERPRETER


def reachable_files(job: Job) -> tuple[list[str], list[str]]:
    """The paths that a program may read, and the devices."""
    headers = [str(job.headers)] if job.headers else []
    system = readable_paths(with_interpreter=interpreter() == INTERPRETER)
    return [*system, str(job.folder), str(INSIDE), *headers], [f"/dev/{name}" for name in DEVICES]
