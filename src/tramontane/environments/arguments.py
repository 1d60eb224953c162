"""Arguments of calls in the types that their schema asks for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tramontane.data.prompts import Tool
from tramontane.types import ToolCall

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def typed(calls: Sequence[ToolCall], tools: Sequence[Tool], *, as_text: bool) -> None:
    """Give the arguments of calls the types of their tools' schemas, in place.

    Args:
        calls: of a message; those of unknown tools stay as they are.
        tools: descriptions of the tools.
        as_text: True if the calls' form writes each argument as a text without quotes.
    """
    known = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    for call in calls:
        schemas = (known.get(call.name) or {}).get("properties") or {}
        for name, value in call.arguments.items():
            call.arguments[name] = coerced(value, schemas.get(name) or {}, as_text=as_text)


def coerced(value: Any, schema: Mapping[str, Any], *, as_text: bool = False) -> Any:
    """The value in the type that a schema asks for, if it was written as text ("7", "[1, 2]", also
    as Python writes it) or as a float without a fraction; any other value is unchanged.

    Args:
        value: from JSON.
        schema: JSON Schema; only its types are read.
        as_text: True if null, too, was written as text.
    """
    kinds = kinds_of(schema)
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value) if value.is_integer() else value
    if isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        return [coerced(item, items) for item in value]
    if isinstance(value, dict) and isinstance(fields := schema.get("properties"), dict):
        return {key: coerced(item, fields.get(key) or {}) for key, item in value.items()}
    if not isinstance(value, str) or not kinds:
        return value
    if "string" in kinds:
        absent = as_text and "null" in kinds and value.strip() in ("null", "None")
        return None if absent else value
    read = _read(value.strip().lower() if "boolean" in kinds else value.strip())
    if isinstance(read, str) or not _is_one_of(read, kinds):
        whole = isinstance(read, float) and read.is_integer() and "integer" in kinds
        return int(read) if whole else value
    return coerced(read, schema)


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema takes, by their names in JSON Schema; none: any, or unknown."""
    wanted = schema.get("type")
    kinds = {wanted} if isinstance(wanted, str) else set(wanted or ())
    if schema.get("nullable") is True:
        kinds.add("null")
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or ():
            kinds |= kinds_of(part)
    if not kinds and (choices := schema.get("enum")):
        kinds = {name for name in _KINDS if any(_is_one_of(each, {name}) for each in choices)}
    return kinds


def _is_one_of(value: Any, kinds: set[str]) -> bool:
    types = tuple(kind for name in kinds for kind in _KINDS.get(name, ()))
    return isinstance(value, types) and (not isinstance(value, bool) or "boolean" in kinds)


def _read(text: str) -> Any:
    """A value from JSON, or as Python writes it; the text if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
