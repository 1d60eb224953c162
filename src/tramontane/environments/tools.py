"""Tools: functions and toolboxes that a model may call, and the answers to its calls.

A tool is a function with type hints and a Google docstring, from which its description is made
(`signatures`). It is called with the arguments that its description allows, in the types of its
hints; its result is the answer: a text, an image, a list with images, or JSON.

A model that uses a tool wrongly reads an error: an unknown name, arguments that do not fit, or a
`ValueError`, `TypeError`, `LookupError` or `ArithmeticError` of the tool. Any other exception is a
failure of the tool, for which the model must not be punished (`EnvironmentFailed`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections import UserString, deque
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from dataclasses import fields, is_dataclass
from datetime import date, timedelta
from datetime import time as clock
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache, partial, partialmethod, singledispatchmethod
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import PurePath
from types import MethodType
from typing import Any, NamedTuple
from uuid import UUID

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tramontane.data.prompts import Tool
from tramontane.data.values import UnknownType, encoded, plain
from tramontane.environments.arguments import BY_NAME, coerced
from tramontane.environments.pictures import holds_images, joined
from tramontane.environments.running import EnvironmentFailed, Runner, blaming, said
from tramontane.environments.signatures import (
    Signature,
    Unfit,
    function_of,
    name_of,
    signature_of,
)
from tramontane.errors import InputError
from tramontane.models.images import Limits
from tramontane.types import PLACE, ToolCall
from tramontane.verifier.functions import MAX_ERROR, defined_at

# Results that become texts.
_AS_TEXT = (UUID, PurePath, Fraction, IPv4Address, IPv6Address, IPv4Network, IPv6Network)
_NO_LISTS = (str, UserString, bytes, bytearray, memoryview)
MISUSE = (ValueError, TypeError, LookupError, ArithmeticError)
# A parameter in a docstring with what stands around its name: `*args: …`, `x (int, optional): …`.
_PARAMETER = re.compile(r"^(\s+)\*{0,2}(\w+)(?: ?\(.*?\))?:", re.MULTILINE)
# Methods of a toolbox or an environment that are not tools.
RESERVED = frozenset({"start", "step", "close", "reset", "get_reward", "tools"})


class Toolset:
    """The tools of one conversation.

    Args:
        tools: functions or bound methods.
        answer_bytes: `conversation.answer_bytes`.
        limits: `data.images`, of what is decoded of an image.

    Raises:
        InputError: a tool without type hints or a docstring, or two with one name.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any]], answer_bytes: int, limits: Limits
    ) -> None:
        self._answer_bytes, self._limits = answer_bytes, limits
        self._tools: dict[str, Callable[..., Any]] = {}
        self.schemas: list[Tool] = []
        for tool in tools:
            described = schema_of(tool)
            name = described["function"]["name"]
            if name in self._tools:
                places = [
                    getattr(each, "place", None) or defined_at(each)
                    for each in (self._tools[name], tool)
                ]
                raise InputError(
                    f"two tools are named {name!r}: {' and '.join(places)}; rename one"
                )
            self._tools[name] = tool
            self.schemas.append(described)

    async def answer(self, calls: Sequence[ToolCall], runner: Runner) -> list[list[str]]:
        """Answer the calls of a turn; those that did not parse already have an answer. Returns the
        images of each answer, as data URIs.

        Calls of one toolbox are answered in order, unless it has `independent = True`; others
        concurrently.

        Raises:
            EnvironmentFailed: a failure of a tool.
        """
        shown: list[list[str]] = [[] for _ in calls]
        lines: dict[Any, list[int]] = {}
        for number, call in enumerate(calls):
            if call.name:
                toolbox = _toolbox_of(self._tools.get(call.name))
                alone = toolbox is None or getattr(toolbox, "independent", False)
                lines.setdefault(("call", number) if alone else id(toolbox), []).append(number)

        async def in_order(line: list[int]) -> None:
            for number in line:
                shown[number] = await self._answer(calls[number], runner)

        tasks = [asyncio.create_task(in_order(line)) for line in lines.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others, if one failed
                task.cancel()
        return shown

    async def _answer(self, call: ToolCall, runner: Runner) -> list[str]:
        started, images = time.perf_counter(), list[str]()
        try:
            tool, positional, named = self._checked(call)
            result = await runner.run(tool, *positional, **named)
        except Misuse as error:
            call.answer, call.error = cut(f"error: {error}", self._answer_bytes), True
        except EnvironmentFailed as failure:
            cause = failure.__cause__
            if not isinstance(cause, MISUSE):
                raise
            text = str(cause) if isinstance(cause, Misuse) else said(cause)
            call.answer, call.error = cut(f"error: {text}", self._answer_bytes), True
        else:
            with blaming(f"the result of {call.name} ({defined_at(tool)})"):
                if holds_images(result):
                    text, images = joined(result, self._limits, text_of)
                    call.answer = cut(text, self._answer_bytes)
                    images = images[: call.answer.count(PLACE)]
                else:
                    call.answer = cut(text_of(result), self._answer_bytes)
        call.seconds = time.perf_counter() - started
        return images

    def _checked(self, call: ToolCall) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
        """The tool that a call names, and its positional and named arguments."""
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise Misuse(f"there is no tool {call.name[:80]!r}; the tools are: {known}")
        tool = self._tools[call.name]
        described = described_of(tool)
        values = checked(call.name, call.arguments, described.parameters)
        if (signature := described.signature) is None:
            return tool, (), values
        for name, value in values.items():
            try:
                with blaming(f"argument {name!r} of {call.name} ({defined_at(tool)})"):
                    values[name] = signature.converted(name, value)
            except EnvironmentFailed as failure:
                if not isinstance(failure.__cause__, Unfit):
                    raise
                text = f"argument {name!r} of {call.name}: {failure.__cause__}"
                raise Misuse(text[:MAX_ERROR]) from None
        bound = signature.bound(values)
        return tool, bound.args, bound.kwargs


def checked(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the arguments of a call of a tool, which may change them, those written as texts
    in their schema's types.

    Raises:
        Misuse: they do not fit.
    """
    known, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    if others is False and (extra := [name for name in arguments if name not in known]):
        takes = ", ".join(known) or "none"
        raise Misuse(f"{tool} has no argument {extra[0][:80]!r}; it takes: {takes}")
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        raise Misuse(f"{tool} needs the argument {missing[0]!r}")
    values = {}
    for name, value in arguments.items():
        part = known.get(name, others)
        values[name] = coerced(value, part if isinstance(part, dict) else {})
        validator = Draft202012Validator(_standard(part))
        if fault := best_match(validator.iter_errors(values[name])):
            raise Misuse(f"argument {name!r} of {tool}: {fault.message[:MAX_ERROR]}")
    return values


class Misuse(ValueError):
    """A call that the tool's description does not allow; the model reads the message alone."""


def methods(toolbox: Any) -> list[Callable[..., Any]]:
    """The public methods of a toolbox, a class or an object, in the order of their definition; or
    the tools that its class describes (`descriptions`), which its `call(name, arguments)` calls.

    Raises:
        InputError: one that Python does not bind as a method: a `partialmethod`, or an object of a
            decorator without `__get__`; or a `singledispatchmethod`, which has several signatures.
    """
    owner = toolbox if inspect.isclass(toolbox) else type(toolbox)
    if describe := getattr(owner, "descriptions", None):
        return [Remote(toolbox, described) for described in describe()]
    names = dict.fromkeys(name for base in reversed(owner.__mro__) for name in vars(base))
    found: list[Callable[..., Any]] = []
    for name in names:
        method = inspect.getattr_static(owner, name)
        if name.startswith("_") or name in RESERVED or not _is_method(method):
            continue
        if not hasattr(method, "__get__") or isinstance(method, singledispatchmethod):
            raise InputError(
                f"{owner.__qualname__}.{name} is a {type(method).__name__}, which cannot be a tool:"
                f" define a method, or begin its name with _"
            )
        bound = method.__get__(toolbox, owner)
        if isinstance(method, partialmethod):
            bound.__name__ = name
        found.append(bound)
    return found


def _is_method(attribute: Any) -> bool:
    """True for functions of any kind in a class, also decorated ones; not for classes."""
    if isinstance(attribute, staticmethod | classmethod | partialmethod | singledispatchmethod):
        return True
    if inspect.isclass(attribute) or isinstance(attribute, property | cached_property):
        return False
    return callable(attribute) or all(hasattr(attribute, n) for n in ("__get__", "__wrapped__"))


def _toolbox_of(tool: Any) -> Any:
    """The object whose method a tool is; None for functions."""
    return _toolbox_of(tool.func) if isinstance(tool, partial) else getattr(tool, "__self__", None)


class Described(NamedTuple):
    """A tool's description, and how it is called; without a signature, by its parameters' names."""

    tool: Tool
    signature: Signature | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        return dict(self.tool["function"].get("parameters") or {})


class Remote:
    """A tool that its toolbox describes, and calls by its name."""

    def __init__(self, toolbox: Any, described: Described) -> None:
        self.__self__, self.described = toolbox, described
        self.__name__ = self.__qualname__ = str(described.tool["function"]["name"])
        self.place = str(getattr(toolbox, "name", ""))

    async def __call__(self, **arguments: Any) -> Any:
        return await self.__self__.call(self.__name__, arguments)


def schema_of(tool: Callable[..., Any]) -> Tool:
    """The description of a tool, in the form that chat templates read.

    Raises:
        InputError: it has no docstring, or a parameter without a type hint or a description, or of
            a type that JSON cannot give.
    """
    return described_of(tool).tool


def described_of(tool: Callable[..., Any]) -> Described:
    """A tool's own attribute `described`, or what its hints and its docstring say; see
    `schema_of`."""
    own = getattr(tool, "described", None)
    return own if isinstance(own, Described) else _described(_Same(tool))


class _Same:
    """A tool that equals itself; a method, that of every other object."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.tool = tool
        self._of = tool.__func__ if isinstance(tool, MethodType) else tool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)


@lru_cache
def _described(same: _Same) -> Described:
    # Imported here: transformers takes seconds, and a run's first checks need none of it.
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    tool, name = same.tool, name_of(same.tool)
    function = function_of(tool)
    try:
        doc = inspect.getdoc(function)
        if not doc and type(tool).__module__ not in ("builtins", "functools"):  # an object
            doc = inspect.getdoc(type(tool))
        if not doc:
            raise TypeError("it has no docstring")
        head, args, rest = doc.strip().partition("\nArgs:")
        doc = head + args + _PARAMETER.sub(r"\1\2:", rest)
        about, parameters, returned = parse_google_format_docstring(doc)
        signature = signature_of(tool, parameters or {})
    except Exception as error:  # a hint may be anything, and raise anything
        named = f"tool {getattr(function, '__qualname__', name)} ({defined_at(function)})"
        raise InputError(
            f"{named}: {error}; a tool needs a type hint for each parameter, of a type that JSON "
            f"can give, and a Google docstring that describes each under `Args:`"
        ) from None
    described = {"name": name, "description": about, "parameters": signature.schema}
    if signature.returns is not None:
        described["return"] = signature.returns | ({"description": returned} if returned else {})
    return Described({"type": "function", "function": described}, signature)


def _standard(schema: Any) -> Any:
    """A schema in standard JSON Schema, which has no `nullable`. Names in objects, which are texts,
    are checked when they are converted."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {k: _standard(v) for k, v in schema.items() if k not in ("nullable", "propertyNames")}
    for key in BY_NAME:
        if isinstance(named := schema.get(key), dict):
            rest[key] = {name: _standard(part) for name, part in named.items()}
    return {"anyOf": [rest, {"type": "null"}]} if schema.get("nullable") is True else rest


def text_of(result: Any) -> str:
    """The answer that the model reads: a text unchanged, anything else as JSON.

    Raises:
        UnknownType: a value without an equivalent in JSON.
    """
    return result if isinstance(result, str) else json.dumps(_jsonable(result), ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    """A result in JSON's types: as a row's values (`plain`), and sets in order, dates, paths,
    enumerations, dataclasses and models."""
    if isinstance(value, Mapping):
        return {_key(key): _jsonable(part) for key, part in value.items()}
    if isinstance(value, Sequence | deque | ValuesView) and not isinstance(value, _NO_LISTS):
        return [_jsonable(part) for part in value]
    if isinstance(value, Set):
        return sorted((_jsonable(part) for part in value), key=_rank)
    if isinstance(value, Enum):
        return _jsonable(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("M", "m"):  # NumPy's dates and spans of time
        return [_jsonable(part) for part in value] if value.shape else str(value)
    if kind == "O" and hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, date | clock | timedelta | BaseModel):
        return to_jsonable_python(value, fallback=_jsonable)
    return plain(value)


def _key(key: Any) -> str | int | float | None:
    found = _jsonable(key)
    if not isinstance(found, str | int | float | None):
        raise UnknownType(f"{key!r:.80} as a name in an object: give text")
    return found


def _rank(part: Any) -> tuple[bool, float, str]:
    """Sorts the parts of a set: numbers first, then by their JSON."""
    if isinstance(part, int | float):
        return False, part, ""
    return True, 0, json.dumps(part)


def cut(text: str, limit: int) -> str:
    """The text in at most `limit` bytes of UTF-8, with a mark where it was cut."""
    data = encoded(text).encode()
    if len(data) <= limit:
        return data.decode()
    mark = f" [cut: {len(data)} bytes]"
    return data[: limit - len(mark)].decode(errors="ignore") + mark
