"""The base class of stages that ask a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tramontane.curation.backend import Answer, Prompt, check_model, open_backend
from tramontane.curation.rows import Row, Stage
from tramontane.types import PAPER_TAGS


class ModelStage(Stage):
    """A stage that asks `config.model`, if the config has one.

    Answers are expensive, so each is recorded when it arrives, and a restarted stage does not
    request an unfinished chunk's recorded answers again.
    """

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.backend = open_backend(config.model) if config.model else None

    @classmethod
    def check(cls, config: Any) -> dict[str, Any]:
        return check_model(config.model) if config.model else {}

    def ask(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], n: int, what: str = "answers"
    ) -> Iterator[tuple[int, list[Answer]]]:
        """`Backend.answers` about a chunk's rows; `what` names the record of this request."""
        assert self.backend is not None
        return self.backend.answers(prompts, n, self.record(rows, what))

    def record(self, rows: Sequence[Row], what: str) -> Path:
        """The file `what` of a chunk; files of other, finished chunks are deleted."""
        chunk = f"asked-{rows[0].number:09d}"
        for path in self.folder.glob("asked-*"):
            if not path.name.startswith(chunk):
                path.unlink()
        return self.folder / f"{chunk}-{what}.jsonl"


def conclusion(text: str) -> str:
    """The part of an answer after its thoughts."""
    return text.rpartition(PAPER_TAGS.closing)[2].strip()
