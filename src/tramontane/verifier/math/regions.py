"""Sets of real numbers, so that two notations of one set compare equal.

Reads intervals, finite sets, their unions, intersections and differences, and inequalities with a
single variable alone on one side, joined by "and" or "or": `x < 3` is `(-∞, 3)`. The condition of a
set may also be a polynomial inequality, which is solved: `{x : x^2 < 4}` is `(-2, 2)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational, Unequality

from tramontane.verifier.math import values

MAX_DEGREE = 8  # of polynomials whose roots are computed
_TOLERANCE = mpmath.mpf(10) ** (values.SLACK - values.DIGITS)


class Region(NamedTuple):
    """A set of real numbers, and the variable that it restricts, if named.

    `contains` tells whether a number is in the set. The answer is the same for all numbers between
    two neighboring `points`.
    """

    points: tuple[Any, ...]
    contains: Callable[[Any], bool]
    name: str | None = None


def same_region(a: Region, b: Region) -> bool:
    """Compare two sets; a variable's name matters only if both sides have one."""
    if a.name and b.name and a.name != b.name:
        return False
    with mpmath.workdps(values.DIGITS):
        return all(a.contains(x) == b.contains(x) for x in _samples([*a.points, *b.points]))


def _samples(points: Iterable[Any]) -> list[Any]:
    """The finite points, and a number in each gap between them, before and after them."""
    distinct: list[Any] = []
    for point in sorted(filter(mpmath.isfinite, points)):
        if not distinct or not _close(distinct[-1], point):
            distinct.append(point)
    if not distinct:
        return [mpmath.mpf(0)]
    first, last = distinct[0], distinct[-1]
    outside = [first - max(1, abs(first)), last + max(1, abs(last))]
    return [*distinct, *((a + b) / 2 for a, b in pairwise(distinct)), *outside]


def read_region(e: Any, *, solved: bool = False) -> Region | None:
    """The region of a SymPy object; None if it is not a set of real numbers with known bounds.

    With `solved`, polynomial inequalities are solved.
    """
    if isinstance(e, sympy.Or | sympy.And | sympy.Union | sympy.Intersection | sympy.Complement):
        return _combine(e, solved)
    if isinstance(e, Equality) and isinstance(e.rhs, sympy.Set):  # a set with a name: x = (1, 2)
        region = read_region(e.rhs, solved=solved) if e.lhs.is_Symbol else None
        return region and region._replace(name=e.lhs.name)
    if isinstance(e, Relational):
        return _read_relation(e, solved)
    if isinstance(e, sympy.Interval):  # also the real numbers
        return _read_interval(e)
    if isinstance(e, sympy.FiniteSet) and all(isinstance(a, sympy.Expr) for a in e.args):
        numbers = [values.number(a) for a in e.args]
        if all(n is not None for n in numbers):
            return Region(tuple(numbers), lambda x: any(_close(n, x) for n in numbers))
    return Region((), lambda _: False) if e is sympy.S.EmptySet else None


def _combine(e: Any, solved: bool) -> Region | None:
    """The region of an operation on sets, or of several conditions on one variable."""
    found = [read_region(part, solved=solved) for part in e.args]
    regions = [region for region in found if region is not None]
    if not regions or len(regions) < len(found) or len({region.name for region in regions}) > 1:
        return None
    any_or_all = any if isinstance(e, sympy.Or | sympy.Union) else all

    def contains(x: Any) -> bool:
        inside = [region.contains(x) for region in regions]
        if isinstance(e, sympy.Complement):
            return inside[0] and not any(inside[1:])
        return any_or_all(inside)

    points = tuple(x for region in regions for x in region.points)
    return Region(points, contains, regions[0].name)


def _read_interval(e: Any) -> Region | None:
    start, end = values.number(e.start), values.number(e.end)
    if start is None or end is None:
        return None

    def contains(x: Any) -> bool:
        after = _before(start, x) or (not e.left_open and _close(start, x))
        return after and (_before(x, end) or (not e.right_open and _close(x, end)))

    return Region((start, end), contains)


def _close(a: Any, b: Any) -> bool:
    return values.close(a, b, _TOLERANCE)


def _before(a: Any, b: Any) -> bool:
    return bool(a < b) and not _close(a, b)


# -------------------------------------------------------------------------- relations


