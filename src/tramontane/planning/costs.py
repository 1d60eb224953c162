"""What each piece of the pipeline's work takes, in seconds, and how long completions are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Array = np.ndarray
Lengths = Callable[[random.Random], int]  # draws the tokens of one completion


@dataclass(frozen=True)
class Costs:
    """Seconds of each worker's work.

    Args:
        decode: a decode step of one generator, for sequences live and tokens cached of all of them
            together: float arrays [steps] both, and the result.
        prefill: prompt tokens of one admission.
        train: an update, for the lengths of the completions that fall to one rank, and the tokens
            of their prompts, each counted once for its group.
        publish: the trainer, for giving out its weights.
        receive: each generator's pause for new weights.
        verify: one completion, on one verifier.
        latency: from a group's last token until its verdicts count, beside `verify`: calls, queues.
        record: writing an update down, beside the next one.
        call: each poll of a generator that decodes, beside its steps: messages.
        poll: from one poll of a generator to the next while the trainer works, in which it stands
            still: calls, which wait for a core.
        generator_beside_trainer, trainer_beside_generator: how much longer each takes while the
            other works; 1 where they share nothing.
    """

    decode: Callable[[Array, Array], Array]
    prefill: Callable[[int], float]
    train: Callable[[Sequence[int], int], float]
    publish: float = 0.0
    receive: float = 0.0
    verify: float = 0.0
    latency: float = 0.0
    record: float = 0.0
    call: float = 0.0
    poll: float = 0.0
    generator_beside_trainer: float = 1.0
    trainer_beside_generator: float = 1.0


@dataclass(frozen=True)
class DecodeCurve:
    """A measured decode step: at some numbers of live sequences, seconds with nothing cached and
    for each cached token; in between, lines."""

    live: Sequence[float]
    seconds: Sequence[float]
    per_cached: Sequence[float]

    def __call__(self, live: Array, cached: Array) -> Array:
        each = np.interp(live, self.live, self.per_cached)
        return np.interp(live, self.live, self.seconds) + each * cached


@dataclass(frozen=True)
class TrainCurve:
    """A measured update: seconds for each token, and for each pair of a completion's tokens."""

    each: float
    pair: float = 0.0

    def __call__(self, completions: Sequence[int], prompts: int) -> float:
        pairs = sum(n * n for n in completions)
        return self.each * (sum(completions) + prompts) + self.pair * pairs

    def times(self, factor: float) -> TrainCurve:
        """The same, so many times as long."""
        return TrainCurve(self.each * factor, self.pair * factor)


@dataclass(frozen=True)
class Line:
    """`fixed` seconds and `each` for every token."""

    fixed: float
    each: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.each * tokens


def constant(tokens: int) -> Lengths:
    """Every completion has as many tokens."""
    return lambda rng: tokens


def empirical(tokens: Sequence[int]) -> Lengths:
    """Completions as they were seen."""
    return lambda rng: rng.choice(tokens)


def geometric(stop: float, longest: int) -> Lengths:
    """Every token is the last with probability `stop`; cut at `longest` tokens."""

    def draw(rng: random.Random) -> int:
        # 1 − random() lies in (0, 1], so its logarithm exists.
        return min(longest, 1 + int(math.log(1 - rng.random()) / math.log1p(-stop)))

    return draw


def lognormal(mean: float, longest: int, sigma: float) -> Lengths:
    """exp(N(μ, sigma²)) tokens, cut at `longest`, with μ such that the mean is `mean` after that.

    `mean` lies above 1 and below `longest`.
    """
    grid = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])
    low, high = -sigma * 10, math.log(longest) + sigma * 10
    for _ in range(60):
        mu = (low + high) / 2
        if np.minimum(np.exp(mu + sigma * grid), longest).mean() < mean:
            low = mu
        else:
            high = mu
    return lambda rng: max(1, min(longest, round(rng.lognormvariate(mu, sigma))))
