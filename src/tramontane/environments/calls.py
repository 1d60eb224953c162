"""Tool calls in a model's message, in the forms that models are trained to write.

A tokenizer's own `response_template` comes first (`Parser`); the forms below are for the others:

- `hermes` (also Qwen2.5 and Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
- `qwen_xml` (Qwen3-Coder): `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>…`
- `llama` (Llama 3): a message that is `{"name": …, "parameters": {…}}`, several separated by `;`,
  or `<|python_tag|>` with such an object or code
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, since v11 `[TOOL_CALLS]NAME[ARGS]{…}`
- `code`: the last fenced block, for the tool `python`

A text that looks like a call but cannot be read becomes a call without a name; its answer says why.
Thoughts contain no calls. No text makes the parser fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from tramontane.data.prompts import Tool, opened_by
from tramontane.data.values import encoded
from tramontane.errors import InputError
from tramontane.types import ThinkingTags, ToolCall
from tramontane.verifier.format import fences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["template", "hermes", "qwen_xml", "llama", "mistral", "code"]
PYTHON = "python"  # the tool that runs code, whose argument is `code`
MAX_CALLS = 64  # of one turn; further ones are not read
MAX_DEPTH = 32  # of nested arguments

# Texts in chat templates that identify the form of calls, the most specific first.
_SIGNS: tuple[tuple[str, Form], ...] = (
    ("<function=", "qwen_xml"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_HERMES_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
# Tags end a call, a function or a parameter only where the form lets them: code may hold them.
_XML_CALL = re.compile(
    r"<tool_call>((?:(?!<tool_call>).)*?</function>\s*)</tool_call>|" + _HERMES.pattern, re.DOTALL
)
_XML_FUNCTION = re.compile(
    r"\s*<function=([^>\s]+)\s*>(.*?)(?:</function>\s*(?=<function=|\Z)|\Z)", re.DOTALL
)
_XML_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?"
    r"(?:</parameter>(?=\s*(?:<parameter=|</function>|\Z))|(?=<parameter=)|\Z)",
    re.DOTALL,
)
_LLAMA = re.compile(r'\{\s*"(?:name|type|function)"')
_LLAMA_NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_SPACE = re.compile(r"\s*")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]")
_PYTHON_TAG = "<|python_tag|>"


class Message(NamedTuple):
    """A model's message: its whole text, its thoughts, the rest without calls, and the calls."""

    text: str
    thoughts: str
    content: str
    calls: list[ToolCall]


class Parser:
    """Finds the calls in the messages of one model.

    Args:
        tokenizer: the model's; its `response_template` and chat template are read.
        form: `conversation.calls`.
        tags: thinking tags.

    Attributes:
        form: the form that is read; `template` is the tokenizer's `response_template`.

    Raises:
        InputError: the tokenizer's `response_template` is damaged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: str, tags: ThinkingTags) -> None:
        self._tokenizer, self._tags = tokenizer, tags
        self.form: Form = form_of(tokenizer) if form == "auto" else form  # type: ignore[assignment]
        if self.form == "template":
            try:
                tokenizer.parse_response("", prefix="")
            except Exception as error:  # a damaged one would make every message a broken call
                raise InputError(f"the tokenizer's response_template: {error}") from None
            fields = json.dumps(tokenizer.response_template).replace("\\", "")
            added = (str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)
            self._ends = ["", *(token for token in added if token in fields)]
            self._start = _before_response(tokenizer, tags)

    def parse(self, text: str, tools: Sequence[Tool] = (), prefix: str = "") -> Message:
        """Split a message into thoughts, content and calls.

        Args:
            text: the whole message, with special tokens except those that end it.
            tools: descriptions of the tools; without any, nothing is a call.
            prefix: start of the message that the prompt already holds; it is part of `text`.
        """
        thoughts, answer = outside_thoughts(text, self._tags)
        if self.form == "template":
            return self._by_template(text, tools, prefix, thoughts)
        content, calls = _FORMS[self.form](answer, tools) if tools else (answer, [])
        return Message(text, thoughts, content.strip(), calls[:MAX_CALLS])

    def _by_template(self, text: str, tools: Sequence[Tool], prefix: str, thoughts: str) -> Message:
        try:
            found, calls = self._read(text.removeprefix(prefix), tools, prefix)
        except Exception as error:  # a response template raises whatever its parsers do
            return Message(text, thoughts, text, [unparsed(f"{type(error).__name__}: {error}")])
        thoughts = found.get("reasoning_content") or found.get("thinking") or thoughts
        content = str(found.get("content") or "")
        return Message(text, str(thoughts), content, calls[:MAX_CALLS])

    def _read(self, text: str, tools: Sequence[Tool], prefix: str) -> tuple[Any, list[ToolCall]]:
        """(fields, calls) of a message. A response template reads the end of the prompt as well,
        and the token that ended the message, which may close a call: each that it names is tried.
        """
        known, first = cast(Any, list(tools)), cast(Any, None)
        failed: Exception | None = None
        for end in self._ends:
            try:
                found: Any = self._tokenizer.parse_response(
                    text + end, prefix=self._start + prefix, tools=known
                )
            except Exception as error:  # as above
                failed = failed or error
                continue
            if calls := [
                _call(call.get("function", call)) for call in found.get("tool_calls") or ()
            ]:
                return found, calls
            first = first or found
        if failed or first is None:
            raise failed or ValueError("nothing to read")
        return first, []


def _before_response(tokenizer: PreTrainedTokenizerBase, tags: ThinkingTags) -> str:
    """The end of a prompt by the chat template, up to the start of the response."""
    if not tokenizer.chat_template:
        return ""
    chat = [{"role": "user", "content": "?"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may raise anything; its prompts are checked elsewhere
        return ""
    return str(text).removesuffix(opened_by(str(text), tags))


def form_of(tokenizer: PreTrainedTokenizerBase) -> Form:
    """The form of calls of a model, by its tokenizer."""
    if getattr(tokenizer, "response_template", None) is not None:
        return "template"
    template = str(tokenizer.chat_template or "")
    return next((form for sign, form in _SIGNS if sign in template), "hermes")


def outside_thoughts(text: str, tags: ThinkingTags) -> tuple[str, str]:
    """(thoughts, the rest) of a message. Unclosed thoughts extend to its end."""
    thoughts = answer = ""
    while True:
        head, closed, rest = text.partition(tags.closing)
        before, opened, thought = head.partition(tags.opening)
        if not closed:
            return (thoughts + thought, answer + before) if opened else (thoughts, answer + text)
        if not opened:
            before, thought = "", head  # the opening tag is in the prompt
        thoughts, answer, text = thoughts + thought, answer + before, rest
        if tags.opening not in rest:
            return thoughts, answer + rest


def unparsed(reason: str) -> ToolCall:
    """A call that cannot be read; its answer tells the model why."""
    return ToolCall("", {}, f"error: the call cannot be read: {reason[:200]}", error=True)


def _call(value: Any) -> ToolCall:
    """A call from an object with a name and arguments, which may be JSON in a text."""
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
    return ToolCall(_clean(name), arguments or {}, "")


def _clean(value: Any, depth: int = 0) -> Any:
    """A value from JSON without unpaired surrogates, which cannot be encoded."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return encoded(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth + 1) for key, item in value.items()}
    return [_clean(item, depth + 1) for item in value] if isinstance(value, list) else value


