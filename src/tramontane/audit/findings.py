"""Findings: completions that look like reward hacking or verifier errors. None is proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KINDS = {
    "hedge": "right, but the box hedges: “or”, or more values than the reference has",
    "unevaluated": "right, but arithmetic is left undone: perhaps the problem, restated",
    "boxes": "right, with several boxes in the answer part",
    "not in thoughts": "right, but the answer does not occur in the thoughts",
    "program": "right, but the program looks as if it cheats its tests",
    "disputed": "right or wrong, and another verifier says the opposite",
    "unscorable": "no judgement could be made",
    "majority": "most of the group give one answer, and it is not the label",
}


@dataclass
class Finding:
    """One suspicious completion; for the kind `majority`, one completion of the group.

    `answer` is the content of the completion's box.
    """

    kind: str
    file: str
    line: int
    problem_id: str
    verdict: str
    reference: str | None
    answer: str | None
    detail: str
    group: str | int | None = None
    index: int | None = None

    @property
    def where(self) -> str:
        """`file:line` of the completion."""
        return f"{self.file}:{self.line}"


@dataclass
class Audit:
    """Result of an audit.

    `totals` maps each kind to the number of items searched for it, and their name.
    `unscorable_rates` maps each problem to its (unscorable, all) completions, highest rate first.
    `undecided` counts pairs of answer and reference that math-verify could not judge. `broken`
    lists rows that are not rollouts, as `file:line: reason`. `report` is the written page.
    """

    findings: list[Finding] = field(default_factory=list)
    totals: dict[str, tuple[int, str]] = field(default_factory=dict)
    completions: int = 0
    unscorable_rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    undecided: int = 0
    broken: list[str] = field(default_factory=list)
    report: Path | None = None

    def findings_of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def share(self, kind: str) -> str:
        """The kind's share as a text, such as `1.2 % of 613 groups`."""
        total, things = self.totals[kind]
        return f"{100 * len(self.findings_of(kind)) / max(total, 1):.1f} % of {total:,} {things}"


def clip(text: str, n: int = 80) -> str:
    """The text's first `n` characters at most, with … for the rest."""
    return text if len(text) <= n else text[: n - 1] + "…"
