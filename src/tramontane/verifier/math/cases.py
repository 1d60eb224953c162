r"""Definitions by cases: `\begin{cases}`, and braces around an array."""

from __future__ import annotations

import re
from collections.abc import Callable

from tramontane.verifier.math.items import same_in_any_order
from tramontane.verifier.math.structure import label

_CASES = re.compile(
    r"(?:\\\{\s*)?\\begin\s*\{cases\}(.*)\\end\s*\{cases\}\s*(?:\\\})?\.?"
    r"|\\\{\s*\\begin\s*\{array\}\s*\{[^{}]*\}(.*)\\end\s*\{array\}\s*\.?",
    re.DOTALL,
)
_IF = re.compile(r"\\text\w*\s*\{\s*(?:if|for|when|wenn|si|se|если|若|当)\s*\}|\b(?:if|for|when)\b")
_IS = re.compile(r"(\\text\w*\s*\{\s*)(?:is|are)\s+")
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

    def same(a: str, b: str) -> bool:
        one, other = a.split("&"), b.split("&")
        if len(one) != 2 or len(other) != 2:
            return False
        is_rest = [_OTHERWISE.fullmatch(row[1].strip()) is not None for row in (one, other)]
        return equal(one[0], other[0]) and (any(is_rest) or equal(one[1], other[1]))

    if g and p and len(g) == len(p) and same_in_any_order(g, p, same):
        return True
    from tramontane.verifier.math import piecewise  # SymPy takes a second to import

    functions = (
        [_without_rest(row) for row in rows or [side]]
        for rows, side in zip((g, p), sides, strict=True)
    )
    decided = piecewise.same_function(*functions)
    return False if decided is None and g and p else decided


def _without_rest(row: str) -> str:
    """A row of cases without the condition "otherwise"."""
    value, _, condition = row.partition("&")
    return value if _OTHERWISE.fullmatch(condition.strip()) else row


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
        rows.append("&".join(cells))
    return [row for row in rows if row]
