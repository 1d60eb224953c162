r"""What looks like reward hacking or verifier error in recorded rollouts; see docs/rewards.md.

Nothing here is proof: a finding is a place to look at, with its file and line. Rows are read one
by one and only what the findings need is kept, so a long run fits in memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tramontane.config import CustomReward, RewardConfig, VerifierConfig
from tramontane.data.files import read_rows
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier.format import CLOSE, OPEN, boxes, last_box
from tramontane.verifier.normalize import to_number, vote
from tramontane.verifier.opinions import math_verify, same_number, same_string
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.score import parse_row

KINDS = {
    "hedge": "right, but the box hedges: “or”, or more values than the reference has",
    "boxes": "right, with several boxes in the answer part",
    "not in thoughts": "right, but the answer does not occur in the thoughts",
    "disputed": "right or wrong, and another verifier says the opposite",
    "unscorable": "no judgement could be made",
    "majority": "most of the group give one answer, and it is not the label",
}
SHOWN = 50  # of each kind, in audit.md; audit.jsonl has all
LONGEST = 1000  # characters of an answer that the judge looks at
Row = dict[str, Any]
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
    """All findings; `totals` says, by kind, how many could have been found, and of what."""

    findings: list[Finding] = field(default_factory=list)
    totals: dict[str, tuple[int, str]] = field(default_factory=dict)
    completions: int = 0
    unscorable_rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    undecided: int = 0
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
    """Look through recorded rollouts, and write `audit.md` and `audit.jsonl`.

    Args:
        path: a run folder, or a JSONL file: rollouts, an evaluation, or what `score` wrote.
        out: the folder to write to; by default where the input is.
        rows: what `score` read, where `path` is what it wrote.
        sample: how many different pairs of answer and reference other verifiers look at.
        config: workers and limits for that.
        progress: called with (pairs looked at, pairs in all).

    Raises:
        InputError: no rollouts there, or a row that is none.
    """
    path = Path(path)
    folder = Path(out) if out is not None else (path if path.is_dir() else path.parent)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder to write audit.md to")
    collected = _Collector()
    for file in _files(path):
        for where, row in _rows(file, rows):
            collected.take(str(file), int(where.rpartition(":")[2]), row)
    result = collected.result()
    _disputes(collected, result, sample, config or VerifierConfig(), progress)
    order = list(KINDS)
    result.findings.sort(key=lambda f: order.index(f.kind))  # stable: by file and line within
    _write(path, folder, result)
    return result


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted((path / "rollouts").glob("update_*.jsonl"))
    if not files:
        raise InputError(f"{path}: no rollouts/update_*.jsonl in it; give a run folder or a file")
    return files


def _rows(file: Path, rows: str | Path | None) -> Iterator[tuple[str, Row]]:
    """The rows with the keys of an evaluation, whichever of the three kinds they are."""
    scored = _Scored(rows) if rows is not None else None
    for where, row in read_rows(str(file)):
        if scored is not None:
            row = row | scored.find(str(row.get("id")), where)
        if "text" not in row and "response" in row:
            row["text"] = row["response"]
        row.setdefault("problem_id", str(row.get("id")))
        if "reference" not in row:  # `answer` is the label, but in an evaluation
            row["reference"] = row.get("answer")
        if isinstance(row["reference"], int | float):
            row["reference"] = str(row["reference"])
        row.setdefault("domain", "code" if row["reference"] is None else "math")
        for key in ("text", "verdict"):
            if not isinstance(row.get(key), str):
                raise InputError(
                    f"{where}: {key} is missing: not a rollout; for what `tramontane score` "
                    f"wrote, give what it read with --rows"
                )
        yield where, row


class _Scored:
    """What `score` read, by id; of rows with one id, in their order."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.rows: defaultdict[str, deque[Row]] = defaultdict(deque)
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                problem, response, _ = parse_row(line)
            except InputError:  # `score` has said so, and written nothing for it
                continue
            row = {"domain": problem.domain, "reference": problem.answer, "text": response}
            self.rows[problem.id].append(row)

    def find(self, row_id: str, where: str) -> Row:
        if not self.rows[row_id]:
            raise InputError(f"{where}: id {row_id!r} is not in {self.path} (so often)")
        return self.rows[row_id].popleft()


@dataclass
class _Seen:
    """What is kept of a completion."""

    file: str
    line: int
    problem_id: str
    verdict: str
    reference: str | None
    box: str | None
    group: Any
    index: int | None

    def finding(self, kind: str, detail: str) -> Finding:
        return Finding(
            kind,
            self.file,
            self.line,
            self.problem_id,
            self.verdict,
            self.reference,
            self.box,
            detail,
            self.group,
            self.index,
        )


