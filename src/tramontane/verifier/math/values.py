"""Equality of expressions by their values at a few fixed points, to many digits.

SymPy's `simplify` may run for hours on a single line, and fails on many true identities. Values at
fixed points decide both ways, in time bounded by the size of the expression: an identity of this
size that holds there to 30 digits beyond the largest value met does not fail elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

from tramontane.verifier.math.numbers import is_rounded
from tramontane.verifier.math.residues import remainder

DIGITS = 50  # precision of values; equal ones agree in all but the last SLACK digits
SLACK = 20
# Digits after the point that are compared for each digit of the largest and the smallest value met:
# what is left of large terms may be small, as in `sqrt(N + 1) - sqrt(N)`.
CANCELLATION = 3
NOISE_BITS = 16
MAX_MAGNITUDE = 2000  # digits before or after the point; the precision grows with them
MAX_TERMS = 1000  # terms of a sum or product
MAX_STEPS = 20_000  # nodes visited in one evaluation of an expression
POINTS = 6  # near zero
FAR_POINTS = 2  # above and below zero, beyond a thousand: `|x - 100|` is not `100 - x`
MAX_ROUNDED_BITS = 100  # magnitude, up and down, of constants that may be rounded
ROUNDED_PLACES = 15
MAX_ARGUMENT = 10**6  # limit for functions that are costly at large arguments
MAX_GAMMA_DIGITS = 300  # precision above which factorials between integers take mpmath seconds


class TooLarge(Exception):
    """A value is past the bounds above, or the evaluation takes too many steps."""


class NoValue(Exception):
    """The expression is undefined at this point, or is not of a kind that has values."""


_SAME_NAME = """
    sin cos tan cot sec csc asin acos atan acot asec acsc
    sinh cosh tanh coth sech csch asinh acosh atanh
    exp floor re im arg sign binomial factorial gamma
