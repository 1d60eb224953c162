"""How a chat template takes calls and writes them, learned from calls that it is made to write.

A template writes one call, and two in one message, whose names and arguments are known. What stands
before a name, between a name and its arguments, and behind them, is its form (`json_calls`, or
`tagged`). Forms of published families stand in `readers`, for checkpoints whose template writes no
calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import ne
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tramontane.data.prompts import Tool
from tramontane.types import Message, ThinkingTags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME, ARGUMENT = "zq0qz", "zq1qz"  # of the calls that a template is made to write
ASKED: Message = {"role": "user", "content": "?"}  # where a template is tried
_PROPERTIES = {"x": {"type": "string", "description": "x"}}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["x"]}
PROBE: Tool = {
    "type": "function",
    "function": {"name": NAME, "description": "x", "parameters": _SCHEMA},
}
SAID = "zq9qz"
TOKEN = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+=\w+")  # of a family, or a header's field
NAMED = r"[\w.-]+"  # the name of a tool


def shared(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    unlike = enumerate(map(ne, one, other))
    return next((place for place, differs in unlike if differs), min(len(one), len(other)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of a tokenizer's special tokens."""
    return [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]


def without_end(text: str, tokens: Collection[str]) -> str:
    """A text without white space at its end, and without the longest of some tokens there."""
    bare = text.rstrip()
    return bare.removesuffix(max(filter(bare.endswith, tokens), key=len, default=""))


def call_id(turn: int, number: int) -> str:
    """The id of a call: nine letters and digits, as Mistral's templates demand."""
    return f"call{turn % 1000:03d}{number % 100:02d}"


class Calls(NamedTuple):
    """How a template takes calls: with their arguments as an object, or as JSON (DeepSeek); and
    what it takes as the content beside them if there is none."""

    as_json: bool
    no_content: str | None

    def message(
        self, content: str, calls: Sequence[tuple[str, dict[str, Any]]], ids: Sequence[str]
    ) -> Message:
        """A message with calls, each a name and arguments."""
        made = []
        for call, (name, given) in zip(ids, calls, strict=True):
            arguments = json.dumps(given, ensure_ascii=False) if self.as_json else given
            function = {"name": name, "arguments": arguments}
            made.append({"id": call, "type": "function", "function": function})
        content_or_none: Any = content or self.no_content
        return {"role": "assistant", "content": content_or_none, "tool_calls": made}

    def probe(self, count: int) -> list[Message]:
        """A chat that ends with calls of `NAME` with `ARGUMENT`."""
        ids = [call_id(0, number) for number in range(count)]
        return [ASKED, self.message("", [(NAME, {"x": ARGUMENT})] * count, ids)]


def taken_by(render: Callable[[list[Message]], str], special: Collection[str]) -> Calls | None:
    """How a template takes calls, found by trying; None if it writes none. Objects come first: some
    (Gemma 4) write JSON in a form of its own. Others (DeepSeek-R1) write an empty content as a
    message of its own, or no calls beside it.

    Args:
        render: returns a chat as the template writes it; empty if it refuses the chat.
        special: the tokenizer's special tokens.
    """
    for as_json in (False, True):
        taken = (Calls(as_json, none) for none in ("", None))
        texts = [(render(each.probe(1)), each) for each in taken]
        found = [
            (sum(map(text.count, special)), each)
            for text, each in texts
            if NAME in text and ARGUMENT in text
        ]
        if found:
            return min(found, key=lambda each: each[0])[1]
    return None


def rendered(tokenizer: PreTrainedTokenizerBase, chat: list[Message], prompts: bool = False) -> str:
    """A chat as the template writes it; empty if it refuses it."""
    try:
        text = tokenizer.apply_chat_template(
            cast(Any, chat), tools=[dict(PROBE)], tokenize=False, add_generation_prompt=prompts
        )
    except Exception:  # a template may raise anything
        return ""
    return str(text)


class Around(NamedTuple):
    """What a chat template writes around an answer, behind a prompt.

    Attributes:
        head: before its text: the header of a channel.
        tail: behind it, before the last token (Apriel's `<|end|>`).
        thinks: its thoughts stand before the head (Kimi K3), or in a message of their own.
        opening: before those thoughts.
        between: behind them, up to the head: what ends a message and begins the next.
    """

    head: str = ""
    tail: str = ""
    thinks: bool = False
    opening: str = ""
    between: str = ""

    def within(self, content: str) -> tuple[str, str]:
        """(thoughts, content) of a message without its calls."""
        content, thoughts = content.lstrip(), ""
        end = self.between or self.head
        if self.thinks and content.startswith(self.opening):  # they may be cut
            thoughts, _, content = content.removeprefix(self.opening).partition(end)
        content = content.lstrip().removeprefix(self.head).strip().removesuffix(self.tail)
        return thoughts, content.strip().removesuffix(self.between).strip()


def around_answer(tokenizer: PreTrainedTokenizerBase, tags: ThinkingTags) -> Around:
    """What the chat template writes around an answer, without thoughts in `tags`."""

    def behind(**more: str) -> str:
        said = cast(Message, {"role": "assistant", "content": SAID, **more})
        text = rendered(tokenizer, [ASKED, said])
        return text[len(prompt) :] if text.startswith(prompt) else ""

    prompt = rendered(tokenizer, [ASKED], prompts=True)
    text, thought = behind(), behind(reasoning_content=NAME)
    if not prompt or text.count(SAID) != 1:
        return Around()
    head, tail = text.split(SAID)
    tail = without_end(tail, special_tokens(tokenizer)).strip()
    if tags.closing in head:
        return Around(head.rpartition(tags.closing)[2].lstrip(), tail)
    opening, _, rest = thought.partition(SAID)[0].partition(NAME)
    if not head.strip() or not rest.endswith(head) or tags.closing in rest:
        return Around(head.lstrip(), tail)
    return Around(head.lstrip(), tail, True, opening.lstrip(), rest.removesuffix(head).strip())


def own_calls(tokenizer: PreTrainedTokenizerBase, headed: bool = False) -> list[str]:
    """A message with one call, and one with two, as the chat template writes them behind a prompt;
    none if it writes no calls. `headed`: messages have headers, which are parts of the calls."""
    render, prompt = partial(rendered, tokenizer), rendered(tokenizer, [ASKED], prompts=True)
    if not prompt:
        return []
    special = special_tokens(tokenizer)
    if (taken := taken_by(render, special)) is None:
        return []
    plain, bodies = render([ASKED, {"role": "assistant", "content": SAID}]), []
    ends = TOKEN.findall(plain.partition(SAID)[2])
    for text in (render(taken.probe(1)), render(taken.probe(2))):
        start = shared(plain, text)
        inside = (m for m in TOKEN.finditer(text) if m.start() < start < m.end())
        start = next((match.start() for match in inside), start)
        start = min(start, len(prompt)) if headed and text.startswith(prompt) else start
        last = text.rfind(ARGUMENT)
        places = [text.find(end, last) for end in ends if end in text[last:]]
        body = text[start : min(places, default=None)]
        bodies.append(without_end(body, () if places else special))
    return bodies


def loose(text: str) -> str:
    """A pattern for a text with any white space, numbers and ids."""
    pattern = re.escape(text)
    pattern = re.sub(r"call\d{5}", r'(?P<id>[^"\\s<>|]*)', pattern, count=1)
    return re.sub(r"(?:\\?\s)+", r"\\s*", re.sub(r"\d+", r"\\d+", pattern))
