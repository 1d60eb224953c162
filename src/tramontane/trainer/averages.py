"""Means and maxima gathered over microbatches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tramontane.trainer.objectives import Metrics
from tramontane.trainer.sharding import total


class Averages:
    """Weighted means and maxima by name; every rank must add the same names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        """Take in sums with their weights."""
        for name, pair in metrics.items():
            pair_sum = torch.stack([x.detach().double() for x in pair])
            self._sums[name] = self._sums[name] + pair_sum if name in self._sums else pair_sum

    def maximum(self, name: str, value: torch.Tensor) -> None:
        """Take in one value, at least 0, of which the largest counts."""
        value = value.detach().double()
        self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def result(self) -> dict[str, float]:
        """Over all ranks; a name without any weight is left out, its maximum too."""
        names, tops = sorted(self._sums), sorted(self._maxima)
        result: dict[str, float] = {}
        if names:
            sums = total(torch.stack([self._sums[n] for n in names]))
            result |= {n: s / w for n, (s, w) in zip(names, sums.tolist(), strict=True) if w}
        if tops:
            maxima = total(torch.stack([self._maxima[n] for n in tops]), dist.ReduceOp.MAX)
            result |= dict(zip(tops, maxima.tolist(), strict=True))
        return result
