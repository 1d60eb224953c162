"""Files of JSON, a row in each line: logs, and journals that a killed process continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tramontane.errors import InputError


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as `object_pairs_hook`: json itself keeps the last of two equal keys.

    Raises:
        ValueError: a key is given twice.
    """
    row = dict(pairs)
    if len(row) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise DuplicateKey(f"key {key!r} is given twice: remove one")
    return row


class DuplicateKey(ValueError):
    """An object of JSON gives a key twice."""


def parse_object(line: str | bytes) -> dict[str, Any]:
    """The object in one line of JSON.

    Raises:
        ValueError: the line is not UTF-8, not JSON, not an object, or gives a key twice; the
            message says which.
    """
    try:
        text = (line.encode() if isinstance(line, str) else line).decode()
        row = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKey:
        raise
    except UnicodeError:  # bytes, or text with bytes that were passed on (surrogateescape)
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:  # numbers too long, or nesting too deep
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}")
    return row


def read_log(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log (JSON lines), without a last row that was truncated when its writer died.
    A missing file has none.

    Raises:
        InputError: a line before the last is broken.
    """
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_object(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise InputError(
                f"{file}:{number}: {error}; every line must hold one JSON object: fix this line, "
                f"or restore the file from a copy"
            ) from None
        yield row


class Journal:
    """A file of finished items, one line of JSON each, which a killed process can continue.

    Iterating gives the items; opening drops a line that a killed process did not complete.

    Args:
        path: the file; created if missing.
        end: length of the valid part, in bytes, if it may be shorter than the complete lines.
        group: items that belong together; those after the last complete group are dropped.
    """

    def __init__(self, path: Path, end: int | None = None, *, group: int = 1) -> None:
        self.path = path
        self._file = path.open("ab")
        lines = path.read_bytes().splitlines(keepends=True)
        whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
        complete = sum(map(len, lines[: whole - whole % group]))
        self._file.truncate(complete if end is None else min(end, complete))

    def __iter__(self) -> Iterator[Any]:
        """The items.

        Raises:
            InputError: a line that is not JSON.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    item = json.loads(line)
                except ValueError as error:
                    raise InputError(
                        f"{self.path}:{number}: damaged ({error}); remove this line, and its "
                        f"result is computed again"
                    ) from None
                yield item

    def add(self, *items: Any) -> int:
        """Write items; returns the file's new length in bytes. A killed process loses none. They
        are not flushed to disk: a power failure may cost the last ones, to be computed again."""
        for item in items:
            text = json.dumps(item, ensure_ascii=False) + "\n"
            # Half a surrogate pair becomes a JSON escape.
            self._file.write(text.encode(errors="backslashreplace"))
        self._file.flush()
        return self._file.tell()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_same(
    items: Path, record: Path, made_with: Mapping[str, Any], remedy: str, levels: int = 1
) -> None:
    """Check that a file's items, if it has any, were made with these settings.

    Args:
        items: the file, usually a `Journal`'s.
        record: JSON file of the settings that the items were made with; may have further keys.
        made_with: what the items depend on, in JSON types.
        remedy: what the user can do, for the message.
        levels: depth to which settings are named and compared one by one.

    Raises:
        InputError: the items were made with different settings, or with unknown ones.
    """
    begun = items.is_file() and items.stat().st_size > 0
    if not record.is_file():
        if begun:
            raise InputError(
                f"{items}: there is no {record.name} that says what it was made with; {remedy}"
            )
        return
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict) or not made_with.keys() <= before.keys():
        raise InputError(f"{record}: not the record of {items.name}, or damaged; {remedy}")
    if begun and (changed := _differing(before, made_with, levels)):
        raise InputError(
            f"{record}: {items.name} was made with different {', '.join(changed)}; {remedy}"
        )


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], levels: int) -> list[str]:
    """The keys of `now` whose values differ, below the first level with dots."""
    keys = []
    for key, value in now.items():
        old = before.get(key)
        if levels > 1 and isinstance(value, Mapping) and isinstance(old, Mapping):
            keys += [f"{key}.{name}" for name in _differing(old, value, levels - 1)]
        elif old != value:
            keys.append(key)
    return keys
