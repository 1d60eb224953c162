"""An append-only file of results that are expensive to compute, one line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tramontane.errors import InputError


class Journal:
    """Appends values to a file, and iterates over the values in it.

    Args:
        path: the file; created if missing.
        end: length of the file's valid part, in bytes. By default it ends after the last complete
            line, since a killed process may leave an incomplete line.
    """

    def __init__(self, path: Path, end: int | None = None) -> None:
        self.path = path
        self._file = path.open("ab")
        complete = _last_line_end(path)
        self._file.truncate(complete if end is None else min(end, complete))

    def __iter__(self) -> Iterator[Any]:
        """The values.

        Raises:
            InputError: a line that this class has not written.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise InputError(
                        f"{self.path}:{number}: damaged ({error}); remove this line, and its "
                        f"result is computed again"
                    ) from None
                yield value

    def add(self, *values: Any) -> int:
        """Write one line per value; returns the file's new length in bytes."""
        for value in values:
            self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _last_line_end(path: Path) -> int:
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                end += len(line)
    return end
