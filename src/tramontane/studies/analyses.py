"""The pages of fits to runs: the compute curve and the length law."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes

from tramontane.errors import InputError
from tramontane.pages import render
from tramontane.studies.fits import (
    COMPUTES,
    LEAST_POINTS,
    PERFORMANCES,
    Compute,
    CurveFit,
    LengthLaw,
    Performance,
    Series,
    compute_series,
    fit_curve,
    fit_length,
    length_series,
    pooled,
    runs_in,
)
from tramontane.studies.plots import line_style, new_figure, save
from tramontane.workplace import owned_folder, write_whole


def study_curve(
    runs: Sequence[str | Path],
    *,
    over: str = "seconds",
    of: str = "held_out",
    skip: int = 0,
    until: float | None = None,
    out: str | Path = "studies/curve",
) -> dict[str, CurveFit]:
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
    for key, value, known in (("over", over, COMPUTES), ("of", of, PERFORMANCES)):
        if value not in known:
            raise InputError(f"{key} is {value!r}; choose from {', '.join(known)}")
    points: dict[str, list[Series]] = {}
    fits = {}
    for path in runs:
        found = [
            compute_series(run, cast(Compute, over), cast(Performance, of), skip)
            for run in runs_in(Path(path))
        ]
        starts = [start for _, start in found if start is not None]
        points[str(path)] = [series for series, _ in found]
        fitted = [_until(series, until, str(path)) for series, _ in found]
        fits[str(path)] = fit_curve(fitted, float(np.mean(starts)) if starts else None)
    figure, (axes,) = new_figure()
    for n, (label, fit) in enumerate(fits.items()):
        x, _ = _draw(axes, n, points[label], label)
        grid = np.linspace(0 if x.min() > 0 else x.min(), x.max(), 200)[1:]
        axes.plot(grid, fit.curve(grid), **line_style(n))
        axes.axhspan(fit.low, fit.high, color=line_style(n)["color"], alpha=0.1, linewidth=0)
    if until is not None:
        axes.axvline(until, color="#8a94a3", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel(f"{over} of training" if over == "seconds" else over)
    axes.set_ylabel("pass@1, held out" if of == "held_out" else "pass rate in training")
    with owned_folder(out, "written"):
        content = {label: asdict(fit) for label, fit in fits.items()}
        text = render("studies/curve.md.j2", fits=fits, over=over, until=until)
        write_analysis(Path(out), "curve", text, content)
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
        draw_law(axes, law, **line_style(n))
    axes.legend(frameon=False, fontsize=8)
    with owned_folder(out, "written"):
        text = render("studies/length.md.j2", laws=laws)
        write_analysis(Path(out), "length", text, {k: asdict(v) for k, v in laws.items()})
        save(figure, Path(out) / "length.svg")
    return laws


def _until(series: Series, until: float | None, label: str) -> Series:
    if until is None:
        return series
    kept = series.x <= until
    if kept.sum() < LEAST_POINTS:
        raise InputError(
            f"{label}: {kept.sum()} points up to {until:g}; a curve takes {LEAST_POINTS}"
        )
    return Series(series.x[kept], series.y[kept])


def curve_table(fits: dict[str, CurveFit]) -> str:
    """The curves as a Markdown table."""
    return render("studies/curve_table.md.j2", fits=fits)


def _draw(
    axes: Axes, number: int, series: Sequence[Series], label: str
) -> tuple[np.ndarray, np.ndarray]:
    x, y = pooled(series)
    axes.scatter(x, y, s=12, alpha=0.7, color=line_style(number)["color"], label=label)
    return x, y


def draw_law(axes: Axes, law: LengthLaw, **style: Any) -> None:
    """Draw the line of a length law, on a logarithmic axis."""
    x = np.geomspace(law.shortest, law.longest, 50)
    axes.plot(x, law.slope * np.log(x) + law.intercept, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a completion, mean (log scale)")
    axes.set_ylabel("raw reward, mean")


def law_table(laws: dict[str, LengthLaw]) -> str:
    """The laws as a Markdown table."""
    return render("studies/law_table.md.j2", laws=laws)


def write_analysis(out: Path, name: str, text: str, content: dict[str, Any]) -> None:
    """Write the page and its figures as JSON."""
    write_whole(out / f"{name}.md", text)
    write_whole(out / f"{name}.json", json.dumps(content, indent=1) + "\n")
