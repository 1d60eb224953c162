"""Arguments of calls in the types that their schema asks for."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

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
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_DATA = ("const", "default", "enum", "examples")  # values, not schemas
BY_NAME = ("properties", "patternProperties", "dependentSchemas")  # schemas by name


def typed(calls: Sequence[ToolCall], tools: Sequence[Tool], *, as_text: bool) -> None:
    """Give the arguments of calls the types of their tools' schemas, in place.

    Args:
        calls: of a message; those of unknown tools stay as they are.
        tools: descriptions of the tools.
        as_text: True if the calls' form writes each argument as a text without quotes.
    """
    known = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    for call in calls:
        schemas = inlined(known.get(call.name) or {}).get("properties") or {}
        for name, value in call.arguments.items():
            call.arguments[name] = coerced(value, _schema(schemas.get(name)), as_text=as_text)


def coerced(value: Any, schema: Mapping[str, Any], *, as_text: bool = False) -> Any:
    """The value in the type that a schema asks for, if it was written as text ("7", "[1, 2]", also
    as Python writes it) or as a float without a fraction; any other value is unchanged.

    Args:
        value: from JSON.
        schema: JSON Schema; only its types are read.
        as_text: True if everything was written as text: where a text is among several types, what
            reads as another of them is that (as vLLM's and sglang's parsers do).
    """
    kinds = kinds_of(schema)
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value) if value.is_integer() else value
    if isinstance(value, list | dict):
        return _coerced_parts(value, _part_for(value, schema), as_text)
    if not isinstance(value, str) or not kinds:
        return value
    if _is_text_of(value, schema):
        read = _read(value.strip()) if as_text and len(kinds) > 1 else value
        return read if not isinstance(read, str) and _is_one_of(read, kinds) else value
    read = _read(value.strip().lower() if "boolean" in kinds else value.strip())
    if isinstance(read, str) or not _is_one_of(read, kinds):
        whole = isinstance(read, float) and read.is_integer() and "integer" in kinds
        return int(read) if whole else value
    return coerced(read, schema)


def _is_text_of(text: str, schema: Mapping[str, Any]) -> bool:
    """False if a schema takes other texts alone: those that it names, or dates and the like, of
    which `null` is none."""
    if parts := [_schema(part) for key in _ALTERNATIVES for part in schema.get(key) or ()]:
        return any(_is_text_of(text, part) for part in parts)
    if "string" not in kinds_of(schema):
        return False
    if "const" in schema or "enum" in schema:
        return text in (schema.get("enum") or [schema.get("const")])
    return "format" not in schema or _read(text) is not None


def _coerced_parts(value: Any, schema: Mapping[str, Any], as_text: bool) -> Any:
    """A list or an object whose parts have the types that a schema asks for."""
    if isinstance(value, list):
        wanted = chain(schema.get("prefixItems") or (), repeat(schema.get("items")))
        pairs = zip(value, wanted, strict=False)
        return [coerced(item, _schema(part), as_text=as_text) for item, part in pairs]
    fields, others = _schema(schema.get("properties")), schema.get("additionalProperties")
    parts = {key: _schema(fields.get(key, others)) for key in value}
    return {key: coerced(value[key], part, as_text=as_text) for key, part in parts.items()}


def _schema(part: Any) -> Mapping[str, Any]:
    """A part of a schema that is one; booleans take anything, or nothing."""
    return part if isinstance(part, dict) else {}


def _part_for(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The alternative of a schema that a list or an object is meant for: the first of its type
    whose properties it has."""
    kind = "array" if isinstance(value, list) else "object"
    own = schema.get("type")
    if own == kind or (isinstance(own, list) and kind in own):
        return schema
    parts = [_schema(part) for key in _ALTERNATIVES for part in schema.get(key) or ()]
    fitting = [part for part in (_part_for(value, part) for part in parts) if part]
    named = (
        p for p in fitting if isinstance(value, dict) and {*value} <= {*p.get("properties", ())}
    )
    return next(named, fitting[0] if fitting else {} if own else schema)


def fault_of(schema: Mapping[str, Any]) -> str:
    """What is wrong with a JSON Schema that somebody else made; empty if nothing is."""
    return _fault_of(json.dumps(schema))


@lru_cache
def _fault_of(text: str) -> str:
    schema, known = json.loads(text), Draft202012Validator
    try:
        validator_for(schema, known).check_schema(schema, known.FORMAT_CHECKER)
    except (SchemaError, RecursionError) as error:
        place = ".".join(map(str, getattr(error, "absolute_path", ())))
        return f"{place}: {getattr(error, 'message', 'nested too deeply')}"
    return ""


def inlined(schema: Any, root: Any = None, within: tuple[str, ...] = ()) -> Any:
    """A JSON Schema with the schemas that it refers to in place of references, and without titles.
    Where one refers to itself, anything is taken.

    Args:
        schema: it, or a part of it.
        root: the whole document; by default the schema itself.
        within: references that lead to this part.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [inlined(part, root, within) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        found = None if reference in within else _referred(reference, root)
        rest = {key: part for key, part in schema.items() if key != "$ref"}
        return inlined(found or {}, root, (*within, reference)) | inlined(rest, root, within)
    whole = {}
    for key, part in schema.items():
        if key in BY_NAME and isinstance(part, dict):
            whole[key] = {name: inlined(each, root, within) for name, each in part.items()}
        elif key not in ("$defs", "definitions", "title"):
            whole[key] = part if key in _DATA else inlined(part, root, within)
    return whole


def _referred(reference: str, root: Any) -> Any:
    """The part of a document that a reference within it names; None if there is none."""
    for name in reference.split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root if reference.startswith("#") else None


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema takes, by their names in JSON Schema; none: any, or unknown."""
    wanted = schema.get("type")
    kinds = {wanted} if isinstance(wanted, str) else set(wanted or ())
    if schema.get("nullable") is True:
        kinds.add("null")
    for key in _ALTERNATIVES:
        for part in schema.get(key) or ():
            kinds |= kinds_of(_schema(part))
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and choices:
        kinds = {name for name in _KINDS if any(_is_one_of(each, {name}) for each in choices)}
    return kinds


def _is_one_of(value: Any, kinds: set[str]) -> bool:
    types = tuple(kind for name in kinds for kind in _KINDS.get(name, ()))
    return isinstance(value, types) and (not isinstance(value, bool) or "boolean" in kinds)


def _read(text: str) -> Any:
    """A value from JSON, or as Python writes it; the text if it is neither, or has numbers that are
    not finite."""
    for reads in (json.loads, ast.literal_eval):
        try:
            value = reads(text)
            return value if _is_finite(value) else text
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value
    return not isinstance(value, dict | list | tuple | set) or all(map(_is_finite, parts))
