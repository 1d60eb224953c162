"""Tools' parameters: their JSON Schema, and arguments in the types that the function declares.

Types of JSON (numbers, texts, lists, objects with text as keys, `Literal`, `Optional`) have the
schema that transformers' `get_json_schema` gives them, which models' templates are made for. All
others are pydantic's: enumerations, tuples, sets, dates, dataclasses, models, `TypedDict`, ….
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import typing_extensions
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tramontane.environments.arguments import inlined, kinds_of

_LIST, _OBJECT = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_JSON = (str, int, float, bool, type(None), list, dict, Any)
_CHOICES = re.compile(r"(.*)\(choices:\s*(.*)\)\s*", re.IGNORECASE | re.DOTALL)
# What a field of a `TypedDict` may be, and whether it must then be given.
_OF_FIELDS = {
    typing_extensions.Required: True,
    typing_extensions.NotRequired: False,
    typing_extensions.ReadOnly: False,  # as without it
}
# Before Python 3.12 they differ; 3.10 has one.
_UNPACK = (typing_extensions.Unpack, getattr(typing, "Unpack", typing_extensions.Unpack))
_FAULTS = 3  # faults of one argument that the model reads


class Unfit(ValueError):
    """An argument that is not of its parameter's type; the message says why."""


class Signature(NamedTuple):
    """What a tool takes."""

    schema: dict[str, Any]  # of its parameters
    returns: dict[str, Any] | None  # schema of its result, of a type of JSON
    python: inspect.Signature
    adapters: dict[str, TypeAdapter[Any]]  # by parameter

    def converted(self, name: str, value: Any) -> Any:
        """An argument from JSON in the type of its parameter.

        Raises:
            Unfit: it is not of that type.
        """
        try:
            return self.adapters[name].validate_python(value)
        except ValidationError as error:
            said = (": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
            raise Unfit("; ".join([*said][:_FAULTS])) from None

    def bound(self, values: Mapping[str, Any]) -> inspect.BoundArguments:
        """Arguments of a call, by their parameters' names, with the defaults of the others."""
        bound = inspect.BoundArguments(self.python, dict(values))  # type: ignore[arg-type]
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if isinstance(value, FieldInfo):
                bound.arguments[name] = value.get_default(call_default_factory=True)
        return bound


def name_of(tool: Callable[..., Any]) -> str:
    """The name that the model calls a tool by."""
    if name := getattr(tool, "__name__", ""):
        return str(name)
    return name_of(tool.func) if isinstance(tool, functools.partial) else type(tool).__name__


def signature_of(tool: Callable[..., Any], docs: Mapping[str, str]) -> Signature:
    """The signature of a function, a method, a partial function or a callable object.

    Args:
        tool: it.
        docs: descriptions of its parameters, from its docstring.

    Raises:
        TypeError: a parameter without a type, or a description, or whose type JSON cannot give; the
            message names it.
    """
    given = tool.keywords if isinstance(tool, functools.partial) else {}
    hints = get_type_hints(inspect.unwrap(function_of(tool)), include_extras=True)
    properties: dict[str, Any] = {}
    adapters: dict[str, TypeAdapter[Any]] = {}
    required, python = [], inspect.signature(tool)
    for name, parameter in python.parameters.items():
        hint, default = hints.get(name), parameter.default
        if isinstance(default, FieldInfo):  # `x: int = Field(…)`, as in pydantic's models
            hint = Annotated[hint, default]
            default = parameter.empty if default.is_required() else None
        if name in given:
            continue
        if hint is None:
            raise TypeError(f"parameter {name!r} has no type hint")
        try:
            hint, properties[name] = _described(hint, parameter.kind, docs.get(name))
            adapters[name] = TypeAdapter(hint)
        except Exception as error:  # a hint may be anything, and raise anything
            said = str(error).partition("\n")[0].partition(". Set `arb")[0]
            raise TypeError(f"parameter {name!r}: {said}") from None
        if default is parameter.empty and parameter.kind not in (_LIST, _OBJECT):
            required.append(name)
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    returned = hints.get("return")
    returns = _schema_of(returned) if _is_json(returned) else None
    return Signature(schema, returns, python, adapters)


def function_of(tool: Any) -> Any:
    """The function whose annotations are those of a tool."""
    while isinstance(tool, functools.partial | types.MethodType):
        tool = tool.func if isinstance(tool, functools.partial) else tool.__func__
    plain = inspect.isroutine(tool) or hasattr(tool, "__wrapped__")
    return tool if plain else type(tool).__call__


def _described(hint: Any, kind: Any, said: str | None) -> tuple[Any, dict[str, Any]]:
    """(type, schema) of a parameter, with its description, in the docstring or its annotation."""
    notes = getattr(hint, "__metadata__", ())
    texts = [note for note in notes if isinstance(note, str)]
    texts += [note.documentation for note in notes if isinstance(note, typing_extensions.Doc)]
    if kind is _LIST:
        hint = list[hint]  # type: ignore[valid-type]
    elif get_origin(hint) in _UNPACK:  # `**options: Unpack[Options]`
        [hint] = get_args(hint)
    elif kind is _OBJECT:
        hint = dict[str, hint]  # type: ignore[valid-type]
    elif len(texts) == len(notes) > 0:
        hint = hint.__origin__
    hint = _readable(hint)
    schema = _schema_of(hint)
    texts += [said] if said else []
    if not texts and "description" not in schema:
        raise TypeError("it has no description: add it under `Args:`, or use Annotated")
    if texts:
        choices = _CHOICES.fullmatch(texts[-1])  # as in transformers
        if choices:
            schema["enum"] = json.loads(choices[2])
        schema["description"] = choices[1].strip() if choices else texts[-1]
    return hint, schema


def _schema_of(hint: Any) -> dict[str, Any]:
    """The JSON Schema of a type.

    Raises:
        Exception: it has none.
    """
    if not _is_json(hint):
        _check_names(hint)
        return dict(inlined(TypeAdapter(hint).json_schema()))
    # Imported here: transformers takes seconds, and a run's first checks need none of it.
    from transformers.utils import chat_template_utils as templates

    # It would import torch, which takes seconds, to recognize a tensor among the type hints.
    templates.is_torch_available = lambda: "torch" in sys.modules
    return dict(templates._parse_type_hint(hint))


def _check_names(hint: Any) -> None:
    """Raise a TypeError for a type whose values, or names in objects, JSON cannot write."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is type:
        raise TypeError(f"{hint} is a class, which JSON cannot give")
    members = list(hint) if isinstance(hint, type) and issubclass(hint, Enum) else []
    members += parts if origin is Literal else []
    values = [getattr(member, "value", member) for member in members]
    if any(not isinstance(value, str | int | float | None) for value in values):
        raise TypeError(f"{hint} has values that are neither texts nor numbers")
    named = isinstance(origin, type) and issubclass(origin, Mapping) and parts
    if named and kinds_of(_schema_of(parts[0])) & {"array", "object"}:
        raise TypeError(f"{hint} has names that are neither texts nor numbers")
    for part in parts:
        _check_names(part)


def _is_json(hint: Any) -> bool:
    """True for the types of JSON's own values."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(isinstance(part, str | int | float | None) for part in parts)
    if origin is dict and parts:
        return parts[0] is str and _is_json(parts[1])
    if origin in (list, Union, types.UnionType):
        return all(map(_is_json, parts))
    return any(hint is kind for kind in _JSON)


def _readable(hint: Any) -> Any:
    """A type that pydantic reads: before Python 3.12, it wants `TypedDict` of typing_extensions."""
    if typing_extensions.is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        fields = {
            name: _field(part, name in hint.__required_keys__) for name, part in hints.items()
        }
        return typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[operator]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal and any(isinstance(part, Enum) for part in parts):
        members = {part.value: part for part in parts if isinstance(part, Enum)}
        return Annotated[hint, BeforeValidator(lambda value: members.get(value, value))]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_readable, parts))]  # noqa: UP007
    if origin is Iterable:  # pydantic's can be read once
        return list[tuple(map(_readable, parts))]  # type: ignore[misc]
    if origin in (list, dict, tuple, set, frozenset):
        return origin[tuple(map(_readable, parts))]
    return hint


def _field(hint: Any, required: bool) -> Any:
    """The type of a field. Where annotations are texts (`from __future__ import annotations`), the
    class does not know which of its fields are `Required`."""
    while (origin := get_origin(hint)) in _OF_FIELDS:
        required = _OF_FIELDS[origin] or (required and origin is typing_extensions.ReadOnly)
        [hint] = get_args(hint)
    kind = typing_extensions.Required if required else typing_extensions.NotRequired
    return kind[_readable(hint)]
