"""The outer shape of an answer: its brackets, its items, its labels."""

from __future__ import annotations

import re

_OPENING = ("(", "[", "{", "\\{")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_TOKEN = re.compile(r"\\[{}|]|\\[A-Za-z]+|\\.|.", re.DOTALL)


def split(text: str, *separators: str) -> list[str]:
    """Split at separators (tokens of LaTeX) that stand outside all brackets; no empty items."""
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


def structure(text: str) -> tuple[str, list[str]]:
    """("list", items) of `1, 2` and `\\{1, 2\\}`; ("()", items) of a tuple or an open interval."""
    kind, inner = "list", text
    match = re.match(r"\\?[{(\[]", text)
    end = re.search(r"\\?[})\]]\Z", text)
    if match and end and end.start() >= match.end():
        inside = text[match.end() : end.start()].strip()
        same = balanced(inside)
        if same and _CLOSING.get(match[0]) == end[0] and "{" in match[0]:
            inner = inside
        elif same and match[0] in "([" and end[0] in ")]":
            kind, inner = match[0] + end[0], inside
    # `(1,2); (3,4)` and `p=5,q=2; p=7,q=2`: the semicolon is the outer separator.
    items = split(inner, ";") if kind == "list" else []
    if len(items) < 2:
        items = split(inner, ",", ";")
    return (kind, items) if kind == "list" or len(items) > 1 else ("list", [text])


def balanced(text: str) -> bool:
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING.values())
        if depth < 0:
            return False
    return depth == 0


def label(item: str) -> tuple[str, str] | None:
    """("x", "5") of `x = 5`; None where there is no label."""
    parts = split(item, "=")
    return (parts[0].replace(" ", ""), parts[1]) if len(parts) == 2 else None


def solutions(items: list[str]) -> list[str] | None:
    """`p=5, q=2, p=7, q=2` as tuples, `(5,2)` and `(7,2)`; None if no label comes again."""
    pairs = [label(item) for item in items]
    if None in pairs or len(pairs) < 4:
        return None
    names = [pair[0] for pair in pairs if pair]
    period = next((k for k in range(1, len(names)) if names[k] == names[0]), len(names))
    if period < 2 or len(names) % period or names != names[:period] * (len(names) // period):
        return None
    if period == len(names):
        return None
    values = [pair[1] for pair in pairs if pair]
    return [f"({','.join(values[k : k + period])})" for k in range(0, len(values), period)]
