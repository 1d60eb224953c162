"""Numbers for expressions: two are equal when they agree, to many digits, where both have values.

SymPy's `simplify` may run for hours on what fits in a line, and fails on much that is true. Values
at a few fixed points decide both ways, in time bounded by the size of the expression: identities of
this size that hold there to 30 digits beyond the largest value met do not fail elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

DIGITS = 50  # of the values; what is equal agrees in all but the last SLACK of them
SLACK = 20
MAX_MAGNITUDE = 2000  # digits before or behind the point; the precision grows with them
MAX_TERMS = 1000  # of a sum or product
MAX_STEPS = 20_000  # of evaluating one expression once
POINTS = 6
FAR_POINTS = 2  # one at a thousand, one below zero: `|x - 100|` is not `100 - x`


class TooLarge(Exception):
    """Values past MAX_MAGNITUDE, or too many steps."""


class NoValue(Exception):
    """Not defined at this point, or nothing that has a value."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(mpmath, function or name)
    for name, function in {
        **dict.fromkeys(
            [
                "sin",
                "cos",
                "tan",
                "cot",
                "sec",
                "csc",
                "asin",
                "acos",
                "atan",
                "acot",
                "asec",
                "acsc",
            ]
        ),
        **dict.fromkeys(
            ["sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh"]
        ),
        **dict.fromkeys(
            ["exp", "floor", "re", "im", "arg", "sign", "binomial", "factorial", "gamma"]
        ),
        "Abs": "fabs",
        "ceiling": "ceil",
        "conjugate": "conj",
    }.items()
}
_WHOLE = (sympy.factorial, sympy.binomial, sympy.Mod, sympy.Sum, sympy.Product)
_ROUNDING = (sympy.floor, sympy.ceiling)
_WHOLE_LETTERS = set("ijklmnpqIKMN")  # by custom; of x the floor is not x


