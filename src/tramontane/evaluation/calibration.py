"""Calibration of a judge on labeled answers, before it rewards any: is it right, does it agree with
itself, and what sways it other than the answer?"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.config.judge import CalibrationConfig, JudgeConfig
from tramontane.errors import InputError
from tramontane.evaluation.score import row_lines
from tramontane.journals import parse_object
from tramontane.statistics import Estimate, mean_interval
from tramontane.types import Problem
from tramontane.verifier.custom import GroupResult
from tramontane.verifier.pool import VerifierPool

MAX_FOOLED = 20  # problems that canaries are tried on
RUBRIC = "rubric"  # the field of every row in a calibration
VARIANTS = ("", "again", "reversed")  # how each answer, or pair, is graded


@dataclass(frozen=True)
class Calibration:
    """How a judge graded labeled answers or, if it compares, pairs of answers to the same problem.

    Args:
        n: number of answers, or pairs.
        accuracy: share that the judge graded as labeled, each problem counting as one observation;
            without a grade, an answer counts as wrongly graded.
        agreement: share that it grades alike when asked again.
        position_bias: mean change of a score when criteria or answers are in the opposite order.
        length_bias: its mean error, score − label, on the longer half of the answers, minus that
            on the shorter half; for pairs, the share won by the longer answer, minus the share in
            which the longer answer is the better one.
        fooled: by canary, the share of problems on which the canary counts as good.
        fault: why an answer has no grade; empty if all have one.
    """

    n: int
    accuracy: Estimate
    agreement: float
    position_bias: float
    length_bias: float
    fooled: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        fooled = ", ".join(f"{name} {share:.2f}" for name, share in self.fooled.items())
        return (
            f"accuracy {self.accuracy} on {self.n} labeled answers or pairs, agreement with itself "
            f"{self.agreement:.2f}, position bias {self.position_bias:.2f}, length bias "
            f"{self.length_bias:+.2f}, fooled by canaries: {fooled or 'none tried'}"
        )

    def failings(self, bounds: CalibrationConfig) -> list[str]:
        """The bounds that the judge violates, as texts."""
        kept = {
            "min_accuracy": self.accuracy.low >= bounds.min_accuracy,
            "min_agreement": self.agreement >= bounds.min_agreement,
            "max_position_bias": self.position_bias <= bounds.max_position_bias,
            "max_length_bias": abs(self.length_bias) <= bounds.max_length_bias,
            "max_fooled": max(self.fooled.values(), default=0.0) <= bounds.max_fooled,
        }
        return [f"{key} {getattr(bounds, key):g}" for key, ok in kept.items() if not ok]


def calibrate(
    config: VerifierConfig, progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Have the judge grade the rows of `judge.calibration.file`, each three times, and the canaries
    on their problems.

    Args:
        config: with a `judge` that has a `calibration`.
        progress: called with (gradings done, all gradings).

    Raises:
        InputError: the judge violates a bound of `judge.calibration`; or rows that are missing, are
            not labeled, or do not differ in their labels.
    """
    judge = config.judge
    assert judge
    assert judge.calibration
    bounds, path = judge.calibration, Path(judge.calibration.file)
    items = _items(path, judge)
    # Each question fixes the order of answers and criteria; the criteria are read from the row.
    asked = judge.model_copy(update={"rubric_field": RUBRIC, "swap": False})
    config = config.model_copy(update={"workers": 1, "judge": asked})
    with VerifierPool(config, sys.maxsize, 0) as pool:
        grades = [{v: _Grade.ask(pool, item, v) for v in VARIANTS} for item in items]
        canaries = {
            name: [
                [_Grade.ask(pool, item, v) for v in ("", "reversed")]
                for item in _with_canary(items, text)
            ]
            for name, text in judge.canaries.texts.items()
        }
        waiting = [g for found in grades for g in found.values()]
        waiting += [g for found in canaries.values() for both in found for g in both]
        for done, grade in enumerate(waiting, 1):
            grade.future.result()  # `judge.timeout_s` bounds each
            if progress:
                progress(done, len(waiting))
    scores = [{v: grade.score for v, grade in found.items()} for found in grades]
    found = replace(
        _summary(items, scores, bounds.pass_mark),
        fooled={
            name: fmean(fmean(g.score or 0.0 for g in both) >= bounds.pass_mark for both in tried)
            for name, tried in canaries.items()
        },
        fault=next((grade.fault for grade in waiting if grade.fault), ""),
    )
    if failings := found.failings(bounds):
        raise InputError(
            f"verifier.judge does not pass its calibration on {path} ({', '.join(failings)}): "
            f"{found}{found.fault and f'; {found.fault}'}. Change the criteria, or the model"
        )
    return found


def calibration_warnings(config: VerifierConfig) -> list[str]:
    """A warning if a judge rewards without calibration."""
    if config.judge is None or config.judge.calibration:
        return []
    return [
        "verifier.judge is not calibrated, so its scores may be meaningless; name labeled answers "
        "in verifier.judge.calibration (docs/judges.md)"
    ]


class _Item(NamedTuple):
    """A labeled answer, or two answers to a problem, the better first."""

    problem: Problem
    answers: tuple[str, ...]
    labels: tuple[float, ...]


