"""Size and removal of the files of an execution, however its folders are nested or closed."""

from __future__ import annotations

import os
import stat
import sys

from .records import MAX_FILES


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
        self._with_maps = with_maps
        self.sockets = 0
        self.hidden: set[str] = set()
        self._sizes: dict[int, int] = {}  # by inode
        for pid in pids:
            try:
                self._look(pid)
            except PermissionError:
                self.hidden.add(pid)
            except OSError:  # ended meanwhile
                continue

    @property
    def unnamed_bytes(self) -> int:
        return sum(self._sizes.values())

    def _look(self, pid: str) -> None:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            self.sockets += stat.S_ISSOCK(status.st_mode)
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                self._sizes[status.st_ino] = status.st_blocks * 512
        if not self._with_maps:
            return
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                # Shared memory without a file is called /dev/zero.
                if line.endswith(b" (deleted)\n") and b" /dev/zero " not in line:
                    span, _, _, _, inode, _ = line.split(maxsplit=5)
                    start, end = (int(x, 16) for x in span.split(b"-"))
                    self._sizes.setdefault(int(inode), end - start)


def empty(box: str, keep: list[str] | None) -> None:
    """Remove everything under `box` except `keep[0]`, the compiled program, if there is one.

    Works at any depth of nesting: the subfolders of a folder move up to `box` before the folder
    is removed.
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
                    os.chmod(inner, 0o700)  # a closed folder cannot be moved
                    moved += 1
                    os.rename(inner, f"{name}-{moved}")
                else:
                    os.unlink(inner)
            os.rmdir(entry)
