"""Records: the runner's report on each execution, read by the judge outside."""

from __future__ import annotations

import struct

from .descriptors import write_all

# A wait status or a code below, bytes of output, bytes of errors; seconds of processor time,
# asleep, and by the clock.
RECORD = struct.Struct("!iIIddd")
# Why an execution was killed: processor time, memory, files, number of processes, time asleep, the
# clock, the end of the other half of its function test, or a process that hides what it holds.
LATE, MEMORY, DISK, CROWD, ASLEEP, BUSY, ALONE, HIDDEN = -1, -2, -3, -4, -5, -6, -7, -8
HOST = -9  # the execution was never begun: the host had no process or memory left
READY = -10  # the runner's first record: a sandbox that ends before it was ended by no program
ERROR_BYTES = 4000  # length of standard error's end that is kept
MAX_PROCESSES = 256  # per execution; more end it with CROWD
MAX_FILES = 20_000  # per execution; more end it with DISK
MAX_SOCKETS = 256  # per execution, each with 0.2 MB of the kernel's memory; more end it with MEMORY


def send_record(
    results: int, record: tuple[int, bytes, bytes], seconds: tuple[float, float, float]
) -> int:
    """Write one record (status, output, errors) with its times; returns its status."""
    status, output, errors = record
    write_all(results, RECORD.pack(status, len(output), len(errors), *seconds) + output + errors)
    return status
