"""What passes between the judge and the sandbox: records of executions, blocks and files.

A record is the runner's report on one execution, read by the judge outside. All reads and writes of
file descriptors are unbuffered.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct

# A wait status or a code below, bytes of output, bytes of errors; seconds of processor time,
# asleep, and by the clock.
RECORD = struct.Struct("!iIIddd")
# Why an execution was killed: processor time, memory, files, number of processes, time asleep, the
# clock, the end of the other half of its function test, or a process that hides what it holds.
LATE, MEMORY, DISK, CROWD, ASLEEP, BUSY, ALONE, HIDDEN = -1, -2, -3, -4, -5, -6, -7, -8
HOST = -9  # the execution was never begun: the host had no process or memory left
READY = -10  # the runner's first record: if a sandbox ends before it, no program is to blame
ENDED = -11  # a session ended itself
ERROR_BYTES = 4000  # kept of the end of standard error
MAX_PROCESSES = 256  # per execution; more end it with CROWD
MAX_FILES = 20_000  # per execution; more end it with DISK
MAX_SOCKETS = 256  # per execution, each with 0.2 MB of the kernel's memory; more end it with MEMORY
CHANNEL = 3  # the socket to the other half of a function test; or the compiled program's file
_ADD_SEALS, _ALL_SEALS, _SEALABLE, _EXECUTABLE = 1033, 15, 2, 16  # of files in memory
_BOTH_WAYS = 2  # argument of shutdown


def send_record(
    results: int, record: tuple[int, bytes, bytes], seconds: tuple[float, float, float]
) -> int:
    """Write one record (status, output, errors) with its times; returns its status."""
    status, output, errors = record
    write_all(results, RECORD.pack(status, len(output), len(errors), *seconds) + output + errors)
    return status


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
    """A copy of a program in memory, which no execution can change, and which runs even where files
    may not be executed. None on systems that cannot execute such a copy."""
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
