"""The file of an evaluation's completions, which an interrupted evaluation can continue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tramontane.errors import InputError
from tramontane.types import Problem

Row = dict[str, Any]


class CompletionsFile:
    """JSONL of completions, in the order of the problems. A context manager.

    Args:
        path: the file.
        resume: keep an earlier process's rows; otherwise the file is replaced.
        samples: completions of each problem. Rows after the last complete problem, and a truncated
            line, are dropped.

    Attributes:
        rows: the rows that were kept.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, samples: int = 1) -> None:
        self.path, self.rows = Path(path), list[Row]()
        kept = 0
        if resume and self.path.is_file():
            lines = self.path.read_bytes().splitlines(keepends=True)
            whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
            whole -= whole % samples
            self.rows = [self._parse(number, line) for number, line in enumerate(lines[:whole], 1)]
            kept = sum(map(len, lines[:whole]))
        self._file = open(path, "a", 1, "utf-8", errors="backslashreplace")  # noqa: SIM115
        self._file.truncate(kept)

    def check(self, problems: Sequence[Problem], samples: int) -> None:
        """Check that the kept rows belong to these problems, `samples` of each, in order.

        Raises:
            InputError: a row belongs to a different problem.
        """
        for place, row in enumerate(self.rows):
            due = problems[place // samples] if place < len(problems) * samples else None
            if due is None or (row["problem_id"], row["problem"]) != (due.id, due.problem):
                raise InputError(
                    f"{self.path}:{place + 1}: a completion of problem {row['problem_id']!r}, but "
                    f"due is {f'one of {due.id!r}' if due else 'no further one'}; name another "
                    f"place (--out), or remove the file"
                )

    def __enter__(self) -> CompletionsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, which are flushed to disk, so a killed process loses none."""
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._file.flush()

    def _parse(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{self.path}:{number}: not JSON ({error}); restore the file from a copy, or keep "
                f"the lines before this one alone"
            ) from None
        return dict(row)
