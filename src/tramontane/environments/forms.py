"""Calls in the forms of families that have tokens of their own for them.

- `glm` (GLM-4.5 and later): `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`
- `invoke` (MiniMax, DeepSeek-V3.2 and others, with a prefix of theirs):
  `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`
- `gemma` (Gemma 4): `<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>`
- `lfm` (LFM2): `<|tool_call_start|>[NAME(KEY='VALUE')]<|tool_call_end|>`
- `deepseek` (V3, R1) and `kimi` (K2): a name and JSON between tokens
- `harmony` (gpt-oss): messages `to=functions.NAME`, and thoughts in the channel `analysis`

A reader never raises: what it cannot read becomes a call without a name (`unparsed`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tramontane.data.values import encoded
from tramontane.types import ToolCall

PYTHON = "python"  # the tool that runs code, whose argument is `code`
MAX_CALLS = 64  # of one turn; further ones are not read
MAX_DEPTH = 32  # of nested arguments
_SPACE = re.compile(r"\s*")
_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[^\s<]+:\d+")


def unparsed(reason: str) -> ToolCall:
    """A call that cannot be read; its answer tells the model why."""
    return ToolCall("", {}, f"error: the call cannot be read: {reason[:200]}", error=True)


def kept_id(text: object) -> str:
    """The id of a call, if it has a form that models are trained on: nine letters and digits
    (Mistral), `functions.NAME:NUMBER` (Kimi); else empty."""
    return text if isinstance(text, str) and _ID.fullmatch(text) else ""


def call_of(value: Any, own_id: object = None) -> ToolCall:
    """A call from an object with a name and arguments, which may be JSON in a text; `own_id`: what
    the model wrote as its id."""
    if not isinstance(value, dict):
        return unparsed("not an object with `name` and `arguments`")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        arguments = _clean(arguments)
    except (ValueError, RecursionError) as error:
        return unparsed(f"its arguments are not JSON: {error}")
    if not isinstance(name, str) or not name:
        return unparsed("it has no `name`")
    if not isinstance(arguments, dict) and arguments is not None:
        return unparsed("its `arguments` are not an object")
    return ToolCall(_clean(name), arguments or {}, "", id=kept_id(own_id))


def _clean(value: Any, depth: int = 0) -> Any:
    """A value from JSON without unpaired surrogates, which cannot be encoded."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return encoded(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth + 1) for key, item in value.items()}
    return [_clean(item, depth + 1) for item in value] if isinstance(value, list) else value


def from_json(text: str) -> ToolCall:
    """A call from its JSON."""
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return unparsed(f"not JSON: {error}")


def decoded(text: str, start: int) -> tuple[Any, int | None]:
    """The first value in JSON from `start` on, and its end; no end if there is none."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None


class _Tags(NamedTuple):
    """A call as a name, pairs of a key and a text, and an end. A text may hold the tags: it ends
    where the form lets it."""

    opening: re.Pattern[str]
    pair: re.Pattern[str]
    closing: re.Pattern[str]


_GLM = _Tags(
    re.compile(r"<tool_call>\s*(?P<name>[^\s<{]+)\s*"),
    re.compile(
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>|\Z))\s*",
        re.DOTALL,
    ),
    re.compile(r"</tool_call>|\Z"),
)
_INVOKE = _Tags(
    re.compile(
        r"(?:<[^\s<>]*(?:function_calls|tool_calls?)>\s*)?"
        r'<[^\s<>]*invoke name="(?P<name>[^"]+)"\s*>\s*'
    ),
    re.compile(
        r'<[^\s<>]*parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</[^\s<>]*parameter>'
        r"(?=\s*(?:<[^\s<>]*parameter |</[^\s<>]*invoke>))\s*",
        re.DOTALL,
    ),
    re.compile(r"</[^\s<>]*invoke>(?:\s*</[^\s<>]*(?:function_calls|tool_calls?)>)?"),
)


def _tagged(text: str, tags: _Tags) -> tuple[str, list[ToolCall]]:
    content, calls, at = "", list[ToolCall](), 0
    while (found := tags.opening.search(text, at)) and len(calls) < MAX_CALLS:
        content += text[at : found.start()]
        arguments, place = {}, found.end()
        while pair := tags.pair.match(text, place):
            arguments[pair["key"].strip()] = pair["value"]
            place = pair.end()
        if closed := tags.closing.match(text, place):
            calls.append(ToolCall(found["name"], arguments, ""))
            at = closed.end()
        else:
            calls.append(unparsed(f"after {text[:place].strip()[-40:]!r}"))
            following = tags.opening.search(text, found.end())
            at = following.start() if following else len(text)
    return content + text[at:], calls


def glm(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of GLM."""
    return _tagged(text, _GLM)


