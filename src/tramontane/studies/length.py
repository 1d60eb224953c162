"""Length law: raw reward, without the length penalty, against the logarithm of the length.

Magistral (arXiv 2506.10910, its analysis) fits reward = a · log(length) + b. Here the points are
the updates of runs, or models on the plane of a landscape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tramontane.errors import InputError
from tramontane.studies.measures import FinishedRun
from tramontane.studies.series import Series, interval, pooled

LEAST_POINTS = 4


@dataclass(frozen=True)
class LengthLaw:
    """reward = slope · ln(tokens) + intercept.

    Args:
        slope: change of the raw reward for lengths that grow by a factor of e.
        low, high: 95 % interval of the slope.
        intercept: reward at a length of one token.
        r_squared: share of the reward's variance that the law explains.
        points: number of points.
        runs: number of runs.
        shortest, longest: range of the lengths, in tokens.
    """

    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float
    points: int
    runs: int
    shortest: float
    longest: float


def length_series(run: FinishedRun) -> Series:
    """Mean tokens of a completion and mean raw reward of every update of a run.

    Raises:
        InputError: too few updates.
    """
    if len(run.updates) < LEAST_POINTS:
        raise InputError(f"{run.folder}: {len(run.updates)} updates; the law takes {LEAST_POINTS}")
    penalty = np.nan_to_num(run.curve("reward_length"))  # zero or negative
    return Series(run.curve("completion_tokens"), run.curve("reward") - penalty)


def fit_length(series: Sequence[Series]) -> LengthLaw:
    """Fit the law to the points of one run or of several, by least squares.

    Args:
        series: tokens of a completion (positive) and raw reward, by run.
    """
    logs = [Series(np.log(s.x), s.y) for s in series]
    x, y = pooled(logs)
    slope, intercept = _line(x, y)
    low, high = interval(logs, lambda units: _line(*pooled(units))[0])
    spread = float(((y - y.mean()) ** 2).sum())
    unexplained = float(((y - slope * x - intercept) ** 2).sum())
    return LengthLaw(
        slope=slope,
        low=low,
        high=high,
        intercept=intercept,
        r_squared=1 - unexplained / spread if spread else np.nan,
        points=len(x),
        runs=len(series),
        shortest=float(np.exp(x.min())),
        longest=float(np.exp(x.max())),
    )


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope, intercept) of the least-squares line; a slope of 0 if all x are equal."""
    centred = x - x.mean()
    square = float(centred @ centred)
    slope = float(centred @ y) / square if square else 0.0
    return slope, float(y.mean() - slope * x.mean())
