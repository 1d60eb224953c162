"""Size and removal of the files of an execution, however its folders are nested or closed."""

from __future__ import annotations

import os
import stat
import sys

from .processes import tasks_of
from .records import MAX_FILES

_EXITING = 4  # in a process's flags


def size_of(folder: str) -> int:
    """Bytes of the files under a folder, at least 4096 for each.

    More than `MAX_FILES` entries count as `sys.maxsize`, before they are looked at: a program makes
    more meanwhile. So does a folder that cannot be read, since its content could be of any size.
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
    """What processes hold open: bytes of files that have no name any more, and sockets.

    `hidden` are the processes that do not show it. Without `with_maps` files that are only mapped
    are not found.
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
            if not os.access(entry, os.R_OK | os.W_OK | os.X_OK):  # each change goes to the disk
                os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)  # a folder without permissions cannot be moved
                    moved += 1
                    os.rename(inner, f"{name}-{moved}")
                else:
                    os.unlink(inner)
            os.rmdir(entry)
