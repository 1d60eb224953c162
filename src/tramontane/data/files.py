"""Rows from JSONL (also gzip), Parquet, or a Hugging Face dataset, each with where it stands."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tramontane.errors import InputError

T = TypeVar("T")


def read_rows(source: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line` or `name[index]`, row).

    Raises:
        InputError: no such file or dataset, or a line that is not a JSON object.
    """
    path = Path(source).expanduser()
    if path.suffix == ".parquet":
        _require(path)
        from datasets import Dataset

        for i, row in enumerate(Dataset.from_parquet(str(path))):
            yield f"{source}[{i}]", dict(row)
    elif path.name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        _require(path)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from _json_lines(source, lines)
    else:
        yield from _hub_rows(source, split)


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """A copy in an order that the seed alone decides."""
    copy = list(items)
    random.Random(seed).shuffle(copy)
    return copy


def _json_lines(source: str, lines: Iterator[str] | Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not JSON ({error}); mend or remove this line") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: a {type(row).__name__}, not a JSON object")
        yield where, row


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.startswith((".", "/", "~")):
        raise InputError(
            f"data {source!r}: not a file that can be read; give .jsonl, .jsonl.gz or .parquet"
        )
    from datasets import load_dataset

    name, _, subset = source.partition("#")
    try:
        rows = load_dataset(name, subset or None, split=split)
    except Exception as error:
        # The hub's client raises many kinds; all mean that the named dataset cannot be had.
        raise InputError(
            f"data {source!r}: no such file, and as a Hugging Face dataset it cannot be loaded "
            f"({type(error).__name__}: {error})"
        ) from error
    for i, row in enumerate(rows):
        yield f"{source}[{i}]", dict(row)


def _require(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"data {str(path)!r}: no such file")
