"""Calls whose arguments are in JSON, in a form that is learned from what a chat template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tramontane.data.prompts import Tool
from tramontane.environments.forms import MAX_CALLS, call_of, decoded, unparsed, written_as
from tramontane.environments.learned import ARGUMENT, NAME, NAMED, TOKEN, loose
from tramontane.types import ToolCall

_ARGUMENTS = re.compile(rf'"?\{{\s*\\?"x\\?"\s*:\s*\\?"{ARGUMENT}\\?"\s*\}}"?')  # or JSON in a text
_ID = re.compile(r"call\d{5}")


class Keys(NamedTuple):
    """Where a call that is an object has its name, its arguments and its id.

    Attributes:
        within: keys of the objects around that with the name and the arguments, from the outermost
            (OpenAI's `function`).
        name: the key of the name.
        arguments: the key of the arguments.
        id: the key of the id, there or in an object around.
    """

    within: tuple[str, ...]
    name: str
    arguments: str
    id: str

    @classmethod
    def of(cls, value: Any, within: tuple[str, ...] = (), own_id: str = "id") -> Keys | None:
        """The keys in a call of `NAME` with `ARGUMENT`; None of any other value."""
        fields = value.items() if isinstance(value, dict) else ()
        names = [key for key, given in fields if given == NAME]
        arguments = [key for key, given in fields if _ARGUMENTS.fullmatch(json.dumps(given))]
        ids = (key for key, given in fields if _ID.fullmatch(str(given)))
        own_id = next(ids, own_id)
        if len(names) == len(arguments) == 1:
            return cls(within, names[0], arguments[0], own_id)
        inner = (cls.of(given, (*within, key), own_id) for key, given in fields)
        return next(filter(None, inner), None)

    def call(self, value: Any, own_id: str | None) -> ToolCall:
        """A call from such an object; `own_id`: what stands before it as its id."""
        fields: dict[str, Any] = {}
        for key in (*self.within, None):
            if not isinstance(value, dict):
                return unparsed(f"not an object with {', '.join((*self.within, self.name))}")
            fields |= value
            value = value.get(key)
        if not fields.get(self.name):
            return unparsed(f"it has no `{self.name}`")
        given = {"name": fields[self.name], "arguments": fields.get(self.arguments)}
        return call_of(given, fields.get(self.id, own_id))


def _objects(text: str) -> Iterator[tuple[int, int, Keys]]:
    """(start, end, keys) of the calls of `NAME` with `ARGUMENT` that are objects in a text."""
    behind = 0
    while (at := text.find("{", behind)) >= 0:
        value, end = decoded(text, at)
        behind = at + 1
        if end is not None and (keys := Keys.of(value)):
            yield at, end, keys
            behind = end


class JsonCalls(NamedTuple):
    """Calls that are a name and arguments in JSON.

    Attributes:
        opening: before a call.
        named: its `name`, perhaps with its `id`, up to its arguments; or the keys of a call that is
            one object, behind a token.
        following: between two calls; None: each is as the first.
        closing: behind the last.
    """

    opening: re.Pattern[str]
    named: re.Pattern[str] | Keys
    following: re.Pattern[str] | None
    closing: re.Pattern[str]

    @classmethod
    def of(cls, bodies: Sequence[str]) -> JsonCalls | None:
        """The form of two messages that a template wrote (`own_calls`), with one call and with two;
        None if it cannot be told."""
        if in_objects := cls._of_objects(bodies):
            return in_objects
        one, two = ([*_ARGUMENTS.finditer(body)] for body in bodies)
        if not one:
            return None
        before, _, behind = bodies[0][: one[0].start()].rpartition(NAME)
        if not before.strip() or NAME in before:
            return None
        following = None
        if len(two) == 2:
            between = bodies[1][two[0].end() : two[1].start()].rpartition(NAME)[0]
            following = re.compile(loose(between))
        return cls(
            re.compile(loose(before.lstrip())),
            re.compile(f"(?P<name>{NAMED}){loose(behind)}"),
            following,
            re.compile(loose(bodies[0][one[0].end() :])),
        )

    @classmethod
    def _of_objects(cls, bodies: Sequence[str]) -> JsonCalls | None:
        """The form of calls that are objects, whose keys a model may write in any order and with
        any white space; None of others, and where no token stands before the first."""
        one, two = ([*_objects(body)] for body in bodies)
        if len(one) != 1:
            return None
        [(start, end, keys)] = one
        if not TOKEN.search(bodies[0][:start]):
            return None
        between = [bodies[1][each[1] : other[0]] for each, other in pairwise(two)]
        return cls(
            re.compile(loose(bodies[0][:start].lstrip())),
            keys,
            re.compile(rf"\s*{loose(between[0])}") if between else None,
            re.compile(rf"\s*{loose(bodies[0][end:])}"),
        )

    def _call(self, text: str, before: re.Match[str]) -> tuple[ToolCall, int] | None:
        """The call behind a match, and the end of its JSON; None if no JSON is there."""
        ids = before.groupdict()
        if isinstance(self.named, Keys):
            value, end = decoded(text, before.end())
            return None if end is None else (self.named.call(value, ids.get("id")), end)
        if not (named := self.named.match(text, before.end())):
            return None
        arguments, end = decoded(text, named.end())
        call = call_of(
            {"name": named["name"], "arguments": arguments}, (ids | named.groupdict()).get("id")
        )
        return None if end is None else (call, end)

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:
        """(content, calls) of a message."""
        content, calls, at = "", list[ToolCall](), 0
        while (found := self.opening.search(text, at)) and len(calls) < MAX_CALLS:
            content += text[at : found.start()]
            more: re.Match[str] | None = found
            closed: re.Match[str] | None = None
            while more:
                if (made := self._call(text, more)) is None:
                    if not more[0].strip() and (closed or more.end() == len(text)):
                        break  # white space alone stands between calls, and no call behind it
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
