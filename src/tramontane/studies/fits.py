"""Fits to the points of runs: ScaleRL's compute curve and Magistral's length law.

The compute curve (arXiv 2510.13786) is a sigmoid of performance over compute:

    R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B)

R_0 is the performance before training, A the asymptote, C_mid the compute at which half of the gain
is reached, and B the exponent. ScaleRL searches a grid over A and C_mid, and fits B by least
squares. Here A is solved exactly for every pair (C_mid, B) of a grid, and the best point is
refined: the same least-squares problem without the grid's resolution.

The length law (arXiv 2506.10910, its analysis) is raw reward, without the length penalty, = a ·
log(length) + b. The points are the updates of runs, or models on the plane of a landscape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tramontane.errors import InputError
from tramontane.journals import read_log
from tramontane.studies.measures import FinishedRun

Compute = Literal["seconds", "tokens", "updates"]
Performance = Literal["held_out", "pass_rate"]
COMPUTES: tuple[Compute, ...] = get_args(Compute)
PERFORMANCES: tuple[Performance, ...] = get_args(Performance)
LEAST_POINTS = 5  # of a curve: one more than the parameters
LEAST_UPDATES = 4  # of a length law
PARTS = 6  # of a single run; fewer and longer ones would widen its interval
EXPONENTS = (0.2, 12.0)  # range of B; ScaleRL's fits lie between 1.6 and 2
CEILING = 1.0  # of a pass rate
END = 0.995  # the asymptote is unknown for a curve that may rise above it


@dataclass(frozen=True)
class Series:
    """Points of one run, in order.

    Args:
        x, y: float64, [points].
    """

    x: np.ndarray
    y: np.ndarray


def runs_in(folder: Path) -> list[FinishedRun]:
    """The run in a folder, or all runs in its subfolders, e.g. the seeds of a study's arm.

    Raises:
        InputError: no run with metrics.
    """
    if (folder / "metrics.jsonl").is_file():
        return [FinishedRun(folder)]
    if not (folders := sorted(file.parent for file in folder.glob("*/metrics.jsonl"))):
        raise InputError(f"{folder}: neither a run nor a folder of runs (no metrics.jsonl)")
    return [FinishedRun(run) for run in folders]


def held_out(run: FinishedRun) -> tuple[np.ndarray, np.ndarray]:
    """(updates done, pass@1 on the held-out problems) at each measurement of a run, update 0 first.

    The measurement after the last update comes at the end, in the place of one during the run.
    """
    rows = [r for r in read_log(run.folder / "evaluations.jsonl") if r.get("set") == "held_out"]
    rates = {row["version"]: float(row["pass_at_1"]["value"]) for row in rows}
    updates = sorted(rates)
    return np.array(updates, dtype=np.int64), np.array([rates[update] for update in updates])


def training_seconds(run: FinishedRun) -> np.ndarray:
    """Seconds of training at the end of each of two updates or more: float64, [updates].

    The first update's time, which includes the start, is replaced by the mean of the others, as in
    `training_seconds` of a summary.
    """
    seconds = run.curve("wall_seconds")
    return np.asarray(seconds - seconds[0] + np.diff(seconds).mean())


def pooled(series: Sequence[Series]) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of all points: [points of all runs] each."""
    return np.concatenate([s.x for s in series]), np.concatenate([s.y for s in series])


def interval(
    series: Sequence[Series], estimate: Callable[[Sequence[Series]], float]
) -> tuple[float, float]:
    """95 % interval of an estimate from runs, by the jackknife (Tukey 1958): each run is left out
    once, and the standard error of these estimates takes Student's t with one degree of freedom
    less than there are runs.

    Runs of one recipe differ by more than the noise within them, so the unit is the run. For a
    single run it is one of `PARTS` consecutive parts, since neighboring points are alike.

    Args:
        series: of each run.
        estimate: the figure of some runs.
    """
    from tramontane.studies.verdicts import quantile  # imports scipy, which takes seconds

    units = list(series) if len(series) > 1 else _parts(series[0])
    count = len(units)
    without = np.array([estimate(units[:i] + units[i + 1 :]) for i in range(count)])
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    middle, half = estimate(series), float(quantile(count - 1) * error)
    return middle - half, middle + half


