"""Points of a run or of several runs of one recipe, and the intervals of what is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tramontane.errors import InputError
from tramontane.studies.measures import FinishedRun
from tramontane.workplace import read_log

PARTS = 6  # of a single run; fewer and longer ones would widen its interval


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
    if not (found := sorted(file.parent for file in folder.glob("*/metrics.jsonl"))):
        raise InputError(f"{folder}: neither a run nor a folder of runs (no metrics.jsonl)")
    return [FinishedRun(run) for run in found]


def held_out(run: FinishedRun) -> tuple[np.ndarray, np.ndarray]:
    """(updates done, pass@1 on the held-out problems) at each measurement of a run, update 0 first.

    The measurement after the last update comes at the end, in the place of one during the run.
    """
    rows = [r for r in read_log(run.folder / "evaluations.jsonl") if r.get("set") == "held_out"]
    found = {row["version"]: float(row["pass_at_1"]["value"]) for row in rows}
    updates = sorted(found)
    return np.array(updates, dtype=np.int64), np.array([found[update] for update in updates])


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

    Runs of one recipe differ by more than the noise within them, so the unit is the run. Of a
    single run it is one of `PARTS` consecutive parts, since neighbouring points are alike.

    Args:
        series: of each run.
        estimate: the figure of some runs.
    """
    units = list(series) if len(series) > 1 else _parts(series[0])
    count = len(units)
    without = np.array([estimate(units[:i] + units[i + 1 :]) for i in range(count)])
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    from scipy.stats import t as student  # takes a second to import

    middle, half = estimate(series), float(student.ppf(0.975, count - 1) * error)
    return middle - half, middle + half


def _parts(series: Series) -> list[Series]:
    count = min(PARTS, len(series.x))
    cuts = zip(np.array_split(series.x, count), np.array_split(series.y, count), strict=True)
    return [Series(x, y) for x, y in cuts]
