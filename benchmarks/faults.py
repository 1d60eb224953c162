"""Playground sets with planted faults and their ground truth, for measuring a curation.

A row has at most one fault. The truth is in a separate file, not in the row.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tramontane.data.playground.arithmetic import LEVELS
from tramontane.data.playground.generate import problems
from tramontane.data.playground.language import pick
from tramontane.types import Problem

# Fault → the reasons given for it by `tramontane curate`.
REASONS: dict[str, tuple[str, ...]] = {
    "wrong_label": ("label_disputed",),
    "duplicate": ("duplicate", "duplicate_conflict"),
    "near_duplicate": ("near_duplicate",),
    "proof": ("proof",),
    "multi_part": ("multi_part",),
    "impossible": ("unsolved",),
    "trivial": ("too_easy",),
    "broken_tests": ("tests_relabeled", "tests_dropped", "no_agreement"),
    "no_solutions": ("no_solutions",),
}
SHARES: dict[str, float] = {
    "wrong_label": 0.05, "duplicate": 0.05, "near_duplicate": 0.03, "proof": 0.04,
    "multi_part": 0.04, "impossible": 0.05, "trivial": 0.08, "broken_tests": 0.03,
    "no_solutions": 0.01,
}  # fmt: skip
PROGRAMS = 0.05  # share of sound programs among all rows
RAW, TRUTH = "raw.jsonl", "truth.json"
MAX_FRUITLESS_DRAWS = 50_000  # consecutive draws without a new, suitable statement
_PADDING = (" Take care.", " Take your time.", " Think first.")
_LONG = 120  # characters of a statement that padding changes little
_EASY, _HARD = (0, 9), (20, 10**9)  # range of the largest number in trivial problems, and in others


class Truth(NamedTuple):
    """The truth about a row.

    Args:
        fault: name of the fault; empty for a sound row.
        right: the right answer; for a program, the right outputs of its tests, in order.
    """

    fault: str
    right: Any


class Score(NamedTuple):
    """A curation's result for one fault.

    Args:
        planted: rows with the fault.
        flagged: rows whose reason names the fault.
        found: rows with the fault whose reason names it.
        kept: rows with the fault that are kept anyway.
    """

    planted: int
    flagged: int
    found: int
    kept: int

    @property
    def precision(self) -> float | None:
        return self.found / self.flagged if self.flagged else None

    @property
    def recall(self) -> float | None:
        return self.found / self.planted if self.planted else None


def planted(
    count: int,
    seed: int,
    shares: Mapping[str, float] = SHARES,
    levels: tuple[int, int] = LEVELS,
    languages: Sequence[str] = ("en",),
) -> Iterator[tuple[dict[str, Any], Truth]]:
    """Rows for a curation, each with its truth, in random order.

    `impossible`: a number is missing from the statement. `trivial`: two steps, all numbers below
    ten; other problems have larger numbers. `broken_tests`: some or all expected outputs of a
    program are wrong. Programs come with three variants of their solution, and a wrong solution.

    Args:
        count: number of rows.
        seed: seed of all draws.
        shares: share of each fault; the other rows are sound.
        levels: levels of the math problems, inclusive.
        languages: languages of the math problems; proofs and multi-part questions are in English.

    Raises:
        ValueError: an unknown fault, shares of more than 1 in total, or (when drawn) too few
            problems or sound rows.
    """
    if unknown := set(shares) - set(REASONS):
        raise ValueError(f"unknown faults {sorted(unknown)}: choose from {tuple(REASONS)}")
    if (total := sum(shares.values()) + PROGRAMS) > 1:
        raise ValueError(
            f"shares add up to {total:g} ({PROGRAMS:g} are sound programs), more than 1"
        )
    kinds = [fault for fault, share in shares.items() for _ in range(round(share * count))]
    kinds += ["program"] * round(PROGRAMS * count)
    kinds += ["sound"] * (count - len(kinds))
    return _planted(kinds, seed, levels, languages)


def _planted(
    kinds: list[str], seed: int, levels: tuple[int, int], languages: Sequence[str]
) -> Iterator[tuple[dict[str, Any], Truth]]:
    rng = Random(f"faults/{seed}")
    rng.shuffle(kinds)
    seen: set[str] = set()
    maths = _maths(problems("train", seed, levels, languages), _HARD, seen)
    easy = _maths(problems("train", seed, (1, 1), languages), _EASY, seen)
    programs = _new(problems("train", seed, kinds=("programs",)), seen)
    earlier: dict[str, list[dict[str, Any]]] = {"duplicate": [], "near_duplicate": []}
    waiting = deque(kinds)
    while waiting:
        kind = waiting.popleft()
        if kind in earlier:
            if not earlier[kind]:  # nothing to repeat yet
                if "sound" not in waiting:
                    raise ValueError(
                        "too few sound rows for the duplicates: ask for a smaller share"
                    )
                waiting.append(kind)
                continue
            row = _repeated(rng, kind, earlier[kind])
            truth = Truth(kind, row["answer"])
        elif kind in ("program", "broken_tests", "no_solutions"):
            row, truth = _program(rng, next(programs), kind)
        else:
            problem = next(easy if kind == "trivial" else maths)
            row = _row(problem) | {"answer": problem.answer}
            truth = Truth("" if kind == "sound" else kind, problem.answer)
            if kind in _SPOIL:
                row |= _SPOIL[kind](rng, problem, maths)
            elif kind == "sound":
                earlier["duplicate"].append(row)
                if len(problem.problem) >= _LONG:
                    earlier["near_duplicate"].append(row)
        yield row, truth


def write(folder: Path, count: int, seed: int, **settings: Any) -> None:
    """Write `raw.jsonl`, and `truth.json` with the seed; `settings` are arguments of `planted`."""
    folder.mkdir(parents=True, exist_ok=True)
    truths = {}
    with (folder / RAW).open("w", encoding="utf-8") as file:
        for number, (row, truth) in enumerate(planted(count, seed, **settings)):
            name = f"p{number:05d}"
            file.write(json.dumps({"id": name, **row}, ensure_ascii=False) + "\n")
            truths[name] = truth._asdict()
    content = {"seed": seed, "count": count, **settings, "rows": truths}
    (folder / TRUTH).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def read_truth(path: Path) -> dict[str, Truth]:
    """Row id → truth, from a `truth.json`."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {name: Truth(**truth) for name, truth in rows.items()}


