r"""What looks like reward hacking or verifier error in recorded rollouts; see docs/rewards.md.

Nothing here is proof: a finding is a place to look at, with its file and line. Rows are read one
by one (`recorded`) and only what the findings need is kept, so a long run fits in memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tramontane.audit import recorded
from tramontane.audit.opinions import math_verify, same_number, same_string
from tramontane.audit.recorded import Rollout
from tramontane.audit.suspicion import cheats, hedges, occurs
from tramontane.config import CustomReward, RewardConfig, VerifierConfig
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier.format import CLOSE, OPEN, boxes, fences, last_box
from tramontane.verifier.math.normalize import vote
from tramontane.verifier.pool import VerifierPool

KINDS = {
    "hedge": "right, but the box hedges: “or”, or more values than the reference has",
    "boxes": "right, with several boxes in the answer part",
    "not in thoughts": "right, but the answer does not occur in the thoughts",
    "program": "right, but the program looks as if it cheats its tests",
    "disputed": "right or wrong, and another verifier says the opposite",
    "unscorable": "no judgement could be made",
    "majority": "most of the group give one answer, and it is not the label",
}
SHOWN = 50  # of each kind, in audit.md; audit.jsonl has all
LONGEST = 1000  # characters of an answer that the judge looks at
Pair = tuple[str, str]  # a box, and the reference


@dataclass
class Finding:
    """One suspicious completion (`majority`: group, shown by one of its completions)."""

    kind: str
    file: str
    line: int
    problem_id: str
    verdict: str
    reference: str | None
    answer: str | None
    detail: str
    group: Any = None
    index: int | None = None

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Audit:
    """All findings; `totals` says, by kind, how many could have been found, and of what.

    `broken` are the rows that are no rollouts, as `file:line: why`.
    """

    findings: list[Finding] = field(default_factory=list)
    totals: dict[str, tuple[int, str]] = field(default_factory=dict)
    completions: int = 0
    unscorable_rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    undecided: int = 0
    broken: list[str] = field(default_factory=list)
    report: Path | None = None

    def of(self, kind: str) -> list[Finding]:
        return [f for f in self.findings if f.kind == kind]

    def share(self, kind: str) -> str:
        """Such as `1.2 % of 613 groups`."""
        total, what = self.totals[kind]
        return f"{100 * len(self.of(kind)) / max(total, 1):.1f} % of {total:,} {what}"


def audit(
    path: str | Path,
    out: str | Path | None = None,
    *,
    rows: str | Path | None = None,
    sample: int = 1000,
    config: VerifierConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Look through recorded rollouts, and write `audit.md` and `audit.jsonl` into the run folder,
    or `audit_NAME.md` and `audit_NAME.jsonl` beside a file NAME.jsonl.

    A row that is no rollout is listed in `broken`, and does not stop the rest.

    Args:
        path: a run folder, or a JSONL file (also gzip): rollouts, an evaluation, or what `score`
            wrote.
        out: another folder to write to.
        rows: what `score` read, where `path` is what it wrote.
        sample: how many different pairs of answer and reference other verifiers look at.
        config: workers and limits for that.
        progress: called with (pairs looked at, pairs in all).

    Raises:
        InputError: no rollouts there.
    """
    path = Path(path)
    folder = Path(out) if out is not None else (path if path.is_dir() else path.parent)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder to write audit.md to")
    collected, broken = _Collector(), list[str]()
    for rollout in recorded.read(path, rows, broken):
        collected.take(rollout)
    if not collected.verdicts:
        raise InputError(broken[0] if broken else f"{path}: there are no rows in it")
    result = collected.result()
    result.broken = broken
    _disputes(collected, result, sample, config or VerifierConfig(), progress)
    order = list(KINDS)
    result.findings.sort(key=lambda f: order.index(f.kind))  # stable: by file and line within
    _write(path, folder, result)
    return result


@dataclass
class _Seen:
    """What is kept of a completion; `answer` is its box."""

    file: str
    line: int
    problem_id: str
    verdict: str
    reference: str | None
    answer: str | None
    group: Any
    index: int | None

    def finding(self, kind: str, detail: str) -> Finding:
        return Finding(kind=kind, detail=detail, **vars(self))


