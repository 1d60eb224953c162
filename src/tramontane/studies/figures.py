"""The look of plots in studies' pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#1f77c9", "#e07b1a", "#17926b", "#8b5cd6", "#c03a2b", "#8a94a3")
DASHES = ("-", "--", ":")  # for further lines once the colours are used up


def new_figure(columns: int = 1, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """A figure with `columns` plots side by side, `height` inches high."""
    figure = Figure(figsize=(6.4 if columns == 1 else 4.6 * columns, height), layout="constrained")
    found = figure.subplots(1, columns, squeeze=False)[0]
    for axes in found:
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(found)


def colours(count: int) -> Sequence[str]:
    """A colour for each of `count` lines; they repeat after six."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def dash(number: int) -> str:
    """The line style of line `number`, which differs where the colours repeat."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def save(figure: Figure, file: Path) -> None:
    """Write a figure as SVG with real text, the same bytes for the same figure."""
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": file.name}
    with matplotlib.rc_context(style):
        figure.savefig(file, metadata={"Date": None}, facecolor="white")
