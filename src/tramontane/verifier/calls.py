"""Function calls, compared by syntax tree with the accepted ones: BFCL's simple, multiple and
parallel kinds for Python (the Berkeley Function-Calling Leaderboard).

A problem's metadata has `function` (descriptions of the callable functions) and `ground_truth`, the
expected calls in any order: a name with the list of accepted values of each argument, in which an
empty text means that the argument may be omitted.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tramontane.verifier.format import fences

_TYPES: dict[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool,
    "array": list, "tuple": list, "dict": dict, "any": str,
}  # fmt: skip
# Ignored in texts, as on the leaderboard: April 1, 2024 is April 1 2024.
_IGNORED = re.compile(r"[ ,./\-_*^]")
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOL_CALLS = "[TOOL_CALLS]"
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
MAX_EXPONENT, MAX_NUMBER = 64, 2**1000  # limits of arithmetic in arguments


class Call(NamedTuple):
    """A call: the function's dotted name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


class Expected(NamedTuple):
    """An expected call: the function's description, and the accepted values by argument."""

    described: Mapping[str, Any]
    accepted: Mapping[str, Sequence[Any]]


class NoCalls(Exception):
    """The answer is not a list of function calls."""


def judge(metadata: Mapping[str, Any], answer: str) -> tuple[bool, str]:
    """(True if the answer makes exactly the expected calls, else the reason).

    Raises:
        ValueError: see `expected_calls`.
    """
    expected = expected_calls(metadata)
    try:
        calls = parse_calls(answer)
    except NoCalls as error:
        return False, str(error)
    if len(calls) != len(expected):
        return False, f"{len(calls)} calls, {len(expected)} expected"
    for wanted in expected:
        reasons = [mismatch(call, wanted) for call in calls]
        if "" not in reasons:
            name = wanted.described["name"]
            return False, reasons[0] if len(reasons) == 1 else f"no call {name} as expected"
        calls.pop(reasons.index(""))
    return True, ""


def expected_calls(row: Mapping[str, Any]) -> list[Expected]:
    """The calls that a row expects.

    Raises:
        ValueError: no descriptions, no expected calls, or a call of a function without a
            description.
    """
    functions, calls = row.get("function"), row.get("ground_truth")
    if not isinstance(functions, list) or not functions or not all(map(_is_described, functions)):
        raise ValueError("`function` must be a list of objects with `name` and `parameters`")
    if not isinstance(calls, list) or not calls:
        raise ValueError("`ground_truth` must be a list of expected calls")
    described = {function["name"]: function for function in functions}
    expected = []
    for call in calls:
        if not isinstance(call, dict) or len(call) != 1:
            raise ValueError("`ground_truth` must have objects with one function each")
        [(name, accepted)] = call.items()
        if name not in described:
            raise ValueError(f"`ground_truth` calls {name!r}, which `function` does not offer")
        if not isinstance(accepted, dict) or not all(
            isinstance(v, list) for v in accepted.values()
        ):
            raise ValueError(f"`ground_truth` of {name}: every argument needs a list of values")
        expected.append(Expected(described[name], accepted))
    return expected


def _is_described(function: Any) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return isinstance(properties, dict) and all(isinstance(v, dict) for v in properties.values())


