"""Records: the runner's report on each execution, read by the judge outside."""

from __future__ import annotations

import struct

from .descriptors import write_all

RECORD = struct.Struct("!iII")  # wait status or a code below, bytes of output, bytes of errors
LATE, MEMORY, DISK, CROWD = -1, -2, -3, -4  # killed: time, memory, files, number of processes
ERROR_BYTES = 4000  # end of standard error that is kept
MAX_PROCESSES = 256  # per execution; more end it with CROWD


def send_record(results: int, record: tuple[int, bytes, bytes]) -> int:
    """Write one record (status, output, errors); returns its status."""
    status, output, errors = record
    write_all(results, RECORD.pack(status, len(output), len(errors)) + output + errors)
    return status
