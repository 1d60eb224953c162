"""Tool calls in a model's message, in the forms that models are trained to write.

A tokenizer's own `response_template` comes first (`Parser`); the forms below are for the others:

- `hermes` (also Qwen2.5 and Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
- `qwen_xml` (Qwen3-Coder): `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>…`
- `llama` (Llama 3): a message that is `{"name": …, "parameters": {…}}`, several separated by `;`,
  or `<|python_tag|>` with such an object or code
- `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, since v11 `[TOOL_CALLS]NAME[ARGS]{…}`
- `code`: the last fenced block, for the tool `python`
- those of `readers`, by families with tokens of their own
- `learned`: as the chat template writes them, around a name and arguments in JSON or in tags

A text that looks like a call but cannot be read becomes a call without a name; its answer says why.
Thoughts contain no calls. No text makes the parser fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from tramontane.data.prompts import Tool, opened_by
from tramontane.environments.arguments import typed
from tramontane.environments.forms import MAX_CALLS, call_of, unparsed
from tramontane.environments.json_calls import JsonCalls
from tramontane.environments.learned import (
    ARGUMENT,
    NAME,
    PROBE,
    around_answer,
    own_calls,
    special_tokens,
)
from tramontane.environments.readers import AS_TEXT, READERS, harmony, outside_channel
from tramontane.environments.tagged import Tags
from tramontane.errors import InputError
from tramontane.types import ThinkingTags, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal[
    "template", "hermes", "qwen_xml", "llama", "mistral", "code", "harmony",
    "invoke", "glm", "gemma", "lfm", "deepseek", "kimi", "learned",
]  # fmt: skip

# Texts in chat templates that identify the form of calls, the most specific first.
_SIGNS: tuple[tuple[str, Form], ...] = (
    ("<|channel|>analysis", "harmony"),
    ("assistant to=", "harmony"),
    ("<function=", "qwen_xml"),
    ("invoke name=", "invoke"),
    ("<arg_key>", "glm"),
    ("<|tool_call>call:", "gemma"),
    ("<|tool_call_start|>", "lfm"),
    ("<|tool_list_start|>", "lfm"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)
_AROUND = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")  # of Cohere, around the content


class Parsed(NamedTuple):
    """A model's message: its whole text, its thoughts, the rest without calls, and the calls."""

    text: str
    thoughts: str
    content: str
    calls: list[ToolCall]


Message = Parsed  # its name in earlier versions