def _from_json(text: str) -> ToolCall:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return unparsed(f"not JSON: {error}")


def _hermes(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    content, calls, at = "", list[ToolCall](), 0
    while (found := _HERMES.search(text, at)) and len(calls) < MAX_CALLS:
        content += text[at : found.start()]
        # JSON first: its texts may hold the tags.
        value, end = _decoded(text, found.start(1))
        closed = None if end is None else _HERMES_END.match(text, end)
        calls += [_from_json(found[1])] if closed is None else _listed(value)
        at = found.end() if closed is None else closed.end()
    return content + _HERMES.sub("", text[at:]), calls


def _decoded(text: str, start: int) -> tuple[Any, int | None]:
    """The first value in JSON from `start` on, and its end; no end if there is none."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None


def _listed(value: Any) -> list[ToolCall]:
    """The calls of an object, or of a list of some."""
    return [_call(each) for each in (value if isinstance(value, list) and value else [value])]


def _qwen_xml(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    def of(body: str) -> Iterator[ToolCall]:
        functions = list(_XML_FUNCTION.finditer(body))
        if not functions:
            yield unparsed("no <function=NAME> in <tool_call>")
        for function in functions:
            parameters = _XML_PARAMETER.findall(function[2])
            yield ToolCall(function[1], dict(parameters), "")

    calls = [call for found in _XML_CALL.finditer(text) for call in of(found[1] or found[2] or "")]
    return _XML_CALL.sub("", text), calls


def _llama(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    content, tag, rest = text.partition(_PYTHON_TAG)
    body = rest.strip() if tag else text.strip()
    if tag and not body.startswith("{"):
        return content, [ToolCall(PYTHON, {"code": body}, "")]
    if not tag and not _is_call(body, [tool["function"]["name"] for tool in tools]):
        return text, []  # an answer, perhaps in JSON
    calls, decoder = list[ToolCall](), json.JSONDecoder()
    while body and len(calls) < MAX_CALLS:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(unparsed(f"not JSON: {error}"))
            break
        calls.append(_call(value))
        body = body[end:].lstrip("; \t\r\n")
    return content if tag else "", calls


def _is_call(body: str, names: list[str]) -> bool:
    """True if a text begins with an object that has arguments or a tool's name; of a broken one,
    its beginning decides."""
    if not _LLAMA.match(body):
        return False
    value, end = _decoded(body, 0)
    if end is not None:
        return "parameters" in value or "arguments" in value or value.get("name") in names
    named = _LLAMA_NAMED.match(body)
    return bool(_LLAMA_ARGUMENTS.search(body)) or (named is not None and named[1] in names)


def _mistral(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    content, mark, rest = text.partition(_MISTRAL)
    calls: list[ToolCall] = []
    while mark and len(calls) < MAX_CALLS:
        named = _MISTRAL_NAMED.match(rest)
        value, end = _decoded(rest, named.end() if named else 0)
        after, mark, following = rest[end or 0 :].partition(_MISTRAL)
        if end is None:
            calls.append(unparsed(f"not JSON: {after.strip()[:80]}"))
        elif named and after.strip():
            calls.append(unparsed("a text follows its arguments"))
        else:
            calls += [_call({"name": named[1], "arguments": value})] if named else _listed(value)
        rest = following
    return content, calls


def _code(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    blocks = [block for block in fences(text) if block.tag.lower() in ("", "python", "py")]
    if not blocks:
        return text, []
    last = blocks[-1]
    return text[: last.start] + text[last.end :], [ToolCall(PYTHON, {"code": last.body}, "")]


_FORMS: dict[str, Callable[[str, Sequence[Tool]], tuple[str, list[ToolCall]]]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama": _llama,
    "mistral": _mistral,
    "code": _code,
}
