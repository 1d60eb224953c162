"""Runs processes next to each other, as many as the machine's cores and memory hold."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tramontane.config.device import VISIBLE, visible_gpus
from tramontane.errors import InputError
from tramontane.interrupt import GRACE_SECONDS
from tramontane.models.memory import machine_memory
from tramontane.placement import warm
from tramontane.sweeps.settings import settings_file
from tramontane.temporary import exit_of

LOG_LINES = 12  # shown of a run that failed
NEEDS = "--needs"  # a word of `sweeps.process`
POLL_SECONDS = 0.2  # between two looks at the processes
CHECK_SECONDS = 600.0  # for the check of one run: its data are read, its rewards are tried


@dataclass(frozen=True)
class Needs:
    """What a process takes of the machine.

    Args:
        cores: CPU cores.
        memory: bytes.
        gpus: number of GPUs.
        gpu_memory: bytes of each of them.
    """

    cores: int = 1
    memory: float = 0.0
    gpus: int = 0
    gpu_memory: float = 0.0


class Room:
    """What is free of a machine.

    Args:
        cores: number of cores.
        memory: bytes.
        gpus: bytes of each GPU by its name in `CUDA_VISIBLE_DEVICES`.
        at_once: upper limit of the processes.
    """

    def __init__(
        self,
        cores: int,
        memory: float,
        gpus: Mapping[str, float] | None = None,
        at_once: float = math.inf,
    ) -> None:
        self.cores, self.memory, self.gpus = cores, memory, dict(gpus or {})
        self.at_once = at_once
        self.taken = 0  # by how many processes

    def take(self, needs: Needs) -> tuple[str, ...] | None:
        """Take what a process needs; returns its GPUs, or None if there is no room.

        An empty machine takes any process: what a run cannot do without, it says itself.
        """
        free = sorted(self.gpus, key=lambda name: -self.gpus[name])[: needs.gpus]
        fits = self.cores >= needs.cores and self.memory >= needs.memory
        fits &= len(free) == needs.gpus and all(self.gpus[g] >= needs.gpu_memory for g in free)
        if self.taken and (not fits or self.taken >= self.at_once):
            return None
        self._add(needs, free, -1)
        return tuple(sorted(free))

    def release(self, needs: Needs, gpus: Iterable[str]) -> None:
        """Give back what `take` took."""
        self._add(needs, gpus, 1)

    def _add(self, needs: Needs, gpus: Iterable[str], sign: int) -> None:
        self.taken -= sign
        self.cores += sign * needs.cores
        self.memory += sign * needs.memory
        for name in gpus:
            self.gpus[name] += sign * needs.gpu_memory


@dataclass(frozen=True)
class Job:
    """A process that runs one or more runs.

    Args:
        files: settings of its runs; see `sweeps.process`.
        log: what it prints.
        needs: its part of the machine.
    """

    files: Sequence[Path]
    log: Path
    needs: Needs = Needs()

    @property
    def tail(self) -> str:
        """The end of its log, for messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def job_of(folder: Path, needs: Needs) -> Job:
    """The job of one run: its settings, and its log next to them."""
    file = settings_file(folder)
    return Job([file], file.with_suffix(".log"), needs)


def work(jobs: Iterable[Job], ended: Callable[[Job, int], None], room: Room | None = None) -> None:
    """Run the jobs in order, as many in parallel as there is room for. If `ended` raises an
    exception, or this process is interrupted, the others end: a signal lets each run take a
    checkpoint, for which it has `GRACE_SECONDS`.

    Args:
        jobs: the jobs.
        ended: called with a job and its exit code.
        room: the machine; None: this one's cores and memory, without GPUs.
    """
    room = room or Room(os.cpu_count() or 1, machine_memory())
    waiting = deque(jobs)
    running: dict[warm.Forked, tuple[Job, tuple[str, ...]]] = {}
    try:
        while waiting or running:
            while waiting and (gpus := room.take(waiting[0].needs)) is not None:
                job = waiting.popleft()
                running[_start(job, gpus)] = job, gpus
            time.sleep(POLL_SECONDS)
            for process in [*running]:
                if (code := process.poll()) is not None:
                    job, gpus = running.pop(process)
                    room.release(job.needs, gpus)
                    ended(job, code)
    finally:
        end(running, GRACE_SECONDS)


def end(processes: Collection[warm.Forked], seconds: float) -> None:
    """End processes; one that takes longer is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)


def _start(job: Job, gpus: Sequence[str]) -> warm.Forked:
    return _fork([*map(str, job.files)], job.log, job.needs.cores, ",".join(gpus))


def _fork(words: Sequence[str], log: Path, cores: int, gpus: str) -> warm.Forked:
    """Run `sweeps.process` with these words, on the GPUs that are named, if any."""
    variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cores)}
    if gpus:
        variables[VISIBLE] = gpus
    command = ["tramontane.sweeps.process", *words]
    with open(log, "ab") as output:
        return warm.fork(command, uuid4().hex, output.fileno(), variables=variables)


@dataclass(frozen=True)
class Measured:
    """Memory of runs by `tramontane train --dry-run`, from a process that ended.

    Args:
        needs: of each run by its settings file.
        errors: of the runs that cannot start, by settings file.
        gpus: bytes of each GPU by its name in `CUDA_VISIBLE_DEVICES`.
    """

    needs: Mapping[Path, Needs]
    errors: Mapping[Path, str]
    gpus: Mapping[str, float]

    def room(self, at_once: int | None = None) -> Room:
        """This machine, empty, for so many processes at most."""
        return Room(os.cpu_count() or 1, machine_memory(), self.gpus, at_once or math.inf)


def measure(files: Sequence[Path], cores: int = 1) -> Measured:
    """Check runs like `tramontane train --dry-run`, in a process of their own, which frees torch's
    memory and the GPUs when it ends.

    Args:
        files: settings of the runs.
        cores: of each run.

    Raises:
        InputError: the process failed, with the end of what it printed; or it took longer than
            `CHECK_SECONDS` for each run.
    """
    limit = CHECK_SECONDS * len(files)
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder) / "needs.json", Path(folder) / "log"
        words = [NEEDS, str(found), str(cores), *map(str, files)]
        process = _fork(words, log, cores, visible_gpus())
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            message = f"the check of {len(files)} runs took more than {limit:,.0f} s"
            raise InputError(message) from None
        finally:
            end([process], 0)
        if code:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise InputError(f"the check of the runs failed ({exit_of(code)}):\n{tail}")
        return measured(json.loads(found.read_text()))


def measured(report: Mapping[str, Any]) -> Measured:
    """The result of `sweeps.needs.needs`."""
    needs = {Path(file): Needs(**values) for file, values in report["needs"].items()}
    errors = {Path(file): text for file, text in report["errors"].items()}
    return Measured(needs, errors, report["gpus"])