def _parts(series: Series) -> list[Series]:
    count = min(PARTS, len(series.x))
    cuts = zip(np.array_split(series.x, count), np.array_split(series.y, count), strict=True)
    return [Series(x, y) for x, y in cuts]


@dataclass(frozen=True)
class Sigmoid:
    """ScaleRL's curve: R_0, A, C_mid (in the unit of the compute) and B."""

    start: float
    asymptote: float
    midpoint: float
    exponent: float

    def __call__(self, compute: np.ndarray) -> np.ndarray:
        """Performance at some compute: float64, the shape of `compute`."""
        return self.start + (self.asymptote - self.start) * _rise(
            compute, self.midpoint, self.exponent
        )


@dataclass(frozen=True)
class CurveFit:
    """A fitted curve.

    Args:
        curve: the least-squares fit to all points.
        low, high: 95 % interval of the asymptote.
        bounded: False if the interval reaches the ceiling, as where a curve that ends there fits
            about as well, or if its lower end lies below the start: the points do not show where
            the curve ends.
        points: number of points.
        runs: number of runs.
        rmse: root of the mean squared residual.
    """

    curve: Sigmoid
    low: float
    high: float
    bounded: bool
    points: int
    runs: int
    rmse: float


def compute_series(
    run: FinishedRun, over: Compute = "seconds", of: Performance = "held_out", skip: int = 0
) -> tuple[Series, float | None]:
    """(points after the start, performance before training) of a run.

    Args:
        run: the run, which may still be training.
        over: compute: `seconds` of training without the start, `tokens` that the trainer
            processed, or `updates`.
        of: `held_out`, pass@1 where `evaluation.every` measured it; or `pass_rate` of the training
            problems at every update, whose start is not known and is fitted.
        skip: updates skipped at the start; ScaleRL skips the first epoch.

    Raises:
        InputError: too few points.
    """
    updates = run.curve("update").astype(np.int64)
    if of == "pass_rate":
        places, values, start = updates, run.curve("pass_rate"), None
    else:
        places, values = held_out(run)
        if len(places) and places[0] == 0:
            start, places, values = float(values[0]), places[1:], values[1:]
        else:
            start = None
    kept = (places > skip) & np.isin(places, updates)
    if kept.sum() < LEAST_POINTS:
        raise InputError(
            f"{run.folder}: {kept.sum()} measurements on held-out problems, and a curve takes "
            f"{LEAST_POINTS}; train with evaluation.every set, or fit the training problems "
            f"(--of pass_rate)"
            if of == "held_out"
            else f"{run.folder}: {kept.sum()} updates, and a curve takes {LEAST_POINTS}"
        )
    totals = {
        "updates": run.curve("update"),
        "seconds": training_seconds(run),
        "tokens": run.curve("computed_tokens").cumsum(),
    }[over]
    return Series(totals[np.searchsorted(updates, places[kept])], values[kept]), start


def fit_curve(series: Sequence[Series], start: float | None = None) -> CurveFit:
    """Fit one curve to a run or to several runs of one recipe.

    The interval of the asymptote is that of `interval`. It extends to the ceiling if a curve
    that ends there fits the points about as well (F test): parts of a curve that has hardly begun
    to rise may agree by chance.

    Args:
        series: compute (positive) and performance of each run.
        start: performance before training, treated as exact: even if it is as noisy as a point, the
            asymptote's interval has the same coverage. None: it is fitted too.
    """
    from scipy.stats import f as f_distribution

    compute, values = pooled(series)
    curve = least_squares_curve(compute, values, start)
    ends = interval(series, lambda units: least_squares_curve(*pooled(units), start).asymptote)
    low, high = np.clip(ends, 0, CEILING).tolist()
    unending = least_squares_curve(compute, values, start, least=END)
    error, other = (float(((values - c(compute)) ** 2).sum()) for c in (curve, unending))
    free = max(1, len(compute) - (3 if start is not None else 4))
    if other <= error * (1 + f_distribution.ppf(0.95, 1, free) / free):
        high = CEILING
    return CurveFit(
        curve=curve,
        low=low,
        high=high,
        bounded=high < END and low > curve.start,
        points=len(compute),
        runs=len(series),
        rmse=float(np.sqrt(error / len(compute))),
    )


