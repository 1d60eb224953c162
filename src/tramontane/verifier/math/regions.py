"""Sets of real numbers as unions of intervals, so that two notations of one set compare equal.

Reads intervals, finite sets, their unions, intersections and differences, and inequalities with a
single variable alone on one side, joined by "and" or "or": `x < 3` is `(-∞, 3)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational, Unequality

from tramontane.verifier.math import values

_TOLERANCE = mpmath.mpf(10) ** (values.SLACK - values.DIGITS)


class Piece(NamedTuple):
    """An interval of real numbers; a point is closed at both of its equal ends."""

    start: Any
    start_open: bool
    end: Any
    end_open: bool


class Region(NamedTuple):
    """A set of real numbers: disjoint pieces in ascending order, and the variable that they
    restrict, if named."""

    pieces: tuple[Piece, ...]
    name: str | None = None


def same_region(a: Region, b: Region) -> bool:
    """Compare two sets; a variable's name matters only if both sides have one."""
    if a.name and b.name and a.name != b.name:
        return False
    return len(a.pieces) == len(b.pieces) and all(
        _close(p.start, q.start)
        and _close(p.end, q.end)
        and (p.start_open, p.end_open) == (q.start_open, q.end_open)
        for p, q in zip(a.pieces, b.pieces, strict=True)
    )


# ------------------------------------------------------------------------------------- reading


def read_region(e: Any) -> Region | None:
    """The region of a SymPy object; None if it is not a set of real numbers with known bounds."""
    for kinds, read in _READERS:
        if isinstance(e, kinds):
            return read(e)
    return None


def _read_all(parts: Iterable[Any]) -> list[Region] | None:
    """The regions of all parts; None if one has none."""
    regions = [read_region(part) for part in parts]
    known = [region for region in regions if region is not None]
    return known if len(known) == len(regions) else None


def _read_and_or(e: Any) -> Region | None:
    """Several conditions on one variable."""
    regions = _read_all(e.args)
    if not regions or len({region.name for region in regions}) > 1:
        return None
    joined = _union(regions) if isinstance(e, sympy.Or) else reduce(_intersection, regions)
    return Region(joined.pieces, regions[0].name)


def _read_equation(e: Any) -> Region | None:
    """A set with a name, `x = (1, 2)`; other equations are not regions."""
    if not (isinstance(e.rhs, sympy.Set) and e.lhs.is_Symbol):
        return None
    region = read_region(e.rhs)
    return region and Region(region.pieces, e.lhs.name)


def _read_inequality(e: Any) -> Region | None:
    """`x < 3`, `3 > x`, `x ≠ 3`, with a letter or `f(x)` alone on one side."""
    differs = isinstance(e, Unequality)
    reversed_ = _is_variable(e.rhs) and not differs
    variable, bound = (e.rhs, e.lhs) if reversed_ else (e.lhs, e.rhs)
    if not _is_variable(variable) or (value := values.number(bound)) is None:
        return None
    if differs:
        return Region(_complement(Region((_point(value),))).pieces, str(variable))
    is_less = isinstance(e, sympy.StrictLessThan | sympy.LessThan)
    is_open = isinstance(e, sympy.StrictLessThan | sympy.StrictGreaterThan)
    if is_less != reversed_:
        piece = Piece(-mpmath.inf, True, value, is_open)
    else:
        piece = Piece(value, is_open, mpmath.inf, True)
    return Region((piece,), str(variable))


def _is_variable(e: Any) -> bool:
    return e.is_Symbol or isinstance(e, AppliedUndef)


def _read_interval(e: Any) -> Region | None:
    start, end = values.number(e.start), values.number(e.end)
    if start is None or end is None:
        return None
    return _tidy([Piece(start, bool(e.left_open), end, bool(e.right_open))])


def _read_finite_set(e: Any) -> Region | None:
    if not all(isinstance(a, sympy.Expr) for a in e.args):
        return None
    numbers = [values.number(a) for a in e.args]
    return None if any(n is None for n in numbers) else _tidy([_point(n) for n in numbers])


def _read_set_operation(e: Any) -> Region | None:
    regions = _read_all(e.args)
    if not regions:
        return None
    if isinstance(e, sympy.Union):
        return _union(regions)
    return reduce(_intersection if isinstance(e, sympy.Intersection) else _difference, regions)


# The first kind that fits is used; `sympy.S.Reals` is an Interval.
_READERS: tuple[tuple[Any, Callable[[Any], Region | None]], ...] = (
    (sympy.Or | sympy.And, _read_and_or),
    (Equality, _read_equation),
    (Relational, _read_inequality),
    (sympy.Interval, _read_interval),
    (sympy.FiniteSet, _read_finite_set),
    (type(sympy.S.EmptySet), lambda _: Region(())),
    (sympy.Union | sympy.Intersection | sympy.Complement, _read_set_operation),
)


# ---------------------------------------------------------------------------------- arithmetic


def _close(a: Any, b: Any) -> bool:
    return values.close(a, b, _TOLERANCE)


def _before(a: Any, b: Any) -> bool:
    return bool(a < b) and not _close(a, b)


def _point(value: Any) -> Piece:
    return Piece(value, False, value, False)


def _union(regions: Iterable[Region]) -> Region:
    return _tidy([piece for region in regions for piece in region.pieces])


def _intersection(a: Region, b: Region) -> Region:
    """The numbers that are in both regions."""
    return _complement(_union([_complement(a), _complement(b)]))


def _difference(a: Region, b: Region) -> Region:
    return _intersection(a, _complement(b))


def _complement(region: Region) -> Region:
    gaps, start, start_open = [], -mpmath.inf, True
    for p in region.pieces:
        gaps.append(Piece(start, start_open, p.start, not p.start_open))
        start, start_open = p.end, not p.end_open
    gaps.append(Piece(start, start_open, mpmath.inf, True))
    return _tidy(gaps)


def _tidy(pieces: list[Piece]) -> Region:
    """Drop empty pieces; join pieces that overlap or touch."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.start, p.start_open)):
        if _is_empty(piece):
            continue
        if joined and not _apart(joined[-1], piece):
            joined[-1] = _join(joined[-1], piece)
        else:
            joined.append(piece)
    return Region(tuple(joined))


def _is_empty(p: Piece) -> bool:
    return _before(p.end, p.start) or (_close(p.start, p.end) and (p.start_open or p.end_open))


def _apart(p: Piece, q: Piece) -> bool:
    """True if `q`, which starts no earlier than `p`, neither overlaps nor touches it."""
    return _before(p.end, q.start) or (_close(p.end, q.start) and p.end_open and q.start_open)


def _join(p: Piece, q: Piece) -> Piece:
    """The union of two pieces that overlap or touch; `q` starts no earlier than `p`."""
    end, end_open = p.end, p.end_open
    if _close(q.end, end):
        end_open = end_open and q.end_open
    elif q.end > end:
        end, end_open = q.end, q.end_open
    start_open = p.start_open and (q.start_open or not _close(q.start, p.start))
    return Piece(p.start, start_open, end, end_open)
