"""Workers for tests of handles. This file imports no torch, so that their processes start fast."""

import os
import signal
import time
from pathlib import Path

from tramontane.errors import InputError


class Worker:
    """Records its calls."""

    def __init__(self, broken: str = "") -> None:
        if broken:
            raise InputError(broken)
        self.calls: list[int] = []

    def note(self, n: int) -> list[int]:
        self.calls.append(n)
        return list(self.calls)

    def pid(self) -> int:
        return os.getpid()

    def wrong(self) -> None:
        raise InputError("mend this")

    def slow(self, seconds: float, begun: Path | None = None) -> None:
        if begun is not None:
            begun.touch()
        time.sleep(seconds)


class Meeting(Worker):
    """Ranks that join a group, except one that never arrives."""

    def meet(self, dead: int) -> None:
        import torch.distributed as dist

        if os.getpid() == dead:
            time.sleep(0.5)
            os.kill(dead, signal.SIGKILL)
        dist.barrier()
