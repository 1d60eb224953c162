"""Completions by problem, in rollouts and evaluations, to compare runs by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tramontane.view.runs import Run

Row = dict[str, Any]
TRAINING = "training"


def problems(runs: list[Run], part: str, limit: int) -> Row:
    """Problems that all the runs answered, each with the number of completions and right ones.

    Args:
        runs: the runs to compare, at least one.
        part: a part of the problem's id; empty for any.
        limit: the most problems to return.
    """
    counts = [_counts(run) for run in runs]
    shared = [name for name in counts[0] if all(name in found for found in counts[1:])]
    matching = [name for name in shared if part.lower() in name.lower()]
    matching.sort(key=lambda name: _agreement([found[name] for found in counts]))
    rows = [
        {"problem_id": name, "counts": [{"n": n, "right": right} for n, right in
                                         (found[name] for found in counts)]}
        for name in matching[:limit]
    ]  # fmt: skip
    return {"rows": rows, "count": len(matching), "each": [len(found) for found in counts]}


def _agreement(found: list[tuple[int, int]]) -> float:
    """Problems on which runs differ most come first."""
    rates = [right / max(1, n) for n, right in found]
    return min(rates) - max(rates)


def _counts(run: Run) -> dict[str, tuple[int, int]]:
    """Completions and right ones by problem."""
    table = run.rollouts.table()
    right = pc.equal(table["verdict"], "right").cast(pa.int32())
    grouped = pa.table({"id": table["problem_id"], "right": right}).group_by("id")
    totals: Counter[str] = Counter()
    rights: Counter[str] = Counter()
    for row in grouped.aggregate([("right", "sum"), ("right", "count")]).to_pylist():
        totals[row["id"]], rights[row["id"]] = row["right_count"], row["right_sum"] or 0
    for rows in run.evaluations.by_name().values():
        for row in rows:
            totals[row["problem_id"]] += 1
            rights[row["problem_id"]] += row.get("verdict") == "right"
    return {name: (total, rights[name]) for name, total in totals.items()}


def answers(run: Run, problem_id: str) -> Row:
    """A run's completions of one problem, oldest first, with its statement."""
    table = run.rollouts.table()
    places = np.flatnonzero(np.asarray(pc.equal(table["problem_id"], problem_id)))
    parts = run.rollouts.refresh()
    rows = [_recorded(row) for row in table.take(pa.array(places, pa.int64())).to_pylist()]
    statement, reference = None, None
    if rows:
        wide = run.rollouts.wide(parts[rows[0]["part"]], rows[0]["row"], ["problem", "reference"])
        statement, reference = wide["problem"], wide["reference"]
    for name, found in run.evaluations.by_name().items():
        for row in found:
            if row["problem_id"] != problem_id:
                continue
            statement, reference = row.get("problem"), row.get("reference")
            kept = ("index", "verdict", "reward", "tokens", "reason", "text", "answer")
            rows.append({"source": name} | {key: row.get(key) for key in kept})
    return {"problem": statement, "reference": reference, "rows": rows}


def _recorded(row: Row) -> Row:
    kept = ("update", "row", "part", "group", "index", "verdict", "reward", "advantage", "tokens",
            "reason", "filtered")  # fmt: skip
    return {"source": TRAINING} | {key: row[key] for key in kept}
