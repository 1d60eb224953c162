"""docs/models.md, from a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.architectures.report import COLUMNS, SAME, Report, outcome, outcomes
from benchmarks.architectures.rows import USED, Row, every_row
from benchmarks.architectures.trial import REFUSED

PAGE = Path(__file__).parents[2] / "docs/models.md"
NOT_ASKED = "–"


def page(report: Report) -> str:
    """The page, in Markdown."""
    rows = [row for row in every_row() if row.name in report.rows]
    found = {row.name: report.rows[row.name] for row in rows}
    used = [row for row in rows if row in USED]
    kinds = {row.name: {*outcomes(found[row.name]).values()} for row in rows}
    rest = [row for row in rows if row not in used and kinds[row.name] != {"unbuilt"}]
    measured = [row for row in rest if {"yes", "no"} & kinds[row.name]]
    wrong = [row for row in rows if {"no", "failed", "crashed"} & kinds[row.name]]
    unbuilt = [row for row in rows if kinds[row.name] == {"unbuilt"}]
    template = jinja2.Template(
        Path(__file__).with_suffix(".md.j2").read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    return template.render(
        report.versions,
        same=f"{SAME:g}",
        used=_table(used, found),
        others=_table(measured, found),
        refused=[(row, _says(found[row.name])) for row in rest if row not in measured],
        not_asked=NOT_ASKED,
        unbuilt=", ".join(f"`{row.kind}`" for row in unbuilt),
        wrong=", ".join(f"`{row.name}`" for row in wrong),
        count=len(rows) - len(unbuilt),
    )


def _table(rows: Iterable[Row], found: Mapping[str, Any]) -> str:
    lines = [("architecture", "known by", *COLUMNS), ("---",) * (2 + len(COLUMNS))]
    for row in rows:
        name = f"`{row.kind}`, {row.variant}" if row.variant else f"`{row.kind}`"
        lines.append((name, row.known, *_cells(found[row.name])))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    """A row's columns; what was said before is not said again."""
    said = ""
    for column in COLUMNS:
        cell = row["cells"].get(column) if "cells" in row else _says(row)
        if cell is None:
            yield NOT_ASKED
        elif cell == said:
            yield outcome(cell)
        elif isinstance(cell, str):
            said = cell
            yield _escaped(cell)
        else:
            yield f"{cell:.0e}" if cell <= SAME else f"**{cell:.2g}**"


def _says(row: Mapping[str, Any]) -> str:
    """All that was said of a row, once."""
    words = [cell for cell in row.get("cells", row).values() if isinstance(cell, str)]
    return _escaped("; ".join(dict.fromkeys(word.removeprefix(REFUSED) for word in words)))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