def _read_relation(e: Any, solved: bool) -> Region | None:
    """`x < 3`, `3 > x`, `x ≠ 3`, with a letter or `f(x)` alone on one side; with `solved`, also
    polynomials in one letter, and their absolute values."""
    for variable, bound, sign in ((e.rhs, e.lhs, -1), (e.lhs, e.rhs, 1)):
        is_variable = variable.is_Symbol or isinstance(variable, AppliedUndef)
        if not is_variable or (isinstance(e, Equality) and not solved):
            continue
        value = values.number(bound)
        if value is not None:
            return _where(e, [-sign * value, mpmath.mpf(sign)], [value], str(variable))
    if isinstance(e.rhs, sympy.Abs) and not isinstance(e.lhs, sympy.Abs):
        e = e.reversed
    if isinstance(e.lhs, sympy.Abs) and not isinstance(e, Equality):
        # Two rays have no shorter form, and `|x - 3| < 2` is a center and a radius.
        is_outside = isinstance(e, sympy.StrictGreaterThan | sympy.GreaterThan)
        solved = solved or is_outside or _is_shifted(e.lhs.args[0])
    if not solved or len(e.free_symbols) != 1:
        return None
    with mpmath.workdps(values.DIGITS):
        return _solve(e, *e.free_symbols)


def _is_shifted(e: Any) -> bool:
    """True for a letter plus or less a number."""
    letters = [term for term in e.args if term.free_symbols]
    return (
        isinstance(e, sympy.Add)
        and len(letters) == 1
        and any(t.is_Symbol for t in (letters[0], -letters[0]))
    )


def _solve(e: Any, letter: Any) -> Region | None:
    """The region of a polynomial relation, or of one between an absolute value and a number."""
    left, right = (_polynomial(side, letter) for side in (e.lhs, e.rhs))
    if isinstance(e.lhs, sympy.Abs) and right and len(right) == 1 and right[0] >= 0:
        inner = _polynomial(e.lhs.args[0], letter)
        left, right = inner and _product(inner, inner), _product(right, right)
    if left is None or right is None:
        return None
    coefficients = [a - b for a, b in zip_longest(left, right, fillvalue=mpmath.mpf(0))]
    roots = _roots(coefficients)
    return None if roots is None else _where(e, coefficients, roots, letter.name)


def _where(e: Any, coefficients: list[Any], roots: list[Any], name: str) -> Region:
    """The region where a polynomial, left less right side, has the sign that `e` demands."""
    is_less = isinstance(e, sympy.StrictLessThan | sympy.LessThan)
    includes_roots = isinstance(e, sympy.LessThan | sympy.GreaterThan | Equality)

    def contains(x: Any) -> bool:
        if any(_close(x, root) for root in roots):
            return includes_roots
        if isinstance(e, Equality | Unequality):
            return isinstance(e, Unequality)
        return bool(mpmath.polyval(coefficients[::-1], x) < 0) == is_less

    return Region(tuple(roots), contains, name)


def _polynomial(e: Any, letter: Any) -> list[Any] | None:
    """The coefficients, the constant first; None if it is not a polynomial of low degree."""
    if not e.has(letter):
        value = values.number(e) if isinstance(e, sympy.Expr) else None
        return None if value is None or mpmath.isinf(value) else [value]
    if e == letter:
        return [mpmath.mpf(0), mpmath.mpf(1)]
    if isinstance(e, sympy.UnevaluatedExpr):
        return _polynomial(e.args[0], letter)
    if isinstance(e, sympy.Pow) and e.exp.is_Integer and 1 <= e.exp <= MAX_DEGREE:
        parts = [_polynomial(e.base, letter)] * int(e.exp)
    elif isinstance(e, sympy.Add | sympy.Mul):
        parts = [_polynomial(a, letter) for a in e.args]
    else:
        return None
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or sum(len(part) - 1 for part in known) > 4 * MAX_DEGREE:
        return None
    if isinstance(e, sympy.Add):
        return [mpmath.fsum(c) for c in zip_longest(*known, fillvalue=mpmath.mpf(0))]
    total = [mpmath.mpf(1)]
    for part in known:
        total = _product(total, part)
    return total if len(total) <= MAX_DEGREE + 1 else None


def _product(a: list[Any], b: list[Any]) -> list[Any]:
    result = [mpmath.mpf(0)] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            result[i + j] += x * y
    return result


def _roots(coefficients: list[Any]) -> list[Any] | None:
    """The real roots of a polynomial that is not constant; None if they cannot be computed."""
    while coefficients and _close(coefficients[-1], mpmath.mpf(0)):
        coefficients = coefficients[:-1]
    if len(coefficients) < 2:
        return None
    if len(coefficients) == 3:  # exact for double roots
        c, b, a = coefficients
        square = b * b - 4 * a * c
        root = mpmath.sqrt(0 if _close(square, mpmath.mpf(0)) else square)
        return [] if square < 0 and root else [(-b - root) / (2 * a), (-b + root) / (2 * a)]
    try:
        roots = mpmath.polyroots(coefficients[::-1], maxsteps=100, extraprec=200)
    except mpmath.mp.NoConvergence:
        return None
    return [mpmath.re(root) for root in roots if _close(mpmath.im(root), mpmath.mpf(0))]
