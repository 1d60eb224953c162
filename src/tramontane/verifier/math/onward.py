r"""Integers from a first one on: `\{3, 4, 5, \ldots\}`, `\{n \in \mathbb{Z} : n \ge 3\}`, `n > 2, n
\in \mathbb{Z}`."""

from __future__ import annotations

import re
from itertools import pairwise

from tramontane.verifier.math.structure import split

_DOTS = re.compile(r"(?:\\\{)?\s*(-?\d[-\d\s,]*),\s*\\ldots\s*(?:\\\})?")
_SET = r"[a-z]\s*\\in\s*\\mathbb\{(?P<set>[ZN])\}(?:_\{?>0\}?|\^\{?\+\}?)?"
_BOUND = r"(?P<letter>[a-z])\s*(?P<sign>>|\\ge)\s*(?P<bound>-?\d{1,9})"
_BOUNDED = [
    re.compile(pattern.replace("SET", _SET).replace("BOUND", _BOUND))
    for pattern in (
        r"\\\{\s*SET\s*(?:[:|]|\\mid)\s*BOUND\s*\\\}",
        r"\\\{\s*[a-z]\s*(?:[:|]|\\mid)\s*BOUND\s*,\s*SET\s*\\\}",
        r"BOUND\s*[,;]\s*SET",
        r"SET\s*[,;]\s*BOUND",
        r"(?:\\text\s*\{\s*)?(?:all )?(?P<set>integer)s?(?:\s*\})?\s*BOUND",
        r"(?P<set>)(?=[i-n]\b)BOUND",
        r"\\mathbb\{(?P<set>Z)\}_\{>(?P<bound>0)\}(?P<sign>)",
    )
]


def same_integers(gold: str, pred: str) -> bool | None:
    """Compare two sets of integers from a first one on; None unless one is listed with dots, or
    both say that they are integers. A bare bound of a letter that stands for integers, `n >= 3`, is
    one of integers where the other side is."""
    if not any(mark in gold + pred for mark in ("\\ldots", "\\mathbb", "integer")):
        return None
    g, p = _read(gold), _read(pred)
    if g is None or p is None or not (g[1] or p[1]):
        return None
    return g[0] == p[0]


def _read(text: str) -> tuple[tuple[int, int], bool] | None:
    """(first, step) of a set of integers, and True if it says that it is one."""
    if match := _DOTS.fullmatch(text):
        items = split(match[1], ",")
        if len(items) < 3 or not all(re.fullmatch(r"-?\d{1,9}", item) for item in items):
            return None
        numbers = [int(item) for item in items]
        step = numbers[1] - numbers[0]
        is_even = all(b - a == step for a, b in pairwise(numbers))
        return ((numbers[0], step), True) if is_even and step > 0 else None
    for pattern in _BOUNDED:
        if match := pattern.fullmatch(text):
            first = int(match["bound"]) + (match["sign"] in (">", ""))
            if match["set"] == "N":
                first = max(first, 1) if first > 0 else first
                if first < 1:
                    return None  # from 0 or from 1
            return (first, 1), bool(match["set"])
    return None
