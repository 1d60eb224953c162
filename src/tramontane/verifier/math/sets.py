r"""Expressions of sets that are letters, such as `A \cup (B \setminus C)`: two are the same if they
have the same elements, whatever the sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product

_TOKEN = re.compile(
    r"\s*(?:(?P<set>[A-Z](?:_(?:\d|\{\d\}))?)|(?P<operation>\\(?:cup|cap|setminus|triangle)(?![A-Za-z]))"
    r"|(?P<bar>\\(?:overline|bar)\s*\{|\\complement(?![A-Za-z]))|(?P<open>[({])|(?P<close>[)}])"
    r"|(?P<complement>\^\s*(?:\{\s*(?:c|C|\\complement|\\prime)\s*\}|c|C|\\complement(?![A-Za-z]))|'))"
)
_OPERATION = re.compile(r"\\(?:cup|cap|setminus|triangle)(?![A-Za-z])")
_MEASURED = re.compile(r"\s*(?:(?P<name>[A-Za-z]|\\Pr)\s*\((?P<inner>.*)\)|\|(?P<size>[^|]*)\|)\s*")
MAX_SETS = 6
_Members = Callable[[dict[str, bool]], bool]
_OPERATIONS: dict[str, Callable[[bool, bool], bool]] = {
    "cup": lambda a, b: a or b,
    "cap": lambda a, b: a and b,
    "setminus": lambda a, b: a and not b,
    "triangle": lambda a, b: a != b,
}


class _NoExpression(Exception):
    """The text is not an expression of sets, or has operations without the brackets they need."""


def same_sets(gold: str, pred: str) -> bool | None:
    """Compare two expressions of sets by the elements that they have; None if one is not such an
    expression, or neither has an operation."""
    if not _OPERATION.search(gold + pred):
        return None
    measured = [_MEASURED.fullmatch(side) for side in (gold, pred)]
    if len({m and (m["name"],) for m in measured}) == 1:  # P(A), n(A), |A|
        gold, pred = (
            (m["inner"] or m["size"]) if m else side
            for m, side in zip(measured, (gold, pred), strict=True)
        )
    try:
        (g, names), (p, others) = _read(gold), _read(pred)
    except _NoExpression:
        return None
    letters = sorted(names | others)
    if len(letters) > MAX_SETS:
        return None
    worlds = (
        dict(zip(letters, world, strict=True))
        for world in product((False, True), repeat=len(letters))
    )
    return all(g(world) == p(world) for world in worlds)


def _read(text: str) -> tuple[_Members, set[str]]:
    tokens: list[tuple[str, str]] = []
    end = 0
    while end < len(text.rstrip()):
        found = _TOKEN.match(text, end)
        if found is None:
            raise _NoExpression
        tokens.append((found.lastgroup or "", found[0].strip()))
        end = found.end()
    reader = iter([*tokens, ("end", "")])
    members, last = _expression(reader)
    if last != "end":
        raise _NoExpression
    return members, {name for kind, name in tokens if kind == "set"}


def _expression(tokens: Iterator[tuple[str, str]]) -> tuple[_Members, str]:
    """An expression up to a closing bracket or the end, and which of these it was."""
    members, (kind, text) = _term(tokens, *next(tokens))
    used = ""
    while kind == "operation":
        name = text.removeprefix("\\")
        if used and (used != name or name == "setminus"):
            raise _NoExpression  # A \cup B \cap C needs brackets
        used, left, combine = name, members, _OPERATIONS[name]
        right, (kind, text) = _term(tokens, *next(tokens))

        def joined(
            world: dict[str, bool],
            left: _Members = left,
            right: _Members = right,
            combine: Callable[[bool, bool], bool] = combine,
        ) -> bool:
            return combine(left(world), right(world))

        members = joined
    return members, kind


def _term(
    tokens: Iterator[tuple[str, str]], kind: str, text: str
) -> tuple[_Members, tuple[str, str]]:
    """A set or an expression in brackets, with its complements, and the token after it."""
    members: _Members
    if kind == "set":

        def members(world: dict[str, bool]) -> bool:
            return world[text]

        after = next(tokens)
    elif kind == "bar" and not text.endswith("{"):
        members, after = _term(tokens, *next(tokens))
        return _complement(members), after
    elif kind in ("open", "bar"):
        members, last = _expression(tokens)
        if last != "close":
            raise _NoExpression
        members = _complement(members) if kind == "bar" else members
        after = next(tokens)
    else:
        raise _NoExpression
    while after[0] == "complement":
        members, after = _complement(members), next(tokens)
    return members, after


def _complement(members: _Members) -> _Members:
    return lambda world: not members(world)