def invoke(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message whose calls are `<invoke>` tags."""
    return _tagged(text, _INVOKE)


_QUOTE = '<|"|>'
_GEMMA = re.compile(
    r'<\|tool_call>call:([^\s{]+)((?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>|<\|tool_call>).)*)'
    r"(?:<tool_call\|>|(?=<\|tool_call>)|\Z)",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"(?<=[{,])\s*([^\s\"{}\[\],:]+)\s*(?=:)")
_LITERAL = re.compile(r"\b(?:None|True|False)\b")
_AS_JSON = {"None": "null", "True": "true", "False": "false"}


def gemma(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of Gemma 4."""

    def as_json(body: str) -> str:
        pieces = body.split(_QUOTE)
        for place, piece in enumerate(pieces):
            if place % 2:
                pieces[place] = json.dumps(piece)
            else:
                bare = _BARE_KEY.sub(lambda found: json.dumps(found[1]), piece)
                pieces[place] = _LITERAL.sub(lambda found: _AS_JSON[found[0]], bare)
        return "".join(pieces)

    calls = []
    for name, body in _GEMMA.findall(text)[:MAX_CALLS]:
        value, end = decoded(as_json(body), 0)
        calls.append(
            unparsed(f"no object in {body[:80]!r}")
            if end is None
            else call_of({"name": name, "arguments": value})
        )
    return _GEMMA.sub("", text), calls


_LFM = re.compile(
    r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|(?=<\|tool_call_start\|>)|\Z)", re.DOTALL
)
# A text in quotes that are not escaped: it ends before the next argument, or the call's end.
_UNESCAPED = re.compile(
    r"(?<==)\s*'(.*?)'(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))", re.DOTALL
)


