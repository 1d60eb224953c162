"""Converts rows and settings given as Python objects, e.g. in a notebook, to what files can hold.

Functions become import paths (`verifier.functions.path_of`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tramontane.data import images
from tramontane.data.files import PYTHON_ROWS, name_of
from tramontane.data.values import Row, UnknownType, plain, plain_row
from tramontane.errors import InputError
from tramontane.temporary import temporary_folder
from tramontane.verifier import functions

Rows: TypeAlias = Iterable[Mapping[str, Any]]
Settings: TypeAlias = "Sequence[str] | Mapping[str, Any]"
WANTED = (
    "give a list of dicts, a datasets.Dataset, a pandas.DataFrame, or the name of a file or dataset"
)

USER_CODE = ("data.environment", "data.tools")  # keys whose values are classes and functions


def rows_of(source: Rows, name: str = f"data{PYTHON_ROWS}") -> list[Row]:
    """Rows as JSON values.

    Args:
        source: objects with values by column, or a pandas `DataFrame`.
        name: name of the file that the rows will be written to (`files.name_of`).

    Raises:
        InputError: no rows, a row that is not a mapping, or a value of an unsupported type; the
            message names the row, e.g. `data[3]`, and the field.
    """
    given = name_of(name)
    frame: Any = source
    rows = []
    if not isinstance(source, Iterable):
        raise InputError(f"{given}: of type {type(source).__name__}; {WANTED}")
    for number, row in enumerate(
        frame.to_dict("records") if hasattr(source, "iterrows") else source
    ):
        where = f"{given}[{number}]"
        if not isinstance(row, Mapping):
            raise InputError(f"{where} is of type {type(row).__name__}; {WANTED}")
        rows.append(plain_row(images.fields_as_text(row, where), where))
    if not rows:
        raise InputError(f"{given}: no rows")
    return rows


def override_texts(settings: Settings | None) -> list[str]:
    """`key=value` texts; a function becomes its import path.

    Raises:
        InputError: a value of a type that a config cannot hold.
    """
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Mapping):
        return list(settings or ())
    return [f"{key}={_setting(key, value)}" for key, value in settings.items()]


def _setting(key: str, value: Any) -> str:
    many = isinstance(value, list)
    found = [_plain(item) for item in (value if many else [value])]
    try:
        return json.dumps(plain(found if many else found[0]), ensure_ascii=False)
    except UnknownType as error:
        if key in USER_CODE:
            raise InputError(
                f"{key}: an object; give its class, of which each conversation makes one, a "
                f"function, or an import path"
            ) from None
        raise InputError(f"{key}: {error}") from None


def _plain(value: Any) -> Any:
    if callable(value):
        return functions.path_of(value)
    return str(value) if isinstance(value, Path) else value


@contextmanager
def as_source(rows: Sequence[Row]) -> Iterator[str]:
    """A temporary file with these rows."""
    with temporary_folder("rows") as folder:
        file = Path(folder) / f"data{PYTHON_ROWS}"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield str(file)