class _Collector:
    """Takes rows one by one."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.verdicts: Counter[str] = Counter()
        self.right_maths = 0
        self.by_problem: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.groups: defaultdict[Any, list[tuple[str | None, _Seen]]] = defaultdict(list)
        self.pairs: defaultdict[Pair, list[_Seen]] = defaultdict(list)

    def take(self, file: str, line: int, row: Row) -> None:
        text, verdict, reference = row["text"], row["verdict"], row["reference"]
        thoughts, _, answer_part = text.removeprefix(OPEN).partition(CLOSE)
        maths = row["domain"] == "math"
        graded = verdict in ("right", "wrong")
        box = last_box(answer_part) if maths else None
        box = box[:LONGEST] if box is not None else None
        group = row.get("group", row["problem_id"])
        seen = _Seen(
            file, line, row["problem_id"], verdict, reference, box, group, row.get("index")
        )
        self.verdicts[verdict] += 1
        self.by_problem[row["problem_id"]][verdict] += 1
        if verdict == "unscorable":
            self.findings.append(seen.finding("unscorable", row.get("reason") or "no reason"))
        if not maths:
            return
        self.groups[(file, group)].append((vote(box) if graded else None, seen))
        if box is None or reference is None or not graded:
            return
        self.pairs[(box, reference)].append(seen)
        if verdict == "right":
            self.right_maths += 1
            self._suspect(seen, box, reference, thoughts, answer_part)

    def _suspect(
        self, seen: _Seen, box: str, reference: str, thoughts: str, answer_part: str
    ) -> None:
        if why := hedges(box, reference):
            self.findings.append(seen.finding("hedge", why))
        if len(found := boxes(answer_part)) > 1:
            contents = [_clip(answer_part[a : b - 1]) for _, a, b in found[:5]]
            self.findings.append(seen.finding("boxes", f"{len(found)}: " + " · ".join(contents)))
        if not occurs(box, thoughts):
            detail = "the thoughts are empty" if not thoughts.strip() else ""
            self.findings.append(seen.finding("not in thoughts", detail))

    def result(self) -> Audit:
        """Everything but the disputes."""
        n = self.verdicts.total()
        right = (self.right_maths, "right maths completions")
        result = Audit(self.findings, {}, n)
        result.totals = dict.fromkeys(("hedge", "boxes", "not in thoughts"), right)
        result.totals["unscorable"] = (n, "completions")
        result.totals["majority"] = (len(self.groups), "groups")
        result.findings += [f for g in self.groups.values() if (f := _majority(g)) is not None]
        rates = {p: (c["unscorable"], c.total()) for p, c in self.by_problem.items()}
        worst = sorted(rates.items(), key=lambda item: -item[1][0] / item[1][1])
        result.unscorable_rates = {p: rate for p, rate in worst if rate[0]}
        return result


# --------------------------------------------------------------------------- what is suspicious

_HEDGE_WORDS = re.compile(
    r"\b(?:or|maybe|perhaps|either|possibly|not|oder|vielleicht|ou|o|или|quizás|peut-être|forse)\b"
    r"|\\lor\b|\\vee\b|\\pm\b|±|或|不是",
    re.IGNORECASE,
)
# Not at braces: what stands in those of \frac or \binom is no value of its own.
_SPLIT = re.compile(
    rf"[,;=<>，；]|\\+(?:approx|leq?|geq?|in|cup|cap)\b|\band\b|{_HEDGE_WORDS.pattern}", re.I
)
_NUMERAL = re.compile(
    r"\\[dt]?frac\{\d{1,30}\}\{\d{1,30}\}|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+"
)
_WORDS = re.compile(r"\\(?:text\w*|mathrm|mathbf)\{([^{}]*)\}")
_QUOTIENT = re.compile(r"(?:\d*\.)?\d+\s*/\s*\d+")


def hedges(box: str, reference: str) -> str:
    """Why a box says more than one thing where its reference does not, or nothing."""
    extra = {w.lower() for w in _HEDGE_WORDS.findall(box)}
    extra -= {w.lower() for w in _HEDGE_WORDS.findall(reference)}
    if extra:
        return f"says “{min(extra)}”"
    decimal = to_number(box.strip().replace(",", "."))  # with a decimal comma, one value
    if decimal is not None and decimal == to_number(reference.strip()):
        return ""
    if (values := _values(box)) > max(_values(reference), 1):
        return f"{values} different numbers"
    return ""


def _values(text: str) -> int:
    """How many different plain numbers stand between separators."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;:]|,)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[cdt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    numbers = (to_number(part.strip(" \\()[]{}")) for part in _SPLIT.split(text) if part)
    return len({number for number in numbers if number is not None})


def occurs(answer: str, thoughts: str) -> bool:
    """Does the answer stand in the thoughts, as a string or, sign aside, as a number?"""
    answer, thoughts = (
        _WORDS.sub(r"\1", unicodedata.normalize("NFKC", side)) for side in (answer, thoughts)
    )
    bare = "".join(answer.split()).casefold().strip("$.")
    if re.search(rf"(?<![\d.]){re.escape(bare)}(?!\d)", "".join(thoughts.split()).casefold()):
        return True
    spelt = vote(answer)
    value = to_number(spelt) if spelt and len(spelt) < 100 else None
    if value is None:
        return False
    numerals = _NUMERAL.findall(thoughts) + _QUOTIENT.findall(thoughts)
    found = {
        to_number(n.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")) for n in numerals
    }
    return bool(found & {value, -value})


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
    for finding in result.findings:
        finding.file = os.path.relpath(finding.file, folder)
    with (folder / "audit.jsonl").open("w", encoding="utf-8") as file:
        for finding in result.findings:
            file.write(json.dumps(vars(finding), ensure_ascii=False) + "\n")
    lines = [f"# Audit of {path.resolve().name}", ""]
    lines += [f"{result.completions:,} completions. A finding is a place to look at, not a proof."]
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
            link = f"[{f.where}](<{f.file}#L{f.line}>)"
            cells = [f.problem_id, f.answer or "", f.reference or "", f.detail]
            lines.append(f"| {link} | {' | '.join(_code(c) for c in cells)} |")
        if len(found) > SHOWN:
            lines += ["", f"{len(found) - SHOWN} more are in audit.jsonl."]
    result.report = folder / "audit.md"
    result.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _code(text: str) -> str:
    """Inline code in a table's cell, whatever is in the text."""
    text = re.sub(r"\s+", " ", _clip(text).replace("`", "'")).replace("|", "\\|").strip()
    return f"`{text}`" if text else ""


def _clip(text: str, n: int = 80) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
