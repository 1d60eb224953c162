"""Findings (completions that look like reward hacking or verifier errors) and their page. None of
them is proof."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tramontane.workplace import write_whole

KINDS = {
    "hedge": "right, but the box hedges: “or”, or more values than the reference has",
    "unevaluated": "right, but arithmetic is left undone: perhaps the problem, restated",
    "boxes": "right, with several boxes in the answer part",
    "not in thoughts": "right, but the answer does not occur in the thoughts",
    "program": "right, but the program looks as if it cheats its tests",
    "tests": "right, but the tests would pass every program, or every one that ends",
    "disputed": "right or wrong, and another verifier says the opposite",
    "judge": "wrong, but the judge likes it, and its scores rise in the run while verdicts do not",
    "unscorable": "no judgment could be made",
    "majority": "most of the group give one answer, and it is not the label",
}
SHOWN = 50  # findings of each kind on the page; the JSONL file has all


@dataclass
class Finding:
    """One suspicious completion; for the kind `majority`, one completion of the group.

    `answer` is the content of the completion's box; `ending` and `calls` (their number) are set for
    a conversation. `images` are names in the folder `images` of the completion's run, or beside its
    file.
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
    ending: str | None = None
    calls: int = 0
    images: tuple[str, ...] = ()

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
    lists rows that are not rollouts, as `file:line: reason`, and `warnings` is what is wrong with
    the references, tests and solutions of the rows themselves. `report` is the written page.
    """

    findings: list[Finding] = field(default_factory=list)
    totals: dict[str, tuple[int, str]] = field(default_factory=dict)
    completions: int = 0
    unscorable_rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    undecided: int = 0
    broken: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
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


def page_of(path: Path, folder: Path) -> Path:
    """The page in `folder` of the audit of a run folder or file."""
    # The names start with `audit`, so that a page among a run's rollouts is not read as rollouts.
    return folder / ("audit.md" if path.is_dir() else f"audit_{path.name.partition('.')[0]}.md")


def write_page(title: str, page: Path, result: Audit) -> None:
    """Write the page, with links relative to its folder, and the JSONL file next to it.

    Args:
        title: name of what was audited.
        page: the page.
        result: its `report` is set to the page.
    """
    folder, name = page.parent, page.stem
    for finding in result.findings:
        finding.file = os.path.relpath(finding.file, folder)
    rows = [json.dumps(vars(finding), ensure_ascii=False) + "\n" for finding in result.findings]
    write_whole(folder / f"{name}.jsonl", "".join(rows))
    lines = _summary(title, result)
    for kind in KINDS:
        if of_kind := result.findings_of(kind):
            lines += _section(kind, of_kind, result, name)
    result.report = page
    write_whole(page, "\n".join(lines) + "\n")


def _summary(title: str, result: Audit) -> list[str]:
    lines = [f"# Audit of {title}", ""]
    lines += [f"{result.completions:,} completions. A finding is a place to look at, not a proof."]
    if result.broken:
        lines += ["", f"{len(result.broken)} rows are not rollouts, and were skipped:", ""]
        lines += [f"- {_code(line, 200)}" for line in result.broken[:SHOWN]]
    for warning in result.warnings:
        lines += ["", warning]
    lines += ["", "| kind | count | share | what it means |", "|---|---|---|---|"]
    for kind, meaning in KINDS.items():
        count = len(result.findings_of(kind))
        lines.append(f"| {kind} | {count} | {result.share(kind)} | {meaning} |")
    return [*lines, "", f"math-verify could not judge {result.undecided} pairs of answer and "
            "reference."]  # fmt: skip


def _section(kind: str, found: list[Finding], result: Audit, name: str) -> list[str]:
    lines = ["", f"## {kind}: {KINDS[kind]}", ""]
    if kind == "unscorable":
        lines += ["| problem | unscorable | of |", "|---|---|---|"]
        worst = list(result.unscorable_rates.items())[:SHOWN]
        lines += [f"| {_code(problem)} | {bad} | {total} |" for problem, (bad, total) in worst]
        lines += [""]
    lines += ["| rollout | problem | answer | reference | detail |", "|---|---|---|---|---|"]
    for f in found[:SHOWN]:
        line = "" if f.file.endswith(".parquet") else f"#L{f.line}"
        link = f"[{_code(f.where)}]({quote(f.file)}{line})"
        talk = f"{f.ending}, calls: {f.calls}" if f.ending else ""
        detail = "; ".join(filter(None, [talk, f.detail]))
        problem = " ".join([_code(f.problem_id), *_pictures(f)])
        cells = [_code(cell) for cell in (f.answer or "", f.reference or "", detail)]
        lines.append(f"| {link} | {' | '.join([problem, *cells])} |")
    if len(found) > SHOWN:
        lines += ["", f"{len(found) - SHOWN} more are in {name}.jsonl."]
    return lines


def _pictures(finding: Finding) -> Iterator[str]:
    """Links to the images of a finding's problem: beside its file, or, of a run, beside the folder
    of its rollouts."""
    file = Path(finding.file)
    folder = file.parent.parent if file.suffix == ".parquet" else file.parent
    for number, name in enumerate(finding.images, 1):
        yield f"[image {number}]({quote((folder / 'images' / name).as_posix())})"


def _code(text: str, n: int = 80) -> str:
    """Inline code for a table's cell, from any text."""
    text = re.sub(r"\s+", " ", clip(text, n).replace("`", "'")).replace("|", "\\|").strip()
    return f"`{text}`" if text else ""
