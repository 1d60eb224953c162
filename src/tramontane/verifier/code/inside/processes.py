"""The processes of an execution and their files: waits for them, measures them, and removes them,
however folders are nested or closed."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from .records import ASLEEP, BUSY, LATE, MAX_FILES

PDEATHSIG, DUMPABLE, NAME, SUBREAPER = 1, 4, 15, 36  # options of prctl
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PSS, _RSS = ("Pss_Anon:", "Pss_Shmem:"), ("RssAnon:", "RssShmem:")  # lines in /proc
_MAX_WAITING = 8  # with more processes at once, the program is to blame for the waiting
_EXITING = 4  # in a process's flags
POLL_SECONDS = 0.05  # between measurements of an execution's memory, files and processes


def prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Times:
    """Seconds used by the processes of an execution so far.

    `processor` is summed over all of them; `asleep` is the time in which none was running or
    waiting for a processor; the rest of `clock` was spent running or waiting for a processor.
    """

    def __init__(self) -> None:
        self.processor = self.asleep = self.clock = 0.0
        self._started = self._looked = time.monotonic()
        self._seconds: dict[str, float] = {}  # each process's own, as last seen
        self.running = 0  # processes that run or wait for a processor, as last seen

    def look(self, pids: list[str]) -> None:
        """Measure again, with the current processes."""
        now = time.monotonic()
        total, self.running = 0.0, 0
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                self.running += fields[0] == "R" or _has_running_thread(pid)
                own, of_children = (
                    (int(fields[i]) + int(fields[i + 1])) / _TICKS_PER_SECOND for i in (11, 13)
                )
                own = max(own, _exact_seconds(pid))
            except OSError:  # ended meanwhile
                continue
            self._seconds[pid] = own
            total += own + of_children
        # Two estimates, each too low: without processes that have gone, and without their children.
        self.processor = max(self.processor, total, sum(self._seconds.values()))
        if not self.running:
            # After a long pause of this process nothing is known about the pause.
            self.asleep += min(now - self._looked, 2 * POLL_SECONDS)
        self.clock, self._looked = now - self._started, now

    def finish(self, usage: resource.struct_rusage) -> None:
        """Add the system's accounts of the first process and the children that it waited for."""
        self.processor = max(self.processor, usage.ru_utime + usage.ru_stime)
        self.clock = time.monotonic() - self._started


def _exact_seconds(pid: str) -> float:
    """Processor time of a process's first thread, not rounded down to ticks as in `stat`."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except FileNotFoundError:  # the kernel keeps no such statistics
        return 0.0


def _has_running_thread(pid: str) -> bool:
    threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads if len(threads) > 1 else []:
        try:
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
        except OSError:  # ended meanwhile
            continue
    return False


def excess_time(times: Times, limits: dict[str, float]) -> int:
    """LATE, ASLEEP or BUSY if an execution has used up its time, else 0.

    The limit is for processor time. A sleeping program is stopped once it has slept and run for
    `asleep_seconds`; a program that waits for a processor is stopped at `clock_seconds`, and then
    it is the host's fault.
    """
    if times.processor >= limits["seconds"]:
        return LATE
    if times.processor + times.asleep >= limits["asleep_seconds"]:
        return ASLEEP
    if times.clock < limits["clock_seconds"]:
        return 0
    return BUSY if times.running <= _MAX_WAITING else LATE  # too many processes delay each other


def wait_for(
    pid: int,
    limits: dict[str, float],
    times: Times,
    pids: Callable[[], list[str]],
    excess: Callable[[list[str]], int],
) -> int:
    """Wait for a child; kill it when its time is over, or when `excess` gives a reason.

    `pids` gives the processes of the execution, and `excess` is called with them; `times` is filled
    in. Returns the child's wait status, or the reason for the kill.
    """
    reason = 0
    while not reason and not has_ended(pid, POLL_SECONDS):
        running = pids()
        times.look(running)
        reason = excess_time(times, limits) or excess(running)
    if reason:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    times.finish(usage)
    if not reason and times.processor >= limits["seconds"]:
        reason = LATE  # ended between measurements, or was killed by the system's limit
    return reason or status


def has_ended(pid: int, seconds: float) -> bool:
    """True if the child ends within `seconds`; it is not reaped."""
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
        for task in tasks_of(unread.pop()):  # each thread has its own children
            try:
                with open(f"{task}/children") as file:
                    children = file.read().split()
            except OSError:  # ended meanwhile
                continue
            found += children
            unread += children
    return found


def tasks_of(pid: str) -> list[str]:
    """The folders of a process's threads in /proc. If the first thread has ended before the others,
    the process's own folder does not show its memory and files."""
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # ended meanwhile
        return []


def memory_of(pids: list[str]) -> int:
    """Memory of the processes in bytes, not counting pages of files on disk.

    Pages that processes share are divided among them. For a process that hides its map, all its
    resident pages count.
    """
    total = 0
    for pid in pids:
        kilobytes = _kilobytes_in(f"/proc/{pid}/smaps_rollup", _PSS)
        for task in [] if kilobytes else tasks_of(pid):
            if kilobytes := _kilobytes_in(f"{task}/status", _RSS):
                break
        total += kilobytes << 10
    return total


