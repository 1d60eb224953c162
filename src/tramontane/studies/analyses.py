"""Analyses of runs, each with a page: the compute curve, the length law and the landscape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import SamplingOptions
from tramontane.studies import curve as curves
from tramontane.studies.figures import colours, dash, new_figure, save
from tramontane.studies.landscape import Grid, Landscape, OnPoint, landscape
from tramontane.studies.length import LengthLaw, fit_length, length_series
from tramontane.studies.series import Series, pooled, runs_in
from tramontane.workplace import owned_folder, write_whole

T = TypeVar("T")


def study_curve(
    runs: Sequence[str | Path],
    *,
    over: str = "seconds",
    of: str = "held_out",
    skip: int = 0,
    until: float | None = None,
    out: str | Path = "studies/curve",
) -> dict[str, curves.CurveFit]:
    """Fit ScaleRL's compute curve to runs, and write `curve.md`, `curve.svg` and `curve.json`.

    Args:
        runs: run folders, each fitted by itself; a folder of runs is fitted as one.
        over: compute: `seconds` of training without the start, `tokens` trained on, or `updates`.
        of: performance: `held_out`, pass@1 as measured by `evaluation.every`, or `pass_rate` of the
            training problems at every update.
        skip: updates skipped at the start, e.g. those of the first epoch.
        until: only points up to this compute are fitted; the page shows the others too.
        out: folder of the result.

    Returns:
        The fit of each item of `runs`, by its text.

    Raises:
        InputError: no runs, too few points, or an unknown name.
    """
    _known("over", over, curves.COMPUTES)
    _known("of", of, curves.PERFORMANCES)
    points: dict[str, list[Series]] = {}
    fits = {}
    for path in runs:
        found = [
            curves.compute_series(
                run, cast(curves.Compute, over), cast(curves.Performance, of), skip
            )
            for run in runs_in(Path(path))
        ]
        starts = [start for _, start in found if start is not None]
        points[str(path)] = [series for series, _ in found]
        fitted = [_until(series, until, str(path)) for series, _ in found]
        fits[str(path)] = curves.fit_curve(fitted, float(np.mean(starts)) if starts else None)
    figure = _curve_figure(points, fits, until)
    figure.axes[0].set_xlabel(f"{over} of training" if over == "seconds" else over)
    figure.axes[0].set_ylabel("pass@1, held out" if of == "held_out" else "pass rate in training")
    content = {k: asdict(v) for k, v in fits.items()}
    with owned_folder(out, "written"):
        _write(Path(out), "curve", _curve_page(fits, over, until), content)
        save(figure, Path(out) / "curve.svg")
    return fits


def study_length(
    runs: Sequence[str | Path], *, out: str | Path = "studies/length"
) -> dict[str, LengthLaw]:
    """Fit raw reward against log length, and write `length.md`, `length.svg` and `length.json`.

    Args:
        runs: run folders, each fitted by itself; a folder of runs is fitted as one.
        out: folder of the result.

    Returns:
        The law of each item of `runs`, by its text.

    Raises:
        InputError: no runs, or too few updates.
    """
    points = {str(path): [length_series(run) for run in runs_in(Path(path))] for path in runs}
    laws = {label: fit_length(series) for label, series in points.items()}
    figure, (axes,) = new_figure()
    for n, (label, law) in enumerate(laws.items()):
        _draw(axes, n, points[label], label)
        x = np.geomspace(law.shortest, law.longest, 50)
        line = law.slope * np.log(x) + law.intercept
        axes.plot(x, line, dash(n), color=colours(n + 1)[n], linewidth=1.6)
    _length_axes(axes)
    axes.legend(frameon=False, fontsize=8)
    text = f"""# Length law

Raw reward (without the length penalty) = a · ln(tokens) + b, over the updates of runs.

{_law_table(laws)}

The interval is that of a jackknife: one run is left out at a time, or one of six consecutive parts
of a single run. Within one run, both figures also change with time: a slope alone does not show
that length is the cause of the reward.

