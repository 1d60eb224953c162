"""How often the judge used as a reward was wrong: compares recorded rollouts with the truth.

A run trains only on the judge's verdicts. If the right answer is known nevertheless (a reference
that the judged domain does not read), there are four cases: a right or a wrong answer, accepted or
rejected. If a model learns to please the judge, the share of wrong answers among accepted ones
rises over the run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from tramontane.errors import InputError
from tramontane.run.rollouts import read_run
from tramontane.statistics import Estimate, mean_interval
from tramontane.workplace import owned_file, write_whole
from tramontane_oversight.responses import letter_of
from tramontane_oversight.reward import NO_VERDICT, NOT_JUDGED, judged_choice

COLUMNS = ("update", "problem_id", "domain", "reference", "answer", "verdict", "reason")
PARTS = 3  # of the run, for the trend
SHOWN = 20  # errors listed on the page


@dataclass(frozen=True)
class Errors:
    """The judge's errors on some answers; None where no such answer was given.

    Args:
        answers: number of answers.
        not_judged: of these, the answers that were not judged, since they match no choice.
        no_verdict: of these, the answers without a verdict from the judge.
        accuracy: share of right verdicts among the others, as for the next two; its interval counts
            each problem once.
        false_acceptance: share of the wrong answers that were accepted.
        false_rejection: share of the right answers that were rejected.
        accepted: share of all answers accepted, which is the reward.
        right: share of all answers that are right.
    """

    answers: int
    not_judged: int
    no_verdict: int
    accuracy: Estimate | None
    false_acceptance: float | None
    false_rejection: float | None
    accepted: float
    right: float


@dataclass(frozen=True)
class JudgeErrors:
    """The audit of a judge: over the whole run, over its first, middle and last third of updates,
    and rows of wrong verdicts, one per problem and answer."""

    whole: Errors
    parts: tuple[Errors, ...]
    examples: list[dict[str, Any]]


def judge_errors(run: str | Path, domain: str = "judged") -> JudgeErrors:
    """Compare a judge's verdicts in a run with the truth; writes `judge_errors.md` and
    `judge_errors.json` into the run's folder.

    Args:
        run: folder of a run.
        domain: name of the judged domain.

    Raises:
        InputError: the run recorded no judged answers with a reference, or another process writes
            the files.
    """
    folder = Path(run)
    with owned_file(folder / "judge_errors.md", "written"):
        rows = [row for row in read_run(folder, COLUMNS) if _is_judged(row, domain)]
        if not rows:
            raise InputError(
                f"{folder}: no rollouts of the domain {domain!r} with a reference and a verdict"
            )
        found = audit_of(rows)
        write_whole(folder / "judge_errors.json", json.dumps(asdict(found), indent=1))
        write_whole(folder / "judge_errors.md", markdown(found))
    return found


def audit_of(rows: Sequence[Mapping[str, Any]]) -> JudgeErrors:
    """The audit of judged rows, at least one."""
    updates = sorted({row["update"] for row in rows})
    part_of = {update: i * PARTS // len(updates) for i, update in enumerate(updates)}
    parts: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    wrong: dict[tuple[str, str], dict[str, Any]] = {}  # equal answers share a discussion
    for row in rows:
        parts[part_of[row["update"]]].append(row)
        if _judged(row) and _accepted(row) != _is_right(row):
            wrong.setdefault((row["problem_id"], row["answer"]), dict(row))
    return JudgeErrors(
        _errors(rows), tuple(_errors(parts[i]) for i in sorted(parts)), [*wrong.values()][:SHOWN]
    )


def markdown(found: JudgeErrors) -> str:
    """The audit as a page."""
    head = "| | answers | not judged | no verdict | accepted | right | judge right "
    head += "| accepted if wrong | rejected if right |"
    lines = ["# Errors of the judge", "", head, "|---" * 9 + "|"]
    names = ["whole run", *(f"part {i} of {len(found.parts)}" for i in range(1, PARTS + 1))]
    for name, e in zip(names, (found.whole, *found.parts), strict=False):
        counts = [str(count) for count in (e.answers, e.not_judged, e.no_verdict)]
        shares = [f"{e.accepted:.3f}", f"{e.right:.3f}", str(e.accuracy or "–")]
        conditional = (e.false_acceptance, e.false_rejection)
        shares += ["–" if rate is None else f"{rate:.3f}" for rate in conditional]
        lines.append(f"| {' | '.join([name, *counts, *shares])} |")
    lines += ["", "## Wrong verdicts", ""]
    for row in found.examples:
        lines.append(
            f"- update {row['update']}, `{row['problem_id']}`: answer `{row['answer']}`, right is "
            f"`{row['reference']}`; {row['reason'] or 'accepted'}"
        )
    return "\n".join([*lines, ""])


def _is_judged(row: Mapping[str, Any], domain: str) -> bool:
    known = row["reference"] is not None and row["answer"] is not None
    return known and row["domain"] == domain and row["verdict"] in ("right", "wrong")


def _judged(row: Mapping[str, Any]) -> bool:
    """True if the judge gave a verdict on the answer."""
    return not (row["reason"] or "").startswith((NOT_JUDGED, NO_VERDICT))


def _accepted(row: Mapping[str, Any]) -> bool:
    return bool(row["verdict"] == "right")


def _is_right(row: Mapping[str, Any]) -> bool:
    """True if the answer is the reference, each given as text or letter. The verdict's reason names
    text and letter of the chosen answer."""
    answer, reference = str(row["answer"]).strip(), str(row["reference"]).strip()
    letter, text = judged_choice(row["reason"] or "") or (answer, answer)
    meant, right = (letter_of(given, ascii_uppercase) for given in (letter, reference))
    return text == reference or (meant is not None and meant == right)


def _errors(rows: Sequence[Mapping[str, Any]]) -> Errors:
    cases: Counter[tuple[bool, bool]] = Counter()  # (accepted, right)
    by_problem: defaultdict[str, list[bool]] = defaultdict(list)
    for row in filter(_judged, rows):
        accepted, right = _accepted(row), _is_right(row)
        cases[accepted, right] += 1
        by_problem[row["problem_id"]].append(accepted == right)
    not_judged = sum((row["reason"] or "").startswith(NOT_JUDGED) for row in rows)
    n_right, n_wrong = (cases[True, kind] + cases[False, kind] for kind in (True, False))
    hits = [sum(found) / len(found) for found in by_problem.values()]
    return Errors(
        answers=len(rows),
        not_judged=not_judged,
        no_verdict=len(rows) - cases.total() - not_judged,
        accuracy=mean_interval(hits) if hits else None,
        false_acceptance=cases[True, False] / n_wrong if n_wrong else None,
        false_rejection=cases[False, True] / n_right if n_right else None,
        accepted=sum(map(_accepted, rows)) / len(rows),
        right=sum(map(_is_right, rows)) / len(rows),
    )