def compare(
    truth: Mapping[str, Truth], *curations: Iterable[Mapping[str, Any]]
) -> dict[str, Score]:
    """The score of each planted fault and, under `""`, of the sound rows.

    A reason given to a sound row, or to a row with a different fault, costs precision. Copies made
    by a curation are ignored. For sound rows, `flagged` and `found` count the kept rows.

    Args:
        truth: from `read_truth`.
        curations: the lines of `decisions.jsonl` of one curation, or of several that build on each
            other.
    """
    reasons: dict[str, set[str]] = {}
    dropped: set[str] = set()
    for decision in chain(*curations):
        name = decision["id"]
        if name in truth:
            reasons.setdefault(name, set()).add(decision["reason"])
            if decision["decision"] == "dropped":
                dropped.add(name)
    scores = {}
    for fault in ("", *(name for name in REASONS if any(t.fault == name for t in truth.values()))):
        having = {name for name in reasons if truth[name].fault == fault}
        flagged = reasons.keys() - dropped
        if fault:
            flagged = {name for name, found in reasons.items() if found & set(REASONS[fault])}
        scores[fault] = Score(
            len(having), len(flagged), len(having & flagged), len(having - dropped)
        )
    return scores


# --------------------------------------------------------------------------------------- drawing


def _new(stream: Iterator[Problem], seen: set[str]) -> Iterator[Problem]:
    """The problems of a stream that are not in `seen`; adds them to it.

    Raises:
        ValueError: no new problem in `MAX_FRUITLESS_DRAWS` draws.
    """
    fruitless = 0
    for problem in stream:
        fruitless += 1
        if problem.problem not in seen:
            fruitless = 0
            seen.add(problem.problem)
            yield problem
        if fruitless == MAX_FRUITLESS_DRAWS:
            raise ValueError("too few different playground problems: ask for fewer, or more levels")