![raw reward over length](length.svg)
"""
    with owned_folder(out, "written"):
        _write(Path(out), "length", text, {k: asdict(v) for k, v in laws.items()})
        save(figure, Path(out) / "length.svg")
    return laws


def study_landscape(
    run: str | Path,
    *,
    grid: Grid = Grid(),  # noqa: B008 (frozen)
    sampling: SamplingOptions | None = None,
    out: str | Path | None = None,
    on_point: OnPoint = lambda done, total: None,
) -> Landscape:
    """Evaluate the plane of a run's principal components; write `landscape.md` and its plots.

    Args:
        run: a run folder with its checkpoints (`checkpoint.every`, `checkpoint.keep`).
        grid: the points of the plane.
        sampling: sampling of a point, if different from the run's evaluations.
        out: folder of the result; None: `RUN/landscape`. Existing points are kept.
        on_point: called with (points evaluated, points in all).

    Raises:
        InputError: see `landscape.landscape`.
    """
    run = Path(run)
    folder = Path(out) if out else run / "landscape"
    with owned_folder(folder, "drawn as a landscape"):
        found = landscape(run, folder, grid, sampling or {}, on_point)
        _landscape_figures(found, folder)
        content = {
            "axes": [axis.tolist() for axis in found.axes],
            "reward": found.reward.tolist(),
            "tokens": found.tokens.tolist(),
            "direction": found.direction.tolist(),
            "correlation": found.correlation,
            "law": asdict(found.law),
        }
        _write(folder, "landscape", _landscape_page(found, run.name), content)
    return found


def _known(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{key} is {value!r}; there are {', '.join(known)}")


def _until(series: Series, until: float | None, label: str) -> Series:
    """The points up to some compute."""
    if until is None:
        return series
    kept = series.x <= until
    if kept.sum() < curves.LEAST_POINTS:
        raise InputError(f"{label}: {kept.sum()} points up to {until:g}; a curve takes 5")
    return Series(series.x[kept], series.y[kept])


def _curve_figure(
    points: dict[str, list[Series]], fits: dict[str, curves.CurveFit], until: float | None
) -> Figure:
    """Points, fitted curves and the intervals of their asymptotes, one colour for each label."""
    figure, (axes,) = new_figure()
    for n, (label, fit) in enumerate(fits.items()):
        _draw(axes, n, points[label], label)
        x, _ = pooled(points[label])
        grid = np.linspace(0 if x.min() > 0 else x.min(), x.max(), 200)[1:]
        axes.plot(grid, fit.curve(grid), dash(n), color=colours(n + 1)[n], linewidth=1.6)
        axes.axhspan(fit.low, fit.high, color=colours(n + 1)[n], alpha=0.1, linewidth=0)
    if until is not None:
        axes.axvline(until, color="#8a94a3", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _curve_page(fits: dict[str, curves.CurveFit], over: str, until: float | None) -> str:
    rows = [
        f"| {label} | {f.curve.asymptote:.3f} | {f.low:.3f} to {f.high:.3f}"
        f"{'' if f.bounded else ' (not bounded)'} | {f.curve.midpoint:,.4g} | "
        f"{f.curve.exponent:.2f} | {f.curve.start:.3f} | {f.points} | {f.rmse:.3f} |"
        for label, f in fits.items()
    ]
    return f"""# Compute curve

R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B), fitted by least squares over {over}
{f"up to {until:g}" if until is not None else ""} (ScaleRL, arXiv 2510.13786).

| runs | A | 95 % interval | C_mid | B | R_0 | points | RMSE |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

The interval of the asymptote A, drawn as a band, is that of a jackknife: one run is left out at a
time, or one of six consecutive parts of a single run. *Not bounded*: it reaches 1 or the start, or
a curve that ends at 1 fits about as well, so these points do not show where the curve ends.

