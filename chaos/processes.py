"""The processes of a run, as the system sees them: who is who, what each holds, and their end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")
ENDED = ("Z", "X")  # a zombie only waits to be asked how it ended


class Usage(NamedTuple):
    """What one process holds. `memory` is its proportional share (PSS), which adds up over
    processes that share pages; `own` what it alone has, files' pages left out; `store` its share of
    shared memory, where Ray's object store is. In bytes."""

    memory: int
    own: int
    store: int
    files: int
    threads: int


def workers(folder: Path) -> dict[str, int]:
    """Each worker's newest process, by what the run wrote down, where it lives."""
    rows = {row["worker"]: row for row in _log(folder) if "process" in row}
    return {name: row["process"] for name, row in rows.items() if _is(row["process"], row["time"])}


def starting(folder: Path) -> set[str]:
    """The generators whose newest process has sampled nothing yet."""
    found = set()
    for row in _log(folder):
        if "process" in row and row["worker"].startswith("generator"):
            found.add(row["worker"])
        elif "version" in row:
            found.discard(row["worker"])
    return found


def tree(root: int) -> dict[int, int]:
    """A process and all that descend from it, each with its parent."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return {pid: parents.get(pid, 0) for pid in found}


def marked(mark: str) -> list[int]:
    """The processes whose environment holds `mark`, orphans among them."""
    return [pid for pid in _parents() if alive(pid) and mark.encode() in _read(pid, "environ")]


def alive(pid: int) -> bool:
    """Whether it runs (a zombie, which only waits to be asked how it ended, does not)."""
    try:
        return _stat(pid)[0] not in ENDED
    except (FileNotFoundError, ProcessLookupError):
        return False


def command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def usage(pid: int) -> Usage | None:
    """Nothing for a process that ended meanwhile."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
        files = len(os.listdir(PROC / str(pid) / "fd"))
        threads = len(os.listdir(PROC / str(pid) / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    kib = {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    # Clean pages are a file's: whose own they are changes with who else has it mapped.
    own = kib.get("Private_Dirty", 0)
    sizes = (kib.get("Pss", 0), own, kib.get("Pss_Shmem", 0))
    return Usage(*(1024 * size for size in sizes), files, threads)


def _is(pid: int, known: float) -> bool:
    """Whether the process of this number is the one that was known by then (seconds since 1970),
    not a stranger that was given it anew: where many begin and end, that takes seconds."""
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
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
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
    """State, parent, process group, session, …: what follows the name, which may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
