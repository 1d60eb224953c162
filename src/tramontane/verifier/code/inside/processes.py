"""The processes of an execution: waiting for them, measuring them, killing all of them."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from .records import LATE

PDEATHSIG, DUMPABLE, SUBREAPER = 1, 4, 36  # options of prctl
_POLL_SECONDS = 0.05  # between two measurements of an execution's memory, files and processes


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def wait_for(pid: int, seconds: float, excess: Callable[[], int]) -> int:
    """Wait for a child; kill it after `seconds`, or when `excess` returns a nonzero code.

    Returns:
        the child's wait status, or the reason for the kill: LATE, or the code from `excess`.
    """
    deadline = time.monotonic() + seconds
    reason = 0
    while not reason and not has_ended(pid, min(_POLL_SECONDS, deadline - time.monotonic())):
        reason = LATE if time.monotonic() >= deadline else excess()
    if reason:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return reason or status


def has_ended(pid: int, seconds: float) -> bool:
    """True if the child ends within `seconds`; it stays to be waited for."""
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(pid)
        readable = select.select([descriptor], [], [], max(seconds, 0))[0]
        os.close(descriptor)
        return bool(readable)
    time.sleep(min(max(seconds, 0), 0.002))  # systems other than Linux
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def descendants(namespaces: bool) -> list[str]:
    """Process ids of the running execution; empty on systems that do not list them."""
    if namespaces and os.getpid() == 1:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found: list[str] = []
    unread = [str(os.getpid())]
    while unread:
        try:
            with open(f"/proc/{unread[0]}/task/{unread.pop(0)}/children") as file:
                children = file.read().split()
        except OSError:  # ended meanwhile
            continue
        found += children
        unread += children
    return found


def memory_of(pids: list[str]) -> int:
    """Private memory of the processes, in bytes.

    Pages that forked processes share are divided among them. A process that hides its map is
    counted with all its resident private pages.
    """
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


def kill_rest(settings: dict[str, Any]) -> None:
    """Kill and reap every process that an execution left behind."""
    if os.getpid() == 1 or (settings["uid"] and not settings["namespaces"]):
        # "All processes" then means those of this sandbox, or of a user that only this sandbox has.
        # One signal reaches all of them at once, so none can escape it by forking.
        kill_quietly(os.kill, -1)
        while reap():
            pass
        return
    # Orphans become children of the runner (see `runner.confine`). A stopped process forks no
    # more, so each round leaves fewer to stop.
    stopped: set[str] = set()
    while new := set(descendants(False)) - stopped:
        for pid in new:
            kill_quietly(os.kill, int(pid), signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        kill_quietly(os.kill, int(pid))
    while reap():
        pass


def kill_quietly(
    kill: Callable[[int, int], None], target: int, number: int = signal.SIGKILL
) -> None:
    """Send a signal by `os.kill` or `os.killpg`; the target may be gone already."""
    try:  # noqa: SIM105 - contextlib would be one more import
        kill(target, number)
    except ProcessLookupError:
        pass


def reap() -> bool:
    """Wait for one child; False if there is none."""
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True
