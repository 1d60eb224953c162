"""Processor time of processes and of all that they start."""

from __future__ import annotations

import ctypes
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

SUBREAPER = 36  # option of prctl


def processor_seconds(work: Callable[[], None]) -> float:
    """Do the work in a fork; returns the processor seconds of the fork and of all its descendants,
    killed and orphaned ones too (Linux). Raises `RuntimeError` if the work fails."""
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(reading)
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # orphans become its children
        worker = os.fork()
        if worker == 0:
            os._exit(_exit_code(work))
        code = _reap(worker)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(writing, str(used.ru_utime + used.ru_stime).encode())
        os._exit(code)
    os.close(writing)
    with open(reading) as pipe:
        seconds = pipe.read()
    if os.waitpid(watcher, 0)[1] != 0:
        raise RuntimeError("the measured work failed: see above")
    return float(seconds)


def used_so_far(root: int) -> float:
    """The processor seconds until now of a process, its living descendants, and those that they
    waited for (Linux)."""
    ticks, children = dict[int, int](), dict[int, list[int]]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(entry.name)
        ticks[pid] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:  # which grows
        found += children.get(pid, [])
    return sum(ticks.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")


def _exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reap(worker: int) -> int:
    """Wait for all descendants; returns the worker's exit code."""
    code = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == worker:
            code = 1 if status else 0
