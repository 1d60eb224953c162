"""Memory of this machine and of this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory() -> int:
    """Bytes of memory available to processes on this machine or in this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [path.read_text(encoding="ascii").strip() for path in _CGROUP_LIMITS if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])


def release_free_memory() -> None:
    """Return free memory held by malloc to the system; does nothing without glibc.

    Tensors of varying sizes fragment malloc's heaps, which keep growing: after half an hour,
    workers in threads held more free memory than they used.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
