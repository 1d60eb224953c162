"""This process' memory."""

import ctypes


def give_back() -> None:
    """Return to the system what this process' malloc holds free, where that is glibc's.

    Tensors of ever new sizes leave holes in its heaps, and the heaps go on growing by them: half an
    hour of workers in threads held more free than in use.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
