r"""Functions of one letter by cases, compared with others by their values: `|x|` is `x` for
`x \ge 0` and `-x` for `x < 0`."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from tramontane.verifier.math import parsing

NEAR = sympy.Rational(1, 1000)  # distance of a point from a bound
_CLOSE = 1e-9
_Row = tuple[Any, Any]  # value, condition


def same_function(gold: list[str], pred: list[str]) -> bool | None:
    """Compare two functions at their bounds, beside them, between and far beyond; None if one
    cannot be read, or has no letter or several.

    Args:
        gold: the rows of a function, each `value & condition`, or a value alone for the rest.
        pred: likewise.
    """
    sides = [_read(rows) for rows in (gold, pred)]
    if any(side is None for side in sides):
        return None
    g, p = (side for side in sides if side is not None)
    letters = {letter for part in (*g, *p) for e in part for letter in e.free_symbols}
    if len(letters) != 1:
        return None
    (letter,) = letters
    try:
        return all(
            _same_value(_at(g, letter, x)[0], value)
            for x in _points(g + p)
            for value in _at(p, letter, x)
        )
    except (TypeError, ValueError, ArithmeticError):  # not a real function
        return None


def _read(rows: list[str]) -> list[_Row] | None:
    read: list[_Row] = []
    for row in sorted(rows, key=lambda row: "&" not in row):
        value, _, condition = row.partition("&")
        parsed = parsing.parse_answer(value)
        where = parsing.parse_answer(condition) if condition else sympy.true
        if not isinstance(parsed, sympy.Expr) or not isinstance(where, Boolean):
            return None
        read.append((parsed, where))
    return read


def _points(rows: list[_Row]) -> list[Any]:
    numbers = {number for row in rows for e in row for number in e.atoms(sympy.Number)}
    bounds = {sign * n for n in numbers if n.is_finite for sign in (1, -1)}
    bounds |= {a / b for a in bounds for b in bounds if b}
    bounds |= {sympy.Integer(n) for n in range(-12, 13)}
    beside = {bound + step for bound in bounds for step in (0, NEAR, -NEAR)}
    return [*beside, *map(sympy.Rational, ("1234567/1000", "-1234567/1000", "7/13", "-29/7"))]


def _at(rows: list[_Row], letter: Any, point: Any) -> list[Any]:
    """The values at a point of all rows whose condition holds, else that of the row for the rest;
    [None] without any."""
    rest = [value for value, where in rows if where == sympy.true]
    stated = [(value, where) for value, where in rows if where != sympy.true]
    held = [value for value, where in stated if where.subs(letter, point) == sympy.true]
    return [value.subs(letter, point) for value in (held or rest)] or [None]


def _same_value(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    difference = sympy.N(one - other)
    return bool(abs(difference) < _CLOSE * (1 + abs(sympy.N(one))))
