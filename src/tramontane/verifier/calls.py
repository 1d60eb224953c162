"""Function calls, compared by syntax tree with the accepted ones: BFCL's simple, multiple and
parallel kinds for Python (the Berkeley Function-Calling Leaderboard).

A problem's metadata has `function` (the descriptions of the functions that may be called) and
`ground_truth`, the expected calls in any order: a name with, for each argument, the list of
accepted values, in which an empty text means that the argument may be left out.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tramontane.verifier.format import fences

_TYPES: dict[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool,
    "array": list, "tuple": list, "dict": dict, "any": str,
}  # fmt: skip
# What the leaderboard leaves out of account in texts: April 1, 2024 is April 1 2024.
_IGNORED = re.compile(r"[ ,./\-_*^]")
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOL_CALLS = "[TOOL_CALLS]"


class Call(NamedTuple):
    """A call: the function's dotted name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


class NoCalls(ValueError):
    """The answer is no list of function calls."""


def judge(metadata: Mapping[str, Any], answer: str) -> tuple[bool, str]:
    """(True if the answer makes exactly the expected calls, else the reason).

    Raises:
        ValueError: the problem's row has no descriptions or no expected calls.
    """
    described, expected = metadata.get("function"), metadata.get("ground_truth")
    if not isinstance(described, list) or not isinstance(expected, list):
        raise ValueError("a row of BFCL needs `function` and `ground_truth`")
    try:
        calls = parse_calls(answer)
    except NoCalls as error:
        return False, str(error)
    if len(calls) != len(expected):
        return False, f"{len(calls)} calls, {len(expected)} expected"
    by_name = {function["name"]: function for function in described}
    for wanted in expected:
        [(name, accepted)] = wanted.items()
        reasons = [mismatch(call, by_name[name], accepted) for call in calls]
        if "" not in reasons:
            return False, reasons[0] if len(reasons) == 1 else f"no call {name} as expected"
        calls.pop(reasons.index(""))
    return True, ""


def parse_calls(answer: str) -> list[Call]:
    """The calls of an answer: `[name(argument=value, …), …]` in Python's syntax, alone or as the
    last fenced block, or JSON in one of the forms in which models call tools (`<tool_call>`,
    `[TOOL_CALLS]`, or a bare list of objects with `name` and `arguments`).

    Nothing is executed: the text is parsed, and values are literals.

    Raises:
        NoCalls: anything else.
    """
    blocks = fences(answer)
    text = (blocks[-1].body if blocks else answer).strip()
    if found := _TOOL_CALL.findall(text):
        return [_from_json(part) for part in found]
    text = text.removeprefix(_TOOL_CALLS).strip()
    if re.match(r"[\[{]\s*[{\"]", text):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NoCalls(f"no JSON: {error}") from None
        return [_from_object(v) for v in (value if isinstance(value, list) else [value])]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoCalls(f"no function calls: {error}") from None
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return [_from_node(node) for node in nodes]


def mismatch(call: Call, described: Mapping[str, Any], accepted: Mapping[str, Any]) -> str:
    """The first difference of a call from an expected one; empty if there is none.

    Args:
        call: the call.
        described: the function's description, with the types of its parameters.
        accepted: accepted values by argument.
    """
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
        kind = parameters["properties"][name].get("type", "any")
        if not _has_type(value, kind, accepted[name]):
            return f"{name}={value!r} is no {kind}"
        if not any(_same(value, choice) for choice in accepted[name]):
            return f"{name}={value!r} is not accepted"
    return ""


def _has_type(value: Any, kind: str, accepted: Sequence[Any]) -> bool:
    """True for the described type, or that of an accepted value, which may name a variable."""
    if isinstance(value, tuple):
        value = list(value)
    expected = _TYPES.get(kind, object)
    if expected is float and type(value) is int:
        return True
    return type(value) is expected or any(type(value) is type(a) for a in accepted if a != "")


def _same(value: Any, accepted: Any) -> bool:
    """True for equal values; texts are compared without case, spaces and most punctuation, a
    dictionary with the accepted values of each of its keys."""
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
    """A literal's value; the source text of a name or an expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.List | ast.Tuple):
            return [_value(element) for element in node.elts]
        return {"true": True, "false": False}.get(text := ast.unparse(node), text)


def _from_json(text: str) -> Call:
    try:
        return _from_object(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise NoCalls(f"no JSON: {error}") from None


def _from_object(value: Any) -> Call:
    """A call from `{"name", "arguments"}` or `{NAME: ARGUMENTS}`; arguments may be JSON text."""
    if isinstance(value, dict) and len(value) == 1:
        [(name, arguments)] = value.items()
    elif isinstance(value, dict):
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters", {}))
    else:
        raise NoCalls(f"no function call: {json.dumps(value)[:80]}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise NoCalls("a call needs a name and arguments by name")
    return Call(name, arguments)
