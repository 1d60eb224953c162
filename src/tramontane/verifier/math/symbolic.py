"""LaTeX → SymPy objects, never evaluated; and whether two of them are the same thing.

Expressions are compared by value (`values`), equations and inequalities up to a constant factor,
sets of real numbers as unions of intervals, matrices cell by cell. SymPy is never asked to
simplify, solve or integrate: that has no bound.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational, Unequality

from tramontane.verifier.math import values


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """The SymPy object of a piece of LaTeX, or None where it is none.

    Raises:
        MemoryError, RecursionError: past the process's limits, which says nothing of the text.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    try:
        return latex2sympy(
            normalize_latex(text, config),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the library has no class of its own for what it cannot read
        return None


def union(parts: list[str]) -> Any:
    """`x < 1` or `x > 2`, which LaTeX has no one way to join; None of anything else."""
    parsed: list[Any] = []
    for part in parts if len(parts) > 1 else []:
        parsed.append(parse_latex(part))
        if not isinstance(parsed[-1], Relational | sympy.And):
            return None
    return sympy.Or(*parsed, evaluate=False) if parsed else None


def bounded(e: Any) -> bool:
    """Can the values of this be told at all?"""
    try:
        same(e, _OTHER)
    except values.TooLarge:
        return False
    return True


_OTHER = sympy.Symbol("a")


def same(gold: Any, pred: Any) -> bool:
    """Are two parsed objects the same thing?

    Raises:
        values.TooLarge: a value is past the bounds.
    """
    gold, pred = _unwrap(gold, pred)
    if isinstance(gold, sympy.MatrixBase) or isinstance(pred, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(pred, sympy.MatrixBase)
            and gold.shape == pred.shape
            and all(same(g, p) for g, p in zip(gold.flat(), pred.flat(), strict=True))
        )
    if gold == pred:
        return True
    if isinstance(pred, sympy.FiniteSet) and len(pred.args) == 1 and isinstance(gold, sympy.Expr):
        return same(gold, pred.args[0])
    if isinstance(gold, Equality) and isinstance(pred, Equality):
        return _same_equation(gold, pred)
    if (g := _region(gold)) is not None and (p := _region(pred)) is not None:
        return _same_region(g, p)
    if isinstance(gold, Relational) and isinstance(pred, Relational):
        return _same_inequality(gold, pred)
    if isinstance(gold, sympy.And) and isinstance(pred, sympy.And):
        return _all_in_any_order(gold.args, pred.args)
    if isinstance(gold, sympy.Tuple) and isinstance(pred, sympy.Tuple):
        return len(gold) == len(pred) and all(map(same, gold, pred))
    if isinstance(gold, sympy.Set) and isinstance(pred, sympy.Set):
        return type(gold) is type(pred) and _all_in_any_order(gold.args, pred.args)
    if isinstance(gold, sympy.Expr) and isinstance(pred, sympy.Expr):
        return values.equal(gold, pred)
    return False


def _members(e: Any) -> list[Any]:
    """`a = b = c` as its members; anything else alone."""
    if isinstance(e, Equality):
        return [e.lhs, e.rhs]
    args = getattr(e, "_unsorted_args", ())
    if isinstance(e, sympy.And) and args and all(isinstance(a, Equality) for a in args):
        return [args[0].lhs, *(a.rhs for a in args)]
    return [e]


def _unwrap(gold: Any, pred: Any) -> tuple[Any, Any]:
    """Of `y = 2x + 1` against `2x + 1`, the side that counts; of a chain, its two ends."""
    g, p = _members(gold), _members(pred)
    if len(g) > 1 and len(p) > 1:
        ends = (sympy.Eq(side[0], side[-1], evaluate=False) for side in (g, p))
        return next(ends), next(ends)
    if len(g) > 1 and not isinstance(pred, Relational | sympy.And) and _is_label(g[0]):
        return g[-1], pred
    if len(p) > 1 and not isinstance(gold, Relational | sympy.And):
        return gold, p[-1]
    return gold, pred


def _is_label(e: Any) -> bool:
    """A letter, a ratio of letters, `f(x)`, `|AB|`: what names the answer."""
    return (not e.has(sympy.Add) and not any(n not in (1, -1) for n in e.atoms(sympy.Number))) or (
        isinstance(e, AppliedUndef)
    )


def _all_in_any_order(gold: Any, pred: Any) -> bool:
    left = list(pred)
    for g in gold:
        found = next((k for k, p in enumerate(left) if same(g, p)), None)
        if found is None:
            return False
        del left[found]
    return not left


# ------------------------------------------------------------------------ equations, inequalities


def _difference(e: Any) -> Any:
    return sympy.Add(e.lhs, sympy.Mul(-1, e.rhs, evaluate=False), evaluate=False)


def _same_equation(gold: Any, pred: Any) -> bool:
    """The same up to a constant factor; labels that are no numbers (`f(x) = …`) as written."""
    sides = (gold.lhs, gold.rhs, pred.lhs, pred.rhs)
    numeric = all(isinstance(side, sympy.Expr) for side in sides)
    if numeric and values.proportional(_difference(gold), _difference(pred)):
        return True
    return bool(gold.lhs == pred.lhs) and same(gold.rhs, pred.rhs)


def _same_inequality(gold: Any, pred: Any) -> bool:
    """The same up to a constant factor, which turns the sign round where it is negative."""
    if isinstance(gold, Equality) or isinstance(pred, Equality):
        return False
    if isinstance(gold, Unequality) or isinstance(pred, Unequality):
        both = isinstance(gold, Unequality) and isinstance(pred, Unequality)
        return both and bool(values.proportional(_difference(gold), _difference(pred)))
    strict = isinstance(gold, sympy.StrictLessThan | sympy.StrictGreaterThan)
    if strict != isinstance(pred, sympy.StrictLessThan | sympy.StrictGreaterThan):
        return False
    less = [isinstance(e, sympy.StrictLessThan | sympy.LessThan) for e in (gold, pred)]
    sign = values.proportional(_difference(gold), _difference(pred))
    return sign == (1 if less[0] == less[1] else -1)


# ------------------------------------------------------------------------------- sets of numbers


class _Piece(NamedTuple):
    """An interval of real numbers; a point is closed at both of its equal ends."""

    start: Any
    start_open: bool
    end: Any
    end_open: bool


class _Region(NamedTuple):
    """A set of real numbers, its pieces disjoint and in order; `name` is the variable's, if any."""

    pieces: tuple[_Piece, ...]
    name: str | None = None


_LINE = _Piece(-mpmath.inf, True, mpmath.inf, True)


def _region(e: Any) -> _Region | None:
    """A set, or an inequality in one variable that stands alone; None for anything else."""
    if isinstance(e, sympy.Or):
        either = [part for a in e.args if (part := _region(a)) is not None]
        if len(either) < len(e.args) or len({part.name for part in either}) > 1:
            return None
        return _Region(_tidy([p for part in either for p in part.pieces]).pieces, either[0].name)
    if isinstance(e, sympy.And):
        parts = [_region(a) for a in e.args]
        if len(parts) == 0 or any(p is None for p in parts):
            return None
        region = parts[0]
        for part in parts[1:]:
            if region is None or part is None or region.name != part.name:
                return None
            region = _meet(region, part)
        return region
    if isinstance(e, Equality) and isinstance(e.rhs, sympy.Set) and e.lhs.is_Symbol:
        inner = _region(e.rhs)
        return inner and _Region(inner.pieces, e.lhs.name)
    if isinstance(e, Relational) and not isinstance(e, Equality):
        return _half_line(e)
    if isinstance(e, sympy.Interval):
        start, end = values.number(e.start), values.number(e.end)
        if start is None or end is None:
            return None
        return _tidy([_Piece(start, bool(e.left_open), end, bool(e.right_open))])
    if isinstance(e, sympy.FiniteSet) and all(isinstance(a, sympy.Expr) for a in e.args):
        numbers = [values.number(a) for a in e.args]
        if any(n is None for n in numbers):
            return None
        return _tidy([_Piece(n, False, n, False) for n in numbers])
    if e is sympy.S.Reals:
        return _Region((_LINE,))
    if e is sympy.S.EmptySet:
        return _Region(())
    if isinstance(e, sympy.Union | sympy.Intersection | sympy.Complement):
        parts = [_region(a) for a in e.args]
        if any(p is None for p in parts):
            return None
        known = [p for p in parts if p is not None]
        if isinstance(e, sympy.Union):
            return _tidy([piece for part in known for piece in part.pieces])
        region = known[0]
        for part in known[1:]:
            region = _meet(region, part if isinstance(e, sympy.Intersection) else _outside(part))
        return region
    return None


def _half_line(e: Any) -> _Region | None:
    less = isinstance(e, sympy.StrictLessThan | sympy.LessThan | Unequality)
    if (e.rhs.is_Symbol or isinstance(e.rhs, AppliedUndef)) and not isinstance(e, Unequality):
        variable, bound, below = e.rhs, e.lhs, not less
    else:
        variable, bound, below = e.lhs, e.rhs, less
    if not (variable.is_Symbol or isinstance(variable, AppliedUndef)):
        return None
    if (value := values.number(bound)) is None:
        return None
    if isinstance(e, Unequality):
        return _Region(
            _outside(_Region((_Piece(value, False, value, False),))).pieces, str(variable)
        )
    is_open = isinstance(e, sympy.StrictLessThan | sympy.StrictGreaterThan)
    if below:
        return _Region((_Piece(-mpmath.inf, True, value, is_open),), str(variable))
    return _Region((_Piece(value, is_open, mpmath.inf, True),), str(variable))


def _at(a: Any, b: Any) -> bool:
    return values.close(a, b, mpmath.mpf(10) ** (values.SLACK - values.DIGITS))


def _before(a: Any, b: Any) -> bool:
    return bool(a < b) and not _at(a, b)


def _tidy(pieces: list[_Piece]) -> _Region:
    """Empty pieces dropped, overlapping and touching ones joined."""
    joined: list[_Piece] = []
    for p in sorted(pieces, key=lambda p: (p.start, p.start_open)):
        if _before(p.end, p.start) or (_at(p.start, p.end) and (p.start_open or p.end_open)):
            continue
        last = joined[-1] if joined else None
        if (
            last is None
            or _before(last.end, p.start)
            or (_at(last.end, p.start) and last.end_open and p.start_open)
        ):
            joined.append(p)
            continue
        end, end_open = last.end, last.end_open
        if _at(p.end, end):
            end_open = end_open and p.end_open
        elif p.end > end:
            end, end_open = p.end, p.end_open
        start_open = last.start_open and (p.start_open or not _at(p.start, last.start))
        joined[-1] = _Piece(last.start, start_open, end, end_open)
    return _Region(tuple(joined))


def _outside(region: _Region) -> _Region:
    gaps, start, start_open = [], -mpmath.inf, True
    for p in region.pieces:
        gaps.append(_Piece(start, start_open, p.start, not p.start_open))
        start, start_open = p.end, not p.end_open
    gaps.append(_Piece(start, start_open, mpmath.inf, True))
    return _tidy(gaps)


def _meet(a: _Region, b: _Region) -> _Region:
    """The intersection: what is outside of neither."""
    outside = _tidy([*_outside(a).pieces, *_outside(b).pieces])
    return _Region(_outside(outside).pieces, a.name or b.name)


def _same_region(a: _Region, b: _Region) -> bool:
    if a.name and b.name and a.name != b.name:
        return False
    return len(a.pieces) == len(b.pieces) and all(
        _at(p.start, q.start) and _at(p.end, q.end) and p[1::2] == q[1::2]
        for p, q in zip(a.pieces, b.pieces, strict=True)
    )
