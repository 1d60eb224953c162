r"""Definitions by cases: `\begin{cases}`, and braces around an array."""

from __future__ import annotations

import re
from collections.abc import Callable

from tramontane.verifier.math.structure import Refused, label

_CASES = re.compile(
    r"(?:\\\{\s*)?\\begin\s*\{cases\}(.*)\\end\s*\{cases\}\s*(?:\\\})?\.?"
    r"|\\\{\s*\\begin\s*\{array\}\s*\{[^{}]*\}(.*)\\end\s*\{array\}\s*\.?",
    re.DOTALL,
)
_IF = re.compile(r"\\text\w*\s*\{\s*(?:if|for|when|wenn|si|se|если|若|当)\s*\}|\b(?:if|for|when)\b")
_IS = re.compile(r"(\\text\w*\s*\{\s*)(?:is|are)\s+")
_OPEN_BOUND = re.compile(r"(?<![A-Za-z\\])([ijkmn])\s*([<>])\s*(-?\d{1,9})(?![\w.])")
_OTHERWISE = re.compile(r"(?:\\text\w*\s*\{)?\s*(?:otherwise|else|sonst|sinon)\s*\}?")


def same_cases(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare definitions by cases row by row, in any order, or else by their values; None if
    neither side is one."""
    if not any(name in side for name in ("{cases}", "{array}") for side in (gold, pred)):
        return None
    sides = [(label(side) or ("", side))[1] for side in (gold, pred)]
    g, p = (_read_cases(side) for side in sides)
    if g is None and p is None:
        return None
    unmatched: tuple[list[str], list[str]] = ([], [])
    if g and p and len(g) == len(p):
        unmatched = _unmatched(g, p, equal)
        if not any(unmatched):
            return True
    from tramontane.verifier.math import piecewise  # SymPy takes a second to import

    functions = (
        [_without_rest(row) for row in rows or [side]]
        for rows, side in zip((g, p), sides, strict=True)
    )
    decided = piecewise.same_function(*functions)
    if decided is not None or not (g and p):
        return decided
    # `otherwise` stands for the condition of the only other row.
    if len(g) != len(p) or len(unmatched[0]) > 1 or len(unmatched[1]) > 1:
        return False
    (one,), (other,) = unmatched
    is_rest = _without_rest(one) != one or _without_rest(other) != other
    return is_rest and equal(one.partition("&")[0], other.partition("&")[0])


def _unmatched(
    gold: list[str], pred: list[str], equal: Callable[[str, str], bool]
) -> tuple[list[str], list[str]]:
    """The rows of each side without an equal row, in value and condition, on the other."""

    def same(a: str, b: str) -> bool:
        one, other = a.split("&"), b.split("&")
        is_rest = [_without_rest(row) != row for row in (a, b)]
        if len(one) != 2 or len(other) != 2 or is_rest[0] != is_rest[1]:
            return False
        return equal(one[0], other[0]) and (is_rest[0] or equal(one[1], other[1]))

    left, right = [], list(pred)
    for row in gold:
        found = next((other for other in right if _holds(same, row, other)), None)
        if found is None:
            left.append(row)
        else:
            right.remove(found)
    return left, right


def _holds(same: Callable[[str, str], bool], row: str, other: str) -> bool:
    try:
        return same(row, other)
    except Refused:  # only a difference
        return False


def _without_rest(row: str) -> str:
    """A row of cases without the condition "otherwise"."""
    value, _, condition = row.partition("&")
    return value if _OTHERWISE.fullmatch(condition.strip()) else row


def _with_closed_bounds(condition: str) -> str:
    r"""`n \ge 2` for `n > 1`, where the letter is an integer by custom."""
    return _OPEN_BOUND.sub(
        lambda m: rf"{m[1]} \ge {int(m[3]) + 1}" if m[2] == ">" else rf"{m[1]} \le {int(m[3]) - 1}",
        condition,
    )


def _read_cases(text: str) -> list[str] | None:
    match = _CASES.fullmatch(text.strip())
    if match is None:
        return None
    rows = []
    for line in re.split(r"\\\\", match[1] or match[2]):
        line = _IS.sub(r"\1", line)
        cells = [_IF.sub(" ", cell).strip(" ,;.") for cell in line.split("&")]
        if len(cells) == 1 and len(parts := _IF.split(line)) == 2:
            cells = [part.strip(" ,;.") for part in parts]
        rows.append("&".join([*cells[:1], *map(_with_closed_bounds, cells[1:])]))
    return [row for row in rows if row]
