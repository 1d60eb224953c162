"""docs/models.md and docs/wrapped-models.md, from a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.architectures.report import COLUMNS, SAME, Report, outcome, outcomes
from benchmarks.architectures.rows import USED, Row, every_row
from benchmarks.architectures.trial import REFUSED, TEXT_HALF

_DOCS, _HERE = Path(__file__).parents[2] / "docs", Path(__file__).parent
PLAIN, WRAPPED = _DOCS / "models.md", _DOCS / "wrapped-models.md"
NOT_ASKED = "–"


def pages(report: Report) -> dict[Path, str]:
    """The pages, in Markdown: of causal LMs, and of models that wrap one."""
    rows = [row for row in every_row() if row.name in report.rows]
    plain = [column for column in COLUMNS if column != TEXT_HALF]
    return {
        PLAIN: _page("page", report, [row for row in rows if not row.wrapped], plain),
        WRAPPED: _page("wrapped", report, [row for row in rows if row.wrapped], COLUMNS),
    }


def _newer(report: Report, columns: Sequence[str]) -> str:
    """The table of architectures that only newer releases of transformers have."""
    wrapped = TEXT_HALF in columns
    rows = [
        Row(name, f"{row['known']} (transformers {row['release']})")
        for name, row in report.newer.items()
        if row["wrapped"] == wrapped
    ]
    return _table(rows, report.newer, columns) if rows else ""


def write(report: Report) -> None:
    for path, text in pages(report).items():
        path.write_text(text, encoding="utf-8")


def _page(template: str, report: Report, rows: Sequence[Row], columns: Sequence[str]) -> str:
    found = {row.name: report.rows[row.name] for row in rows}
    used = [row for row in rows if row in USED]
    kinds = {row.name: {*outcomes(found[row.name]).values()} for row in rows}
    rest = [row for row in rows if row not in used and kinds[row.name] != {"unbuilt"}]
    measured = [row for row in rest if {"yes", "no"} & kinds[row.name]]
    wrong = [row for row in rows if {"no", "failed", "crashed"} & kinds[row.name]]
    unbuilt = [row for row in rows if kinds[row.name] == {"unbuilt"}]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    return environment.get_template(f"{template}.md.j2").render(
        report.versions,
        same=f"{SAME:g}",
        newer=_newer(report, columns),
        used=_table(used, found, columns),
        others=_table(measured, found, columns),
        refused=[(row, _says(found[row.name])) for row in rest if row not in measured],
        not_asked=NOT_ASKED,
        unbuilt=", ".join(f"`{row.kind}`" for row in unbuilt),
        wrong=", ".join(f"`{row.name}`" for row in wrong),
        count=len(rows) - len(unbuilt),
    )


def _table(rows: Iterable[Row], found: Mapping[str, Any], columns: Sequence[str]) -> str:
    lines = [("architecture", "known by", *columns), ("---",) * (2 + len(columns))]
    for row in rows:
        name = f"`{row.kind}`, {row.variant}" if row.variant else f"`{row.kind}`"
        lines.append((name, row.known, *_cells(found[row.name], columns)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    """A row's columns; what was said before is not said again."""
    said = ""
    for column in columns:
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