"""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(mpmath, name) for name in _SAME_NAME.split()},
    "Abs": mpmath.fabs,
    "ceiling": mpmath.ceil,
    "conjugate": mpmath.conj,
    r"\varsigma": lambda *values: mpmath.mpf(math.gcd(*map(_whole, values))),
    r"\varpi": lambda *values: mpmath.mpf(math.lcm(*map(_whole, values))),
    r"\zeta": lambda value: mpmath.zeta(_whole(value)),
}
# Functions that the parser does not know, or computes of polynomials, under names that it does.
GCD, LCM, ZETA = (sympy.Function(name) for name in (r"\varsigma", r"\varpi", r"\zeta"))
_NAMED = {GCD.__name__, LCM.__name__, ZETA.__name__}
_SATURATING = (mpmath.tanh, mpmath.coth)
_STEPS = (mpmath.floor, mpmath.ceil)
_CHEAP = (mpmath.fabs, mpmath.re, mpmath.im, mpmath.floor, mpmath.ceil)
_GAMMAS = (mpmath.binomial, mpmath.factorial, mpmath.gamma)
_INTEGER_FUNCTIONS = (
    sympy.factorial, sympy.binomial, sympy.Mod, sympy.Sum, sympy.Product, GCD, LCM,
)  # fmt: skip
_IMAGINARY_UNIT = {"i"}
_COMPLEX = {"z", "w"}  # where an answer has their absolute value: |z|^2 is not z^2
_ROUNDING = (sympy.floor, sympy.ceiling)
_INTEGER_LETTERS = set("ijklmnpqIKMN")  # by custom; the floor of x is not x


class _Evaluation:
    """Evaluates one expression at one point. `digits_before` and `digits_after` are the digits
    before and after the decimal point of the largest and the smallest value met on the way."""

    def __init__(self, point: dict[str, Any]) -> None:
        self.point = point
        self.digits_before = self.digits_after = 0
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
            self._note(digits_before=digits, digits_after=-digits)
        return value

    def _note(self, *, digits_before: int = 0, digits_after: int = 0) -> None:
        self.digits_before = max(self.digits_before, digits_before)
        self.digits_after = max(self.digits_after, digits_after)
        if max(self.digits_before, self.digits_after) > MAX_MAGNITUDE:
            raise TooLarge

    def _value(self, e: Any) -> Any:
        if isinstance(e, sympy.Symbol):
            if e.name in self.point:
                return self.point[e.name]
            raise NoValue
        if isinstance(e, sympy.Integer):
            return mpmath.mpf(int(e))
        if isinstance(e, sympy.Rational):
            return mpmath.mpf(int(e.p)) / int(e.q)
        if isinstance(e, sympy.Float):  # as written, not as rounded to binary
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
            terms = [self(a) for a in e.args]
            total = mpmath.fsum(terms)
            largest = max(map(mpmath.mag, terms))
            # What is left of terms that cancel is noise in the last digits.
            is_noise = total and mpmath.mag(total) < largest - mpmath.mp.prec + NOISE_BITS
            return mpmath.mpf(0) if is_noise else total
        if isinstance(e, sympy.Mul):
            return mpmath.fprod([self(a) for a in e.args])
        if isinstance(e, sympy.Pow):
            if e.exp.is_negative and _has_pole(self, e.base):
                return mpmath.mpf(0)
            return self._power(self(e.base), e.exp)
        if isinstance(e, sympy.UnevaluatedExpr):
            return self(e.args[0])
        if isinstance(e, sympy.Sum | sympy.Product):
            return self._series(e)
        if isinstance(e, sympy.Mod):
            b = self._integer(e.args[1])
            if not b or mpmath.isinf(b):
                return mpmath.nan
            known = remainder(e.args[0], int(b)) if b > 0 else None
            return mpmath.fmod(self._integer(e.args[0]), b) if known is None else mpmath.mpf(known)
        if isinstance(e, sympy.Max | sympy.Min):
            values = [self(a) for a in e.args]
            if any(mpmath.im(v) for v in values):
                raise NoValue
            return max(values) if isinstance(e, sympy.Max) else min(values)
        if isinstance(e, sympy.log):
            logarithm, *base = (self._log(self(a)) for a in e.args)
            if base and not base[0]:
                raise NoValue
            return logarithm / base[0] if base else logarithm
        if isinstance(e, sympy.exp):
            return self._power(mpmath.e, e.args[0])
        function = _FUNCTIONS.get(type(e).__name__)
        if function is None or (isinstance(e, AppliedUndef) and type(e).__name__ not in _NAMED):
            raise NoValue
        return self._call(function, [self(a) for a in e.args])

    def _call(self, function: Callable[..., Any], values: list[Any]) -> Any:
        cheap = function in _CHEAP
        if not cheap and any(mpmath.isinf(v) or abs(v) > MAX_ARGUMENT for v in values):
            raise TooLarge
        if function in _SATURATING:  # tanh(200) is not 1
            self._note(digits_after=2 * math.ceil(abs(values[0]) / math.log(10)))
        between_integers = function in _GAMMAS and not all(map(mpmath.isint, values))
        if between_integers and mpmath.mp.dps > MAX_GAMMA_DIGITS:
            raise TooLarge
        if (
            function in _STEPS
        ):  # a value such as log(8) / log(2) is an integer but for its last digits
            values = [_nearest(v) for v in values]
        try:
            return function(*values)
        except (ZeroDivisionError, ValueError, mpmath.libmp.ComplexResult) as error:
            raise NoValue from error

    @staticmethod
    def _log(value: Any) -> Any:
        if not value or mpmath.isinf(value):
            raise NoValue
        return mpmath.log(value)

    def _integer(self, e: Any) -> Any:
        value = self(e)
        if mpmath.isinf(value) or mpmath.im(value) or value != mpmath.nint(value):
            raise NoValue
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        power = self(exponent)
        if mpmath.isinf(base) or mpmath.isinf(power) or (not base and mpmath.re(power) <= 0):
            raise NoValue
        if base and _log_above(base, abs(power)):
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


def _log_above(base: Any, factor: Any) -> bool:
    """True if the logarithm of a value, times a factor, is past MAX_MAGNITUDE digits."""
    limit = MAX_MAGNITUDE * math.log(10)
    # Its size is known up to a factor of 8, and its angle is at most π: mostly enough.
    if factor * ((abs(mpmath.mag(base)) + 3) * math.log(2) + math.pi) <= limit:
        return False
    return bool(factor * abs(mpmath.log(base)) > limit)


def _has_pole(values: _Evaluation, e: Any) -> bool:
    """True for the factorial of a negative integer, alone or in a product: its reciprocal is 0, as
    in `\\frac{n!}{2!(n-2)!}` at 1."""
    parts = e.args if isinstance(e, sympy.Mul | sympy.UnevaluatedExpr) else ()
    if isinstance(e, sympy.factorial):
        value = values(e.args[0])
        return bool(mpmath.isint(value) and value < 0)
    return any(_has_pole(values, part) for part in parts if part.has(sympy.factorial))


def _point(
    names: Sequence[str], index: int, *, integers: set[str], positive: bool, wide: set[str]
) -> dict[str, Any]:
    """The value of each name at point number `index`, the same in every process.

    `i` is the imaginary unit. Values are mostly positive, where roots and logarithms are real; any
    two of up to four names differ in sign at some point, or `|xy|` would equal `xy`. Those of
    `wide` are complex.
    """
    point = {}
    for position, name in enumerate(names):
        draw = zlib.crc32(f"{index} {name}".encode())
        if name in _IMAGINARY_UNIT:
            point[name] = mpmath.mpc(0, 1)
            continue
        if name in integers:
            value = mpmath.mpf(3 + draw % 17 + index)
        elif index >= POINTS:
            value = (-1) ** (index - POINTS) * (1500 + mpmath.mpf(draw % 9973) / 13)
        else:
            negative = {2: position & 1, 4: position & 2, 5: True}.get(index)
            sign = -1 if negative else 1
            value = sign * mpmath.mpf(1 + draw % 9973) / (997 if index % 2 else 5000)
        if name in wide:
            value = mpmath.mpc(value, mpmath.mpf(1 + draw % 31) / 7)
        elif positive:
            value = abs(value)
        point[name] = value
    return point


def _whole(value: Any) -> int:
    """A value as an integer.

    Raises:
        ValueError: it is not one, or is too large.
    """
    if not mpmath.isint(value) or abs(value) > MAX_ARGUMENT**2:
        raise ValueError
    return int(mpmath.nint(value.real))


def _nearest(value: Any) -> Any:
    """The nearest integer of a value that differs from it by rounding errors only."""
    nearest = mpmath.nint(value)
    return nearest if abs(value - nearest) < mpmath.mpf(10) ** (SLACK - DIGITS) else value


_STEPPED = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.binomial, GCD, LCM)
_COSTLY = (sympy.Sum, sympy.Product, sympy.factorial)
MAX_STEP = 10**6  # constants near which steps are looked for


def _steps(a: Any, b: Any) -> list[int]:
    """Integers at which two expressions with steps are compared: all small ones, and the neighbors
    of powers and of the constants met, where a step of one may be missing in the other."""
    if a.has(*_COSTLY) or b.has(*_COSTLY):
        return list(range(1, 13))
    constants = {abs(int(n.p)) for e in (a, b) for n in e.atoms(sympy.Rational)}
    constants |= {int(n.q) for e in (a, b) for n in e.atoms(sympy.Rational)}
    met = [c for c in sorted(constants) if 2 < c <= MAX_STEP][:8]
    centers = {*met, *(2 * c for c in met), *(c * c for c in met if c < 1000)}
    if not (a.has(sympy.binomial) or b.has(sympy.binomial)):
        centers |= {128, 243, 256, 625, 1000, 1024, 10_000, 65_536, 10**6}
    return [*range(1, 101), *sorted({c + d for c in centers for d in (-1, 0, 1)} - set(range(101)))]


def _stepped_points(
    names: Sequence[str], a: Any, b: Any, integers: set[str]
) -> list[Callable[[], dict[str, Any]]]:
    """Points at the steps of two expressions: integers, and for letters of real numbers also their
    neighborhood."""
    letters = [name for name in names if name not in _IMAGINARY_UNIT]
    steps = _steps(a, b)
    if len(letters) > 1:  # small values of each with each, as far as eighty points go
        width = {2: 9, 3: 5}.get(len(letters), 3)
        grid = list(product(range(1, width + 1), repeat=len(letters)))[:80]
        rows = [
            *grid,
            *(
                tuple(
                    steps[(k * p + j) % len(steps)] for j, p in enumerate(_STRIDES[: len(letters)])
                )
                for k in range(40)
            ),
        ]
        if not set(letters) <= integers:
            rows = [
                tuple(v + mpmath.mpf(k % 4) / 4 for k, v in enumerate(row, k))
                for k, row in enumerate(rows)
            ]
    elif set(letters) <= integers:
        rows = [(step,) for step in steps]
    else:
        near = [mpmath.mpf(0), mpmath.mpf(10) ** -6, -(mpmath.mpf(10) ** -6), mpmath.mpf("0.37")]
        rows = [(n + d,) for n in (*range(-4, 13), *steps[100:112]) for d in near]
        # x + 1/2 has its steps between integers. Only halves, quarters, … are exact here.
        parts = {abs(n) % 1 for e in (a, b) for n in e.atoms(sympy.Rational)} | {sympy.S.Half}
        for part in sorted(parts)[:6]:
            beside = near[:3] if part.q & (part.q - 1) == 0 else near[1:3]
            ends = [mpmath.mpf(n.p) / n.q for n in (part, 1 - part)]
            rows += [(n + end + d,) for n in range(-2, 3) for end in ends for d in beside]
    imaginary = {name: mpmath.mpc(0, 1) for name in names if name in _IMAGINARY_UNIT}
    return [
        partial(lambda row: imaginary | dict(zip(letters, map(mpmath.mpf, row), strict=True)), row)
        for row in rows
    ]


_STRIDES = (1, 7, 13, 29, 31, 37, 41, 43)


def _letters_of_signs(e: Any) -> set[str]:
    """The letters of exponents of negative numbers: the n of `(-1)^n` is an integer."""
    powers = (p for p in e.atoms(sympy.Pow) if p.base.is_number and p.base.is_negative)
    return {symbol.name for power in powers for symbol in power.exp.free_symbols}


def pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the values of two expressions at points where the first is defined, with the tolerance
    there.

    The second value is nan where it is undefined, or not real although the first is.

    Raises:
        TooLarge: a value is past the bounds.
    """
    names = sorted({s.name for e in (a, b) for s in e.free_symbols})
    symbols = {s.name for e in (a, b) for s in e.atoms(sympy.Symbol)}  # bound ones included
    rounding = any(
        e.has(*_INTEGER_FUNCTIONS)
        or (e.has(*_ROUNDING) and {name[0] for name in names} <= _INTEGER_LETTERS)
        for e in (a, b)
    )
    integers = set(names) if rounding else _letters_of_signs(a) | _letters_of_signs(b)
    # The argument of a logarithm is taken to be positive: `\ln x^2` is `2 \ln x`.
    positive = a.has(sympy.log) or b.has(sympy.log)
    wide = {s.name for e in (a, b) for size in e.atoms(sympy.Abs) for s in size.free_symbols}
    wide &= _COMPLEX
    imaginary = bool(symbols & _IMAGINARY_UNIT or wide) or a.has(sympy.I) or b.has(sympy.I)
    count = POINTS + (0 if rounding else FAR_POINTS)
    points: list[tuple[Callable[[], dict[str, Any]], bool]] = [
        (
            partial(_point, names, index, integers=integers, positive=positive, wide=wide),
            index >= POINTS,
        )
        for index in range(count if set(names) - _IMAGINARY_UNIT else 1)
    ]
    if len(points) > 1 and len(names) <= len(_STRIDES) and (a.has(*_STEPPED) or b.has(*_STEPPED)):
        points += [(point, True) for point in _stepped_points(names, a, b, integers)]
    for point, is_far in points:
        first, second, tolerance, digits = _evaluate(a, b, point, is_far=is_far)
        if mpmath.isnan(first):
            continue
        if not imaginary:
            if abs(mpmath.im(first)) > tolerance:
                continue
            if not mpmath.isnan(second) and abs(mpmath.im(second)) > tolerance:
                second = mpmath.nan
        with mpmath.workdps(digits):
            yield first, second, tolerance


