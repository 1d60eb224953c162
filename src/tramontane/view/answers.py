"""Completions by problem, from rollouts and evaluations, for comparing runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tramontane.statistics import paired_difference
from tramontane.view.details import pictures, with_pictures
from tramontane.view.runs import Run

Row = dict[str, Any]
TRAINING = "training"


def problems(runs: list[Run], sources: list[str], part: str, limit: int) -> Row:
    """Problems answered by all sides of a comparison, with the numbers of completions and of right
    ones.

    Args:
        runs: the runs to compare, at least one; a run may be compared with itself.
        sources: for each run, an evaluation or `training`. A missing one, such as an empty text, is
            replaced by the run's last evaluation.
        part: a part of the problem's id; empty for any.
        limit: maximum number of problems.
    """
    counted = [_counts(run) for run in runs]
    sources = [_source(found, chosen) for found, chosen in zip(counted, sources, strict=True)]
    counts = [found[source] for found, source in zip(counted, sources, strict=True)]
    shared = [name for name in counts[0] if all(name in found for found in counts[1:])]
    matching = [name for name in shared if part.lower() in name.lower()]
    matching.sort(key=lambda name: _agreement([found[name] for found in counts]))
    rows = [
        {"problem_id": name, "counts": [{"n": n, "right": right} for n, right in
                                         (found[name] for found in counts)]}
        for name in matching[:limit]
    ]  # fmt: skip
    return {
        "rows": rows,
        "count": len(matching),
        "each": [len(found) for found in counts],
        "sources": sources,
        "choices": [list(found) for found in counted],
        "difference": _difference(counts, shared),
    }


def _difference(counts: list[dict[str, tuple[int, int]]], shared: list[str]) -> Row | None:
    """The second side's pass@1 minus the first's on the problems of both, with its interval; None
    without any, or with more than two sides."""
    sides = [
        {name: (right, n) for name in shared for n, right in [found[name]] if n} for found in counts
    ]
    both = sides[0].keys() & sides[-1].keys()
    if len(sides) != 2 or not both:
        return None
    pair = [{name: side[name] for name in both} for side in sides]
    return asdict(paired_difference(*pair))


def _source(found: dict[str, Any], chosen: str) -> str:
    return next((name for name in (chosen, "after") if name in found), list(found)[-1])


def _agreement(found: list[tuple[int, int]]) -> float:
    """Sort key: problems on which runs differ most come first."""
    rates = [right / max(1, n) for n, right in found]
    return min(rates) - max(rates)


def _counts(run: Run) -> dict[str, dict[str, tuple[int, int]]]:
    """By source, from training to the last evaluation: completions that could be
    judged, and right ones, by problem."""
    table = run.rollouts.table()
    table = table.filter(pc.not_equal(table["verdict"], "unscorable"))
    right = pc.equal(table["verdict"], "right").cast(pa.int32())
    grouped = pa.table({"id": table["problem_id"], "right": right}).group_by("id")
    sums = grouped.aggregate([("right", "count"), ("right", "sum")]).to_pylist()
    counts = {TRAINING: {row["id"]: (row["right_count"], row["right_sum"] or 0) for row in sums}}
    for name, found in run.evaluations().items():
        rows = [row for row in found if row.get("verdict") != "unscorable"]
        totals = Counter(row["problem_id"] for row in rows)
        rights = Counter(row["problem_id"] for row in rows if row.get("verdict") == "right")
        counts[name] = {problem: (total, rights[problem]) for problem, total in totals.items()}
    return counts


def answers(run: Run, problem_id: str) -> Row:
    """A run's completions of one problem, oldest first, with its statement."""
    parts, table = run.rollouts.current()
    places = np.flatnonzero(np.asarray(pc.equal(table["problem_id"], problem_id)))
    rows = [_recorded(row) for row in table.take(pa.array(places, pa.int64())).to_pylist()]
    asked: Row = {}  # the last row that says what was asked
    if rows:
        names = ["problem", "reference", "image_files", "image_tokens"]
        asked = run.rollouts.wide(parts[rows[0]["part"]], rows[0]["row"], names)
    for name, found in run.evaluations().items():
        for row in found:
            if row["problem_id"] != problem_id:
                continue
            asked = row
            kept = ("index", "verdict", "reward", "tokens", "reason", "text", "answer")
            shown = {"source": name} | {key: row.get(key) for key in kept}
            shown["turns"] = with_pictures(row.get("turns"), run)
            rows.append(shown | {"prompt": run.tokens.text(row.get("prompt_ids"))})
    return {
        "problem": asked.get("problem"),
        "reference": asked.get("reference"),
        "pictures": [*pictures(asked, run, [])],
        "rows": rows,
    }


def _recorded(row: Row) -> Row:
    kept = ("update", "row", "part", "group", "index", "verdict", "reward", "advantage", "tokens",
            "reason", "filtered")  # fmt: skip
    return {"source": TRAINING} | {key: row[key] for key in kept}
