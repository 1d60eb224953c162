"""Temporary folders and child processes that do not outlive their process, however it ends.

All folders of a process are in one locked folder in the system's temporary folder (`TMPDIR`). The
system releases the lock when the process ends, so the next process can delete unlocked folders.
Unlike process ids, locks also work between containers that share the folder.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = f"tramontane-{os.getuid()}-"
_UNLOCKED = "tramontane-new-"  # so that a folder is not taken for abandoned before it is locked
_lock = threading.Lock()
_own: dict[tuple[int, str], Path] = {}  # by process, since forks inherit this, and by TMPDIR
# Loaded at import, since nothing may be imported between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, for any reason, and even if this
    process is stopped (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_of(code: int) -> str:
    """How a child process ended: `exit code 2`, or the signal that killed it, `SIGKILL`."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def temporary_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """A folder to use as a context manager."""
    return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=process_folder())


def process_folder() -> Path:
    """The folder of this process, created on first use. Other users, such as sandboxed programs,
    may traverse but not list it."""
    place = (os.getpid(), tempfile.gettempdir())
    with _lock:
        if place not in _own:
            _remove_abandoned(Path(place[1]))
            made = Path(place[1], f"{_UNLOCKED}{secrets.token_hex(8)}")
            try:
                made.mkdir(0o700)
                made.chmod(0o711)
                # Never closed: the lock lasts as long as the process.
                fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)
                _own[place] = made.rename(made.with_name(made.name.replace(_UNLOCKED, PREFIX)))
            except BaseException:  # Ctrl-C between two lines leaves nothing either
                shutil.rmtree(made, ignore_errors=True)
                raise
        return _own[place]


@atexit.register
def remove_own() -> None:
    """Delete the folders of this process: at exit, and before an end that skips exit handlers."""
    for (process, _), folder in list(_own.items()):
        if process == os.getpid():
            _remove(folder)


def _remove_abandoned(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another process deleted it first, or another user owns it
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
    """Restore the owner's permissions that a program removed, and try again."""
    for closed in (os.path.dirname(path), path):
        if os.path.exists(closed) and not os.path.islink(closed):
            os.chmod(closed, 0o700)
    if function is os.unlink:
        Path(path).unlink(missing_ok=True)
    elif os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
