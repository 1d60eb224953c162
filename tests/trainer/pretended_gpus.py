"""Ranks whose GPUs are a CPU under other names, as far as that goes: real processes over gloo.

In the process that unpickles it, `Pretending` replaces the three functions that tell a rank its
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.rollouts import batch, trainer
from tramontane.trainer import sharding

chosen: list[str] = []  # devices made current, in this process
asked: list[str] = []  # devices that the trainer took for its rank


class Ranked:
    """A worker that knows the devices of all ranks."""

    def devices(self) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (chosen, asked))
        return found


class OnRank(Ranked):
    """A trainer of two ranks."""

    def __init__(self, device: str) -> None:
        self.trainer = trainer(ranks=2, device=device)

    def step(self) -> dict[str, float]:
        return self.trainer.step(batch(groups=2))


class Pretending:
    """Makes an `OnRank`, or the worker of another class, in a process that was told of GPUs."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        of_rank = sharding.device_of_rank

        def on_cpu(configured: str) -> torch.device:
            asked.append(str(of_rank(configured)))
            return torch.device("cpu")

        torch.cuda.set_device = chosen.append  # type: ignore[assignment]
        torch.cuda.current_device = lambda: int(chosen[-1].partition(":")[2])
        sharding.device_of_rank = on_cpu

    def __call__(self) -> Any:
        return self.make()
