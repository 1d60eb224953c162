"""Measured costs as curves, and the lengths of the benchmarks' models, for the simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tramontane.planning.simulate import Array, Lengths


@dataclass(frozen=True)
class DecodeCurve:
    """A measured decode step, interpolated linearly.

    Args:
        live: counts of live sequences, ascending; a step was measured at each.
        seconds: seconds of a step with nothing cached, at each of them.
        per_cached: seconds for each cached token, at each of them.
    """

    live: Sequence[float]
    seconds: Sequence[float]
    per_cached: Sequence[float]

    def __call__(self, live: Array, cached: Array) -> Array:
        per_token = np.interp(live, self.live, self.per_cached)
        return np.interp(live, self.live, self.seconds) + per_token * cached


@dataclass(frozen=True)
class TrainCurve:
    """A measured update: seconds per token (`each`) and per pair of tokens of a completion."""

    each: float
    pair: float = 0.0

    def __call__(self, completions: Sequence[int], prompts: int) -> float:
        pairs = sum(n * n for n in completions)
        return self.each * (sum(completions) + prompts) + self.pair * pairs

    def times(self, factor: float) -> TrainCurve:
        """The curve with all times multiplied by `factor`."""
        return TrainCurve(self.each * factor, self.pair * factor)


def geometric(stop: float, longest: int) -> Lengths:
    """Each token is the last with probability `stop`; cut at `longest` tokens."""

    def draw(rng: random.Random) -> int:
        # 1 − random() lies in (0, 1], so its logarithm exists.
        return min(longest, 1 + int(math.log(1 - rng.random()) / math.log1p(-stop)))

    return draw
