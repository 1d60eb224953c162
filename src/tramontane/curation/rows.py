"""What travels from stage to stage: a row, and what was decided of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tramontane.types import Problem

Verb = Literal["kept", "rewritten", "dropped"]


@dataclass(frozen=True)
class Row:
    """One row of the input with its standing.

    Args:
        number: from 0 over all inputs: the order of everything written.
        where: `file:line` or `name[index]`.
        problem: none where the row could not be read.
        stage: the stage whose decision stands; empty until one says more than `kept`.
        decision: `kept`, `rewritten` (kept, in another form) or `dropped`.
        reason: a code, e.g. `near_duplicate`; of a kept row a note, mostly empty.
        detail: what a person needs to check the decision.
        copied_by: the stage that made it as a copy of the input's row `number`, if one did.
    """

    number: int
    where: str
    problem: Problem | None
    stage: str = ""
    decision: Verb = "kept"
    reason: str = ""
    detail: str = ""
    copied_by: str = ""

    def drop(self, stage: str, reason: str, detail: str) -> Row:
        return replace(self, stage=stage, decision="dropped", reason=reason, detail=detail)

    def note(self, stage: str, reason: str, detail: str) -> Row:
        """Kept, with a remark, unless an earlier stage had one."""
        if self.reason:
            return self
        return replace(self, stage=stage, reason=reason, detail=detail)

    def rewrite(self, stage: str, reason: str, detail: str, problem: Problem) -> Row:
        """In a new form; a statement and answer that it no longer has stay in the metadata."""
        before = self.task
        if (problem.problem, problem.answer) != (before.problem, before.answer):
            old = {"original_problem": before.problem, "original_answer": before.answer}
            problem = replace(problem, metadata={**old, **problem.metadata})
        return replace(
            self, stage=stage, decision="rewritten", reason=reason, detail=detail, problem=problem
        )

    def copy(self, stage: str, reason: str, detail: str, problem: Problem) -> Row:
        """A second row, which belongs behind this one; a stage makes one of a row at most."""
        return replace(self.rewrite(stage, reason, detail, problem), copied_by=stage)

    def dump(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @property
    def task(self) -> Problem:
        """The problem of a row that could be read; no stage sees any other."""
        assert self.problem is not None
        return self.problem

    @classmethod
    def parse(cls, line: str) -> Row:
        got = json.loads(line)
        problem = got.pop("problem")
        return cls(problem=problem and Problem(**problem), **got)


class Stage:
    """A step of a curation: the base of all.

    `decide` sees the rows that no earlier stage dropped, a chunk at a time and in order, and may
    depend on nothing but them, its config and what it saw before: so a curation that was killed
    ends as if it had not been. What must be remembered of earlier chunks goes through `save` and
    `restore`.

    Args:
        config: the stage's own section.
        folder: for what the stage keeps on disk.
    """

    name: str

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @classmethod
    def check(cls, config: Any) -> dict[str, Any]:
        """Refuse what can be seen to be wrong before any work; returns a fingerprint of the files
        that the stage reads, so that a curation does not go on with others.

        Raises:
            InputError: they are not there, or unfit.
        """
        return {}

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        """The same rows in the same order, each with its new standing, and behind it its copy."""
        raise NotImplementedError

    def save(self, chunk: int) -> None:
        """Write what this chunk added to memory; called before its rows are committed, and not
        for a chunk of which no row came so far."""

    def restore(self, chunks: int) -> None:
        """Remember the first so many chunks, which were decided before."""

    def close(self) -> None:
        """Let go of processes."""
