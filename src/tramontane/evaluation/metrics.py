"""pass@1, pass@k and maj@k with 95 % intervals, from counts alone.

Samples of one problem are not independent, so every interval is clustered: each problem's rate
counts as one observation (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from random import Random

import numpy as np

Z = 1.959963984540054  # the standard normal's 0.975 quantile
MAX_SUBSETS = 256


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, in [0, 1], and its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float] | np.ndarray, samples: int = 1) -> Estimate:
    """The mean of per-problem values, with a Wilson interval at an effective sample size.

    With m problems whose values have mean p and variance s², the variance of the mean is s²/m, the
    same as that of m_eff = p(1 − p)·m/s² independent trials. m_eff is at most m · samples, and m
    if all problems agree, so that the interval never closes to a point. Since s² is itself
    estimated, the quantile is Student's with m − 1 degrees of freedom instead of the normal one.

    Args:
        values: one per problem, in [0, 1], e.g. the share of its samples that are right.
        samples: number of samples behind each value.

    Raises:
        ValueError: no problems.
    """
    x = np.asarray(values, dtype=np.float64)
    m = len(x)
    if m == 0:
        raise ValueError("no problems: a mean needs at least one")
    p = float(x.mean())
    s2 = float(x.var(ddof=1)) if m > 1 else 0.0
    if s2 < 1e-12:  # rounding in the mean leaves about 1e-33
        return wilson(p, m)
    effective = min(p * (1 - p) * m / s2, m * samples)
    return wilson(p, effective, student_quantile(m - 1))


def wilson(p: float, n: float, z: float = Z) -> Estimate:
    """Wilson's score interval for a share `p` of `n` trials (`n` need not be whole)."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p)))


def student_quantile(degrees: int) -> float:
    """Student's 0.975 quantile: exact for 1 and 2 degrees of freedom, then the Cornish-Fisher
    series about the normal's (Abramowitz and Stegun 26.7.5), within 0.004."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z, v = Z, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right), from `right` of `n`:
    1 − C(n − right, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Raises:
        ValueError: k is not within 1…n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs k within 1…{n}, the number of samples")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    """P(the most frequent answer among k of a problem's n samples is right).

    Samples vote with their answer, `None` abstains. Among equally frequent answers the first one
    wins; without votes the result is wrong. For k < n this is the mean over all subsets of k
    samples, or over MAX_SUBSETS seeded subsets if there are more.

    Args:
        votes: each sample's answer; equal answers have equal spelling.
        right: True for each sample that was judged right; an answer is right if any of its samples
            is.
        k: within 1…n.
        seed: chooses the subsets.

    Raises:
        ValueError: k is not within 1…n.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} needs k within 1…{n}, the number of samples")
    good = {vote for vote, ok in zip(votes, right, strict=True) if ok and vote is not None}
    wins = [majority([votes[i] for i in subset]) in good for subset in _subsets(n, k, seed)]
    return sum(wins) / len(wins)


def majority(votes: Sequence[str | None]) -> str | None:
    """The most frequent vote, the first seen among equals; None if all abstain."""
    # Counter keeps the order of first occurrence, and most_common(1) the first of equals.
    counts = Counter(vote for vote in votes if vote is not None)
    return counts.most_common(1)[0][0] if counts else None


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n."""
    return [2**i for i in range(n.bit_length())]


def _subsets(n: int, k: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Subsets of k of n indices, each in increasing order: the first seen is the first sampled."""
    if math.comb(n, k) <= MAX_SUBSETS:
        return combinations(range(n), k)
    rng = Random(f"{seed}/{n}/{k}")
    draws = (tuple(sorted(rng.sample(range(n), k))) for _ in iter(int, 1))
    return islice(draws, MAX_SUBSETS)
