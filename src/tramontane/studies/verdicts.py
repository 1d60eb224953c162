"""Verdicts: what the runs of a study say about a claim, and their detectable effect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from tramontane.studies.study import Expectation

Outcome = Literal["holds", "does not hold", "undecided at this budget"]
UNDECIDED: Outcome = "undecided at this budget"
POWER = 0.8  # power of the detectable effect


@dataclass(frozen=True)
class Verdict:
    """The difference between two arms, and what it says about the claim.

    Args:
        outcome: computed from the interval alone.
        difference: mean over seeds of `arm` less that of `against`, or less the number; NaN if no
            run of one of them has a figure.
        low, high: 95 % interval of the difference; infinite if an arm has fewer than two figures.
        detectable: detectable effect: smallest true difference that 80 % of studies with this
            spread would detect, from 0 or, for `equal`, beyond the margin.
        seeds: number of figures of the arm with fewer of them.
    """

    outcome: Outcome
    difference: float
    low: float
    high: float
    detectable: float
    seeds: int


def finite(runs: Sequence[float]) -> np.ndarray:
    """The values that are numbers: a run may have none, e.g. no pass rate at a time that it did not
    reach."""
    found = np.asarray(runs, dtype=np.float64)
    return found[np.isfinite(found)]


def mean_and_interval(runs: Sequence[float]) -> tuple[float, float]:
    """(mean, half of Student's 95 % interval) over an arm's seeds.

    The mean is NaN without figures, the interval infinite with fewer than two.
    """
    found = finite(runs)
    if not len(found):
        return math.nan, math.inf
    error, degrees = _squared_error(found)
    return float(found.mean()), _quantile(0.975, degrees) * math.sqrt(error)


def judge(
    values: Mapping[str, Sequence[float]],
    arm: str,
    against: str | float,
    *,
    expect: Expectation,
    margin: float,
) -> Verdict:
    """The verdict on one claim, by Welch's interval: the arms' spreads may differ.

    `higher` and `lower` hold if the interval lies beyond 0 on that side, and do not hold if it lies
    below the margin. `equal` holds if the interval lies within the margin on both sides, and does
    not hold if it lies beyond the margin.

    Args:
        values: a measure of each run, by arm.
        arm: the arm whose figure is compared.
        against: the arm that it is compared to, or a known number.
        expect: the claim.
        margin: the smallest difference of interest.
    """
    first = finite(values[arm])
    compared = [first] if not isinstance(against, str) else [first, finite(values[against])]
    seeds = min(map(len, compared))
    if not seeds:
        return Verdict(UNDECIDED, math.nan, -math.inf, math.inf, math.inf, 0)
    known = 0.0 if isinstance(against, str) else against
    difference = float(first.mean()) - sum(float(arm.mean()) for arm in compared[1:]) - known
    squares, freedoms = zip(*map(_squared_error, compared), strict=True)
    error = math.sqrt(sum(squares))
    # Welch and Satterthwaite: the degrees of freedom of a sum of two estimated variances.
    shares = sum(s * s / d for s, d in zip(squares, freedoms, strict=True) if d)
    degrees = error**4 / shares if shares else min(freedoms)
    half = _quantile(0.975, degrees) * error
    low, high = difference - half, difference + half
    detectable = half + _quantile(POWER, degrees) * error
    outcome = _outcome(low, high, expect, margin)
    return Verdict(
        outcome, difference, low, high, detectable + (margin if expect == "equal" else 0), seeds
    )


def _squared_error(runs: np.ndarray) -> tuple[float, int]:
    """(squared standard error of the mean, degrees of freedom); infinite of a single figure."""
    if len(runs) < 2:
        return math.inf, 0
    return float(runs.var(ddof=1)) / len(runs), len(runs) - 1


def _quantile(share: float, degrees: float) -> float:
    """Student's quantile; 1 without degrees of freedom, where the standard error is infinite."""
    return float(stats.t.ppf(share, degrees)) if degrees else 1.0


def _outcome(low: float, high: float, expect: Expectation, margin: float) -> Outcome:
    if expect == "lower":
        return _outcome(-high, -low, "higher", margin)
    if expect == "higher":
        if low > 0:
            return "holds"
        return "does not hold" if high < margin else UNDECIDED
    if -margin < low and high < margin:
        return "holds"
    return "does not hold" if low > margin or high < -margin else UNDECIDED
