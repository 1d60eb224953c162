"""Readers of calls, by the forms that models are trained to write (`calls`).

A reader returns (content, calls) of a message and never raises: what it cannot read becomes a call
without a name (`unparsed`). Those that are a name, and tags or JSON behind it, are patterns for
`tagged` and `learned`, where the forms of other chat templates are learned.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from tramontane.data.prompts import Tool
from tramontane.environments.forms import (
    MAX_CALLS,
    PYTHON,
    call_of,
    decoded,
    from_json,
    unparsed,
    written_as,
)
from tramontane.environments.json_calls import JsonCalls
from tramontane.environments.tagged import Tags
from tramontane.types import ToolCall
from tramontane.verifier.format import fences

Reader = Callable[[str, Sequence[Tool]], tuple[str, list[ToolCall]]]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_HERMES_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_LLAMA = re.compile(r'\{\s*"(?:name|type|function)"')
_LLAMA_NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([^\[\]{}\n]*[^\[\]{}\s])\s*(?:\[CALL_ID\](\w*))?\[ARGS\]")
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_4 = re.compile(r"\s*<\|python_start\|>(.*?)<\|python_end\|>(.*)", re.DOTALL)
_LISTED = re.compile(r"\[\s*([\w.]+)\(")


def _hermes(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    content, calls, at = "", list[ToolCall](), 0
    while (found := _HERMES.search(text, at)) and len(calls) < MAX_CALLS:
        content += text[at : found.start()]
        # JSON first: its texts may hold the tags.
        value, end = decoded(text, found.start(1))
        closed = None if end is None else _HERMES_END.match(text, end)
        at = found.end() if closed is None else closed.end()
        made = [from_json(found[1])] if closed is None else _listed(value)
        calls += written_as(text[found.start() : at], made)
    return content + _HERMES.sub("", text[at:]), calls


def _listed(value: Any) -> list[ToolCall]:
    """The calls of an object, or of a list of some."""
    listed = value if isinstance(value, list) and value else [value]
    return [call_of(each, each.get("id") if isinstance(each, dict) else None) for each in listed]


def _llama(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    names = [tool["function"]["name"] for tool in tools]
    if found := _LLAMA_4.match(text):  # around a text before a call, or around a call or code
        said, rest = found.groups()
        content, body, tag = (said, rest, "") if rest.strip() else ("", said, _PYTHON_TAG)
    else:
        content, tag, rest = text.partition(_PYTHON_TAG)
        content, body = (content, rest) if tag else ("", text)
    body = body.strip()
    if (listed := _LISTED.match(body)) and listed[1] in names:
        return content, _python_calls(body)
    if tag and not body.startswith("{"):
        return content, [ToolCall(PYTHON, {"code": body}, "")]
    if not tag and not _is_call(body, names):
        return text, []  # an answer, perhaps in JSON
    calls, decoder = list[ToolCall](), json.JSONDecoder()
    while body and len(calls) < MAX_CALLS:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(unparsed(f"not JSON: {error}", body))
            break
        calls += written_as(body[:end], [call_of(value)])
        body = body[end:].lstrip("; \t\r\n")
    return content, calls


def _is_call(body: str, names: list[str]) -> bool:
    """True if a text begins with an object that has arguments or a tool's name; of a broken one,
    its beginning decides."""
    if not _LLAMA.match(body):
        return False
    value, end = decoded(body, 0)
    if end is not None:
        return "parameters" in value or "arguments" in value or value.get("name") in names
    named = _LLAMA_NAMED.match(body)
    return bool(_LLAMA_ARGUMENTS.search(body)) or (named is not None and named[1] in names)


def _mistral(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    content, mark, rest = text.partition(_MISTRAL)
    calls: list[ToolCall] = []
    while mark and len(calls) < MAX_CALLS:
        named = _MISTRAL_NAMED.match(rest)
        value, end = decoded(rest, named.end() if named else 0)
        after, mark, following = rest[end:].partition(_MISTRAL)
        if end is None:
            made = [unparsed(f"not JSON: {after.strip()[:80]}")]
        elif named and after.strip():
            made = [unparsed("a text follows its arguments")]
        elif named:
            made = [call_of({"name": named[1], "arguments": value}, named[2])]
        else:
            made = _listed(value)
            if after.strip():  # said behind the list
                content, after = content + after, ""
        calls += written_as(_MISTRAL + rest[: end or 0] + after, made)
        rest = following
    return content, calls


def _code(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    blocks = [block for block in fences(text) if block.tag.lower() in ("", "python", "py")]
    if not blocks:
        return text, []
    last = blocks[-1]
    return text[: last.start] + text[last.end :], [ToolCall(PYTHON, {"code": last.body}, "")]


# A tag ends a call or a value only where the form lets it: code may hold tags. Qwen3-Coder may
# leave out the tags that end a parameter, and several functions may share a `<tool_call>`.
_QWEN_XML = Tags(
    opening=r"(?:<(?:seed:)?tool_call>\s*)?<function=",
    named=r"(?P<name>[^>\s]+)\s*>\s*",
    pair=r"<parameter=(?P<key>[^>\s]+)\s*>\n?",
    ended=(
        r"\n?(?:</parameter>\s*|(?=<parameter=|<(?:seed:)?tool_call>\s*<function=)|"
        r"(?=</function>\s*(?:</(?:seed:)?tool_call>|<function=|\Z))|\Z)",
    ),
    closing=r"</function>\s*|(?=<(?:seed:)?tool_call>\s*<function=)",
    closed=r"</(?:seed:)?tool_call>",
)
_GLM = Tags(
    opening=r"<tool_call>\s*(?=[^\s<{])",
    named=r"(?P<name>[^\s<{]+)\s*",
    pair=r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>",
    ended=(r"</arg_value>\s*",),
    closing="</tool_call>",
    closed="",
)
_INVOKE = Tags(
    opening=r'(?:<[^\s<>]*(?:function_calls|tool_calls?)>\s*)?<[^\s<>]*invoke name="',
    named=r'(?P<name>[^"]+)"\s*>\s*',
    pair=r'<[^\s<>]*parameter name="(?P<key>[^"]+)"[^>]*>',
    ended=(r"</[^\s<>]*parameter>\s*",),
    closing=r"</[^\s<>]*invoke>",
    closed=r"\s*</[^\s<>]*(?:function_calls|tool_calls?)>",
)
_DEEPSEEK = JsonCalls(
    opening=re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"),
    named=re.compile(r"(?:\w+<｜tool▁sep｜>)?(?P<name>[^\s<{]+)\s*(?:```json|<｜tool▁sep｜>)"),
    following=None,
    closing=re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?|\Z)"),
)
_KIMI = JsonCalls(
    opening=re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"),
    named=re.compile(
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    ),
    following=None,
    closing=re.compile(r"\s*(?:<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?|\Z)"),
)


_QUOTE = '<|"|>'
_GEMMA = re.compile(
    r'<\|tool_call>call:([^\s{]+)((?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>|<\|tool_call>).)*)'
    r"(?:<tool_call\|>|(?=<\|tool_call>)|\Z)",
    re.DOTALL,
)
_BARE_KEY = re.compile(r"(?<=[{,])\s*([^\s\"{}\[\],:]+)\s*(?=:)")
_LITERAL = re.compile(r"\b(?:None|True|False)\b")
_AS_JSON = {"None": "null", "True": "true", "False": "false"}


def _gemma(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
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
    for found in islice(_GEMMA.finditer(text), MAX_CALLS):
        name, body = found.groups()
        value, end = decoded(as_json(body), 0)
        call = (
            unparsed(f"no object in {body[:80]!r}")
            if end is None
            else call_of({"name": name, "arguments": value})
        )
        calls += written_as(found[0], [call])
    return _GEMMA.sub("", text), calls


_LFM = re.compile(
    r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|(?=<\|tool_call_start\|>)|\Z)", re.DOTALL
)
# A text in quotes that are not escaped: it ends before the next argument, or the call's end.
_UNESCAPED = re.compile(
    r"(?<==)\s*'(.*?)'(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))", re.DOTALL
)


def _lfm(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a message of LFM2: calls as in Python, or JSON."""
    calls = list[ToolCall]()
    for found in _LFM.finditer(text):
        calls += written_as(found[0], _python_calls(found[1].strip()))
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
    if not isinstance(made, ast.Call) or made.args or not all(k.arg for k in made.keywords):
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
        keys = (str(ast.literal_eval(key or "")) for key in value.keys)  # `**` has none
        return dict(zip(keys, map(_constant, value.values), strict=True))
    return ast.literal_eval(value)


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
            calls += written_as(message, _called(to[1], body))
        elif mark and ("analysis" in header or (to and to[1] == "self")):
            thoughts.append(body)
        else:
            content.append(body)
    return "\n".join(thoughts), "".join(content), calls[:MAX_CALLS]


def _called(name: str, body: str) -> list[ToolCall]:
    """The calls in a message to a tool: JSON, `<invoke>` tags, or code."""
    if found := _INVOKE.read(body)[1]:
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


READERS: dict[str, Reader] = {
    "hermes": _hermes,
    "qwen_xml": _QWEN_XML.read,
    "llama": _llama,
    "mistral": _mistral,
    "code": _code,
    "glm": _GLM.read,
    "invoke": _INVOKE.read,
    "gemma": _gemma,
    "lfm": _lfm,
    "deepseek": _DEEPSEEK.read,
    "kimi": _KIMI.read,
}
AS_TEXT = ("qwen_xml", "glm", "invoke", "harmony")  # arguments are texts without quotes
