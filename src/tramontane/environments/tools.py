"""Tools: functions and toolboxes that a model may call, and the answers to its calls.

A tool is a function with type hints and a Google docstring, from which its description is made
(transformers' `get_json_schema`). It is called with the arguments that its description allows; its
result is the answer, a text or JSON.

A model that uses a tool wrongly reads an error: an unknown name, arguments that do not fit, or a
`ValueError`, `TypeError`, `LookupError` or `ArithmeticError` of the tool. Any other exception is a
failure of the tool, for which the model must not be punished (`EnvironmentFailed`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partialmethod
from types import FunctionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from tramontane.data.prompts import Tool
from tramontane.data.values import UnknownType, encoded, plain
from tramontane.environments.arguments import coerced
from tramontane.environments.running import EnvironmentFailed, Runner, blaming, said
from tramontane.errors import InputError
from tramontane.types import ToolCall
from tramontane.verifier.functions import MAX_ERROR, defined_at

MISUSE = (ValueError, TypeError, LookupError, ArithmeticError)
_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
# Methods of a toolbox or an environment that are not tools.
RESERVED = frozenset({"start", "step", "close", "reset", "get_reward", "tools"})


class Toolset:
    """The tools of one conversation.

    Args:
        tools: functions or bound methods.
        answer_bytes: `conversation.answer_bytes`.

    Raises:
        InputError: a tool without type hints or a docstring, or two with one name.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], answer_bytes: int) -> None:
        self._answer_bytes = answer_bytes
        self._tools: dict[str, Callable[..., Any]] = {}
        self.schemas: list[Tool] = []
        for tool in tools:
            described = schema_of(tool)
            name = described["function"]["name"]
            if name in self._tools:
                raise InputError(
                    f"two tools are named {name!r}: {defined_at(self._tools[name])} and "
                    f"{defined_at(tool)}; rename one"
                )
            self._tools[name] = tool
            self.schemas.append(described)

    async def answer(self, calls: Sequence[ToolCall], runner: Runner) -> None:
        """Answer the calls of a turn; those that did not parse already have an answer.

        Calls of one toolbox are answered in order, unless it has `independent = True`; others
        concurrently.

        Raises:
            EnvironmentFailed: a failure of a tool.
        """
        lines: dict[Any, list[ToolCall]] = {}
        for number, call in enumerate(calls):
            if call.name:
                toolbox = getattr(self._tools.get(call.name), "__self__", None)
                alone = toolbox is None or getattr(toolbox, "independent", False)
                lines.setdefault(("call", number) if alone else id(toolbox), []).append(call)
        tasks = [asyncio.create_task(self._in_order(line, runner)) for line in lines.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others, if one failed
                task.cancel()

    async def _in_order(self, calls: Sequence[ToolCall], runner: Runner) -> None:
        for call in calls:
            await self._answer(call, runner)

    async def _answer(self, call: ToolCall, runner: Runner) -> None:
        started = time.perf_counter()
        try:
            tool, arguments = self._checked(call)
            result = await runner.run(tool, **arguments)
        except _Misuse as error:
            call.answer, call.error = cut(f"error: {error}", self._answer_bytes), True
        except EnvironmentFailed as failure:
            cause = failure.__cause__
            if not isinstance(cause, MISUSE):
                raise
            call.answer, call.error = cut(f"error: {said(cause)}", self._answer_bytes), True
        else:
            with blaming(f"the result of {call.name} ({defined_at(tool)})"):
                call.answer = cut(text_of(result), self._answer_bytes)
        call.seconds = time.perf_counter() - started

    def _checked(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The tool that a call names, and its arguments."""
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise _Misuse(f"there is no tool {call.name[:80]!r}; the tools are: {known}")
        tool = self._tools[call.name]
        function = getattr(tool, "__func__", tool)  # the same for all conversations
        schema = _schema(function)["function"]["parameters"]
        known = schema.get("properties", {})
        if extra := [name for name in call.arguments if name not in known]:
            takes = ", ".join(known) or "none"
            raise _Misuse(f"{call.name} has no argument {extra[0][:80]!r}; it takes: {takes}")
        if missing := [name for name in schema.get("required", ()) if name not in call.arguments]:
            raise _Misuse(f"{call.name} needs the argument {missing[0]!r}")
        arguments = {}
        for name, value in call.arguments.items():
            arguments[name] = coerced(value, known[name])
            if fault := best_match(_validator(function, name).iter_errors(arguments[name])):
                raise _Misuse(f"argument {name!r} of {call.name}: {fault.message[:MAX_ERROR]}")
        return tool, arguments


class _Misuse(Exception):
    """A call that the tool's description does not allow."""


def methods(toolbox: Any) -> list[Callable[..., Any]]:
    """The public methods of a toolbox, a class or an object, in the order of their definition.

    Raises:
        InputError: one that Python does not bind as a method: a `partialmethod`, or an object of a
            decorator without `__get__`.
    """
    owner = toolbox if inspect.isclass(toolbox) else type(toolbox)
    names = dict.fromkeys(name for base in reversed(owner.__mro__) for name in vars(base))
    found: list[Callable[..., Any]] = []
    for name in names:
        method = inspect.getattr_static(owner, name)
        if name.startswith("_") or name in RESERVED or not _is_method(method):
            continue
        if isinstance(method, partialmethod) or not hasattr(method, "__get__"):
            raise InputError(
                f"{owner.__qualname__}.{name} is a {type(method).__name__}, which cannot be a tool:"
                f" define a method, or begin its name with _"
            )
        plainly = isinstance(method, FunctionType | staticmethod | classmethod)
        found.append(getattr(toolbox, name) if plainly or toolbox is not owner else method)
    return found


def _is_method(attribute: Any) -> bool:
    """True for functions of any kind in a class, also decorated ones; not for classes."""
    kinds = staticmethod, classmethod, partialmethod
    return isinstance(attribute, kinds) or (callable(attribute) and not inspect.isclass(attribute))


def schema_of(tool: Callable[..., Any]) -> Tool:
    """The description of a tool, in the form that chat templates read.

    Raises:
        InputError: it has no docstring, or a parameter without a type hint or a description.
    """
    return _schema(getattr(tool, "__func__", tool))


@lru_cache
def _schema(function: Callable[..., Any]) -> Tool:
    # Imported here: transformers takes seconds, and a run's first checks need none of it.
    from transformers.utils import chat_template_utils as templates

    # It would import torch, which takes seconds, to recognize a tensor among the type hints.
    templates.is_torch_available = lambda: "torch" in sys.modules
    name = getattr(function, "__qualname__", repr(function))
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in _BY_NAME and parameter.name != "self":
                raise TypeError(f"parameter {parameter.name!r} cannot be given by name")
        for named, hint in get_type_hints(function).items():
            _check_hint(named, hint, templates._parse_type_hint)
        described: Tool = templates.get_json_schema(function)
    except Exception as error:  # a hint may be anything, and raise anything
        raise InputError(
            f"tool {name} ({defined_at(function)}): {error}; a tool needs a type hint for each "
            f"parameter and a Google docstring that describes each under `Args:`"
        ) from None
    return described


def _check_hint(parameter: str, hint: Any, parse: Callable[[Any], Any]) -> None:
    """Raise a TypeError for a parameter whose values JSON does not give in its type."""
    if parameter == "return":
        return
    try:
        parse(hint)
    except Exception as error:
        raise TypeError(f"parameter {parameter!r}: {error}") from None
    todo = [hint]
    while todo:
        part = todo.pop()
        keys = get_args(part)[:1] if get_origin(part) is dict else ()
        is_enum = isinstance(part, type) and issubclass(part, Enum) and not issubclass(part, str)
        if is_enum or get_origin(part) is tuple or part is tuple or keys not in ((), (str,)):
            raise TypeError(
                f"parameter {parameter!r}: JSON has no {part}; take text, numbers, a Literal, a "
                f"list or a dict with text as keys"
            )
        todo += [inner for inner in get_args(part) if get_origin(part) is not Literal]


@lru_cache
def _validator(function: Callable[..., Any], parameter: str) -> Draft202012Validator:
    properties = _schema(function)["function"]["parameters"]["properties"]
    return Draft202012Validator(_standard(properties[parameter]))


def _standard(schema: Any) -> Any:
    """A schema in standard JSON Schema, which has no `nullable`."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _standard(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if schema.get("nullable") is True else rest


def text_of(result: Any) -> str:
    """The answer that the model reads: a text unchanged, anything else as JSON.

    Raises:
        UnknownType: a value without an equivalent in JSON.
    """
    return result if isinstance(result, str) else json.dumps(_jsonable(result), ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    """A result in JSON's types: as a row's values (`plain`), and sets in order, dates, enumerations
    and dataclasses."""
    if isinstance(value, Mapping):
        return {_key(key): _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    if isinstance(value, Set):
        return sorted((_jsonable(part) for part in value), key=_rank)
    if isinstance(value, Enum):
        return _jsonable(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind == "M" and not getattr(value, "shape", ()):
        return str(value)  # NumPy's date
    if kind in ("M", "O") and hasattr(value, "tolist"):  # of dates, of objects
        return [_jsonable(part) for part in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "model_dump"):  # of pydantic
        return value.model_dump(mode="json")
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