def _maths(
    stream: Iterator[Problem], largest: tuple[int, int], seen: set[str]
) -> Iterator[Problem]:
    """New problems whose largest number is within the bounds `largest`."""
    low, high = largest
    fitting = (
        p for p in stream if low <= max(max(a, b, c) for a, _, b, c in p.metadata["steps"]) <= high
    )
    return _new(fitting, seen)


def _row(problem: Problem) -> dict[str, Any]:
    return {"problem": problem.problem, "difficulty": problem.difficulty} | (
        {"language": problem.language} if problem.domain == "math" else {}
    )


def _repeated(rng: Random, kind: str, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "near_duplicate":
        row = earlier.pop(rng.randrange(len(earlier)))  # each row only once
        return row | {"problem": row["problem"] + pick(rng, _PADDING)}
    row = pick(rng, earlier)
    return row | {"problem": row["problem"].upper().replace(" ", "  ")}


def _program(rng: Random, problem: Problem, kind: str) -> tuple[dict[str, Any], Truth]:
    solution, wrong = problem.metadata["solution"], pick(rng, problem.metadata["wrong"])
    solutions = [solution, f"{solution}\n", f"# Solution\n{solution}", wrong]
    cases = (problem.tests or {})["cases"]
    right = [case["output"] for case in cases]
    labels = _broken(rng, right) if kind == "broken_tests" else right
    cases = [case | {"output": label} for case, label in zip(cases, labels, strict=True)]
    row = _row(problem) | {"tests": {**(problem.tests or {}), "cases": cases}, "language": "python"}
    if kind != "no_solutions":
        row["solutions"] = rng.sample(solutions, len(solutions))
    return row, Truth("" if kind == "program" else kind, right)


def _broken(rng: Random, right: list[str]) -> list[str]:
    """The expected outputs, some or all replaced by another test's."""
    count = pick(rng, (1, 1, 2, 3, len(right)))
    labels = list(right)
    for i in rng.sample(range(len(right)), count):
        others = [label for label in right if label != right[i]]
        labels[i] = pick(rng, others) if others else right[i].strip() + "1\n"
    return labels


# ---------------------------------------------------------------------------------------- faults


def _wrong_label(rng: Random, problem: Problem, others: Iterator[Problem]) -> dict[str, Any]:
    right = int(problem.answer or 0)
    return {"answer": str(right + pick(rng, (1, 2, 3, 5, 10, 11)))}


def _proof(rng: Random, problem: Problem, others: Iterator[Problem]) -> dict[str, Any]:
    opening = pick(rng, ("Prove that", "Show that", "Give a proof that"))
    return {"problem": f"{opening} {problem.metadata['expression']} = {problem.answer}."}


def _multi_part(rng: Random, problem: Problem, others: Iterator[Problem]) -> dict[str, Any]:
    second = next(others)
    return {
        "problem": f"(a) {problem.problem}\n(b) {second.problem}",
        "answer": f"{problem.answer}, {second.answer}",
    }


def _impossible(rng: Random, problem: Problem, others: Iterator[Problem]) -> dict[str, Any]:
    number = pick(rng, list(re.finditer(r"\d+", problem.problem)))
    text = problem.problem[: number.start()] + "x" + problem.problem[number.end() :]
    return {"problem": text}


_SPOIL = {
    "wrong_label": _wrong_label,
    "proof": _proof,
    "multi_part": _multi_part,
    "impossible": _impossible,
}