class _Collector:
    """Takes rollouts one by one."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.verdicts: Counter[str] = Counter()
        self.right: Counter[str] = Counter()  # by domain
        self.by_problem: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.groups: defaultdict[Any, list[tuple[str | None, _Seen]]] = defaultdict(list)
        self.pairs: defaultdict[Pair, list[_Seen]] = defaultdict(list)

    def take(self, row: Rollout) -> None:
        thoughts, _, answer_part = row.text.removeprefix(OPEN).partition(CLOSE)
        graded = row.verdict in ("right", "wrong")
        box = last_box(answer_part) if row.domain == "math" else None
        box = box[:LONGEST] if box is not None else None
        seen = _Seen(
            row.file,
            row.line,
            row.problem_id,
            row.verdict,
            row.reference,
            box,
            row.group,
            row.index,
        )
        self.verdicts[row.verdict] += 1
        self.by_problem[row.problem_id][row.verdict] += 1
        if row.verdict == "unscorable":
            self.findings.append(seen.finding("unscorable", row.reason or "no reason"))
        if row.domain == "code" and row.verdict == "right" and (blocks := fences(answer_part)):
            self.right["code"] += 1
            if why := cheats(blocks[0].body, row.tests):
                self.findings.append(seen.finding("program", why))
        if row.domain != "math":
            return
        self.groups[(row.file, row.group)].append((vote(box) if graded else None, seen))
        if box is None or row.reference is None or not graded:
            return
        self.pairs[(box, row.reference)].append(seen)
        if row.verdict == "right":
            self.right["math"] += 1
            self._suspect(seen, box, row.reference, thoughts, answer_part)

    def _suspect(
        self, seen: _Seen, box: str, reference: str, thoughts: str, answer_part: str
    ) -> None:
        if why := hedges(box, reference):
            self.findings.append(seen.finding("hedge", why))
        if len(found := boxes(answer_part)) > 1:
            contents = [_clip(answer_part[a : b - 1]) for _, a, b in found[:5]]
            self.findings.append(seen.finding("boxes", f"{len(found)}: " + " · ".join(contents)))
        if not occurs(box, thoughts) and not occurs(reference, thoughts):
            detail = "the thoughts are empty" if not thoughts.strip() else ""
            self.findings.append(seen.finding("not in thoughts", detail))

    def result(self) -> Audit:
        """Everything but the disputes."""
        n = self.verdicts.total()
        right = (self.right["math"], "right maths completions")
        result = Audit(self.findings, {}, n)
        result.totals = dict.fromkeys(("hedge", "boxes", "not in thoughts"), right)
        result.totals["program"] = (self.right["code"], "right programs")
        result.totals["unscorable"] = (n, "completions")
        result.totals["majority"] = (len(self.groups), "groups")
        result.findings += [f for g in self.groups.values() if (f := _majority(g)) is not None]
        rates = {p: (c["unscorable"], c.total()) for p, c in self.by_problem.items()}
        worst = sorted(rates.items(), key=lambda item: -item[1][0] / item[1][1])
        result.unscorable_rates = {p: rate for p, rate in worst if rate[0]}
        return result


def _majority(group: list[tuple[str | None, _Seen]]) -> Finding | None:
    """More than half of a group of three or more agree on an answer that was graded wrong."""
    votes = Counter(v for v, _ in group if v is not None)
    if len(group) < 3 or not votes:
        return None
    answer, count = votes.most_common(1)[0]
    first = next(seen for v, seen in group if v == answer)
    if 2 * count <= len(group) or first.verdict != "wrong":
        return None
    return first.finding("majority", f"{count} of {len(group)} answer {_clip(answer)}")


def _disputes(
    seen: _Collector,
    result: Audit,
    sample: int,
    config: VerifierConfig,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Ask the other verifiers about each pair, once however many completions gave it."""
    pairs = sorted(seen.pairs)
    if len(pairs) > sample:
        pairs = sorted(random.Random(0).sample(pairs, sample))
    asked = sum(len(seen.pairs[pair]) for pair in pairs)
    result.totals["disputed"] = (asked, "completions that others looked at")
    function = f"{math_verify.__module__}.{math_verify.__name__}"
    own = CustomReward(name="math_verify", function=function, weight=1)
    weights = RewardConfig(format=0, correctness=0, length=0, language=0, custom=(own,))
    with VerifierPool(config.model_copy(update={"reward": weights}), sys.maxsize, 0) as pool:
        futures = [
            pool.score(
                Problem(str(i), "math", "", reference), [(f"{OPEN}{CLOSE}\\boxed{{{box}}}", 0)]
            )
            for i, (box, reference) in enumerate(pairs)
        ]
        for i, (pair, future) in enumerate(zip(pairs, futures, strict=True), 1):
            [verdict] = future.result()
            decided = verdict.verdict in ("right", "wrong")
            says = {0.0: False, 1.0: True}.get(verdict.reward) if decided else None
            result.undecided += says is None
            opinions = {
                "string equality": same_string(*pair),
                "numeric comparison": same_number(*pair),
                "math-verify": says,
                "grading again": verdict.verdict == "right" if decided else None,
            }
            for one in seen.pairs[pair]:
                right = one.verdict == "right"
                against = [n for n, said in opinions.items() if said not in (None, right)]
                if against:
                    detail = f"{', '.join(against)}: {'wrong' if right else 'right'}"
                    result.findings.append(one.finding("disputed", detail))
            if progress:
                progress(i, len(pairs))


