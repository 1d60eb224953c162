"""Modular arithmetic: the remainders of integers too large to be written out, and the comparison of
expressions by their remainders modulo large primes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sympy

from tramontane.verifier.math.numbers import residue

MAX_EXPONENT_BITS = 4096
MAX_FACTORIAL = 10_000
_PRIMES = (2**61 - 1, 2**89 - 1, 2**107 - 1)
MAX_BINOMIAL = 20_000
_NO_LETTERS: Mapping[str, int] = MappingProxyType({})


def same_fingerprint(a: Any, b: Any) -> bool | None:
    """Compare integers and polynomials of any size, such as `(x+1)^{3000}`, modulo large primes,
    where their letters have fixed values. None for other objects."""
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return None
    names = {symbol.name for e in (a, b) for symbol in e.free_symbols}
    if "i" in names:  # the imaginary unit
        return None
    for prime in _PRIMES:
        letters = {name: pow(zlib.crc32(name.encode()) + 2, 3, prime) for name in names}
        of_a, of_b = (remainder(e, prime, letters) for e in (a, b))
        if of_a is None or of_b is None:
            return None
        if of_a != of_b:
            return False
    return True


def remainder(e: Any, modulus: int, letters: Mapping[str, int] = _NO_LETTERS) -> int | None:
    """The remainder of a SymPy expression of integers, and of letters with the values `letters`, in
    small steps; None for other objects."""
    if isinstance(e, sympy.Symbol):
        return letters.get(e.name)
    if isinstance(e, sympy.Rational):
        return residue(int(e.p), int(e.q), modulus)
    if isinstance(e, sympy.UnevaluatedExpr):
        return remainder(e.args[0], modulus, letters)
    if isinstance(e, sympy.Add | sympy.Mul):
        parts = [remainder(a, modulus, letters) for a in e.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return (sum(known) if isinstance(e, sympy.Add) else math.prod(known)) % modulus
    if isinstance(e, sympy.Pow):
        base, exponent = remainder(e.base, modulus, letters), _exact(e.exp)
        if base is None or exponent is None:
            return None
        try:
            return pow(base, exponent, modulus)
        except ValueError:  # a negative exponent without an inverse
            return None
    if isinstance(e, sympy.factorial) and (n := _exact(e.args[0])) is not None:
        if n >= modulus:
            return 0
        return math.factorial(n) % modulus if 0 <= n <= MAX_FACTORIAL else None
    if isinstance(e, sympy.binomial):
        n, k = (_exact(a) for a in e.args)
        if n is not None and k is not None and 0 <= k <= n <= MAX_BINOMIAL:
            return math.comb(n, k) % modulus
    return None


def _exact(e: Any) -> int | None:
    """The value of a small tower of integers, such as the exponent in `2^{3^4}`."""
    if isinstance(e, sympy.Integer):
        return int(e)
    if isinstance(e, sympy.UnevaluatedExpr):
        return _exact(e.args[0])
    if not isinstance(e, sympy.Add | sympy.Mul | sympy.Pow):
        return None
    parts = [_exact(a) for a in e.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or any(abs(k).bit_length() > MAX_EXPONENT_BITS for k in known):
        return None
    if isinstance(e, sympy.Pow):
        base, exponent = known
        if exponent < 0 or abs(base).bit_length() * exponent > MAX_EXPONENT_BITS:
            return None
        return int(base**exponent)
    return sum(known) if isinstance(e, sympy.Add) else int(sympy.prod(known))
