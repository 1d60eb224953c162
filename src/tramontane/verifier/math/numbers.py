r"""Plain numbers, read and compared exactly.

`to_number` reads integers, decimals, fractions, mixed numbers, powers and repeating decimals as
fractions. Ratios, numerals in another base and congruences have rules of their own. A comparison
returns None where neither side has the form that it knows.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
MIN_PLACES = 6  # decimals required of a rounded value of a fraction such as 1/3

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMERATOR = rf"(?:\{{\s*(?P<num>[+-]?\s*{DECIMAL})\s*\}}|(?P<num1>\d))"
_DENOMINATOR = rf"(?:\{{\s*(?P<den>{DECIMAL})\s*\}}|(?P<den1>\d))"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{(?P<exp1>[+-]?\d+)\}|(?P<exp2>\d))"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:
      (?P<thousands>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?)
    | (?P<lead>\d*)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot)\{{(?P<rep1>\d+)\}}|\((?P<rep2>\d+)\))
    | (?:(?P<mantissa>{DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?{_POWER_OF_TEN}
    | (?:(?P<whole>\d+)\s*)?\\frac\s*{_NUMERATOR}\s*{_DENOMINATOR}
    | (?:(?P<whole2>\d+)\s+)?(?P<num2>{DECIMAL})\s*/\s*(?P<den2>{DECIMAL})
    | (?P<base>\d{{1,6}})\s*\^\s*(?:\{{(?P<power>\d{{1,2}})\}}|(?P<power1>\d))
    | (?P<decimal>{DECIMAL})
    )""",
    re.VERBOSE,
)


def to_number(text: str) -> Fraction | None:
    """Read an integer, decimal, fraction, mixed number, power or repeating decimal exactly.

    None for any other text, and for a number too long to be an answer.
    """
    if len(text) > MAX_DIGITS or not (m := _NUMBER.fullmatch(text.strip())):
        return None
    sign = -1 if m["sign"] == "-" else 1
    value: Fraction
    if m["thousands"]:
        value = Fraction(m["thousands"].replace(",", ""))
    elif repeat := m["rep1"] or m["rep2"]:
        fixed = m["fixed"]
        value = Fraction(int((m["lead"] or "0") + fixed), 10 ** len(fixed))
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(fixed))
    elif exponent := m["exp1"] or m["exp2"]:
        if abs(int(exponent)) > MAX_EXPONENT:
            return None
        value = Fraction(m["mantissa"] or "1") * Fraction(10) ** int(exponent)
    elif denominator := m["den"] or m["den1"] or m["den2"]:
        divisor = Fraction(denominator)
        if not divisor:
            return None
        numerator = (m["num"] or m["num1"] or m["num2"]).replace(" ", "")
        whole = m["whole"] or m["whole2"]
        if whole and numerator.startswith("-"):
            return None
        value = Fraction(numerator) / divisor + int(whole or 0)
    elif m["base"]:
        value = Fraction(int(m["base"]) ** int(m["power"] or m["power1"]))
    else:
        value = Fraction(m["decimal"])
    return sign * value


def read_numbers(gold: str, pred: str) -> tuple[Fraction | None, Fraction | None]:
    """Read both sides; a comma in the prediction is a decimal point where the reference shows it.

    Four of the seven languages write a decimal comma, but only a reference that is a decimal tells
    it from the comma of a list.
    """
    g, p = to_number(gold), to_number(pred)
    if g is not None and p is None and g.denominator > 1 and re.fullmatch(r"[+-]?\d+,\d+", pred):
        p = to_number(pred.replace(",", "."))
    elif g is not None and p is not None and g != p and re.fullmatch(r"[+-]?\d{1,3},\d{3}", pred):
        as_decimal = to_number(pred.replace(",", "."))
        p = g if as_decimal == g else p
    return g, p


def same_number(gold: Fraction, pred: Fraction, spelling: str) -> bool:
    """Compare exactly, or up to rounding where no finite decimal equals the reference.

    `spelling` is the prediction as written: it must have at least MIN_PLACES decimal places to be
    accepted as the reference cut off or rounded there.
    """
    if gold == pred:
        return True
    places = len(spelling.partition(".")[2])
    if "." not in spelling or not spelling[-1].isdigit() or places < MIN_PLACES:
        return False
    if _is_finite_decimal(gold):
        return False
    exact = abs(gold) * 10**places
    cut_or_rounded = abs(pred) * 10**places in (int(exact), round(exact))
    return cut_or_rounded and gold * pred > 0 and abs(pred) > Fraction(1, 10)


def _is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


_RATIO = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9})")


def same_ratio(gold: str, pred: str) -> bool | None:
    """Compare ratios: `6:8` is `3:4`, but a time of day such as `12:30` equals only itself."""
    g, p = _RATIO.fullmatch(gold), _RATIO.fullmatch(pred)
    if not g or not p:
        return None
    a, b, c, d = (int(x) for x in (*g.groups(), *p.groups()))
    is_time = re.fullmatch(r"[0-5]\d", g[2]) and a < 24
    if is_time or not b or not d:
        return (a, b) == (c, d)
    return a * d == b * c


_NUMERAL = re.compile(r"(?:[A-Za-z]\s*=\s*)?(-?\d[\w.]*)_\{?(\d+)\}?")


def same_base(gold: str, pred: str) -> bool | None:
    """Compare numerals with a base, such as `204_5`: digits and base must both agree.

    The prediction may leave the base out.
    """
    gold_numeral, pred_numeral = (_NUMERAL.fullmatch(side) for side in (gold, pred))
    if not gold_numeral:
        return False if pred_numeral and to_number(gold) is not None else None
    if pred_numeral:
        return gold_numeral.groups() == pred_numeral.groups()
    return gold_numeral[1] == pred


_CONGRUENCE = re.compile(
    r"(?:.*\\equiv\s*)?([+-]?\d{1,9})\s*"
    r"(?:\\pmod|\(?\s*(?:\\(?:bmod|mod)|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|mod)(?![A-Za-z]))"
    r"\s*\{?\s*(\d{1,9})\s*\}?\s*\)?"
)


def same_congruence(gold: str, pred: str) -> bool | None:
    """Compare `3 \\pmod 7` with another congruence by remainder, with a number as written."""
    g, p = _CONGRUENCE.fullmatch(gold), _CONGRUENCE.fullmatch(pred)
    if g and p:
        return g[2] == p[2] and int(p[2]) > 0 and (int(g[1]) - int(p[1])) % int(g[2]) == 0
    if g or p:
        match, number = (g, to_number(pred)) if g else (p, to_number(gold))
        assert match is not None
        return None if number is None else int(match[1]) == number
    return None
