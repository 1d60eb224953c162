"""Time limits of an execution: of processor time, asleep, and by the clock."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tramontane.verifier.code.inside.processes import Times, excess_time, wait_for
from tramontane.verifier.code.inside.records import ASLEEP, BUSY, LATE

LIMITS = {"seconds": 2.0, "asleep_seconds": 4.0, "clock_seconds": 20.0}


@pytest.mark.parametrize(
    ("processor", "asleep", "clock", "running", "expected"),
    [
        (1.9, 0.0, 19.9, 1, 0),
        (2.0, 0.0, 2.0, 1, LATE),
        (0.5, 3.5, 4.0, 0, ASLEEP),
        (0.5, 3.4, 19.9, 1, 0),
        (0.5, 0.0, 20.0, 1, BUSY),
        (0.5, 0.0, 20.0, 8, BUSY),
        (0.5, 0.0, 20.0, 9, LATE),  # the program's own crowd kept it waiting
        (2.0, 4.0, 20.0, 1, LATE),  # its own fault comes before the host's
    ],
)
def test_reasons_to_stop(
    processor: float, asleep: float, clock: float, running: int, expected: int
) -> None:
    times = Times()
    times.processor, times.asleep, times.clock, times.running = processor, asleep, clock, running
    assert excess_time(times, LIMITS) == expected


@pytest.fixture
def busy_cpu() -> Iterator[int]:
    """A processor that another process keeps busy."""
    cpu = max(os.sched_getaffinity(0))
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(spin.pid, {cpu})
    yield cpu
    spin.kill()
    spin.wait()


@pytest.mark.slow
def test_a_program_that_is_kept_from_the_processor_is_no_late_program(busy_cpu: int) -> None:
    """In the scheduler's idle class, next to a busy process on the same processor, a program gets
    next to nothing of it."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(program.pid, {busy_cpu})
    os.sched_setscheduler(program.pid, os.SCHED_IDLE, os.sched_param(0))
    times = Times()
    limits = {"seconds": 1.5, "asleep_seconds": 1.5, "clock_seconds": 2.0}
    reason = wait_for(program.pid, limits, times, lambda: [str(program.pid)], lambda _: 0)
    program.wait()  # reaped already
    assert reason == BUSY
    assert times.clock >= 2.0 > 1.5 > times.processor + times.asleep


def test_a_program_that_runs_is_stopped_by_its_own_time(busy_cpu: int) -> None:
    """Half of a processor takes twice as long, and is as late after the same work."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(program.pid, {busy_cpu})
    times, began = Times(), time.monotonic()
    limits = {"seconds": 0.2, "asleep_seconds": 60.0, "clock_seconds": 600.0}
    reason = wait_for(program.pid, limits, times, lambda: [str(program.pid)], lambda _: 0)
    program.wait()
    assert reason == LATE
    assert 0.2 <= times.processor <= time.monotonic() - began