class Parser:
    """Finds the calls in the messages of one model.

    Args:
        tokenizer: the model's; its `response_template` and chat template are read.
        form: `conversation.calls`.
        tags: thinking tags.

    Attributes:
        form: the form that is read; `template` is the tokenizer's `response_template`.
        headers: texts that surround an answer without being part of it; may be empty.
        unread: a call as the chat template writes it, if it cannot be read; else empty.

    Raises:
        InputError: the tokenizer's `response_template` is damaged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: str, tags: ThinkingTags) -> None:
        self._tokenizer, self._tags = tokenizer, tags
        self.form: Form = form_of(tokenizer) if form == "auto" else form  # type: ignore[assignment]
        self._own = shown_by(tokenizer) if self.form == "template" else self.form
        if self.form == "template":
            try:
                tokenizer.parse_response("", prefix="")
            except Exception as error:  # a damaged one would make every message a broken call
                raise InputError(f"the tokenizer's response_template: {error}") from None
            fields = json.dumps(tokenizer.response_template).replace("\\", "")
            self._ends = ["", *(t for t in special_tokens(tokenizer) if t in fields)]
            self._start = _before_response(tokenizer, tags)
        self._around = found = around_answer(tokenizer, tags)
        self.headers = (found.opening, found.between + found.head, found.tail)
        self._learned: JsonCalls | Tags | None = None
        self.unread = ""
        own = own_calls(tokenizer, bool(self._around.head)) if form == "auto" else []
        if own and not self._reads(own[0]):
            self._learned = JsonCalls.of(own)
            if not self._reads(own[0]):
                self._learned = Tags.of(tokenizer)
            self.unread = "" if self._learned else own[0]
            if self._learned and self.form != "template":
                self.form = "learned"

    def check(self, tools: Sequence[Tool]) -> None:
        """Raise an InputError if there are tools, and their calls cannot be read."""
        if tools and self.unread:
            raise InputError(
                "the chat template writes calls in a form that is not read; a call is "
                f"{' '.join(self.unread.split())[:80]!r}: name the form that the model writes "
                "(conversation.calls), or give another template (data.chat_template)"
            )

    def _reads(self, text: str) -> bool:
        """True if the call that a template was made to write is read."""
        calls = [(call.name, call.arguments) for call in self.parse(text, [PROBE]).calls]
        return calls == [(NAME, {"x": ARGUMENT})]

    def parse(self, text: str, tools: Sequence[Tool] = (), prefix: str = "") -> Parsed:
        """Split a message into thoughts, content and calls, whose arguments have the types of
        their tools' schemas.

        Args:
            text: the whole message, with special tokens except those that end it.
            tools: descriptions of the tools; without any, nothing is a call.
            prefix: start of the message that the prompt already holds; it is part of `text`.
        """
        message = self._by_form(text, tools)
        if self.form == "template":
            message = self._by_template(text, tools, prefix, message)
        as_text = self._own in AS_TEXT or isinstance(self._learned, Tags)
        typed(message.calls, tools, as_text=as_text)
        return message

    def _by_form(self, text: str, tools: Sequence[Tool]) -> Parsed:
        if self._own == "harmony":
            thoughts, content, calls = harmony(text)
            return Parsed(text, thoughts, content.strip(), calls if tools else [])
        thoughts, answer = outside_thoughts(text, self._tags)
        if self._own == "gemma":
            in_channel, answer = outside_channel(text)
            thoughts = in_channel or thoughts
            answer = outside_thoughts(answer, self._tags)[1]
        content, calls = answer, list[ToolCall]()
        if tools and self._learned:
            content, calls = self._learned.read(answer)
        elif tools:
            content, calls = READERS[self._own](answer, tools)
        if tools and not calls and "<tool_call>" in answer:  # as `TOOLS_PROMPT` asks for them
            content, calls = READERS["hermes"](answer, tools)
        before, content = self._around.within(_AROUND.sub("", content))
        return Parsed(text, thoughts or before, content, calls[:MAX_CALLS])

    def _by_template(self, text: str, tools: Sequence[Tool], prefix: str, own: Parsed) -> Parsed:
        """A message by the `response_template`; `own`: by the form that the chat template shows,
        whose calls are taken where they are more, or where the response template fails."""
        named = [call for call in own.calls if call.name]
        try:
            found, calls = self._read(text.removeprefix(prefix), tools, prefix)
        except Exception as error:  # a response template raises whatever its parsers do
            if named:
                return own
            failed = unparsed(f"{type(error).__name__}: {error}")
            return Parsed(text, own.thoughts, text, [failed])
        if len(named) > len(calls):
            return own
        thoughts = found.get("reasoning_content") or found.get("thinking")
        content = str(found.get("content") or "")
        if not thoughts:
            thoughts, content = own.thoughts, outside_thoughts(content, self._tags)[1].strip()
        return Parsed(text, str(thoughts), content, calls[:MAX_CALLS])

    def _read(self, text: str, tools: Sequence[Tool], prefix: str) -> tuple[Any, list[ToolCall]]:
        """(fields, calls) of a message. A response template reads the end of the prompt as well,
        and the token that ended the message, which may close a call: each that it names is tried.
        """
        known, first = cast(Any, list(tools)), cast(Any, {})
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
                call_of(call.get("function", call)) for call in found.get("tool_calls") or ()
            ]:
                return found, calls
            first = first or found
        if failed:
            raise failed
        return first, []


def _before_response(tokenizer: PreTrainedTokenizerBase, tags: ThinkingTags) -> str:
    """The end of a prompt by the chat template, up to the start of the response."""
    chat = [{"role": "user", "content": "?"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception:  # no template, or one that raises; its prompts are checked elsewhere
        return ""
    return str(text).removesuffix(opened_by(str(text), tags))


def form_of(tokenizer: PreTrainedTokenizerBase) -> Form:
    """The form of calls of a model, by its tokenizer."""
    if getattr(tokenizer, "response_template", None) is not None:
        return "template"
    return shown_by(tokenizer)


def shown_by(tokenizer: PreTrainedTokenizerBase) -> Form:
    """The form of calls that a chat template shows."""
    template = str(tokenizer.chat_template or "")
    return next((form for sign, form in _SIGNS if sign in template), "hermes")


def outside_thoughts(text: str, tags: ThinkingTags) -> tuple[str, str]:
    """(thoughts, the rest) of a message. Unclosed thoughts extend to its end."""
    thoughts = answer = ""
    while True:
        head, closed, rest = text.partition(tags.closing)
        before, opened, thought = head.partition(tags.opening)
        if not closed:
            return thoughts + thought, answer + before
        if not opened:
            before, thought = "", head  # the opening tag is in the prompt
        thoughts, answer, text = thoughts + thought, answer + before, rest
        if tags.opening not in rest:
            return thoughts, answer + rest
