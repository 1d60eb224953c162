"""How a chat template takes calls and writes them, learned from calls that it is made to write.

A template writes one call, and two in one message, whose names and arguments are known. What stands
before a name, between a name and its arguments in JSON, and behind them, is its form. Forms of
published families stand in `readers`, for checkpoints whose template writes no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tramontane.data.prompts import Tool
from tramontane.environments.forms import MAX_CALLS, call_of, decoded, unparsed, written_as
from tramontane.types import Message, ThinkingTags, ToolCall

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
_ARGUMENTS = re.compile(rf'"?\{{\s*\\?"x\\?"\s*:\s*\\?"{ARGUMENT}\\?"\s*\}}"?')  # or JSON in a text
TOKEN = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+=\w+")  # of a family, or a header's field
NAMED = r"[\w.-]+"  # the name of a tool


def shared(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
        taken = [Calls(as_json, none) for none in ("", None)]
        texts = [render(each.probe(1)) for each in taken]
        found = [
            (sum(map(text.count, special)), each)
            for text, each in zip(texts, taken, strict=True)
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

    prompt = rendered(tokenizer, [ASKED], prompts=True) if tokenizer.chat_template else ""
    text, thought = behind(), behind(reasoning_content=NAME)
    if not prompt or text.count(SAID) != 1:
        return Around()
    head, tail = text.split(SAID)
    tail = without_end(tail, special_tokens(tokenizer)).strip()
    if tags.closing in head:
        return Around(head.rpartition(tags.closing)[2].lstrip(), tail)
    opening, found, rest = thought.partition(SAID)[0].partition(NAME)
    thinks = bool(found and head.strip() and rest.endswith(head)) and tags.closing not in rest
    if not thinks:
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
    ends = TOKEN.findall(plain.partition(SAID)[2]) or special
    for text in (render(taken.probe(1)), render(taken.probe(2))):
        start = shared(plain, text)
        inside = (m for m in TOKEN.finditer(text) if m.start() < start < m.end())
        start = next((match.start() for match in inside), start)
        start = min(start, len(prompt)) if headed and text.startswith(prompt) else start
        last = max(text.rfind(ARGUMENT), text.rfind(NAME))
        places = [place for end in ends if (place := text.find(end, last)) >= 0]
        body = text[start : min(places, default=None)]
        bodies.append(without_end(body, () if places else special))
    return bodies


class Keys(NamedTuple):
    """Where a call that is an object has its name, its arguments and its id."""

    name: str
    arguments: str
    id: str


class _Object(NamedTuple):
    """A call that stands in a text as an object in JSON."""

    start: int
    end: int
    keys: Keys


def _objects(text: str) -> Iterator[_Object]:
    """The calls of `NAME` with `ARGUMENT` that stand in a text as objects in JSON."""
    at = text.find("{")
    while at >= 0:
        value, end = decoded(text, at)
        fields = value.items() if isinstance(value, dict) else ()
        names = [key for key, given in fields if given == NAME]
        arguments = [key for key, given in fields if _ARGUMENTS.fullmatch(json.dumps(given))]
        if end is not None and len(names) == len(arguments) == 1:
            ids = (key for key, given in fields if re.fullmatch(r"call\d{5}", str(given)))
            yield _Object(at, end, Keys(names[0], arguments[0], next(ids, "id")))
            at = end - 1
        at = text.find("{", at + 1)


class Form(NamedTuple):
    """Calls that are a name and arguments in JSON.

    Attributes:
        opening: before a call.
        named: its `name`, perhaps with its `id`, up to its arguments; or, of a call that is an
            object in JSON behind the template's own text, where these stand.
        following: between two calls; None: each is as the first.
        closing: behind the last.
    """

    opening: re.Pattern[str]
    named: re.Pattern[str] | Keys
    following: re.Pattern[str] | None
    closing: re.Pattern[str]

    @classmethod
    def of(cls, bodies: Sequence[str]) -> Form | None:
        """The form of messages that a template wrote (`own_calls`); None if it cannot be told."""
        if in_objects := cls._of_objects(bodies):
            return in_objects
        first, *others = [[*_ARGUMENTS.finditer(body)] for body in bodies]
        name = bodies[0].rfind(NAME, 0, first[0].start()) if first else -1
        if name < 0 or not bodies[0][:name].strip():
            return None
        texts = [bodies[0][:name].lstrip(), bodies[0][name + len(NAME) : first[0].start()]]
        for body, pair in zip(bodies[1:], others, strict=True):
            if len(pair) == 2:
                behind = body[pair[0].end() : pair[1].start()]
                texts.append(behind[: behind.rfind(NAME)])
        following = texts[2] if len(texts) == 3 else None
        return cls(
            re.compile(loose(texts[0])),
            re.compile(f"(?P<name>{NAMED}){loose(texts[1])}"),
            None if following is None else re.compile(loose(following)),
            re.compile(loose(bodies[0][first[0].end() :])),
        )

    @classmethod
    def _of_objects(cls, bodies: Sequence[str]) -> Form | None:
        """The form of calls that are objects, whose keys a model may write in any order and with
        any white space; None of others, and where no token stands before the first."""
        found = [[*_objects(body)] for body in bodies]
        if len(found[0]) != 1 or not TOKEN.search(bodies[0][: found[0][0].start]):
            return None
        [first] = found[0]
        between = [
            body[one.end : two.start]
            for body, objects in zip(bodies, found, strict=True)
            for one, two in pairwise(objects)
        ]
        return cls(
            re.compile(loose(bodies[0][: first.start].lstrip())),
            first.keys,
            re.compile(rf"\s*{loose(between[0])}") if between else None,
            re.compile(rf"\s*{loose(bodies[0][first.end :])}"),
        )

    def _call(self, text: str, before: re.Match[str]) -> tuple[ToolCall, int] | None:
        """The call behind a match, and the end of its JSON; None if no JSON is there."""
        ids = before.groupdict()
        if isinstance(self.named, Keys):
            value, end = decoded(text, before.end())
            own_id = ids.get("id")
            if isinstance(value, dict):
                own_id = value.get(self.named.id, own_id)
                value = {
                    "name": value.get(self.named.name),
                    "arguments": value.get(self.named.arguments),
                }
        elif named := self.named.match(text, before.end()):
            arguments, end = decoded(text, named.end())
            value = {"name": named["name"], "arguments": arguments}
            own_id = (ids | named.groupdict()).get("id")
        else:
            return None
        return None if end is None else (call_of(value, own_id), end)

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
        """(content, calls) of a message."""
        content, calls, at = "", list[ToolCall](), 0
        while (found := self.opening.search(text, at)) and len(calls) < MAX_CALLS:
            content += text[at : found.start()]
            more: re.Match[str] | None = found
            while more:
                if (made := self._call(text, more)) is None:
                    shown = text[found.start() : more.end()].strip()
                    following = self.opening.search(text, more.end())
                    at = following.start() if following else len(text)
                    broken = text[more.start() : at]
                    calls.append(unparsed(f"after {shown[-40:]!r}", broken))
                    break
                call, end = made
                closed = self.closing.match(text, end)
                at = closed.end() if closed else end
                calls += written_as(text[more.start() : at], [call])
                more = self.following.match(text, end) if self.following else None
        return content + text[at:], calls


def loose(text: str) -> str:
    """A pattern for a text with any white space, numbers and ids."""
    pattern = re.escape(text)
    pattern = re.sub(r"call\d{5}", r'(?P<id>[^"\\s<>|]*)', pattern, count=1)
    return re.sub(r"(?:\\?\s)+", r"\\s*", re.sub(r"\d+", r"\\d+", pattern))
