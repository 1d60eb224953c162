"""Reads rows with their locations from JSONL (also gzip), Parquet, or a Hugging Face dataset."""

from __future__ import annotations

import difflib
import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tramontane.errors import InputError

T = TypeVar("T")

JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
ENDINGS = (*JSON_ENDINGS, ".parquet")
SCHEMES = ("playground:", "reasoning_gym:")


def read_rows(source: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line` or `name[index]`, row).

    A source without one of the file endings is a Hugging Face dataset, `NAME` or `NAME#SUBSET`,
    from the hub or the folder of a local copy. `split` applies to datasets only.

    Raises:
        InputError: no such file or dataset, no rows, a file that is cut off or of another format,
            or a line that is not a JSON object.
    """
    path = Path(source).expanduser()
    folder = Path(source.partition("#")[0]).expanduser().is_dir()
    if path.name.endswith(JSON_ENDINGS):
        require_file(path)
        rows = _json_rows(source, path)
    elif path.suffix == ".parquet":
        require_file(path)
        rows = _parquet_rows(source, path)
    elif not folder and (path.exists() or source.startswith((".", "/", "~"))):
        raise InputError(
            f"data {source!r}: not a file that can be read; give .jsonl, .jsonl.gz or .parquet"
        )
    else:
        rows = _dataset_rows(source, split)
    empty = True
    for where, row in rows:
        empty = False
        yield where, row
    if empty:
        raise InputError(f"data {source!r}: there are no rows in it; give one with problems")


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """A shuffled copy; the seed alone determines its order."""
    copy = list(items)
    random.Random(seed).shuffle(copy)
    return copy


def _json_rows(source: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in read_lines(source, path):
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # numbers too long, or nesting too deep
            raise InputError(
                f"{where}: not JSON ({error}); every line must hold one JSON object: fix or "
                f"remove this line"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"{where}: a {type(row).__name__}; every line must hold one JSON object"
            )
        yield where, row


def read_lines(source: str, path: Path, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """The lines of a text file (also gzip) that are not blank, numbered from 1.

    With `errors="surrogateescape"`, bytes that are not UTF-8 pass, for the caller to judge.

    Raises:
        InputError: the file is cut off, damaged, or not UTF-8.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        # Files from other systems may begin with a byte order mark, which JSON does not allow.
        with opener(path, "rt", encoding="utf-8-sig", errors=errors) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except EOFError:
        raise InputError(
            f"{source}: the gzip file is cut off after line {number}; fetch or write it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{source}: damaged after line {number}, or not gzip ({error}); fetch it again"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: not UTF-8 text after line {number} ({error.reason}); convert it to UTF-8"
        ) from None


def _parquet_rows(source: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    index = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{source}[{index}]", row
                    index += 1
    except (ArrowException, OSError) as error:
        raise InputError(
            f"{source}: damaged after row {index}, or not Parquet ({error}); fetch it again"
        ) from None


def _dataset_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if ":" in source or f"{source}:" in SCHEMES:
        near = difflib.get_close_matches(source.partition(":")[0] + ":", SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {' and '.join(SCHEMES)}"
        raise InputError(f"data {source!r}: no such kind of source; {hint}")
    from datasets import load_dataset

    name, _, subset = source.partition("#")
    try:
        rows = load_dataset(str(Path(name).expanduser()), subset or None, split=split)
    except Exception as error:
        # The hub's client raises many types; all mean that the dataset is not available.
        raise InputError(
            f"data {source!r}: no such file, and as a Hugging Face dataset (NAME or NAME#SUBSET, "
            f"split {split!r}) it cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    for i, row in enumerate(rows):
        yield f"{source}[{i}]", dict(row)


def require_file(path: Path) -> None:
    """Check that a path is a file.

    Raises:
        InputError: it is not; the message suggests the nearest name in the same folder.
    """
    if path.is_file():
        return
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
    raise InputError(f"data {str(path)!r}: no such file{hint}")
