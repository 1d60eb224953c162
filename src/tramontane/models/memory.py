"""Returns free memory of this process to the system."""

import ctypes


def release_free_memory() -> None:
    """Return the free memory that malloc holds to the system; nothing happens without glibc.

    Tensors of varying sizes leave holes in malloc's heaps, and the heaps keep growing: after half
    an hour, workers in threads held more free memory than memory in use.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
