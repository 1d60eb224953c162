"""The plots of the report, as SVG in the colours and font of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tramontane.run.curves import LEARNING, Lines

Metrics = Mapping[str, Any]

# Placeholder colours, replaced by CSS variables so that a plot fits light and dark pages.
INK, GRID = "#010203", "#010204"
SERIES = tuple(f"#0102{i:02x}" for i in range(0xA0, 0xA5))
_VARIABLES = {INK: "--muted", GRID: "--grid"} | {c: f"--c{i}" for i, c in enumerate(SERIES)}

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A finished plot for the page."""

    title: str
    unit: str
    note: str
    svg: str


def line_plots(specs: Sequence[Lines], metrics: Sequence[Metrics]) -> list[Plot]:
    """One plot for each spec for which the run has figures."""
    return [
        _finish(spec.title, spec.unit, spec.note, figure)
        for spec in specs
        if (figure := _lines(spec, metrics)) is not None
    ]


def custom_rewards(metrics: Sequence[Metrics]) -> Lines:
    """The custom parts of the reward, as many as there are colours."""
    known = next(s for s in LEARNING if "reward" in s.keys).keys
    names = [k for k in metrics[0] if k.startswith("reward_") and k not in known] if metrics else []
    keys = {key: key.removeprefix("reward_") for key in names[: len(SERIES)]}
    return Lines("Custom rewards", "mean over a batch", keys)


def pass_rate_plot(metrics: Sequence[Metrics], summary: Mapping[str, Any]) -> Plot | None:
    """Pass rate in training, with pass@1 before and after."""
    spec = next(s for s in LEARNING if "pass_rate" in s.keys)
    figure = _lines(spec, metrics)
    if figure is None:
        return None
    axes = figure.axes[0]
    ends = summary.get("pass_at_1") or {}
    for x, when in [(0, "before"), (metrics[-1]["update"], "after")]:
        if estimate := ends.get(when):
            value = estimate["value"]
            spread = [[max(0.0, value - estimate["low"])], [max(0.0, estimate["high"] - value)]]
            label = "evaluation" if when == "before" else None
            axes.errorbar(
                x, value, spread, fmt="o", ms=4, capsize=3, color=SERIES[1], label=label, zorder=5
            )
    axes.set_ylim(0, 1)
    if ends:
        _legend(axes)
    return _finish(spec.title, spec.unit, spec.note if ends else "", figure)


def groups_plot(metrics: Sequence[Metrics]) -> Plot | None:
    """Groups trained on and groups filtered."""
    rows = [m for m in metrics if m.get("groups_kept") is not None]
    if not rows:
        return None
    figure, axes = _axes()
    x = [m["update"] for m in rows]
    kept = [m["groups_kept"] for m in rows]
    axes.bar(x, kept, width=0.8, color=SERIES[0], label="kept")
    dropped = [m.get("groups_filtered", 0) for m in rows]
    axes.bar(x, dropped, bottom=kept, width=0.8, color=SERIES[1], alpha=0.6, label="dropped")
    _legend(axes)
    return _finish("Groups", "an update", "", figure)


def staleness_plot(metrics: Sequence[Metrics]) -> Plot | None:
    """Share of all trained tokens by their staleness in versions."""
    tokens: dict[int, float] = {}
    for m in metrics:
        for age, count in (m.get("staleness_histogram") or {}).items():
            tokens[int(age)] = tokens.get(int(age), 0) + count
    total = sum(tokens.values())
    if not total:
        return None
    figure, axes = _axes("versions old")
    ages = range(max(tokens) + 1)
    shares = [tokens.get(age, 0) / total for age in ages]
    bars = axes.bar(ages, shares, width=0.7, color=SERIES[0])
    axes.bar_label(
        bars, [f"{s:.1%}" for s in shares], padding=2, color=INK, fontsize=_STYLE["font.size"]
    )
    axes.set_xticks(list(ages))
    axes.set_ylim(0, max(shares) * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    return _finish("Staleness", "share of trained tokens", "", figure)


def _lines(spec: Lines, metrics: Sequence[Metrics]) -> Figure | None:
    present = [key for key in spec.keys if any(m.get(key) is not None for m in metrics)]
    if not present:
        return None
    figure, axes = _axes()
    for key in present:
        rows = [m for m in metrics if m.get(key) is not None]
        x, y = [m["update"] for m in rows], [m[key] for m in rows]
        # A series keeps its colour, whichever others are missing.
        colour = SERIES[list(spec.keys).index(key)]
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=colour, label=spec.keys[key], marker=marker, markersize=3)
    if spec.log:
        axes.set_yscale("log", nonpositive="mask")
        axes.minorticks_off()
    elif spec.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if spec.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    elif not spec.log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if len(present) > 1:
        _legend(axes)
    return figure


def _axes(xlabel: str = "update") -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.35), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set_xlabel(xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _legend(axes: Axes) -> None:
    with matplotlib.rc_context(_STYLE):
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=5,
            borderpad=0,
            handlelength=1.2,
            columnspacing=1.2,
            handletextpad=0.5,
        )


def _percent(value: float, _: object) -> str:
    return f"{value * 100:.4g} %"


def _finish(title: str, unit: str, note: str, figure: Figure) -> Plot:
    """Render to SVG without a fixed size, fixed colours and a date."""
    buffer = io.StringIO()
    # The salt makes ids unique to a plot but stable between runs.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r'(<g id="[^"]*)"', rf'\1-{re.sub("[^a-z]", "", title.lower())}"', svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Plot(title, unit, note, svg)
