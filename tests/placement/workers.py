"""Workers for tests of handles. This file imports no torch, so that their processes start fast."""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tramontane.errors import InputError


@contextmanager
def no_large_files() -> Iterator[None]:
    """Let this process write no file larger than a byte: a worker's own process, not a test's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Worker:
    """Records its calls."""

    def __init__(self, broken: str = "") -> None:
        if broken:
            raise InputError(broken)
        self.calls: list[int] = []

    def close(self, seconds: float) -> None: ...

    def note(self, n: int) -> list[int]:
        self.calls.append(n)
        return list(self.calls)

    def images(self, *values: Any) -> list[tuple[str, str]]:
        """The type and the content of all images of requests and batches."""
        found = []
        for value in values:
            sequences = value if isinstance(value, list) else value.sequences
            found += [(type(i).__name__, i) for one in sequences for i in one.images]
        return found

    def pid(self) -> int:
        return os.getpid()

    def imported(self, *names: str) -> set[str]:
        return {*names} & {*sys.modules}

    def wrong(self) -> None:
        raise InputError("fix this")

    def save_weights(self, path: Path) -> None:
        """Write weights where no file may be larger than a byte."""
        with no_large_files():
            save_file({"w": np.zeros(9)}, path)

    def slow(self, seconds: float, begun: Path | None = None) -> None:
        if begun is not None:
            begun.touch()
        time.sleep(seconds)

    def wait_for(self, path: Path) -> list[int]:
        """Wait until another call has made a file; returns the calls noted by then."""
        while not path.exists():
            time.sleep(0.01)
        return list(self.calls)

    def make(self, path: Path) -> None:
        path.touch()


class Awaited(Worker):
    """Is made when a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.wait_for(path)


class Meeting(Worker):
    """Ranks that join a group, except one that never arrives."""

    def meet(self, dead: int) -> None:
        import torch.distributed as dist

        if os.getpid() == dead:
            time.sleep(0.5)
            os.kill(dead, signal.SIGKILL)
        dist.barrier()
