"""Reads the rows of all inputs as problems; a row that cannot be read is dropped, not fatal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tramontane.curation.rows import Row
from tramontane.data.files import (
    ENDINGS,
    JSON_ENDINGS,
    SCHEMES,
    is_array,
    read_lines,
    read_rows,
    require_file,
)
from tramontane.data.load import RowRules, check_fields, parse_problem
from tramontane.data.values import encodable
from tramontane.errors import InputError
from tramontane.journals import parse_object

STAGE = "load"


def check_inputs(inputs: tuple[str, ...], fields: dict[str, str]) -> dict[str, Any]:
    """Check the inputs before any work; returns each file's size and modification time.

    Raises:
        InputError: no inputs, no such file, an endless source, an unknown field.
    """
    check_fields(fields)
    if not inputs:
        raise InputError("curate: no inputs; name files or datasets")
    prints: dict[str, Any] = {}
    for source in inputs:
        if source.startswith(SCHEMES):
            raise InputError(
                f"data {source!r}: curate reads files and datasets; write these problems to a file "
                f"first"
            )
        path = Path(source).expanduser()
        if source.endswith(ENDINGS):
            require_file(path)
            prints[source] = [path.stat().st_size, path.stat().st_mtime_ns]
    return prints


def read_problems(
    inputs: tuple[str, ...], rules: RowRules, split: str, skip: int = 0
) -> Iterator[Row]:
    """Every row of every input, in order, except the first `skip`.

    A row that is not a problem (not JSON, not UTF-8, no statement, an unknown domain, tests of
    unknown form) is dropped as `malformed`, and so is the point where a file is truncated. Rows
    without an answer pass, and later stages judge them.

    Raises:
        InputError: a dataset cannot be loaded.
    """
    raw = enumerate(item for source in inputs for item in _raw_rows(source, split))
    for number, (source, where, content) in islice(raw, skip, None):
        row = Row(number, where, None)
        try:
            parsed = _parse(content, where)
            stem = Path(source).name.partition(".")[0] if source.endswith(ENDINGS) else source
            name = f"{stem}-{re.findall(r'[0-9]+', where)[-1]}"
            problem = parse_problem(parsed, where, rules, default_id=name, source=stem)
            row = Row(number, where, problem)
        except InputError as error:
            row = row.drop(STAGE, "malformed", str(error).removeprefix(f"{where}: "))
        yield row


def _parse(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, InputError):
        raise content
    if isinstance(content, str):
        try:
            return encodable(parse_object(content), where)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
    return content


def _raw_rows(source: str, split: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (source, where, content): a line or row, or the error that ends the file there."""
    path, where = Path(source).expanduser(), source
    rows: Iterator[tuple[str, Any]] = read_rows(source, split)
    if source.endswith(JSON_ENDINGS) and not is_array(path):
        lines = read_lines(source, path, errors="surrogateescape")
        rows = ((f"{source}:{number}", line) for number, line in lines)
    try:
        for where, row in rows:
            yield source, where, row
    except InputError as error:
        if not source.endswith(ENDINGS):
            raise  # a dataset that is unavailable now may be available later
        yield source, where, InputError(f"{where}: {error}")
