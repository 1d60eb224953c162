"""Calls whose arguments are in JSON, in a form that is learned from what a chat template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tramontane.data.prompts import Tool
from tramontane.environments.forms import MAX_CALLS, call_of, decoded, unparsed, written_as
from tramontane.environments.learned import ARGUMENT, NAME, NAMED, TOKEN, loose
from tramontane.types import ToolCall

_ARGUMENTS = re.compile(rf'"?\{{\s*\\?"x\\?"\s*:\s*\\?"{ARGUMENT}\\?"\s*\}}"?')  # or JSON in a text


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


class JsonCalls(NamedTuple):
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
    def of(cls, bodies: Sequence[str]) -> JsonCalls | None:
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
    def _of_objects(cls, bodies: Sequence[str]) -> JsonCalls | None:
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
