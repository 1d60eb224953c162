"""Results of the executions in a sandbox, read from the runner's records."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from tramontane.verifier.code.inside import records
from tramontane.verifier.code.sandbox.job import (
    ANSWER_SECONDS,
    BOX_MB,
    OUTPUT_BYTES,
    Limits,
)


class Times(NamedTuple):
    """Seconds of an execution: of processor time, asleep, and by the clock."""

    processor: float = 0.0
    asleep: float = 0.0
    clock: float = 0.0


class Result(NamedTuple):
    """The end of one execution: its output, or in `failure` why the output is not used.

    With `is_unjudged` the failure is not the program's fault: the host was too busy to run it, or
    had no process left. With
    `is_clock` the execution was stopped while asleep, or by the clock.
    """

    output: bytes
    failure: str
    code: int | None = None  # exit code, negative for a signal; None if the runner killed it
    is_unjudged: bool = False
    is_clock: bool = False
    times: Times = Times()


class Results(Iterator[Result]):
    """Iterates over the results of a sandbox's executions, as they end.

    Ends after the first failure, unless `keep_going`, and when the sandbox ends.

    Args:
        descriptor: the pipe with the runner's records, which are not trusted.
        limits: limits of each execution, the compiler's first if there is one.
        keep_going: continue after a failed execution.
    """

    def __init__(self, descriptor: int, limits: list[Limits], keep_going: bool) -> None:
        self._descriptor, self._limits, self._keep_going = descriptor, limits, keep_going
        self._ready = False  # the runner has begun

    def __next__(self) -> Result:
        if not self._limits:
            raise StopIteration
        return self.wait(self._limits[0].clock_seconds + ANSWER_SECONDS)

    def wait(self, seconds: float) -> Result:
        """The next result; one without a judgement if it does not come within `seconds`."""
        limits = self._limits.pop(0)
        deadline = time.monotonic() + seconds
        head = self._read(records.RECORD.size, deadline)
        if head is not None and not self._ready:
            self._ready = records.RECORD.unpack(head)[0] == records.READY
            head = self._read(records.RECORD.size, deadline) if self._ready else head
        if head is None:
            self._limits.clear()
            late = time.monotonic() >= deadline
            reason = "killed the sandbox" if self._ready else "the sandbox did not start"
            if late:
                reason = f"the sandbox gave no result within {seconds:g} s"
            return Result(b"", reason, is_unjudged=late or not self._ready, is_clock=late)
        status, n_output, n_errors, *seconds_of = records.RECORD.unpack(head)
        times = Times(*seconds_of)
        n_output = min(n_output, OUTPUT_BYTES)
        output = self._read(n_output, deadline)
        errors = self._read(min(n_errors, records.ERROR_BYTES), deadline)
        if status == 0 and output is not None:
            return Result(output, "", 0, times=times)
        if not self._keep_going:
            self._limits.clear()
        failure = _describe_failure(status, limits, n_output, errors or b"")
        code = None if status < 0 else _exit_code(status)
        is_clock = status in (records.ASLEEP, records.BUSY)
        is_unjudged = status in (records.BUSY, records.HOST)
        return Result(b"", failure, code, is_unjudged, is_clock, times)

    def drain(self, seconds: float) -> None:
        """Read until the pipe closes, `seconds` at most, and close it."""
        deadline = time.monotonic() + seconds
        while self._readable(deadline) and os.read(self._descriptor, 1 << 20):
            pass
        os.close(self._descriptor)

    def _readable(self, deadline: float) -> bool:
        poll = select.poll()  # `select.select` accepts only descriptors below 1,024
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))

    def _read(self, size: int, deadline: float) -> bytes | None:
        """`size` bytes, or None if the deadline passes or the sandbox ends before."""
        data = b""
        while len(data) < size:
            if not self._readable(deadline):
                return None
            part = os.read(self._descriptor, size - len(data))
            if not part:
                return None
            data += part
        return data


def _exit_code(status: int) -> int:
    """`os.waitstatus_to_exitcode` for any number: a broken sandbox may send an impossible one."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _describe_failure(status: int, limits: Limits, n_output: int, errors: bytes) -> str:
    if status == records.LATE:
        return f"timed out after {limits.seconds:g} s"
    if status == records.ASLEEP:
        return f"timed out after {limits.asleep_seconds:g} s, most of it asleep"
    if status == records.BUSY:
        return f"the host was too busy to run it within {limits.clock_seconds:g} s"
    if status == records.HOST:
        return "the host had no process or memory left to run it"
    if status == records.ALONE:
        return "continued after the other side of its function test had ended"
    if status == records.MEMORY:
        return f"needed more than {limits.memory_mb} MB"
    if status == records.CROWD:
        return f"started more than {records.MAX_PROCESSES} processes"
    if status == records.DISK:
        return f"wrote more than {BOX_MB} MB, or {records.MAX_FILES:,} files"
    if status == records.HIDDEN:
        return "hid what its processes hold open"
    code = _exit_code(status)
    if code == -signal.SIGXFSZ or n_output >= OUTPUT_BYTES:
        return f"printed more than {OUTPUT_BYTES >> 20} MB"
    lines = errors.decode(errors="replace").strip().splitlines()
    line = next((x for x in lines if "error:" in x), lines[-1] if lines else "")
    if "MemoryError" in line or "bad_alloc" in line:
        return f"needed more than {limits.memory_mb} MB"
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{end}: {line[:200]}" if line else end
