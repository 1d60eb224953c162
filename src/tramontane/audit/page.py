"""The page and the JSONL file that an audit writes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import quote

from tramontane.audit.findings import KINDS, Audit, Finding, clip
from tramontane.workplace import write_whole

SHOWN = 50  # findings of each kind on the page; the JSONL file has all


def page_of(path: Path, folder: Path) -> Path:
    """The page in `folder` of the audit of a run folder or file."""
    # The names start with `audit`, so that a page among a run's rollouts is not read as rollouts.
    return folder / ("audit.md" if path.is_dir() else f"audit_{path.name.partition('.')[0]}.md")


def write(title: str, page: Path, result: Audit) -> None:
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
        if found := result.findings_of(kind):
            lines += _section(kind, found, result, name)
    result.report = page
    write_whole(page, "\n".join(lines) + "\n")


def _summary(title: str, result: Audit) -> list[str]:
    lines = [f"# Audit of {title}", ""]
    lines += [f"{result.completions:,} completions. A finding is a place to look at, not a proof."]
    if result.broken:
        lines += ["", f"{len(result.broken)} rows are not rollouts, and were skipped:", ""]
        lines += [f"- {_code(line, 200)}" for line in result.broken[:SHOWN]]
    lines += ["", "| kind | count | share | what it means |", "|---|---|---|---|"]
    for kind, meaning in KINDS.items():
        count = len(result.findings_of(kind))
        lines.append(f"| {kind} | {count} | {result.share(kind)} | {meaning} |")
    return [*lines, "", f"math-verify could not judge {result.undecided} pairs of answer and "
            "reference."]  # fmt: skip


def _section(kind: str, found: list[Finding], result: Audit, name: str) -> list[str]:
    """One kind's findings, as a table."""
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
        cells = [f.problem_id, f.answer or "", f.reference or "", f.detail]
        lines.append(f"| {link} | {' | '.join(_code(cell) for cell in cells)} |")
    if len(found) > SHOWN:
        lines += ["", f"{len(found) - SHOWN} more are in {name}.jsonl."]
    return lines


def _code(text: str, n: int = 80) -> str:
    """Inline code for a table's cell, from any text."""
    text = re.sub(r"\s+", " ", clip(text, n).replace("`", "'")).replace("|", "\\|").strip()
    return f"`{text}`" if text else ""
