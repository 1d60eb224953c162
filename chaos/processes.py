"""The processes of a run in /proc: which worker each is, what it holds, and whether it lives."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")
ENDED = ("Z", "X")  # states; a zombie has ended, and its parent has not read its exit code


class Usage(NamedTuple):
    """Resources of one process; sizes are in bytes.

    Args:
        memory: proportional share (PSS), which adds up over processes that share pages.
        private: memory of this process alone, without pages of files.
        store: share of shared memory, which holds Ray's object store.
        files: open files.
        threads: threads.
    """

    memory: int
    private: int
    store: int
    files: int
    threads: int


def workers(folder: Path) -> dict[str, int]:
    """The newest process of each worker by the run's records, if it lives."""
    rows = {row["worker"]: row for row in _log(folder) if "process" in row}
    return {
        name: row["process"] for name, row in rows.items() if _existed(row["process"], row["time"])
    }


def starting(folder: Path) -> set[str]:
    """Generators whose newest process has sampled nothing yet."""
    found = set()
    for row in _log(folder):
        if "process" in row and row["worker"].startswith("generator"):
            found.add(row["worker"])
        elif "version" in row:
            found.discard(row["worker"])
    return found


def tree(root: int) -> dict[int, int]:
    """A process and all its descendants, each with its parent."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return {pid: parents.get(pid, 0) for pid in found}


def second_of(pid: int) -> list[int]:
    """The second process of a worker, if it has one: vLLM's engine, or the environments."""
    second = re.compile(r"vllm_worker\.py|tramontane\.environments\.process")
    children = [child for child, parent in tree(pid).items() if parent == pid]
    return [child for child in children if second.search(command(child))]


def marked(mark: str) -> list[int]:
    """Processes whose environment holds `mark`, orphans included."""
    return [pid for pid in _parents() if alive(pid) and mark.encode() in _read(pid, "environ")]


def alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return _stat(pid)[0] not in ENDED
    except (FileNotFoundError, ProcessLookupError):
        return False


def command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def usage(pid: int) -> Usage | None:
    """Resources of a process; None if it ended meanwhile."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
        files = len(os.listdir(PROC / str(pid) / "fd"))
        threads = len(os.listdir(PROC / str(pid) / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    kib = {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    # Clean pages belong to a file: they are private only while no other process maps it.
    private = kib.get("Private_Dirty", 0)
    sizes = (kib.get("Pss", 0), private, kib.get("Pss_Shmem", 0))
    return Usage(*(1024 * size for size in sizes), files, threads)


def _existed(pid: int, known: float) -> bool:
    """True if the live process with this number had started by `known`, in seconds since 1970. A
    busy system reuses numbers within seconds, so it may be another process."""
    try:
        stat = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    if stat[0] in ENDED:
        return False
    booted = re.search(r"^btime (\d+)", (PROC / "stat").read_text(), re.MULTILINE)
    assert booted is not None
    # `btime` is in whole seconds.
    return int(booted[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK") <= known + 1


def _log(folder: Path) -> list[dict[str, Any]]:
    file = folder / "workers.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's
        return b""


def _parents() -> dict[int, int]:
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int(_stat(int(entry.name))[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
    return found


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session, …: the fields after the name, which may hold any
    character."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
