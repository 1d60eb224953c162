"""A recipe's report: its models in the columns of the paper's table, and a line for each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tramontane.evaluation.comparison import Comparison
from tramontane.pages import render
from tramontane.recipes.steps import Facts
from tramontane.workplace import write_whole

REPORT = "report"  # .md and .html


def write_report(out: Path, title: str, found: Comparison, steps: Mapping[str, Facts]) -> None:
    """Write `report.md` and `report.html`.

    A row of the table is a result on a suite, as in the paper's table 2: pass@1, and the majority
    vote if there are several samples whose answers can be equal.

    Args:
        out: the recipe's folder.
        title: heading.
        found: the comparison.
        steps: facts of the finished steps by name.
    """
    for ending in ("md", "html"):
        text = render(
            f"recipes/report.{ending}.j2",
            title=title,
            columns=list(next(iter(found.values()))),
            rows=table(found),
            steps={name: sentence(facts) for name, facts in steps.items()},
        )
        write_whole(out / f"{REPORT}.{ending}", text)


def table(found: Comparison) -> list[tuple[str, list[str]]]:
    """(name of the figure, its text for each model) of each row, in per cent with intervals."""
    rows = []
    for suite, models in found.items():
        results = [model.result for model in models.values()]
        left_out = next(iter(models.values())).left_out
        note = f" ({left_out} overlong problems skipped)" if left_out else ""
        rows.append((f"{suite} pass@1{note}", [_percent(r.pass_at_1) for r in results]))
        k = max(results[0].maj_at_k, default=1)
        if k > 1:
            rows.append((f"{suite} maj@{k}", [_percent(r.maj_at_k[k]) for r in results]))
    return rows


def sentence(facts: Facts) -> str:
    """A step's facts as text: `name: value` in turn, nested ones in brackets."""
    return ", ".join(f"{_words(key)}: {_value(value)}" for key, value in facts.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({sentence({**value})})"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(key: str) -> str:
    return "pass@1" if key == "pass_at_1" else key.replace("_", " ")


def _percent(estimate: Any) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
