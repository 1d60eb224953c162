r"""Numerals with a base: `52_8`, `(52)_{8}`, `52_{\text{eight}}`, `52 (base 8)`, `0x2A`.

Digits and base must both agree; the prediction may omit the base. The same number in a different
base is a different answer, as questions about bases ask for the digits.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from tramontane.verifier.math.numbers import MAX_DIGITS, to_number

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15,
    "sixteen": 16, "twenty": 20,
}  # fmt: skip
_PREFIXES = {"0x": 16, "0o": 8, "0b": 2}
_WRAPPER = re.compile(r"\\(?:text|mathrm|textrm|mathbf|mbox|rm)(?![A-Za-z])")
_LABEL = re.compile(r"(?:[A-Za-z]|[A-Z]{2})=")
_BASE = rf"(?:base)?(\d{{1,2}}|{'|'.join(_NAMES)})"
_SUBSCRIPT = re.compile(rf"(-?)([\dA-Za-z.]+)(?:_{_BASE}|_?base{_BASE})", re.IGNORECASE)
_INDEXED = re.compile(r"[-+]?[\d.]+\s*_.*")
_PREFIXED = re.compile(r"(-?)(0[xob])([\dA-F]+)", re.IGNORECASE)


class Numeral(NamedTuple):
    """Digits in upper case, with their sign and without leading zeros, and their base."""

    digits: str
    base: int


def read_numeral(text: str, *, lower: bool = False) -> Numeral | None:
    """Read a numeral whose digits exist in its base; None for any other text.

    A letter with an index is a name (`A_{12}`, `ab_{16}`); several capitals are digits, and with
    `lower`, so are small letters.
    """
    bare = re.sub(r"[\s{}()]", "", _WRAPPER.sub("", text))
    bare = _LABEL.sub("", bare, count=1) if "=" in bare else bare
    if match := _PREFIXED.fullmatch(bare):
        return _numeral(match[1], match[3], _PREFIXES[match[2].lower()])
    if match := _SUBSCRIPT.fullmatch(bare):
        named = match[3] or match[4]
        base = _NAMES.get(named.lower()) or int(named)
        if (
            lower
            or any(c.isdigit() for c in match[2])
            or (len(match[2]) > 1 and match[2].isupper())
        ):
            return _numeral(match[1], match[2], base)
    return None


def _numeral(sign: str, digits: str, base: int) -> Numeral | None:
    digits = digits.upper()
    if not 2 <= base <= len(_DIGITS) or digits.count(".") > 1:
        return None
    if not set(digits) <= set(_DIGITS[:base]) | {"."}:
        return None
    return Numeral(sign + (digits.lstrip("0") or "0"), base)


def numeral_value(text: str) -> Fraction | None:
    """The value of a numeral, or of a plain number; None for any other text."""
    numeral = read_numeral(text)
    if numeral is None or len(numeral.digits) > MAX_DIGITS:
        return to_number(text)
    whole, _, places = numeral.digits.lstrip("-").partition(".")
    value = Fraction(int(whole + places, numeral.base), numeral.base ** len(places))
    return -value if numeral.digits.startswith("-") else value


def same_numeral(gold: str, pred: str) -> bool | None:
    """Compare numerals by digits and base. None if neither is a numeral, or if only the prediction
    is and the reference is not a number. A numeral with base 10 is the number itself."""
    g, p = read_numeral(gold), read_numeral(pred)
    if g is None:
        if p is None and _INDEXED.fullmatch(pred) and to_number(gold) is not None:
            return False  # digits that do not exist in the base
        if p is None or (number := to_number(gold)) is None:
            return None
        return p.base == 10 and numeral_value(pred) == number
    if p := read_numeral(pred, lower=True):
        return g == p
    bare = _WRAPPER.sub("", re.sub(r"[\s{}()]", "", pred)).upper()
    sign, digits = ("-", bare[1:]) if bare.startswith("-") else ("", bare)
    return _numeral(sign, digits, g.base) == g