def _evaluate(
    a: Any, b: Any, point: Callable[[], dict[str, Any]], *, is_far: bool
) -> tuple[Any, Any, Any, int]:
    """The values of two expressions at a point, the tolerance, and the digits of precision.

    The first evaluation shows how large the values are; if they need more digits, a second one
    follows. At a far point, where many expressions are too large, these have the value nan.
    """
    digits, tolerance, least = DIGITS, mpmath.mpf(0), 0
    for _ in range(2):
        with mpmath.workdps(digits):
            values = point()
            runs = [_Evaluation(values), _Evaluation(values)]
            try:
                first, second = (_try(run, e) for run, e in zip(runs, (a, b), strict=True))
            except TooLarge:
                if not is_far:
                    raise
                first = second = mpmath.nan
            after = max(run.digits_after for run in runs)
            before = max(run.digits_before for run in runs)
            if tolerance == 0:
                # Far points only distinguish what near ones cannot: |x - 100| from 100 - x.
                least = after if is_far else CANCELLATION * (after + before)
                tolerance = mpmath.mpf(10) ** -(DIGITS - SLACK + least)
        needed = DIGITS + least + before
        if needed <= digits + 3:
            break
        digits = needed
    return first, second, tolerance, digits


def _try(run: _Evaluation, e: Any) -> Any:
    try:
        return run(e)
    except NoValue:
        return mpmath.nan


