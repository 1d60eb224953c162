"""Temporary folders that do not outlive their process, however that ends.

All of a process lie in one folder of the system's temporary folder (`TMPDIR`), which the process
keeps locked. The system releases the lock when the process ends, so the next process deletes the
folders that nobody holds. A lock is also right where a process's number is not: between containers
that share the folder.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = f"tramontane-{os.getuid()}-"
_UNLOCKED = "tramontane-new-"  # until a folder is locked, nobody may take it for abandoned
_lock = threading.Lock()
_own: dict[tuple[int, str], Path] = {}  # by process, since forks inherit this, and by TMPDIR


def temporary_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """A folder to use as a context manager."""
    return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=process_folder())


def process_folder() -> Path:
    """The folder of this process, made when it is first asked for. Other users may pass through it,
    as sandboxed programs do, and not list it."""
    place = (os.getpid(), tempfile.gettempdir())
    with _lock:
        if place not in _own:
            _remove_abandoned(Path(place[1]))
            made = Path(tempfile.mkdtemp(prefix=_UNLOCKED))
            made.chmod(0o711)
            # Never closed: the lock lasts as long as the process.
            fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)
            _own[place] = made.rename(made.with_name(made.name.replace(_UNLOCKED, PREFIX)))
        return _own[place]


@atexit.register
def remove_own() -> None:
    """Delete the folders of this process; for a process that ends without its exit handlers."""
    for (process, _), folder in list(_own.items()):
        if process == os.getpid():
            _remove(folder)


def _remove_abandoned(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another process was faster, or another user made this
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(folder)
        finally:
            os.close(held)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, onerror=_allow)


def _allow(function: Callable[..., Any], path: str, _: object) -> None:
    """Take back what a program has forbidden its owner, and try once more."""
    for closed in (os.path.dirname(path), path):
        if os.path.exists(closed) and not os.path.islink(closed):
            os.chmod(closed, 0o700)
    if function is os.unlink:
        Path(path).unlink(missing_ok=True)
    elif os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
