"""Recorded rollouts in one form: from a run, from an evaluation, or from the output of `score`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tramontane.errors import InputError, importing
from tramontane.evaluation.score import parse_row, row_lines
from tramontane.journals import parse_object
from tramontane.types import Problem
from tramontane.verifier.code.comparing import fault_of

Row = dict[str, Any]
VERDICTS = ("right", "wrong", "unscorable", "malformed")
# Columns of a run's rollouts that the audit reads: all but the tokens.
AUDITED = [
    *("group", "index", "problem_id", "domain", "reference", "text", "verdict", "reason"),
    *("turns", "ending", "parts", "image_files"),
]


@dataclass(frozen=True)
class Rollout:
    """One completion and its verdict; `tests` is None if they were not recorded, and so is the
    problem's `statement` empty.

    `line` is the line of a JSONL file, or the row of a Parquet file. For a conversation, `text` is
    the last turn, and `before` the earlier turns with the messages that answered them. `judged` is
    the judge's part of the reward beside another verifier's; None without one. `calls` is the
    number of tool calls. `images` are the names of those of its prompt, in the folder `images` of
    its run or beside its evaluation."""

    file: str
    line: int
    problem_id: str
    domain: str
    text: str
    verdict: str
    reason: str
    reference: str | None
    group: str | int
    index: int | None
    tests: Row | None
    statement: str = ""
    before: str = ""
    judged: float | None = None
    ending: str | None = None
    calls: int = 0
    images: tuple[str, ...] = ()


def read(path: Path, rows: str | Path | None, broken: list[str]) -> Iterator[Rollout]:
    """The rollouts of a run folder or a file, one at a time.

    Args:
        path: a run folder, a Parquet file of its rollouts, or a JSONL file (also gzip).
        rows: the input of `score`, if `path` is its output.
        broken: gets `file:line: reason` for each row that is not a rollout.

    A damaged Parquet file is one line of `broken`; the others are read.

    Raises:
        InputError: a file does not exist, or a JSONL file is truncated or damaged.
    """
    scored = _ScoredRows(rows) if rows is not None else None
    for file in _files(path):
        if file.suffix == ".parquet":
            yield from _recorded(file, broken)
            continue
        for number, line in row_lines(file):
            try:
                yield _rollout(parse_object(line), str(file), number, scored)
            except (InputError, ValueError) as error:
                broken.append(f"{file}:{number}: {error}")


def problems(rows: str | Path) -> list[Problem]:
    """The problems of the input of `score`, each once; rows that it could not read are left out."""
    found: dict[str, Problem] = {}
    for _, line in row_lines(Path(rows)):
        with suppress(InputError):
            problem, _ = parse_row(line)
            found.setdefault(problem.id, problem)
    return [*found.values()]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or run folder")
    with importing():
        from tramontane.run import rollouts
    files = rollouts.files(path / "rollouts")
    if not files:
        raise InputError(
            f"{path}: no rollouts/{rollouts.PATTERN} in it (a run with `rollouts: none` writes "
            f"none); give a run folder or a file"
        )
    return files


def _recorded(file: Path, broken: list[str]) -> Iterator[Rollout]:
    """The rollouts of one update, up to where the file is damaged."""
    from tramontane.run import rollouts

    try:
        for number, row in enumerate(rollouts.read_rollouts(file, AUDITED), 1):
            yield _rollout(row, str(file), number, None)
    except InputError as error:
        broken.append(str(error))


def _rollout(row: Row, file: str, line: int, scored: _ScoredRows | None) -> Rollout:
    if scored is not None:
        row = row | scored.find(str(row.get("id")))
    text = row.get("text", row.get("response"))
    # The label is `reference` in an evaluation, `answer` elsewhere.
    reference = row["reference"] if "reference" in row else row.get("answer")
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    problem_id = str(row.get("problem_id", row.get("id")))
    group = row.get("group", problem_id)
    if not isinstance(text, str):
        raise InputError(
            "text is missing: not a rollout; for the output of `tramontane score`, give its input "
            "with --rows"
        )
    if row.get("verdict") not in VERDICTS:
        raise InputError(f"verdict must be one of {', '.join(VERDICTS)}")
    if not isinstance(reference, str | None) or not isinstance(group, str | int):
        name = "group" if isinstance(reference, str | None) else "the reference answer"
        raise InputError(f"{name} is of the wrong type")
    before, parts = "", row.get("parts") or {}
    turns, tests = _turns(row.get("turns") or []), row.get("tests")
    if turns:
        text = turns[-1]["text"]
        said = [[t["text"], *(m["content"] for m in t["messages"])] for t in turns[:-1]]
        before = "\n\n".join(chain.from_iterable(said))
    if not isinstance(parts, dict):
        raise InputError("parts is not an object")
    return Rollout(
        file=file,
        line=line,
        problem_id=problem_id,
        domain=row.get("domain") or ("code" if reference is None else "math"),
        text=text,
        verdict=row["verdict"],
        reason=str(row.get("reason") or ""),
        reference=reference,
        group=group,
        index=row.get("index"),
        tests=tests if isinstance(tests, dict) and not fault_of(tests) else None,
        statement=str(row.get("problem") or ""),
        before=before,
        judged=parts.get("judge"),
        ending=row.get("ending"),
        calls=sum(len(turn["calls"]) for turn in turns),
        images=tuple(Path(str(name)).name for name in row.get("image_files") or ()),
    )


def _turns(turns: Any) -> list[Row]:
    """The recorded turns of a conversation.

    Raises:
        InputError: they lack what the audit reads.
    """
    try:
        return [
            {
                "text": str(turn["text"]),
                "messages": [{"content": str(m["content"])} for m in turn["messages"]],
                "calls": [*turn["calls"]],
            }
            for turn in turns
        ]
    except (KeyError, TypeError):
        raise InputError("turns are not those of a rollout (text, messages, calls)") from None


class _ScoredRows:
    """The rows that `score` read, by id; rows that share an id are in file order."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{path}: no such file")
        self.rows: defaultdict[str, deque[Row]] = defaultdict(deque)
        for _, line in row_lines(self.path):
            try:
                problem, response = parse_row(line)
            except InputError:  # reported by `score`, which wrote no row for it
                continue
            text = response.turns[-1][0] if response.turns else response.text
            row = {"domain": problem.domain, "reference": problem.answer, "text": text}
            self.rows[problem.id].append(row | {"tests": problem.tests})

    def find(self, row_id: str) -> Row:
        """The next row of this id.

        Raises:
            InputError: there is none, or all are used.
        """
        if not self.rows[row_id]:
            raise InputError(f"id {row_id!r} is not in {self.path} that many times")
        return self.rows[row_id].popleft()