def close(first: Any, second: Any, tolerance: Any) -> bool:
    """Compare two values up to an absolute tolerance; infinities exactly. NaN equals nothing."""
    if mpmath.isnan(second):
        return False
    if mpmath.isinf(first) or mpmath.isinf(second):
        return bool(first == second)
    return bool(abs(first - second) <= tolerance)


def _has_more_letters(a: Any, b: Any) -> bool:
    """True if a letter that only the first has is lost in a zero or an infinity, as in `0x`; a
    letter that cancels is none."""
    known = {symbol.name for symbol in b.free_symbols} | _IMAGINARY_UNIT
    extra = {symbol for symbol in a.free_symbols if symbol.name not in known}

    def vanishes(e: Any) -> bool:
        constants = (part for part in e.args if (e.is_Mul or e.is_Add) and not part.free_symbols)
        return any(part.is_infinite or (e.is_Mul and part.is_zero) for part in constants)

    nodes = sympy.preorder_traversal(a) if extra else ()
    return any(e.free_symbols & extra and vanishes(e) for e in nodes)


def equal(a: Any, b: Any) -> bool:
    """True if two expressions agree wherever the first is defined; if it is defined nowhere, they
    must be written alike. The second loses no letter of its own: `0x` is not 0."""
    if a == b:
        return True
    agrees = False
    for triple in pairs(a, b):
        if not close(*triple):
            return False
        agrees = True
    return agrees and not _has_more_letters(b, a)


