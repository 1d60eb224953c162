"""Values of rows: text, numbers, booleans, null, lists and objects, as in JSON.

A run records its rows and sends them to other processes, so other types are converted if nothing is
lost (NumPy, tensors, pandas tables, decimal numbers), and otherwise rejected with an error:
converted to text, they would reach a reward with a different type than the user gave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tramontane.errors import InputError

Row = dict[str, Any]


class UnknownType(TypeError):
    """A value of a type not allowed in a row; the message begins with its type."""


def plain(value: Any) -> Any:
    """The value in JSON's types. Tuples become lists, arrays and tensors nested lists.

    Raises:
        UnknownType: the type has no JSON equivalent.
    """
    if value is None or type(value) in (str, int, bool, float):
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise UnknownType(f"{_kind(name)} as a name in an object: give text")
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas: no value
        return None
    if isinstance(value, str | int | float):
        base = next(kind for kind in (str, int, float) if isinstance(value, kind))
        return base(value)
    if isinstance(value, Decimal):
        return _number(value)
    # NumPy's scalars and arrays, tensors of torch and JAX, columns of pandas.
    # NumPy's times would become numbers of nanoseconds.
    is_time = getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")
    if hasattr(value, "tolist") and not is_time:
        listed = value.tolist()
        if type(listed) is not type(value):  # NumPy's longdouble has no equivalent
            return plain(listed)
    raise UnknownType(f"{_kind(value)}{_remedy(value)}")


def plain_row(row: Mapping[str, Any], where: str) -> Row:
    """A row in JSON's types.

    Raises:
        InputError: a value of an unsupported type, or half of a surrogate pair; the message begins
            with `where` and names the field.
    """
    found: Row = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise InputError(f"{where}: the name of a field is {_kind(name)}: give text")
        try:
            found[name] = plain(value)
        except UnknownType as error:
            raise InputError(f"{where}: field {name!r} holds {error}") from None
    return encodable(found, where)


def encodable(row: Row, where: str) -> Row:
    """The row, if its text can be written as UTF-8.

    Raises:
        InputError: half of a surrogate pair, which JSON escapes allow; the message names the field.
    """
    for name, value in row.items():
        if not is_encodable(value) or not is_encodable(name):
            shown = name.encode(errors="backslashreplace").decode()
            raise InputError(
                f"{where}: field {shown!r} has half of a surrogate pair (\\ud800 to \\udfff), "
                f"which is not a character: remove it, or write the whole pair"
            )
    return row


def encoded(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which UTF-8 lacks."""
    return text.encode("utf-8", "replace").decode()


def cleaned(value: Any) -> Any:
    """A value in JSON's types with a question mark for each half of a surrogate pair."""
    if is_encodable(value):
        return value
    return json.loads(encoded(json.dumps(value, ensure_ascii=False)))


def is_encodable(value: Any) -> bool:
    """False if a value in JSON's types holds half of a surrogate pair."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_missing(value: Any) -> bool:
    """True for null, and for NaN, which tables use for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _number(value: Decimal) -> int | float:
    """A decimal number as an integer, or as a float that prints the same digits."""
    if not value.is_finite():
        return float(value)
    if abs(value.adjusted()) < 300:
        if value == value.to_integral_value():
            return int(value)
        if Decimal(repr(float(value))) == value:
            return float(value)
    raise UnknownType(f"the decimal {value}, which no float holds: give text (str)")


def _kind(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of type {module}{kind.__qualname__}"


def _remedy(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return ": give a list, such as sorted(…)"
    if hasattr(value, "isoformat"):
        return ": give text, such as .isoformat()"
    if isinstance(value, bytes | bytearray):
        return ": give text, such as .decode()"
    return ": give text, a number, a list or a dict"