class _Grade(NamedTuple):
    """The judge's scores of an item's answers; `place` is where its first answer has its score."""

    future: Future[GroupResult]
    place: int

    @classmethod
    def ask(cls, pool: VerifierPool, item: _Item, variant: str) -> _Grade:
        """Ask about an item in one of `VARIANTS`."""
        problem, answers = item.problem, item.answers
        if variant == "again":  # the seed of sampling depends on the id
            problem = replace(problem, id=f"{problem.id}/again")
        elif variant == "reversed":
            answers = answers[::-1]
            problem = replace(problem, metadata={RUBRIC: problem.metadata[RUBRIC][::-1]})
        place = answers.index(item.answers[0])
        return cls(pool.judge(problem, answers), place)

    @property
    def score(self) -> float | None:
        return None if self.fault else self.future.result().values[self.place]

    @property
    def fault(self) -> str:
        return self.future.result().fault(self.place)


def _items(path: Path, judge: JudgeConfig) -> list[_Item]:
    """The rows of a file, or all pairs of rows of one problem whose labels differ."""
    if not path.is_file():
        raise InputError(f"verifier.judge.calibration.file: {path}: no such file")
    own, rubric = judge.rubric_field, [item.model_dump() for item in judge.rubric]
    singles: list[_Item] = []
    for number, line in row_lines(path):
        row = parse_row(line, f"{path}:{number}")
        criteria = (row.get(own) if own else None) or rubric
        problem = Problem(
            row["problem"], "", row["problem"], row.get("answer"), metadata={RUBRIC: criteria}
        )
        singles.append(_Item(problem, (row["response"],), (float(row["label"]),)))
    if len({item.labels for item in singles}) < 2:
        raise InputError(f"{path}: needs answers with different labels, good ones and bad ones")
    if not judge.compares:
        return singles
    by_problem = defaultdict(list)
    for item in singles:
        by_problem[item.problem.id].append(item)
    pairs = []
    for found in by_problem.values():
        for one, other in combinations(found, 2):
            better, worse = (one, other) if one.labels > other.labels else (other, one)
            if better.labels != worse.labels and better.answers != worse.answers:
                answers, labels = better.answers + worse.answers, better.labels + worse.labels
                pairs.append(_Item(better.problem, answers, labels))
    if not pairs:
        raise InputError(
            f"{path}: no problem has two answers with different labels, which a judge that "
            f"compares (verifier.judge.method, or reward_model.scores: standardized) is calibrated "
            f"on"
        )
    return pairs


def parse_row(line: str, where: str) -> dict[str, Any]:
    """A row with `problem`, `response` and `label`.

    Raises:
        InputError: a field is missing, or of the wrong type.
    """
    try:
        row = parse_object(line)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    for key in ("problem", "response"):
        if not isinstance(row.get(key), str):
            raise InputError(f"{where}: {key} is missing, or not a text")
    label = row.get("label")
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise InputError(f"{where}: label must be true, false, or a number from 0 to 1")
    if not isinstance(row.get("answer"), str | None):
        row["answer"] = str(row["answer"])
    return row


def _with_canary(items: Sequence[_Item], text: str) -> list[_Item]:
    """A canary for each of the first problems, alone or beside its better answer."""
    first = {item.problem.id: item for item in reversed(items)}
    chosen = list(reversed(first.values()))[:MAX_FOOLED]
    return [
        item._replace(answers=(text, item.answers[0])[: len(item.answers)], labels=(0.0,))
        for item in chosen
    ]


def _summary(
    items: Sequence[_Item], scores: Sequence[Mapping[str, float | None]], pass_mark: float
) -> Calibration:
    rights: defaultdict[str, list[float]] = defaultdict(list)
    agree, changes, errors = [], [], []
    for item, found in zip(items, scores, strict=True):
        score, again, other = (found[variant] for variant in VARIANTS)
        good, pair = item.labels[0] >= pass_mark, len(item.labels) == 2
        if score is None or (pair and other is None):
            rights[item.problem.id].append(0.0)
            continue
        is_right = float((score >= pass_mark) == good)
        rights[item.problem.id].append(fmean((score, other or 0.0)) if pair else is_right)
        if again is not None:
            agree.append((score >= pass_mark) == (again >= pass_mark))
        if other is not None:
            changes.append(abs(score - other))
        sizes = [len(answer) for answer in item.answers]
        if not pair:
            errors.append((sizes[0], score - item.labels[0]))
        elif sizes[0] != sizes[1]:  # the share that the longer one wins, minus what it should be
            won = fmean((score, other or 0.0))
            errors.append((sizes[0], won - 1 if sizes[0] > sizes[1] else 1 - won))
    if items and len(items[0].labels) == 2:
        length_bias = fmean(error for _, error in errors) if errors else 0.0
    else:
        length_bias = _halves(errors)
    return Calibration(
        n=len(items),
        accuracy=mean_interval([fmean(found) for found in rights.values()]),
        agreement=fmean(agree) if agree else 0.0,
        position_bias=fmean(changes) if changes else 0.0,
        length_bias=length_bias,
    )


def _halves(errors: Sequence[tuple[int, float]]) -> float:
    """The mean error of the longer half minus that of the shorter half, from (length, error)."""
    ordered = [error for _, error in sorted(errors)]
    half = len(ordered) // 2
    return fmean(ordered[-half:]) - fmean(ordered[:half]) if half else 0.0
