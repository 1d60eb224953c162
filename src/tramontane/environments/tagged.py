"""Calls with arguments in tags of a template's own (`<param name="KEY">VALUE</param>`),
learned from calls that the template is made to write.

What two calls have in common before their names, and two arguments before their keys, is the form.
A closing tag may hold the key (`<KEY>VALUE</KEY>`); then lists and objects are tags within tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tramontane.data.prompts import Tool
from tramontane.environments.forms import MAX_CALLS, MAX_DEPTH, unparsed
from tramontane.environments.learned import (
    ASKED,
    NAME,
    NAMED,
    SAID,
    call_id,
    loose,
    rendered,
    shared,
    special_tokens,
    taken_by,
    without_end,
)
from tramontane.types import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARGUMENTS = {"zq2qz": "zq4qz", "zq3qz": "zq5qz"}
_KEYS, _VALUES = [*_ARGUMENTS], [*_ARGUMENTS.values()]
_CALLS = re.compile(
    f"(.*?){NAME}(.*?){_KEYS[0]}(.*?){_VALUES[0]}(.*?){_KEYS[1]}.*?{_VALUES[1]}(.*?){NAME}"
    f".*{_VALUES[1]}(.*)",
    re.DOTALL,
)
_TAG = re.compile(r"<[^<>]*>")
_KEY = r"(?P<key>[^\s/<>\"=][^<>\"=\n]*?)"
_ATTRIBUTE = re.compile(r'="[^"]*"')  # perhaps the type of a value
_DATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)  # a text as XML writes it


class Tags(NamedTuple):
    """Patterns of the pieces of calls, in their order."""

    opening: str  # before a name, with what begins the first call
    named: str  # a `name`, and what stands behind it
    pair: str  # a key, and what stands before and behind it
    ended: tuple[str, ...]  # behind a value; of two, the key stands between them
    closing: str  # behind the last value
    closed: str  # behind the last call
    item: str = ""  # key of a list's items, where values are tags themselves

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Tags | None:
        """The form of a tokenizer's chat template; None if it cannot be told."""
        special = special_tokens(tokenizer)
        taken = taken_by(lambda chat: rendered(tokenizer, chat), special)
        if taken is None:
            return None

        def written(*arguments: Any) -> str:
            ids = [call_id(0, number) for number in range(len(arguments))]
            said = taken.message(SAID, [(NAME, each) for each in arguments], ids)
            return rendered(tokenizer, [ASKED, said]).rpartition(SAID)[2]

        text = written(_ARGUMENTS, _ARGUMENTS)
        plain = rendered(tokenizer, [ASKED, {"role": "assistant", "content": SAID}])
        form = cls._between(text, without_end(plain.rpartition(SAID)[2], special), special)
        if form is None:
            return None
        listed = form.read(written({_KEYS[0]: [_VALUES[0]]}))[1] or [unparsed("")]
        if isinstance(within := listed[0].arguments.get(_KEYS[0]), dict):
            form = form._replace(item=next(iter(within)))
        found = [(call.name, call.arguments) for call in form.read(text)[1]]
        return form if found == [(NAME, _ARGUMENTS)] * 2 else None

    @classmethod
    def _between(cls, text: str, tail: str, special: list[str]) -> Tags | None:
        """The form of a message with a text and two calls; `tail`: behind a text alone."""
        if (match := _CALLS.fullmatch(text)) is None:
            return None
        before, named, equals, ended, following, closed = match.groups()
        opening, pair = _common_end(before, following), _common_end(named, ended)
        ended, following = ended.removesuffix(pair), following.removesuffix(opening)
        parts = tuple(ended.split(_KEYS[0]))
        last = _KEYS[1].join(parts)
        closing = following.removeprefix(last)
        closed = without_end(closed, special).removeprefix(last).removeprefix(closing)
        alike = _common_end(closed, tail)
        return cls(
            f"(?:{loose(before.removesuffix(opening))})?{loose(opening)}",
            f"(?P<name>{NAMED}){loose(named.removesuffix(pair))}",
            loose(pair) + _KEY + _ATTRIBUTE.sub('="[^"]*"', loose(equals)),
            tuple(map(loose, parts)),
            loose(closing),
            f"{loose(closed.removesuffix(alike))}(?:{loose(alike)})?",
        )

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
        """(content, calls) of a message."""
        content, calls, at = "", list[ToolCall](), 0
        opening = re.compile(self.opening)
        while (found := opening.search(text, at)) and len(calls) < MAX_CALLS:
            content += text[at : found.start()]
            named = re.compile(self.named).match(text, found.end())
            pairs, at = self._pairs(text, named.end(), self.closing) if named else ([], found.end())
            if named and (closing := re.compile(rf"{self.closing}|\Z").match(text, at)):
                calls.append(ToolCall(named["name"], dict(pairs), ""))
                closed = re.compile(self.closed).match(text, closing.end())
                at = (closed or closing).end()
            else:
                shown = text[:at].strip()
                following = opening.search(text, found.end())
                at = following.start() if following else len(text)
                broken = text[found.start() : at]
                calls.append(unparsed(f"after {shown[-40:]!r}", broken))
        return content + text[at:], calls

    def _pairs(
        self, text: str, at: int, closing: str, depth: int = 0
    ) -> tuple[list[tuple[str, Any]], int]:
        """The keys and values from a place on, up to what closes them, and their end."""
        pairs, start = list[tuple[str, Any]](), re.compile(self.pair)
        while found := start.match(text, at):
            key, value, closed = found["key"], None, None
            ended = re.escape(key).join(self.ended)
            if len(self.ended) > 1 and depth < MAX_DEPTH:
                inner, place = self._pairs(text, found.end(), ended, depth + 1)
                closed = re.compile(ended).match(text, place) if inner else None
                value = self._shaped(inner)
            if closed is None:
                last = re.compile(rf"{ended}(?={self.pair}|{closing}|\Z)")
                if (closed := last.search(text, found.end())) is None:
                    break
                value = text[found.end() : closed.start()]
                data = _DATA.fullmatch(value)
                value = data[1] if data else value
            pairs.append((key, value))
            at = closed.end()
        return pairs, at

    def _shaped(self, inner: list[tuple[str, Any]]) -> Any:
        """A list, or an object, of tags in a value."""
        return [v for _, v in inner] if {k for k, _ in inner} == {self.item} else dict(inner)


def _common_end(one: str, other: str) -> str:
    """What two texts end with, from the start of a tag on."""
    start = -shared(one[::-1], other[::-1])
    inside = [
        match.end() - len(text)
        for text in (one, other)
        for match in _TAG.finditer(text)
        if match.start() < len(text) + start < match.end()
    ]
    place = max(inside, default=start)
    return one[place:] if place else ""
