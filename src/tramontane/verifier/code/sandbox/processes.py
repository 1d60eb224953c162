"""Users and limits of the processes in a sandbox, and the killing of leftovers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
from pathlib import Path

from tramontane.verifier.code.sandbox.job import PROCESSES

_next_user = itertools.count()


def new_user() -> int:
    """A user id for one sandbox; the judge must be root.

    Eight ids for each worker: sandboxes that run at the same time must not share one.
    """
    return 0x70000000 + 8 * os.getpid() + next(_next_user) % 8


def process_limit(own_user: bool) -> int:
    """The value of RLIMIT_NPROC for a sandbox.

    Args:
        own_user: the sandbox has its own user or user namespace.
    """
    return PROCESSES + (0 if own_user and _counts_by_namespace() else _threads_of_user())


@functools.cache
def _counts_by_namespace() -> bool:
    """True if the system counts processes by namespace and user, not by user alone (Linux 5.14)."""
    if os.geteuid() == 0:
        return True  # the user is reserved for the sandbox
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (5, 14)


def _threads_of_user() -> int:
    """Outside namespaces the limit of the system counts all threads of the user."""
    if sys.platform != "linux":
        return 4096  # unknown there; more than a user runs
    total, uid = 0, os.geteuid()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if entry.stat().st_uid == uid:
                total += len(os.listdir(entry / "task"))
    return total


def kill_group(group: int) -> None:
    """Kill the rest of a process group, if there is any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
