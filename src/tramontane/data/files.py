"""Reads rows with their locations from JSON lines, JSON arrays, CSV (all also gzip), Parquet, or a
Hugging Face dataset."""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import importlib.util
import json
import logging
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from tramontane.data import images
from tramontane.data.values import Row, UnknownType, encodable, plain
from tramontane.errors import InputError, importing, not_installed
from tramontane.journals import DuplicateKey, parse_object, unique_keys
from tramontane.models.names import check_hub
from tramontane.verifier import tasksets

if TYPE_CHECKING:
    from datasets import DatasetBuilder

logger = logging.getLogger("tramontane")

T = TypeVar("T")

JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
CSV_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
ENDINGS = (*JSON_ENDINGS, *CSV_ENDINGS, ".parquet")
PYTHON_ROWS = ".python.jsonl"  # suffix of files with rows that were given as Python objects
NEAR = 0.7  # similarity of a file's name, with its ending, that a hint names
MAX_CELL = 2**30  # characters in a CSV cell
GENERATED = ("playground:", "reasoning_gym:")  # without an end
SCHEMES = (*GENERATED, tasksets.SCHEME)


def read_rows(
    source: str, split: str = "train", limit: int | None = None
) -> Iterator[tuple[str, Row]]:
    """Yield (`file:line` or `name[index]`, row) with values in JSON's types (`data.values`).

    `verifiers:NAME` is a set of tasks. A source without one of the file suffixes is a Hugging Face
    dataset, `NAME` or `NAME#SUBSET`, from the hub or from a folder with a local copy. `split`
    applies to datasets only, and `limit` to endless sets of tasks.

    Raises:
        InputError: no such file or dataset, no rows, a file that is truncated or has a different
            format, a row that is not a JSON object, or half of a surrogate pair.
    """
    if source.startswith(tasksets.SCHEME):
        yield from tasksets.task_rows(source, limit)
        return
    path = Path(source).expanduser()
    folder = Path(source.partition("#")[0]).expanduser().is_dir()
    if path.name.endswith(ENDINGS):
        if "://" in source:
            raise InputError(f"data {source!r}: an address; download the file, and name its path")
        require_file(path)
        if path.suffix == ".parquet":
            rows = _table_rows(source, _parquet_rows(source, path))
        elif path.name.endswith(CSV_ENDINGS):
            rows = _csv_rows(source, path)
        else:
            rows = _json_file_rows(source, path)
    elif not folder and (path.exists() or source.startswith((".", "/", "~"))):
        raise InputError(f"data {source!r}: not a file that can be read; give {', '.join(ENDINGS)}")
    else:
        rows = _table_rows(source, _dataset_rows(source, split))
    empty = True
    for where, row in rows:
        empty = False
        yield where, row
    if empty:
        raise InputError(f"data {source!r}: there are no rows in it; give one with problems")


def name_of(source: str) -> str:
    """The name of a source in messages: `data` or `data['eval']` for rows given as Python
    objects."""
    name = Path(source).name
    if not name.endswith(PYTHON_ROWS):
        return source
    split = name.removesuffix(PYTHON_ROWS)
    return "data" if split == "data" else f"data[{split!r}]"


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """A shuffled copy; the seed alone determines its order."""
    copy = list(items)
    random.Random(seed).shuffle(copy)
    return copy


def _json_file_rows(source: str, path: Path) -> Iterator[tuple[str, Row]]:
    return _array_rows(source, path) if is_array(path) else _json_rows(source, path)


def _json_rows(source: str, path: Path) -> Iterator[tuple[str, Row]]:
    given = name_of(source)
    for number, line in read_lines(source, path):
        where = f"{source}:{number}" if given == source else f"{given}[{number - 1}]"
        try:
            row = parse_object(line)
        except ValueError as error:
            raise InputError(
                f"{where}: {error}; every line must hold one JSON object (or a .json file one "
                f"array of them): fix or remove this line"
            ) from None
        # In UTF-8, half of a surrogate pair can only occur as an escape.
        yield where, encodable(row, where) if "\\u" in line else row