def lfm(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of LFM2: calls as in Python, or JSON."""
    calls = [call for found in _LFM.finditer(text) for call in _python_calls(found[1].strip())]
    return _LFM.sub("", text), calls


def _python_calls(body: str) -> list[ToolCall]:
    value, end = decoded(body, 0)
    if end is not None:
        return [call_of(each) for each in (value if isinstance(value, list) else [value])]
    mended = _UNESCAPED.sub(lambda found: repr(found[1]), body)
    for source in (body, mended):
        try:
            tree = ast.parse(source, mode="eval").body
            made = tree.elts if isinstance(tree, ast.List) else [tree]
            return [_python_call(each) for each in made]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return [unparsed(f"not [NAME(KEY=VALUE)]: {body[:80]!r}")]


def _python_call(made: ast.expr) -> ToolCall:
    if not isinstance(made, ast.Call) or made.args:
        return unparsed("not NAME(KEY=VALUE)")
    arguments = {str(each.arg): _constant(each.value) for each in made.keywords}
    return call_of({"name": ast.unparse(made.func), "arguments": arguments})


def _constant(value: ast.expr) -> Any:
    names = {"null": None, "true": True, "false": False}
    if isinstance(value, ast.Name) and value.id in names:
        return names[value.id]
    if isinstance(value, ast.List):
        return [_constant(each) for each in value.elts]
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return {str(ast.literal_eval(key)): _constant(each) for key, each in pairs if key}
    return ast.literal_eval(value)


_DEEPSEEK = (
    re.compile(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:\w+<｜tool▁sep｜>)?"
        r"(?P<name>[^\s<{]+)\s*"
        r"(?:```json|<｜tool▁sep｜>)"
    ),
    re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?|\Z)"),
)
_KIMI = (
    re.compile(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?"
        r"(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    ),
    re.compile(r"\s*(?:<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?|\Z)"),
)


def _named(text: str, form: tuple[re.Pattern[str], re.Pattern[str]]) -> tuple[str, list[ToolCall]]:
    """Calls that are a name and JSON, between tokens."""
    opening, closing = form
    content, calls, at = "", list[ToolCall](), 0
    while (found := opening.search(text, at)) and len(calls) < MAX_CALLS:
        content += text[at : found.start()]
        value, end = decoded(text, found.end())
        closed = None if end is None else closing.match(text, end)
        if closed:
            made = {"name": found["name"], "arguments": value}
            calls.append(call_of(made, found.groupdict().get("id")))
            at = closed.end()
        else:
            calls.append(unparsed(f"not JSON: {text[found.end() :].strip()[:80]!r}"))
            following = opening.search(text, found.end())
            at = following.start() if following else len(text)
    return content + text[at:], calls


def deepseek(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of DeepSeek-V3 or R1."""
    return _named(text, _DEEPSEEK)


def kimi(text: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of Kimi K2."""
    return _named(text, _KIMI)


_START = re.compile(r"(?:<\|(?:end|call|return|eom|eot)\|>)?\s*<\|start\|>assistant")
_END = re.compile(r"<\|(?:end|call|return|eom|eot)\|>\s*\Z")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def harmony(text: str) -> tuple[str, str, list[ToolCall]]:
    """(thoughts, content, calls) of a turn of several messages, each with a channel or a
    recipient."""
    thoughts, content, calls = list[str](), list[str](), list[ToolCall]()
    for message in _START.split(text):
        header, mark, body = message.partition("<|message|>")
        body = _END.sub("", body if mark else header)
        to = _RECIPIENT.search(header) if mark else None
        if to and to[1] not in ("self", "user", "all"):
            calls += _called(to[1], body)
        elif mark and ("analysis" in header or (to and to[1] == "self")):
            thoughts.append(body)
        else:
            content.append(body)
    return "\n".join(thoughts), "".join(content), calls[:MAX_CALLS]


def _called(name: str, body: str) -> list[ToolCall]:
    """The calls in a message to a tool: JSON, `<invoke>` tags, or code."""
    if found := invoke(body)[1]:
        return found
    value, end = decoded(body, 0)
    if end is None and name == PYTHON:
        return [ToolCall(PYTHON, {"code": body}, "")]
    if end is None or body[end:].strip():
        return [unparsed(f"not JSON: {body.strip()[:80]!r}")]
    return [call_of({"name": name, "arguments": value})]


_CHANNEL = re.compile(r"<\|channel>(?:thought)?\n?(.*?)\n?(?:<channel\|>|\Z)", re.DOTALL)


def outside_channel(text: str) -> tuple[str, str]:
    """(thoughts, the rest) of a message of Gemma 4."""
    return "".join(_CHANNEL.findall(text)), _CHANNEL.sub("", text)


# The tokens around calls that are written as text.
DELIMITERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


def written(form: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls, each with `name` and `arguments`, as a model writes them in a form; for templates that
    do not write them."""
    if form == "lfm":
        texts = [
            f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"
            for call in calls
        ]
        return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"
    if form == "llama":
        made = ({"name": c["name"], "parameters": c["arguments"]} for c in calls)
        return "; ".join(json.dumps(each, ensure_ascii=False) for each in made)
    lines = (json.dumps(dict(call), ensure_ascii=False) for call in calls)
    return "\n".join(f"<tool_call>{line}</tool_call>" for line in lines)


READERS: dict[str, Callable[[str], tuple[str, list[ToolCall]]]] = {
    "glm": glm,
    "invoke": invoke,
    "gemma": gemma,
    "lfm": lfm,
    "deepseek": deepseek,
    "kimi": kimi,
}
