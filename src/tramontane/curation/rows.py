"""A row with the decision about it, passed from stage to stage, and the stages' base classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tramontane.asking import Answer, Prompt
from tramontane.asking.model import check_model, open_model
from tramontane.types import Problem

Verb = Literal["kept", "rewritten", "dropped"]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Row:
    """One row of the input with the current decision about it.

    Args:
        number: position over all inputs, from 0; everything is written in this order.
        where: `file:line` or `name[index]`.
        problem: None if the row could not be read.
        stage: the stage that made the decision; empty while the row is unchanged.
        decision: `kept`, `rewritten` (kept, in another form) or `dropped`.
        reason: a code, e.g. `near_duplicate`; for a kept row a note, usually empty.
        detail: facts for checking the decision.
        copied_by: the stage that copied this row from the input's row `number`; else empty.
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
        """The row with a note, unless an earlier stage gave a reason."""
        if self.reason:
            return self
        return replace(self, stage=stage, reason=reason, detail=detail)

    def rewrite(self, stage: str, reason: str, detail: str, problem: Problem) -> Row:
        """The row in a new form; a replaced statement and answer stay in the metadata."""
        before = self.task
        if (problem.problem, problem.answer) != (before.problem, before.answer):
            old = {"original_problem": before.problem, "original_answer": before.answer}
            problem = replace(problem, metadata={**old, **problem.metadata})
        return replace(
            self, stage=stage, decision="rewritten", reason=reason, detail=detail, problem=problem
        )

    def copy(self, stage: str, reason: str, detail: str, problem: Problem) -> Row:
        """A copy of the row, to insert after it; a stage makes at most one per row."""
        return replace(self.rewrite(stage, reason, detail, problem), copied_by=stage)

    def dump(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @property
    def task(self) -> Problem:
        """The problem of a readable row; stages see no other rows."""
        assert self.problem is not None
        return self.problem

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Row:
        """The row of a line from `dump`."""
        problem = fields.pop("problem")
        return cls(problem=problem and Problem(**problem), **fields)


class Stage:
    """One step of a curation: the base class.

    `decide` sees the rows that no earlier stage dropped, chunk by chunk and in order. It may depend
    only on these rows, its config and the rows it saw before, so that a killed and restarted
    curation ends with the same result. Memory of earlier chunks goes through `save` and `restore`.

    Args:
        config: the stage's section of the config.
        folder: the stage's files.
    """

    name: str

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @classmethod
    def check(cls, config: Any) -> dict[str, Any]:
        """Check the config and the stage's input files before any work.

        Returns:
            A fingerprint of the files, so that a restarted curation does not continue with
            different ones.

        Raises:
            InputError: a file is missing or unsuitable.
        """
        return {}

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        """The same rows in the same order, each with its new decision and followed by its copy."""
        raise NotImplementedError

    def save(self, chunk: int) -> None:
        """Write what this chunk added to the stage's memory.

        Called before the chunk's rows are committed; not called for a chunk without rows.
        """

    def restore(self, chunks: int) -> None:
        """Load the memory of the first `chunks` chunks, which were decided earlier."""

    def close(self) -> None:
        """End the stage's processes and close its files."""


class ModelStage(Stage):
    """A stage that asks `config.model`, if the config has one.

    Answers are expensive, so each is recorded when it arrives, and a restarted stage does not
    request an unfinished chunk's recorded answers again.
    """

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.model = open_model(config.model) if config.model else None

    @classmethod
    def check(cls, config: Any) -> dict[str, Any]:
        return check_model(config.model) if config.model else {}

    def ask(
        self, rows: Sequence[Row], prompts: Mapping[Key, Prompt], n: int, what: str = "answers"
    ) -> Iterator[tuple[Key, list[Answer]]]:
        """Yield (key of a prompt, its n answers) as each prompt's last answer arrives.

        Args:
            rows: the chunk.
            prompts: about these rows.
            n: answers per prompt.
            what: name of this request's record.
        """
        assert self.model is not None
        keys = list(prompts)
        answers = self.model.answers(list(prompts.values()), n, self.record(rows, what))
        return ((keys[place], of_place) for place, of_place in answers)

    def record(self, rows: Sequence[Row], what: str) -> Path:
        """The file `what` of a chunk; files of other, finished chunks are deleted."""
        chunk = f"asked-{rows[0].number:09d}"
        for path in self.folder.glob("asked-*"):
            if not path.name.startswith(chunk):
                path.unlink()
        return self.folder / f"{chunk}-{what}.jsonl"