def _kilobytes_in(file: str, names: tuple[str, ...]) -> int:
    """The sum of these lines of a file in /proc; 0 if it cannot be read."""
    try:
        with open(file) as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(names))
    except OSError:  # hidden, or ended meanwhile
        return 0


def kill_rest(settings: dict[str, Any]) -> None:
    """Kill and reap every process that an execution left behind."""
    if _together(settings):
        kill_quietly(os.kill, -1)
    else:
        for pid in _stop_each():
            kill_quietly(os.kill, int(pid))
    while reap():
        pass


def pause_rest(settings: dict[str, Any]) -> None:
    """Stop every process of an execution, until `resume_rest`."""
    if _together(settings):
        kill_quietly(os.kill, -1, signal.SIGSTOP)
    else:
        _stop_each()


def resume_rest(settings: dict[str, Any]) -> None:
    """Resume the processes of a paused execution."""
    for pid in ["-1"] if _together(settings) else descendants(False):
        kill_quietly(os.kill, int(pid), signal.SIGCONT)


def _together(settings: dict[str, Any]) -> bool:
    """True if "all processes" means those of this sandbox, or of a user reserved for it. One signal
    then reaches all of them at once, so none can escape by forking."""
    return os.getpid() == 1 or bool(settings["uid"] and not settings["namespaces"])


def _stop_each() -> set[str]:
    """Stop every process of an execution, one by one; returns their ids.

    Orphans become children of the runner (see `runner.confine`). Stopped processes cannot fork, so
    each round leaves fewer to stop.
    """
    stopped: set[str] = set()
    while new := set(descendants(False)) - stopped:
        for pid in new:
            kill_quietly(os.kill, int(pid), signal.SIGSTOP)
        stopped |= new
    return stopped


def kill_quietly(
    kill: Callable[[int, int], None], target: int, number: int = signal.SIGKILL
) -> None:
    """Send a signal with `os.kill` or `os.killpg`; the target may already be gone."""
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


# ------------------------------------------------------------------------------------------ files


def size_of(folder: str) -> int:
    """Bytes of the files under a folder, at least 4096 for each.

    More than `MAX_FILES` entries count as `sys.maxsize`, before they are measured: a program could
    make more meanwhile. So does a folder that cannot be read, since its content could be of any
    size.
    """
    total, seen, folders = 0, 0, [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
            seen += len(entries)
            if seen > MAX_FILES:
                return sys.maxsize
            for entry in entries:
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # nested too deeply, or closed to this user
            return sys.maxsize
    return total


def inodes_of(folder: str) -> int:
    """Files, folders and links of the folder's own file system."""
    space = os.statvfs(folder)
    return space.f_files - space.f_ffree


class Held:
    """What processes hold open: sockets, and bytes of files that no longer have a name.

    `hidden` has the processes that do not show this. Without `with_maps`, files that are only
    mapped are not found.
    """

    def __init__(self, pids: list[str], with_maps: bool) -> None:
        self.hidden: set[str] = set()
        self._sockets: set[int] = set()  # inodes
        self._sizes: dict[int, int] = {}  # by inode
        for pid in pids:
            unread = with_maps
            for task in tasks_of(pid):  # a thread may have a table of descriptors of its own
                try:
                    self._look(task, unread)
                    unread = False  # threads have one map
                except PermissionError:
                    if not _is_ending(task):
                        self.hidden.add(pid)
                except OSError:  # ended meanwhile
                    continue

    @property
    def sockets(self) -> int:
        return len(self._sockets)

    @property
    def unnamed_bytes(self) -> int:
        return sum(self._sizes.values())

    def _look(self, task: str, with_maps: bool) -> None:
        for name in os.listdir(f"{task}/fd"):
            try:
                status = os.stat(f"{task}/fd/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                self._sockets.add(status.st_ino)
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                self._sizes[status.st_ino] = status.st_blocks * 512
        if not with_maps:
            return
        with open(f"{task}/maps", "rb") as file:
            for line in file:
                # Shared memory without a file is called /dev/zero.
                if line.endswith(b" (deleted)\n") and b" /dev/zero " not in line:
                    span, _, _, _, inode, _ = line.split(maxsplit=5)
                    start, end = (int(x, 16) for x in span.split(b"-"))
                    self._sizes.setdefault(int(inode), end - start)


def _is_ending(task: str) -> bool:
    """True for a thread that has ended or is about to, which no longer exposes anything."""
    try:
        with open(f"{task}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def empty(box: str, keep: list[str] | None) -> None:
    """Remove everything under `box` except `keep[0]`, the compiled program, if there is one.

    Works at any depth of nesting: a folder's subfolders move up to `box` before it is removed.
    """
    name = os.path.join(box, os.urandom(8).hex())
    moved = 0
    while entries := [e for e in os.scandir(box) if not keep or e.path != keep[0]]:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            if not os.access(entry, os.R_OK | os.W_OK | os.X_OK):  # a change is written to the disk
                os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)  # a folder without permissions cannot be moved
                    moved += 1
                    os.rename(inner, f"{name}-{moved}")
                else:
                    os.unlink(inner)
            os.rmdir(entry)
