"""Unbuffered reads and writes of file descriptors, and the descriptor of a function test."""

from __future__ import annotations

import ctypes
import os
import select

CHANNEL = 3  # the socket to the other half of a function test; or the compiled program's file
_ADD_SEALS, _ALL_SEALS, _SEALABLE, _EXECUTABLE = 1033, 15, 2, 16  # of files in memory
_BOTH_WAYS = 2  # argument of shutdown


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_block(descriptor: int) -> bytes:
    """Read a length (8 bytes, big-endian) and the bytes after it.

    Without a buffer: a later test's input must not lie in the memory that this test inherits.
    """
    size = int.from_bytes(os.read(descriptor, 8), "big")
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def memory_file() -> int:
    """An empty file in memory (a temporary file on systems other than Linux)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("test")
    import tempfile

    return os.dup(tempfile.TemporaryFile().fileno())


def sealed_file(path: str) -> int | None:
    """A copy of a program in memory, which no execution can change, and which runs wherever files
    may not be executed. None on systems that cannot execute such a file."""
    if not hasattr(os, "memfd_create"):
        return None
    import fcntl

    with open(path, "rb") as file:
        content = file.read()
    try:
        copy = os.memfd_create("program", _SEALABLE | _EXECUTABLE | os.MFD_CLOEXEC)
    except OSError:  # before Linux 6.3, where every such file can be executed
        copy = os.memfd_create("program", _SEALABLE | os.MFD_CLOEXEC)
    write_all(copy, content)
    fcntl.fcntl(copy, _ADD_SEALS, _ALL_SEALS)
    return copy


def read_file(descriptor: int, limit: int) -> bytes:
    """The file's first `limit` bytes, read from its beginning."""
    size = min(os.fstat(descriptor).st_size, limit)
    return os.pread(descriptor, size, 0) if size else b""


def has_hung_up(descriptor: int) -> bool:
    """True if the other end of a socket is closed; nothing is read."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported
    return bool(poll.poll(0))


def hang_up(descriptor: int) -> None:
    """End a connection. Closing would not do: the sandbox's first process has the socket too."""
    ctypes.CDLL(None).shutdown(descriptor, _BOTH_WAYS)
    os.close(descriptor)
