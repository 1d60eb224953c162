"""Means and maxima gathered over microbatches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tramontane.trainer.objectives import Metrics
from tramontane.trainer.sharding import total


class Averages:
    """Weighted means and maxima by name; every rank must add the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        """Add sums with their weights."""
        for name, pair in metrics.items():
            added = torch.stack([_summable(x) for x in pair])
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def maximum(self, name: str, value: torch.Tensor) -> None:
        """Update a maximum; `name` must also be given to `add`."""
        value = _summable(value)
        self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def merge(self, other: Averages) -> None:
        """Add everything that was added to `other`."""
        for name, added in other._sums.items():
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        for name, value in other._maxima.items():
            self.maximum(name, value)

    def result(self) -> dict[str, float]:
        """Means by `name` and maxima by `name_max` over all ranks, except those of weight 0.
        Collective: every rank must call it."""
        names, tops = sorted(self._sums), sorted(self._maxima)
        if not names:
            return {}
        sums = total(torch.stack([self._sums[n] for n in names])).tolist()
        result = {n: s / w for n, (s, w) in zip(names, sums, strict=True) if w}
        if tops:
            maxima = total(torch.stack([self._maxima[n] for n in tops]), dist.ReduceOp.MAX)
            pairs = zip(tops, maxima.tolist(), strict=True)
            result |= {f"{n}_max": value for n, value in pairs if n in result}
        return result


def _summable(value: torch.Tensor) -> torch.Tensor:
    """The value in float64, or in float32 on Apple's GPUs, which have no float64."""
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
