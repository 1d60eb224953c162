"""Bounds on processor time: unlike the clock, it does not depend on the machine's load."""

import os
import time
from contextlib import contextmanager

TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def at_most(seconds, text=""):
    """Fails if the block takes this thread more processor time; `text` names the input."""
    started = time.thread_time()
    yield
    spent = time.thread_time() - started
    assert spent < seconds, f"{spent:.1f} s of processor time: {text[:60]}"


def spent(pid):
    """Processor seconds that a process has used so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