def proportional(a: Any, b: Any) -> int:
    """The sign of the real constant c ≠ 0 with a = c·b; 0 if there is no such constant."""
    ratios = []
    for first, second, tolerance in pairs(a, b):
        if mpmath.isnan(second) or mpmath.isinf(first) or mpmath.isinf(second):
            return 0
        if abs(first) <= tolerance or abs(second) <= tolerance:
            if abs(first) > tolerance or abs(second) > tolerance:
                return 0
            continue
        ratios.append((first / second, tolerance))
    # A single ratio does not show that it is constant.
    if len(ratios) < 2 or any(abs(mpmath.im(r)) > t for r, t in ratios) or _has_more_letters(b, a):
        return 0
    c = ratios[0][0]
    if not all(close(c, r, tolerance * 10**5 * max(1, abs(c))) for r, tolerance in ratios[1:]):
        return 0
    return 1 if mpmath.re(c) > 0 else -1


def number(e: Any, point: dict[str, Any] | None = None) -> Any:
    """The real value of a constant, or of an expression whose letters have the values `point` (an
    mpf, infinities included); None for any other object."""
    if not {symbol.name for symbol in e.free_symbols} <= (point or {}).keys():
        return None
    with mpmath.workdps(DIGITS):
        value = _try(_Evaluation(point or {}), e)
        if mpmath.isnan(value) or mpmath.im(value):
            return None
        return mpmath.re(value)


def rounded(e: Any, spelling: str, places: int | None) -> bool:
    """True if `spelling` is a decimal that stands for the constant (`numbers.is_rounded`)."""
    value = number(e)
    if value is None or not mpmath.isfinite(value) or not value:
        return False
    if abs(mpmath.mag(value)) > MAX_ROUNDED_BITS:
        return False
    sign, mantissa, exponent, _ = value._mpf_
    exact = Fraction(int(mantissa)) * Fraction(2) ** exponent * (-1) ** sign
    # `\sqrt{4}` is 2 in the first 40 digits: a decimal that ends, not one to be rounded.
    nearest = Fraction(round(exact * 10**ROUNDED_PLACES), 10**ROUNDED_PLACES)
    terminates = abs(exact - nearest) <= abs(exact) * Fraction(1, 10**40)
    return is_rounded(nearest if terminates else exact, spelling, places, terminates=terminates)