def least_squares_curve(
    compute: np.ndarray, values: np.ndarray, start: float | None, least: float = 0.0
) -> Sigmoid:
    """The curve with the smallest squared error; A lies between `least` and 1, B within
    `EXPONENTS`.

    Args:
        compute: positive, [points].
        values: [points].
        start: R_0; None: it is fitted too.
        least: smallest A.
    """
    from scipy.optimize import least_squares

    middles = np.geomspace(compute.min() / 4, compute.max() * 8, 40)
    exponents = np.geomspace(*EXPONENTS, 24)
    pairs = np.stack(np.meshgrid(middles, exponents, indexing="ij"), -1).reshape(-1, 2)
    rise = _rise(compute, pairs[:, :1], pairs[:, 1:])  # [pairs, points]
    starts, asymptotes = _solve(rise, values, start, least)
    errors = starts[:, None] + (asymptotes - starts)[:, None] * rise - values
    best = int((errors**2).sum(1).argmin())

    def residuals(free: np.ndarray) -> np.ndarray:
        first = start if start is not None else free[3]
        rising = _rise(compute, np.exp(free[1]), np.exp(free[2]))
        return np.asarray(first + (free[0] - first) * rising - values)

    initial = np.array([asymptotes[best], *np.log(pairs[best]), starts[best]])
    low = np.array([least, np.log(middles[0]), np.log(EXPONENTS[0]), 0])
    high = np.array([CEILING, np.log(middles[-1]), np.log(EXPONENTS[1]), CEILING])
    count = 3 if start is not None else 4
    inside = np.clip(initial, low + 1e-9, high - 1e-9)[:count]
    fitted = least_squares(residuals, inside, bounds=(low[:count], high[:count])).x
    return Sigmoid(
        start=start if start is not None else float(fitted[3]),
        asymptote=float(fitted[0]),
        midpoint=float(np.exp(fitted[1])),
        exponent=float(np.exp(fitted[2])),
    )


def _rise(compute: np.ndarray, midpoint: object, exponent: object) -> np.ndarray:
    """1 / (1 + (C_mid / C)^B), broadcast over its arguments."""
    return np.asarray(1 / (1 + (midpoint / compute) ** exponent))  # type: ignore[operator]


def _solve(
    rise: np.ndarray, values: np.ndarray, start: float | None, least: float
) -> tuple[np.ndarray, np.ndarray]:
    """(R_0, A) with the smallest squared error for every row of `rise`: each [pairs].

    Performance is linear in both. R_0 is clipped to its range, A then solved again and clipped.
    """
    squares, ones = (rise**2).sum(1), ((1 - rise) ** 2).sum(1)
    cross = (rise * (1 - rise)).sum(1)
    if start is not None:
        starts = np.full(len(rise), start)
    else:
        top, bottom = rise @ values, (1 - rise) @ values
        determinant = np.maximum(squares * ones - cross**2, 1e-12)
        starts = np.clip((squares * bottom - cross * top) / determinant, 0, CEILING)
    asymptotes = (rise @ values - starts * cross) / np.maximum(squares, 1e-12)
    return starts, np.clip(asymptotes, least, CEILING)


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
    if len(run.updates) < LEAST_UPDATES:
        raise InputError(f"{run.folder}: {len(run.updates)} updates; the law takes {LEAST_UPDATES}")
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
    centered = x - x.mean()
    square = float(centered @ centered)
    slope = float(centered @ y) / square if square else 0.0
    return slope, float(y.mean() - slope * x.mean())