def parse_calls(answer: str) -> list[Call]:
    """The calls of an answer: `[name(argument=value, …), …]` in Python's syntax, alone or as the
    last fenced block, or JSON in one of the forms that models use for tool calls (`<tool_call>`,
    `[TOOL_CALLS]`, or a bare list of objects with `name` and `arguments`).

    Nothing is executed: the text is parsed, and values are literals.

    Raises:
        NoCalls: anything else.
    """
    blocks = fences(answer)
    text = (blocks[-1].body if blocks else answer).strip()
    if found := _TOOL_CALL.findall(text):
        return [_from_object(_json(part)) for part in found]
    text = text.removeprefix(_TOOL_CALLS).strip()
    if re.match(r"[\[{]\s*[{\"]", text):
        value = _json(text)
        return [_from_object(v) for v in (value if isinstance(value, list) else [value])]
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_from_node(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCalls(f"no function calls: {error}") from None


def mismatch(call: Call, expected: Expected) -> str:
    """The first difference of a call from an expected one; empty if there is none."""
    described, accepted = expected
    if call.name != described["name"]:
        return f"call of {call.name}, {described['name']} expected"
    parameters = described["parameters"]
    missing = [p for p in parameters.get("required", ()) if p not in call.arguments]
    missing += [p for p, v in accepted.items() if p not in call.arguments and "" not in v]
    if missing:
        return f"no argument {missing[0]}"
    for name, value in call.arguments.items():
        if name not in accepted or name not in parameters["properties"]:
            return f"unexpected argument {name}"
        parameter = parameters["properties"][name]
        kind = parameter.get("type", "any")
        if kind == "tuple" and isinstance(value, tuple):
            value = list(value)  # the accepted values come from JSON, which has no tuples
        if not _has_type(value, kind, accepted[name]):
            return f"{name}={value!r:.80} is not of type {kind}"
        inner = _item_type(parameter)
        if inner and not _has_items(value, inner, accepted[name]):
            return f"{name}={value!r:.80} is not of type {kind} of {inner}"
        if not any(_same(value, choice) for choice in accepted[name]):
            return f"{name}={value!r:.80} is not accepted"
    return ""


def _has_type(value: Any, kind: str, accepted: Sequence[Any]) -> bool:
    """True for the described type, or the type of the accepted values."""
    expected = _TYPES.get(kind, object)
    if expected is float and type(value) is int:
        return True
    return type(value) is expected or type(value) is _first_type(accepted)


def _item_type(parameter: Mapping[str, Any]) -> str:
    """The described type of an array's or a tuple's items; empty if there is none."""
    items = parameter.get("items")
    kind = items.get("type") if isinstance(items, dict) else None
    return kind if parameter.get("type") in ("array", "tuple") and kind in _TYPES else ""


def _has_items(value: Any, kind: str, accepted: Sequence[Any]) -> bool:
    """True if all items have the described type, or that of the accepted items. As on the
    leaderboard, the items of an argument that may be omitted are not checked."""
    return not isinstance(value, list) or any(
        not isinstance(choice, list)
        or all(type(item) in (_TYPES[kind], _first_type(choice)) for item in value)
        for choice in accepted
    )


def _first_type(accepted: Sequence[Any]) -> type | None:
    return next((type(value) for value in accepted if value != ""), None)


def _same(value: Any, accepted: Any) -> bool:
    """True for equal values: texts up to case and punctuation, dictionaries key by key."""
    if isinstance(value, str) and isinstance(accepted, str):
        return _plain(value) == _plain(accepted)
    if isinstance(value, dict) and isinstance(accepted, dict):
        known = all(
            key in accepted and any(_same(v, choice) for choice in _choices(accepted[key]))
            for key, v in value.items()
        )
        return known and all(key in value or "" in _choices(v) for key, v in accepted.items())
    if isinstance(value, list | tuple) and isinstance(accepted, list):
        return len(value) == len(accepted) and all(map(_same, value, accepted))
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    return bool(value == accepted)


def _choices(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _from_node(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise NoCalls(f"no function call: {ast.unparse(node)[:80]}")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise NoCalls("an argument without its name")
    name = ast.unparse(node.func)
    return Call(name, {str(k.arg): _value(k.value) for k in node.keywords})


def _value(node: ast.expr) -> Any:
    """The value of a literal or of arithmetic; the source text of any other expression."""
    match node:
        case ast.Constant(value):
            if isinstance(value, int) and value > MAX_NUMBER:
                raise ValueError("a number that is too large")
            return value
        case ast.List(elements):
            return [_value(element) for element in elements]
        case ast.Tuple(elements):
            return tuple(_value(element) for element in elements)
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return {_value(key): _value(value) for key, value in pairs if key is not None}
        case ast.BinOp() | ast.UnaryOp():
            try:
                return _number(node)
            except (ValueError, ArithmeticError):
                pass
    return {"true": True, "false": False}.get(text := ast.unparse(node), text)


def _number(node: ast.expr) -> int | float:
    """The value of arithmetic on numbers; `ValueError` or `ArithmeticError` for others."""
    value: Any = None
    match node:
        case ast.Constant(constant):
            value = constant
        case ast.UnaryOp(ast.USub(), operand):
            value = -_number(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            value = _number(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
            first, second = _number(left), _number(right)
            if isinstance(operation, ast.Pow) and abs(second) > MAX_EXPONENT:
                raise ValueError("an exponent that is too large")
            value = _ARITHMETIC[type(operation)](first, second)
    if type(value) not in (int, float) or abs(value) > MAX_NUMBER:
        raise ValueError("no number, or one that is too large")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoCalls(f"no JSON: {error}") from None


def _from_object(value: Any) -> Call:
    """A call from `{"name", "arguments"}` or `{NAME: ARGUMENTS}`; arguments may be text."""
    if not isinstance(value, dict):
        raise NoCalls(f"no function call: {value!r:.80}")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) and len(value) == 1:
        [(name, arguments)] = value.items()
    if isinstance(arguments, str) and arguments.strip():
        arguments = _json(arguments)
    if not isinstance(name, str) or not isinstance(arguments or {}, dict):
        raise NoCalls("a call needs a name and arguments by name")
    return Call(name, arguments or {})
