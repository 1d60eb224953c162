"""No process outlives the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

# Looked up here, since between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends, however that ends, and even where
    this one is stopped (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
