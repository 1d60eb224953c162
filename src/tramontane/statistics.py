"""Figures of samples on problems: pass@k, maj@k, 95 % intervals, and paired comparisons.

Samples of one problem are not independent, so every interval is clustered: each problem's rate
counts as one observation (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from random import Random
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

Z = 1.959963984540054  # the standard normal's 0.975 quantile
MAX_SUBSETS = 256
NEWTON_STEPS = 16  # 12 are enough for a share of 1 − 1e-6
LONG_FACTOR = 64  # terms from which Fourier's transforms multiply polynomials faster


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
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, min(center - half, p)), min(1.0, max(center + half, p)))


@functools.cache
def student_quantile(degrees: int, share: float = 0.975) -> float:
    """Student's quantile, by default that of a two-sided 95 % interval; infinite without degrees of
    freedom.

    With t = √degrees · tan θ, Student's density in θ is a power of cos θ, which Gauss's rule
    integrates to rounding. It falls with θ, so that Newton's steps from the normal quantile, which
    is nearer to 0, never go past the root.

    Args:
        degrees: of freedom, a whole number.
        share: above 0 and below 1.
    """
    if not degrees:
        return math.inf
    if share < 0.5:
        return -student_quantile(degrees, 1 - share)
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def area(end: float) -> float:
        half = end / 2
        return half * float(np.cos(half * (1 + nodes)) ** (degrees - 1) @ weights)

    whole = 2 * area(min(math.pi / 2, 12 / math.sqrt(degrees)))  # nothing is left beyond
    theta = math.atan(NormalDist().inv_cdf(share) / math.sqrt(degrees))
    for _ in range(NEWTON_STEPS):
        theta += ((share - 0.5) * whole - area(theta)) / math.cos(theta) ** (degrees - 1)
    return math.sqrt(degrees) * math.tan(theta)


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

    Samples vote with their answer, `None` abstains. Votes are counted as in `merged`; among equally
    frequent answers the first one wins; without votes the result is wrong. For k < n this is the
    mean over all subsets of k samples, or over MAX_SUBSETS seeded subsets if there are more.

    Args:
        votes: each sample's answer; equal answers have equal spelling.
        right: True for each sample that was judged right.
        k: within 1…n.
        seed: chooses the subsets.

    Raises:
        ValueError: k is not within 1…n.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} needs k within 1…{n}, the number of samples")
    counted = merged(votes, right)
    wins = [majority([counted[i] for i in subset]) is True for subset in _subsets(n, k, seed)]
    return sum(wins) / len(wins)


def merged(votes: Sequence[str | None], right: Sequence[bool]) -> list[str | bool | None]:
    """The votes, with every right answer as True, however it is written: the judge found all of
    them equal to the reference. An answer is right if any sample with it was judged right."""
    good = {vote for vote, ok in zip(votes, right, strict=True) if ok and vote is not None}
    return [True if vote in good else vote for vote in votes]


def grouped(items: Sequence[T], same: Callable[[T, T], bool]) -> list[list[T]]:
    """The items in groups of equal ones, in order of each group's first item, with which `same`
    compares the others."""
    groups: list[list[T]] = []
    for item in items:
        for group in groups:
            if item == group[0] or same(item, group[0]):
                group.append(item)
                break
        else:
            groups.append([item])
    return groups


def majority(votes: Sequence[T | None]) -> T | None:
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


# --------------------------------------------------------------------------- paired comparisons


@dataclass(frozen=True)
class Difference:
    """The difference of two models' pass@1: the second's minus the first's.

    Args:
        value: the mean over problems, in [−1, 1].
        low, high: its 95 % interval over problems of this kind.
        p_value: probability of a difference at least this large if neither model were better on any
            problem (exact two-sided permutation test).
        better, worse: number of problems that the second model solves more often and less often.
        n_problems: number of problems.
    """

    value: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int
    n_problems: int

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.3g}"


Counts = Mapping[str, tuple[int, int]]  # by problem: (right samples, samples)


def counts_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Right samples and all that could be judged of each problem, by id, from the rows of an
    evaluation."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        (right, n), verdict = counts.get(row["problem_id"], (0, 0)), row["verdict"]
        counts[row["problem_id"]] = right + (verdict == "right"), n + (verdict != "unscorable")
    return counts


def paired_difference(first: Counts, second: Counts) -> Difference:
    """Compare two models by their rates on each problem of which both have samples.

    The interval is Student's, with each problem's difference as one observation. If all differences
    are equal, their variance is uninformative: the interval then has the width of Wilson's for a
    share of 0 or 1.

    Raises:
        ValueError: no problems, or problems that only one of the models was evaluated on.
    """
    if first.keys() != second.keys():
        alone = sorted(first.keys() ^ second.keys())
        raise ValueError(
            f"{len(alone)} problems were measured on one model alone, e.g. {alone[0]!r}; a paired "
            f"comparison needs the same problems"
        )
    problems = [name for name in first if first[name][1] and second[name][1]]
    if not problems:
        raise ValueError("no problems to compare")
    n1, n2 = (np.array([counts[p][1] for p in problems]) for counts in (first, second))
    c1, c2 = (np.array([counts[p][0] for p in problems]) for counts in (first, second))
    differences = c2 / n2 - c1 / n1
    m, value = len(problems), float(differences.mean())
    spread = float(differences.std(ddof=1)) if m > 1 else 0.0
    if spread > 1e-12:
        half = student_quantile(m - 1) * spread / math.sqrt(m)
    else:
        half = wilson(0.0, m).high
    scale = math.lcm(*map(int, n1), *map(int, n2))
    whole = c2 * (scale // n2) - c1 * (scale // n1)
    return Difference(
        value=value,
        low=max(-1.0, value - half),
        high=min(1.0, value + half),
        p_value=sign_flip_p_value(whole),
        better=int((whole > 0).sum()),
        worse=int((whole < 0).sum()),
        n_problems=m,
    )


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Exact two-sided p-value of the sum of differences, under all 2^m changes of their signs.

    If the models were equally good on every problem, each difference could equally have the
    opposite sign. The distribution of the sum is that of the product of m polynomials, multiplied
    in pairs, by Fourier transforms where they are long: m log² m steps for each unit of the largest
    difference, not 2^m. Their rounding errors add up to about 1e-15.

    Args:
        differences: int, [m].
    """
    sizes = [int(size) for size in np.abs(differences) if size]
    total = sum(sizes)
    if not total:
        return 1.0
    # chances[i]: probability of the sum 2·i − total, with i the sum of the positive ones.
    factors = [np.bincount([0, size]) / 2 for size in sizes]
    while len(factors) > 1:
        pairs = zip(factors[::2], factors[1::2], strict=False)
        odd = factors[len(factors) // 2 * 2 :]
        factors = [_product(one, other) for one, other in pairs] + odd
    chances = factors[0].clip(min=0.0)
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(chances[np.abs(sums) >= abs(int(differences.sum()))].sum()))


def _product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The coefficients of the product of two polynomials."""
    if min(len(one), len(other)) <= LONG_FACTOR:
        return np.convolve(one, other)
    length = len(one) + len(other) - 1
    size = 1 << (length - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)[:length]