def is_array(path: Path) -> bool:
    """True if a .json file is one array, by its first character."""
    if not path.name.endswith((".json", ".json.gz")):
        return False
    with open_text(path, errors="replace") as file:
        try:
            return next((c for c in iter(lambda: file.read(1), "") if not c.isspace()), "") == "["
        except (EOFError, OSError, zlib.error):
            return False  # damaged, which reading the lines reports


def _array_rows(source: str, path: Path) -> Iterator[tuple[str, Row]]:
    text = "".join(_raw_lines(source, path))
    try:
        rows = json.loads(text, object_pairs_hook=unique_keys)
    except DuplicateKey as error:
        raise InputError(f"{source}:{_line_of(text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{source}: begins with [ and is not a JSON array ({error}); give an array of "
            f"objects, or one object on each line"
        ) from None
    for index, row in enumerate(rows):
        where = f"{source}[{index}]"
        if not isinstance(row, dict):
            raise InputError(f"{where}: a {type(row).__name__}; the array must hold objects")
        yield where, encodable(row, where) if "\\u" in text else row


def _line_of(text: str) -> int:
    """The line of the first item of a JSON array that gives a key twice."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    start = text.index("[")
    while True:
        start = re.compile(r"[\s,\[]*").match(text, start).end()  # type: ignore[union-attr]
        try:
            _, start = decoder.raw_decode(text, start)
        except DuplicateKey:
            return text.count("\n", 0, start) + 1


def _csv_rows(source: str, path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of text; an empty cell is null. The header names the columns, and its first line shows
    whether commas, semicolons or tabs separate them."""
    csv.field_size_limit(MAX_CELL)
    lines = _raw_lines(source, path)
    header = next(lines, "")
    separator = max(",;\t", key=header.count)
    reader = csv.reader(chain([header], lines), delimiter=separator, strict=True)
    names: list[str] = []
    line = 1  # the row's first line: cells may contain line breaks
    try:
        for cells in reader:
            where, line = f"{source}:{line}", reader.line_num + 1
            if not names:
                names = [name.strip() for name in cells]
                if len({*names}) < len(names) or not all(names):
                    raise InputError(f"{where}: a header needs different names, not {names}")
            elif len(cells) > len(names) or (any(cells) and len(cells) < len(names)):
                raise InputError(
                    f"{where}: {len(cells)} cells, where the header has {len(names)} "
                    f"({', '.join(names)}); put cells with separators or line breaks in quotes"
                )
            elif any(cells):
                yield where, {k: v or None for k, v in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise InputError(f"{source}:{line}: not CSV ({error}); fix or remove this row") from None


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """A text file (also gzip), without the byte order mark that some systems put first."""
    opener = gzip.open if path.suffix == ".gz" else open
    return cast(TextIO, opener(path, "rt", encoding="utf-8-sig", errors=errors, newline=""))


def read_lines(source: str, path: Path, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """The lines of a text file (also gzip) that are not blank, numbered from 1.

    With `errors="surrogateescape"`, bytes that are not UTF-8 are passed on to the caller.

    Raises:
        InputError: the file is truncated, damaged, or not UTF-8.
    """
    for number, line in enumerate(_raw_lines(source, path, errors), 1):
        if line.strip():
            yield number, line


def _raw_lines(source: str, path: Path, errors: str = "strict") -> Iterator[str]:
    number = 0
    try:
        with open_text(path, errors) as lines:
            for line in lines:
                number += 1
                yield line
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


def _table_rows(source: str, rows: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Rows of a table, with images as text, and without columns of unsupported types, which a
    warning names. They are not an error, since a table may have unused columns of dates."""
    left_out: set[str] = set()
    for where, row in rows:
        kept: Row = {}
        for name, value in images.fields_as_text(row, where).items():
            try:
                kept[name] = plain(value)
            except UnknownType as error:
                if name not in left_out:
                    left_out.add(name)
                    logger.warning("%s: column %r is skipped: it holds %s", source, name, error)
        yield where, encodable(kept, where)


def _parquet_rows(source: str, path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    index = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise InputError(
                    f"{source}: column {twice[0]!r} is given twice: rename or remove one"
                )
            json_columns = {f.name: f.type for f in file.schema_arrow if _has_json(f.type)}
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    parsed = {k: _parsed(row[k], kind) for k, kind in json_columns.items()}
                    yield f"{source}[{index}]", row | parsed
                    index += 1
    except (ArrowException, OSError) as error:
        raise InputError(
            f"{source}: damaged after row {index}, or not Parquet ({error}); fetch it again"
        ) from None


def _has_json(kind: Any) -> bool:
    """True for a type of Arrow with JSON texts in it, which `datasets` writes for columns of mixed
    types."""
    return _is_json(kind) or any(_has_json(kind.field(i).type) for i in range(kind.num_fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _parsed(value: Any, kind: Any) -> Any:
    """A value of an Arrow type with its JSON texts parsed."""
    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if isinstance(value, dict):
        return {k: _parsed(v, kind.field(k).type) for k, v in value.items()}
    if isinstance(value, list) and _has_json(kind):
        return [_parsed(item, kind.value_type) for item in value]
    return value


def _dataset_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    if ":" in source or f"{source}:" in SCHEMES:
        near = difflib.get_close_matches(source.partition(":")[0] + ":", SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(SCHEMES)}"
        raise InputError(f"data {source!r}: no such kind of source; {hint}")
    name, _, subset = source.partition("#")
    beside = [path for path in glob.glob(f"{glob.escape(name)}.*") if path.endswith(ENDINGS)]
    hint = f"; did you mean {min(beside)!r}?" if beside else _near(Path(name).expanduser())
    with importing():
        from datasets import load_dataset, load_dataset_builder

    try:
        if not (folder := Path(name).expanduser()).is_dir():
            _check_dataset(source, name)
        builder = load_dataset_builder(str(folder), subset or None)
        paths = _json_files(builder, split)
        rows = [] if paths else load_dataset(str(folder), subset or None, split=split)
    except InputError as error:
        raise InputError(f"{error}{hint}") from None
    except Exception as error:
        # The hub's client raises many types; all mean that the dataset is not available.
        raise InputError(
            f"data {source!r}: no such file, and as a Hugging Face dataset (NAME or NAME#SUBSET, "
            f"split {split!r}) it cannot be loaded ({type(error).__name__}: {error}){hint}"
        ) from error
    read = chain.from_iterable(_json_file_rows(str(path), path) for path in paths)
    for i, row in enumerate(chain((row for _, row in read), map(dict, rows))):
        yield f"{source}[{i}]", row


def _json_files(builder: DatasetBuilder, split: str) -> list[Path]:
    """The files of a split in JSON, fetched; none if it has others, or types of its own.

    `datasets` makes other values of JSON's without a word: of the text "2024-05-01" a time, of
    integers above 64 bits floats, and of the texts "007" and "null" in a column that also has
    numbers 7 and nothing.
    """
    from huggingface_hub import hf_hub_download

    config: Any = builder.config
    files = [str(file) for file in (config.data_files or {}).get(split, ())]
    if builder.name != "json" or builder.info.features or config.field:
        return []
    if not all(file.endswith(JSON_ENDINGS) for file in files):
        return []
    found = []
    for file in files:
        if hub := re.fullmatch(r"hf://datasets/(.+?)@(.+?)/(.+)", file):
            name, revision, inner = hub.groups()
            file = hf_hub_download(name, inner, repo_type="dataset", revision=revision)
        found.append(Path(file))
    return found


def _check_dataset(source: str, name: str) -> None:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(
            f"data {source!r}: neither a file nor the name of a dataset (NAME or NAME#SUBSET); "
            f"give one source: several files in one, or in stages"
        )
    check_hub(name, "dataset")


def require_file(path: Path) -> None:
    """Check that a path is a file, and that what reads it is installed.

    Raises:
        InputError: it is not a file (the message suggests the nearest name in the same folder), or
            Parquet without its reader (the message says what to install).
    """
    if path.is_file():
        if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
            raise InputError(f"data {str(path)!r}: {not_installed('pyarrow')}")
        return
    if path.is_dir():
        raise InputError(f"data {str(path)!r}: a folder; name a file in it")
    here = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise InputError(f"data {str(path)!r}: no such file{_near(path) or here}")


def _near(path: Path) -> str:
    """A hint at the file of the nearest name in the same folder that can be read, if any is."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [sibling.name for sibling in siblings if sibling.name.endswith(ENDINGS)]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=NEAR)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
