"""The outer shape of a maths answer: its brackets, its items, its labels."""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = ("(", "[", "{", "\\{")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_TOKEN = re.compile(r"\\[{}|]|\\[A-Za-z]+|\\.|.", re.DOTALL)


class Shape(NamedTuple):
    """The items of an answer; `kind` is "list" (any order) or the brackets of a tuple or interval:
    "()", "[]", "[)", "(]"."""

    kind: str
    items: list[str]


def split(text: str, *separators: str) -> list[str]:
    """Split at LaTeX tokens outside of all brackets; empty items are dropped."""
    items: list[str] = []
    current: list[str] = []
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING.values())
        if token.startswith(("\\begin", "\\end")):
            depth += 1 if token == "\\begin" else -1
        if depth == 0 and token in separators:
            items.append("".join(current))
            current = []
        else:
            current.append(token)
    items.append("".join(current))
    return [item.strip() for item in items if item.strip()]


def read_shape(text: str) -> Shape:
    """A list for `1, 2` and `\\{1, 2\\}`, else the brackets of a tuple or interval; a single item
    is a list of one."""
    kind, inner = "list", text
    opening = re.match(r"\\?[{(\[]", text)
    closing = re.search(r"\\?[})\]]\Z", text)
    if opening and closing and closing.start() >= opening.end():
        inside = text[opening.end() : closing.start()].strip()
        is_pair = balanced(inside)
        if is_pair and _CLOSING.get(opening[0]) == closing[0] and "{" in opening[0]:
            inner = inside
        elif is_pair and opening[0] in "([" and closing[0] in ")]":
            kind, inner = opening[0] + closing[0], inside
    # `(1,2); (3,4)` and `p=5,q=2; p=7,q=2`: the semicolon is the outer separator.
    items = split(inner, ";") if kind == "list" else []
    if len(items) < 2:
        items = split(inner, ",", ";")
    return Shape(kind, items) if kind == "list" or len(items) > 1 else Shape("list", [text])


def balanced(text: str) -> bool:
    """True if brackets are balanced; kinds are not compared."""
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING.values())
        if depth < 0:
            return False
    return depth == 0


def label(item: str) -> tuple[str, str] | None:
    """("x", "5") of `x = 5`; None without exactly one `=`."""
    parts = split(item, "=")
    return (parts[0].replace(" ", ""), parts[1]) if len(parts) == 2 else None
