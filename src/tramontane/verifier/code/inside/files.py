"""Size and removal of the files of an execution, however its folders are nested or closed."""

from __future__ import annotations

import os
import sys

_MAX_FILES = 20_000  # counted by `size_of`


def size_of(folder: str) -> int:
    """Bytes of the files under a folder, at least 4096 for each.

    Counting stops after `_MAX_FILES` entries. A folder that cannot be read counts as
    `sys.maxsize`, since its content could be of any size.
    """
    total, seen, folders = 0, 0, [folder]
    while folders and seen < _MAX_FILES:
        try:
            entries = list(os.scandir(folders.pop()))
            for entry in entries:
                seen += 1
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # nested too deeply, or closed to this user
            return sys.maxsize
    return total


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
            os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)  # a closed folder cannot be moved
                    moved += 1
                    os.rename(inner, f"{name}-{moved}")
                else:
                    os.unlink(inner)
            os.rmdir(entry)
