"""Comparison of two models on the same problems, problem by problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tramontane.evaluation.metrics import student_quantile, wilson


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.3g}"


Counts = Mapping[str, tuple[int, int]]  # by problem: (right samples, samples)


def counts_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Right samples and all samples of each problem, by id, from the rows of an evaluation."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        right, n = counts.get(row["problem_id"], (0, 0))
        counts[row["problem_id"]] = right + (row["verdict"] == "right"), n + 1
    return counts


def paired_difference(first: Counts, second: Counts) -> Difference:
    """Compare two models by their rates on each problem.

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
    if not first:
        raise ValueError("no problems to compare")
    problems = list(first)
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
    from scipy.signal import convolve  # takes a second to import

    sizes = [int(size) for size in np.abs(differences) if size]
    total = sum(sizes)
    if not total:
        return 1.0
    # chances[i]: probability of the sum 2·i − total, with i the sum of the positive ones.
    factors = [np.bincount([0, size]) / 2 for size in sizes]
    while len(factors) > 1:
        pairs = zip(factors[::2], factors[1::2], strict=False)
        odd = factors[len(factors) // 2 * 2 :]
        factors = [convolve(one, other) for one, other in pairs] + odd
    chances = factors[0].clip(min=0.0)
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(chances[np.abs(sums) >= abs(int(differences.sum()))].sum()))