# --------------------------------------------------------------------------------- what is written


def _write(path: Path, folder: Path, result: Audit) -> None:
    # Begins with `audit`: among a run's rollouts it must not be taken for one.
    name = "audit" if path.is_dir() else f"audit_{path.name.partition('.')[0]}"
    for finding in result.findings:
        finding.file = os.path.relpath(finding.file, folder)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for finding in result.findings:
            file.write(json.dumps(vars(finding), ensure_ascii=False) + "\n")
    lines = [f"# Audit of {path.resolve().name}", ""]
    lines += [f"{result.completions:,} completions. A finding is a place to look at, not a proof."]
    if result.broken:
        lines += ["", f"{len(result.broken)} rows are no rollouts, and were passed over:", ""]
        lines += [f"- {_code(line, 200)}" for line in result.broken[:SHOWN]]
    lines += ["", "| kind | count | share | what it means |", "|---|---|---|---|"]
    for kind, meaning in KINDS.items():
        lines.append(f"| {kind} | {len(result.of(kind))} | {result.share(kind)} | {meaning} |")
    lines += ["", f"math-verify could not say of {result.undecided} pairs of answer and reference."]
    for kind, meaning in KINDS.items():
        if not (found := result.of(kind)):
            continue
        lines += ["", f"## {kind}: {meaning}", ""]
        if kind == "unscorable":
            lines += ["| problem | unscorable | of |", "|---|---|---|"]
            worst = list(result.unscorable_rates.items())[:SHOWN]
            lines += [f"| {_code(p)} | {bad} | {total} |" for p, (bad, total) in worst]
            lines += [""]
        lines += ["| rollout | problem | answer | reference | detail |", "|---|---|---|---|---|"]
        for f in found[:SHOWN]:
            link = f"[{_code(f.where)}]({quote(f.file)}#L{f.line})"
            cells = [f.problem_id, f.answer or "", f.reference or "", f.detail]
            lines.append(f"| {link} | {' | '.join(_code(c) for c in cells)} |")
        if len(found) > SHOWN:
            lines += ["", f"{len(found) - SHOWN} more are in {name}.jsonl."]
    result.report = folder / f"{name}.md"
    result.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _code(text: str, n: int = 80) -> str:
    """Inline code in a table's cell, whatever is in the text."""
    text = re.sub(r"\s+", " ", _clip(text, n).replace("`", "'")).replace("|", "\\|").strip()
    return f"`{text}`" if text else ""


def _clip(text: str, n: int = 80) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
