"""The plots of studies, and their look.

Importing this module raises `InputError` if the extra `studies` is not installed, so that a study
says so before its runs and not after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tramontane.errors import InputError, install

if find_spec("matplotlib") is None:
    raise InputError(f"studies draw their plots with matplotlib; install: {install('studies')}")

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tramontane.studies.measures import FinishedRun
from tramontane.studies.study import Claim, Study
from tramontane.studies.verdicts import ClaimVerdict, mean_and_interval

FOREST = 6  # margins
MEASURES_SHOWN = 3  # in the plot of arms, side by side
COLOURS = ("#1f77c9", "#e07b1a", "#17926b", "#8b5cd6", "#c03a2b", "#8a94a3")
DASHES = ("-", "--", ":")  # for further lines once the colors are used up


def new_figure(columns: int = 1, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` plots side by side, `height` inches high."""
    figure = Figure(figsize=(6.4 if columns == 1 else 4.6 * columns, height), layout="constrained")
    plots = figure.subplots(1, columns, squeeze=False)[0]
    for axes in plots:
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(plots)


def line_style(number: int) -> dict[str, Any]:
    """Color and dashes of line `number`: the dashes differ where the colors repeat."""
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes, "linewidth": 1.6}


def save(figure: Figure, file: Path) -> None:
    """Write a figure as SVG with real text, the same bytes for the same figure."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": file.name}
    with matplotlib.rc_context(style):
        figure.savefig(file, metadata={"Date": None}, facecolor="white")


def plot_arms(study: Study, figures: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """The measures that the claims compare: each seed as a dot, means with intervals, by arm.

    Args:
        study: its arms and claims.
        figures: each run's figure, by measure and arm.
    """
    names = list(dict.fromkeys(claim.measure for claim in study.claims))[:MEASURES_SHOWN]
    figure, every = new_figure(len(names), 0.9 + 0.32 * len(study.arms))
    places = np.arange(len(study.arms))[::-1]
    for axes, name in zip(every, names, strict=True):
        values = figures[name]
        intervals = [mean_and_interval(values[arm]) for arm in study.arms]
        means, halves = np.array(intervals).T
        for place, arm in zip(places, study.arms, strict=True):
            axes.plot(values[arm], [place] * len(values[arm]), "o", color=COLOURS[5], markersize=3)
        spread = np.where(np.isfinite(halves), halves, 0.0)
        axes.errorbar(
            means, places, xerr=spread, fmt="D", color=COLOURS[0], capsize=3, markersize=4
        )
        shown = study.arms if axes is every[0] else []
        axes.set_yticks(places if len(shown) else [], list(shown))
        axes.set_ylim(-0.6, len(places) - 0.4)
        axes.set_title(study.shown[name].title, loc="left", fontsize=9)
    return figure


def plot_curve(key: str, runs: Mapping[str, Sequence[FinishedRun]], over: str) -> Figure:
    """A metric over another: the mean of an arm's seeds as a line, with its 95 % interval over
    seeds as a band. A moving mean of three points smooths every run first. The axis is logarithmic
    if the largest value is over a thousand times the median, since a diverging run would flatten
    all others."""
    figure, (axes,) = new_figure()
    values = np.concatenate([run.curve(key) for every in runs.values() for run in every])
    values = values[values > 0]
    if len(values) and values.max() > 1000 * np.median(values):
        axes.set_yscale("log", nonpositive="mask")
    for n, (arm, found) in enumerate(runs.items()):
        length = min(len(run.updates) for run in found)
        if not length or not any(np.isfinite(run.curve(key)).any() for run in found):
            continue  # this arm has no such metric, e.g. no sampled rewards on trajectories alone
        table = np.stack([_smooth(run.curve(key)[:length]) for run in found])
        x = np.mean([run.curve(over)[:length] for run in found], axis=0)
        mean, style = table.mean(0), line_style(n)
        axes.plot(x, mean, label=arm, **style)
        if len(table) > 1:
            half = np.array([mean_and_interval(seeds)[1] for seeds in table.T])
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(x, mean - half, mean + half, **band)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(over.replace("_", " "))
    axes.set_title(key.replace("_", " "), loc="left", fontsize=10)
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    if axes.lines:  # more than six names would cover the lines
        axes.legend(frameon=False, fontsize=8, **(beside if len(axes.lines) > 6 else {}))
    return figure


def _smooth(curve: np.ndarray, window: int = 3) -> np.ndarray:
    padded = np.pad(curve, window // 2, mode="edge")
    return np.convolve(padded, np.ones(window) / window, mode="valid")


def plot_forest(studies: Sequence[tuple[str, Sequence[tuple[Claim, ClaimVerdict]]]]) -> Figure:
    """The difference of every claim with its interval, in margins, so that all share an axis; those
    beyond `FOREST` margins are drawn at its end.

    Args:
        studies: of each study the paper's arXiv number and the claims with their verdicts. A
            paper's claims stand together, under its number.
    """
    papers = sorted(studies, key=lambda study: study[0])
    rows = [(paper, *pair) for paper, pairs in papers for pair in pairs]
    figure = Figure(figsize=(9, 0.6 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = {"holds": COLOURS[2], "does not hold": COLOURS[4]}
    for place, (_, claim, verdict) in enumerate(reversed(rows)):
        color = colors.get(verdict.outcome, COLOURS[5])
        ends = np.clip(np.array([verdict.low, verdict.high]) / claim.margin, -FOREST, FOREST)
        axes.plot(ends, [place, place], color=color, linewidth=1.6)
        center = np.clip(verdict.difference / claim.margin, -FOREST, FOREST)
        axes.plot([center], [place], "D", color=color, markersize=3)
    for line in (-1, 0, 1):
        axes.axvline(line, color=COLOURS[5], linewidth=0.8, linestyle="-" if not line else ":")
    names, before = [], ""
    for paper, claim, _ in rows:
        names.append(f"arXiv {paper}: " * (paper != before) + claim.text.strip())
        before = paper
    axes.set_yticks(range(len(rows)), names[::-1])
    axes.tick_params(axis="y", labelsize=6, length=0)
    axes.set_ylim(-0.8, len(rows) - 0.2)
    axes.set_xlim(-FOREST - 0.2, FOREST + 0.2)
    axes.set_xlabel("difference in margins: green holds, red does not")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