![performance over compute](curve.svg)
"""


def _landscape_figures(found: Landscape, folder: Path) -> None:
    """Write `landscape.svg`, contours on the plane, and `length.svg`, the law on its points."""
    figure, (reward, tokens) = new_figure(2, 3.6)
    _contours(reward, found, found.reward, "raw reward")
    _contours(tokens, found, found.tokens, "tokens of a completion")
    save(figure, folder / "landscape.svg")
    figure, (axes,) = new_figure()
    axes.scatter(found.tokens.ravel(), found.reward.ravel(), s=14, color=colours(1)[0])
    x = np.geomspace(found.law.shortest, found.law.longest, 50)
    axes.plot(x, found.law.slope * np.log(x) + found.law.intercept, color=colours(2)[1])
    _length_axes(axes)
    save(figure, folder / "length.svg")


def _landscape_page(found: Landscape, name: str) -> str:
    shares = ", ".join(f"{share:.1%}" for share in found.plane.explained[:4])
    rows = [
        f"| {update} | {first:+.4g} | {second:+.4g} |"
        for update, (first, second) in zip(found.updates, found.plane.coordinates, strict=True)
    ]
    return f"""# Landscape of {name}

The plane of the two largest principal components of {len(found.updates)} checkpoints, around the
final one. Shares of the checkpoints' variance in the first components: {shares}. α_1 and α_2 are in
units of the Euclidean norm of the weights.

![raw reward and tokens on the plane](landscape.svg)

The line is the trajectory of the checkpoints, the star the final one; the arrow points along the
plane's *length direction*, in which completions grow fastest.

## Length law on the plane

{_law_table({name: found.law})}

Correlation of the raw reward with the log of the length over the {found.reward.size} points:
{found.correlation:.2f}.

![raw reward over length](length.svg)

## Checkpoints

| update | α_1 | α_2 |
|---|---|---|
{chr(10).join(rows)}
"""


def _draw(axes: Axes, number: int, series: Sequence[Series], label: str) -> None:
    axes.scatter(*pooled(series), s=12, alpha=0.7, color=colours(number + 1)[number], label=label)


def _length_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a completion, mean (log scale)")
    axes.set_ylabel("raw reward, mean")


def _law_table(laws: dict[str, LengthLaw]) -> str:
    lines = [
        "| runs | a | 95 % interval | b | R² | tokens | points |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, law in laws.items():
        lines.append(
            f"| {label} | {law.slope:+.3f} | {law.low:+.3f} to {law.high:+.3f} | "
            f"{law.intercept:+.3f} | {law.r_squared:.2f} | "
            f"{law.shortest:,.0f} to {law.longest:,.0f} | {law.points} |"
        )
    return "\n".join(lines)


def _contours(axes: Axes, found: Landscape, values: np.ndarray, title: str) -> None:
    """Filled contours of a figure on the plane, with the trajectory and the length direction."""
    axes.grid(False)
    filled = axes.contourf(*found.axes, values, levels=12, cmap="viridis")
    axes.figure.colorbar(filled, ax=axes, shrink=0.85)
    places = found.plane.coordinates
    axes.plot(*places.T, color="white", linewidth=2.4)
    axes.plot(*places.T, "o-", color="#c03a2b", linewidth=1.1, markersize=3)
    axes.plot(0, 0, "*", color="#c03a2b", markeredgecolor="white", markersize=13)
    extents = np.array([np.ptp(axis) for axis in found.axes])
    size = 0.25 * float((extents / np.maximum(np.abs(found.direction), 1e-9)).min())
    axes.annotate(
        "",
        xy=tuple(size * found.direction),
        xytext=(0, 0),
        arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 1.6},
    )
    axes.set_xlabel("α₁")
    axes.set_ylabel("α₂")
    axes.set_title(title, loc="left", fontsize=10)


def _write(out: Path, name: str, text: str, content: dict[str, Any]) -> None:
    write_whole(out / f"{name}.md", text)
    write_whole(out / f"{name}.json", json.dumps(content, indent=1) + "\n")
