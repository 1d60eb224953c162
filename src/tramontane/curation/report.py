"""Report of a curation: the funnel, and every reason with its count and examples.

The paper's funnel goes from 699k problems through 501k to 38k (arXiv 2506.10910, section 4.1).
The report does not depend on when or how often a curation was started.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from tramontane.curation.config import CurateConfig
from tramontane.curation.rows import Row
from tramontane.pages import render

EXAMPLES = 3  # shown for each reason
EXCERPT = 400  # characters shown of a statement
MAX_MALFORMED = 100  # rows listed individually
RATES = ("0", *(f"{n}–{n + 10} %" for n in range(0, 100, 10)), "100 %")  # upper ends included
BINS = (0, 50, 100, 150, 200, 300, 400, 600, 800, 1200, 2000)  # characters of a statement


class Example(NamedTuple):
    """A row in the report; `new` is its rewritten form, if any."""

    id: str
    where: str
    text: str
    answer: str
    new: str
    detail: str


class Tally:
    """Counts rows; its memory does not grow with their number.

    Args:
        stages: names of the stages, in order.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.rows = 0  # rows of the input, without copies
        self.copies: Counter[str] = Counter()  # number of copies, by stage
        self.decisions: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str, str]] = Counter()  # stage, decision, reason
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.lengths: dict[str, Counter[int]] = {"kept": Counter(), "dropped": Counter()}
        self.examples: dict[tuple[str, str, str], list[Example]] = defaultdict(list)
        self.malformed: list[str] = []
        # Stage → kept or dropped → index in RATES → problems.
        self.rates: dict[str, dict[str, Counter[int]]] = {}

    def add(self, row: Row) -> None:
        if row.copied_by:
            self.copies[row.copied_by] += 1
        else:
            self.rows += 1
        self.decisions[row.decision] += 1
        self.sources[re.sub(r"(?::\d+|\[\d+\])$", "", row.where)][row.decision] += 1
        if row.reason:
            key = (row.stage, row.decision, row.reason)
            self.reasons[key] += 1
            if len(self.examples[key]) < EXAMPLES:
                self.examples[key].append(_example(row))
        if row.problem is None:
            if len(self.malformed) < MAX_MALFORMED:
                self.malformed.append(f"{row.where}: {row.detail}")
        else:
            fate = "dropped" if row.decision == "dropped" else "kept"
            length = len(row.problem.problem)
            self.lengths[fate][max(i for i, low in enumerate(BINS) if length >= low)] += 1
            last = self.stages.index(row.stage) if fate == "dropped" else len(self.stages)
            for stage in self.stages[: last + 1]:
                if isinstance(rate := row.problem.metadata.get(f"{stage}_pass_rate"), float):
                    place = len(RATES) - 1 if rate == 1 else math.ceil(10 * rate - 1e-9)
                    fates = self.rates.setdefault(stage, {"kept": Counter(), "dropped": Counter()})
                    fates[fate][place] += 1

    def histogram(self, stage: str) -> list[tuple[str, int, int, int]]:
        """(range of pass rates, problems kept, dropped, both) for a stage that measures them."""
        kept, dropped = (self.rates[stage][fate] for fate in ("kept", "dropped"))
        return [(n, kept[i], dropped[i], kept[i] + dropped[i]) for i, n in enumerate(RATES)]

    def funnel(self) -> list[tuple[str, int, Counter[str]]]:
        """(stage, remaining rows including its copies, dropped rows by reason), in order."""
        remaining, steps = self.rows, []
        for stage in self.stages:
            dropped = Counter(
                {
                    reason: count
                    for (where, decision, reason), count in self.reasons.items()
                    if where == stage and decision == "dropped"
                }
            )
            remaining += self.copies[stage] - dropped.total()
            steps.append((stage, remaining, dropped))
        return steps

    def summary(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "copies": self.copies.total(),
            "kept": self.decisions["kept"],
            "rewritten": self.decisions["rewritten"],
            "dropped": self.decisions["dropped"],
            "stages": [
                {"stage": stage, "left": remaining, "dropped": dict(dropped.most_common())}
                for stage, remaining, dropped in self.funnel()
            ],
            "pass_rates": {
                stage: [
                    {"solved": name, "kept": kept, "dropped": dropped}
                    for name, kept, dropped, _ in self.histogram(stage)
                ]
                for stage in self.rates
            },
            "notes": self._reasons("kept"),
            "rewrites": self._reasons("rewritten"),
            "malformed": sum(
                c for (_, _, reason), c in self.reasons.items() if reason == "malformed"
            ),
            "malformed_rows": self.malformed,
        }

    def _reasons(self, decision: str) -> dict[str, int]:
        counts = Counter({r: n for (_, d, r), n in self.reasons.items() if d == decision})
        return dict(counts.most_common())


def write_report(tally: Tally, config: CurateConfig) -> dict[str, str]:
    """The texts of `report.md` and `report.html`, by file name."""
    order = {stage: n for n, stage in enumerate(tally.stages)}
    reasons = sorted(tally.reasons, key=lambda key: (order[key[0]], -tally.reasons[key], key))
    context = {
        "title": "Curation",
        "tally": tally,
        "funnel": (funnel := tally.funnel()),
        "widest": max([tally.rows, *(remaining for _, remaining, _ in funnel)]) or 1,
        "reasons": [(key, tally.reasons[key], tally.examples[key]) for key in reasons],
        "most": max(tally.reasons.values(), default=1),
        "lengths": _lengths(tally),
        "histograms": {stage: tally.histogram(stage) for stage in tally.rates},
        "config": yaml.safe_dump(
            config.model_dump(mode="json", exclude={"out"}), sort_keys=False, allow_unicode=True
        ),
    }
    names = ("report.md", "report.html")
    return {name: render(f"curation/{name}.j2", **context) for name in names}


def _lengths(tally: Tally) -> list[tuple[str, float, float]]:
    """(characters, share of the kept rows, share of the dropped rows) for each bin."""
    names = [f"{low}–{high - 1}" for low, high in pairwise(BINS)]
    kept, dropped = tally.lengths["kept"], tally.lengths["dropped"]
    return [
        (name, kept[i] / max(kept.total(), 1), dropped[i] / max(dropped.total(), 1))
        for i, name in enumerate([*names, f"{BINS[-1]}–"])
    ]


def _example(row: Row) -> Example:
    if row.problem is None:
        return Example("", row.where, "", "", "", row.detail)
    problem, metadata = row.problem, row.problem.metadata
    reworded = row.decision == "rewritten" and "original_problem" in metadata
    old = metadata["original_problem"] if reworded else problem.problem
    answer = metadata["original_answer"] if reworded else problem.answer
    new = _short(problem.problem) + f"\n→ {problem.answer}" * (problem.answer is not None)
    new = new if reworded else ""
    return Example(problem.id, row.where, _short(old), answer or "", new, row.detail)


def _short(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT // 2] + " […] " + text[-EXCERPT // 2 :]