class _Evaluation:
    """One expression at one point. `up` and `down`: digits before and behind the point of the
    largest and the smallest value on the way."""

    def __init__(self, point: dict[str, Any]) -> None:
        self.point = point
        self.up = self.down = 0
        self.steps = 0

    def __call__(self, e: Any) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLarge
        value = self._value(e)
        if mpmath.isinf(value):
            return value
        if mpmath.isnan(value):
            raise NoValue
        if value:
            # The exponent of a huge mpf may itself be huge: never through a float.
            digits = int(mpmath.mag(value) * math.log10(2))
            self.up, self.down = max(self.up, digits), max(self.down, -digits)
            if max(self.up, self.down) > MAX_MAGNITUDE:
                raise TooLarge
        return value

    def _value(self, e: Any) -> Any:
        if isinstance(e, sympy.Symbol):
            if e.name in self.point:
                return self.point[e.name]
            raise NoValue
        if isinstance(e, sympy.Integer):
            return mpmath.mpf(int(e))
        if isinstance(e, sympy.Rational):
            return mpmath.mpf(int(e.p)) / int(e.q)
        if isinstance(e, sympy.Float):  # as it was written, not as it was rounded
            return mpmath.mpf(str(e))
        if e is sympy.oo:
            return mpmath.inf
        if e is sympy.S.NegativeInfinity:
            return -mpmath.inf
        if e is sympy.I:
            return mpmath.mpc(0, 1)
        if isinstance(e, sympy.NumberSymbol):
            return +{"Pi": mpmath.pi, "Exp1": mpmath.e}.get(type(e).__name__, mpmath.nan)
        if isinstance(e, sympy.Add):
            return mpmath.fsum([self(a) for a in e.args])
        if isinstance(e, sympy.Mul):
            return mpmath.fprod([self(a) for a in e.args])
        if isinstance(e, sympy.Pow):
            return self._power(self(e.base), e.exp)
        if isinstance(e, sympy.UnevaluatedExpr):
            return self(e.args[0])
        if isinstance(e, sympy.Sum | sympy.Product):
            return self._series(e)
        if isinstance(e, sympy.Mod):
            a, b = self._whole(e.args[0]), self._whole(e.args[1])
            return mpmath.fmod(a, b) if b else mpmath.nan
        if isinstance(e, sympy.Max | sympy.Min):
            values = [self(a) for a in e.args]
            if any(mpmath.im(v) for v in values):
                raise NoValue
            return max(values) if isinstance(e, sympy.Max) else min(values)
        if isinstance(e, sympy.log):
            above = self._log(self(e.args[0]))
            return above if len(e.args) == 1 else self._ratio(above, self._log(self(e.args[1])))
        if isinstance(e, sympy.exp):
            return self._power(mpmath.e, e.args[0])
        function = _FUNCTIONS.get(type(e).__name__)
        if function is None or isinstance(e, AppliedUndef):
            raise NoValue
        return self._call(function, [self(a) for a in e.args])

    def _call(self, function: Callable[..., Any], values: list[Any]) -> Any:
        if any(mpmath.isinf(v) or abs(v) > 10**6 for v in values) and function not in (
            mpmath.fabs,
            mpmath.re,
            mpmath.im,
        ):
            raise TooLarge
        try:
            return function(*values)
        except (ZeroDivisionError, ValueError, mpmath.libmp.ComplexResult) as error:
            raise NoValue from error

    @staticmethod
    def _log(value: Any) -> Any:
        if not value or mpmath.isinf(value):
            raise NoValue
        return mpmath.log(value)

    @staticmethod
    def _ratio(above: Any, below: Any) -> Any:
        if not below:
            raise NoValue
        return above / below

    def _whole(self, e: Any) -> Any:
        value = self(e)
        if mpmath.im(value) or value != mpmath.nint(value):
            raise NoValue
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        power = self(exponent)
        if mpmath.isinf(base) or mpmath.isinf(power) or (not base and mpmath.re(power) <= 0):
            raise NoValue
        if base and abs(power) * abs(mpmath.log(base)) > MAX_MAGNITUDE * math.log(10):
            raise TooLarge
        odd_root = isinstance(exponent, sympy.Rational) and exponent.q % 2 and exponent.q > 1
        if odd_root and not mpmath.im(base) and mpmath.re(base) < 0:
            return (-1) ** int(exponent.p) * mpmath.power(-base, power)  # the real root, as taught
        return mpmath.power(base, power)

    def _series(self, e: Any) -> Any:
        (name, low, high), *others = e.limits
        first, last = self(low), self(high)
        if others or mpmath.isinf(last) or mpmath.isinf(first):
            raise NoValue
        if mpmath.im(first) or mpmath.im(last) or first != int(first) or last != int(last):
            raise NoValue
        if last - first > MAX_TERMS:
            raise TooLarge
        outer = self.point
        total = mpmath.mpf(0 if isinstance(e, sympy.Sum) else 1)
        for k in range(int(first), int(last) + 1):
            self.point = {**outer, name.name: mpmath.mpf(k)}
            term = self(e.function)
            total = total + term if isinstance(e, sympy.Sum) else total * term
        self.point = outer
        return total


def _point(names: Sequence[str], index: int, whole: bool, positive: bool) -> dict[str, Any]:
    """The same points every time; `i` is the imaginary unit. Mostly above zero, where roots and
    logarithms are real; of up to four names each two differ in sign once, or `|xy|` were `xy`."""
    point = {}
    for position, name in enumerate(names):
        draw = zlib.crc32(f"{index} {name}".encode())
        far = 0 if index < POINTS else (-1) ** (index - POINTS)
        if name in ("i", "I"):
            point[name] = mpmath.mpc(0, 1)
        elif whole:
            point[name] = mpmath.mpf(3 + draw % 17 + index)
        elif far:
            point[name] = far * (1500 + mpmath.mpf(draw % 9973) / 13)
        else:
            below = {2: position & 1, 4: position & 2, 5: True}.get(index)
            sign = -1 if below else 1
            point[name] = sign * mpmath.mpf(1 + draw % 9973) / (997 if index % 2 else 5000)
        if positive and name not in ("i", "I"):
            point[name] = abs(point[name])
    return point


def pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Values of two expressions at points where the first is defined, and the tolerance there.

    A second one that is undefined or not real where the first is real comes as nan.

    Raises:
        TooLarge: a value is past the bounds.
    """
    names = sorted({s.name for e in (a, b) for s in e.free_symbols})
    bound = {s.name for e in (a, b) for s in e.atoms(sympy.Symbol)}
    whole = any(
        e.has(*_WHOLE) or (e.has(*_ROUNDING) and {name[0] for name in names} <= _WHOLE_LETTERS)
        for e in (a, b)
    )
    # Of a logarithm's letters one supposes that they have one: `\ln x^2` is `2 \ln x`.
    positive = a.has(sympy.log) or b.has(sympy.log)
    imaginary = bool(bound & {"i", "I"}) or a.has(sympy.I) or b.has(sympy.I)
    points = POINTS + (0 if whole else FAR_POINTS)
    for index in range(points if set(names) - {"i", "I"} else 1):
        digits, tolerance = DIGITS, mpmath.mpf(0)
        for _ in range(2):  # once to see the sizes, once more if they ask for more digits
            with mpmath.workdps(digits):
                point = _point(names, index, whole, positive)
                runs = [_Evaluation(point), _Evaluation(point)]
                try:
                    first, second = (_try(run, e) for run, e in zip(runs, (a, b), strict=True))
                except TooLarge:
                    if index < POINTS:
                        raise
                    first = second = mpmath.nan  # far out much is too large: nothing is learnt
                down = max(run.down for run in runs)
                if tolerance == 0:
                    tolerance = mpmath.mpf(10) ** -(DIGITS - SLACK + down)
            needed = DIGITS + down + max(run.up for run in runs)
            if needed <= digits + 3:
                break
            digits = needed
        if mpmath.isnan(first):
            continue
        if not imaginary:
            if abs(mpmath.im(first)) > tolerance:
                continue
            if not mpmath.isnan(second) and abs(mpmath.im(second)) > tolerance:
                second = mpmath.nan
        with mpmath.workdps(digits):
            yield first, second, tolerance


def _try(run: _Evaluation, e: Any) -> Any:
    try:
        return run(e)
    except NoValue:
        return mpmath.nan


def close(first: Any, second: Any, tolerance: Any) -> bool:
    if mpmath.isnan(second):
        return False
    if mpmath.isinf(first) or mpmath.isinf(second):
        return bool(first == second)
    return bool(abs(first - second) <= tolerance)


def equal(a: Any, b: Any) -> bool:
    """Do two expressions agree wherever the first is defined? Where it never is, as written."""
    if a == b:
        return True
    met = [close(*triple) for triple in pairs(a, b)]
    return bool(met) and all(met)


def proportional(a: Any, b: Any) -> int:
    """The sign of c where a = c·b for one real constant c ≠ 0; 0 where there is none."""
    ratios = []
    for first, second, tolerance in pairs(a, b):
        if mpmath.isnan(second) or mpmath.isinf(first) or mpmath.isinf(second):
            return 0
        if abs(first) <= tolerance or abs(second) <= tolerance:
            if abs(first) > tolerance or abs(second) > tolerance:
                return 0
            continue
        ratios.append((first / second, tolerance))
    # One point proves nothing of a constant ratio.
    if len(ratios) < 2 or any(abs(mpmath.im(r)) > t for r, t in ratios):
        return 0
    c = ratios[0][0]
    if not all(close(c, r, tolerance * 10**5 * max(1, abs(c))) for r, tolerance in ratios[1:]):
        return 0
    return 1 if mpmath.re(c) > 0 else -1


def number(e: Any) -> Any:
    """The real value of a constant (an mpf, infinities included), or None."""
    if e.free_symbols:
        return None
    with mpmath.workdps(DIGITS):
        value = _try(_Evaluation({}), e)
        if mpmath.isnan(value) or mpmath.im(value):
            return None
        return mpmath.re(value)


def rounded(e: Any, spelling: str) -> bool:
    """Is a decimal of six places or more the constant, cut or rounded, where no decimal is it?"""
    sign, _, decimals = spelling.strip().partition(".")
    places = len(decimals)
    whole = sign.lstrip("+-")
    if places < 6 or places > DIGITS - SLACK or not (decimals + (whole or "0")).isdigit():
        return False
    value = number(e)
    if value is None or mpmath.isinf(value) or len(whole) > DIGITS - SLACK - places:
        return False
    with mpmath.workdps(DIGITS):
        written = mpmath.mpf(spelling.strip())
        exact = value * 10**places
        units = written * 10**places
        near = abs(exact - units) < 1 and abs(units) <= abs(exact) + mpmath.mpf("0.5")
        return bool(near and value * written > 0 and abs(written) > 0.1)
