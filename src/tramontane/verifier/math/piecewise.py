r"""Functions of one letter by cases, compared with others by their values: `|x|` is `x` for
`x \ge 0` and `-x` for `x < 0`."""

from __future__ import annotations

import math
import re
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
        where = read_condition(condition) if condition else sympy.true
        if not isinstance(parsed, sympy.Expr) or not isinstance(where, Boolean):
            return None
        read.append((parsed, where))
    return read


_MAX_MODULUS = 100
_PARITY = re.compile(
    r"(?:\\text\{)?(?:is|are|an?|all)*(?:\\text\{)?(?P<first>even|odd)?(?:\\text\{)?(?:integer|number)?\}?"
    r"(?P<letter>[a-z])(?:\\text\{)?(?:is|are|an?|all)*(?P<last>even|odd)?(?:integer|number)?s?\}?"
)
_DIVIDES = re.compile(r"(\d{1,3})(?:\||\\mid)([a-z])|(\d{1,3})\\nmid([a-z])")
_CONGRUENT = re.compile(
    r"([a-z])(?:\\equiv|=)(-?\d{1,3}(?:,-?\d{1,3})*)\(?\\?[bp]?mod\{?(\d{1,3})\}?\)?"
    r"|([a-z])\\?[bp]?mod(\d{1,3})=(\d{1,3})"
)
_GENERAL = re.compile(r"([a-z])=(\d{1,3})[a-z]([-+]\d{1,3})?")


def read_condition(text: str) -> Any:
    """The SymPy object of a condition; None if it cannot be read. `n` even, `3 \\mid n` and `n
    \\equiv 1 \\pmod 4` are remainders of n."""
    plain = re.sub(r"\s+", "", text).replace("\\not\\mid", "\\nmid")
    found = _read_remainders(plain)
    if found is None:
        return parsing.parse_answer(text)
    name, modulus, remainders = found
    remainder = sympy.Mod(sympy.Symbol(name), modulus)
    return sympy.Or(*(sympy.Eq(remainder, r % modulus) for r in remainders))


def _read_remainders(text: str) -> tuple[str, int, set[int]] | None:
    if (m := _PARITY.fullmatch(text)) and (m["first"] is None) != (m["last"] is None):
        return m["letter"], 2, {int((m["first"] or m["last"]) == "odd")}
    if m := _DIVIDES.fullmatch(text):
        modulus = int(m[1] or m[3])
        found = (m[2], modulus, {0}) if m[2] else (m[4], modulus, set(range(1, modulus)))
    elif m := _CONGRUENT.fullmatch(text):
        found = m[1] or m[4], int(m[3] or m[5]), set(map(int, (m[2] or m[6]).split(",")))
    elif m := _GENERAL.fullmatch(text):
        found = m[1], int(m[2]), {int(m[3] or 0)}
    else:
        return None
    return found if 1 < found[1] <= _MAX_MODULUS else None


def _points(rows: list[_Row]) -> list[Any]:
    moduli = {int(mod.args[1]) for _, where in rows for mod in where.atoms(sympy.Mod)}
    if moduli:  # a function of a positive integer
        period = min(math.lcm(*moduli), _MAX_MODULUS)
        return [sympy.Integer(n) for n in (*range(1, 2 * period + 13), 1000, 1001)]
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
