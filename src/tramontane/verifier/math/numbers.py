r"""Plain numbers, read and compared exactly.

`to_number` reads integers, decimals, fractions, mixed numbers, powers and repeating decimals as
fractions. Ratios have their own rule.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
MIN_DIGITS = 4  # significant digits of a rounded decimal: 0.000033 is too imprecise for 1/30000
MIN_FLOAT_DIGITS = 16  # significant digits from which a decimal counts as a printed float …
FLOAT_ERROR = Fraction(1, 2**51)  # … and its relative error, of a few roundings

DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMERATOR = rf"(?:\{{\s*(?P<num>[+-]?\s*{DECIMAL})\s*\}}|(?P<num1>\d))"
_DENOMINATOR = rf"(?:\{{\s*(?P<den>{DECIMAL})\s*\}}|(?P<den1>\d))"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{(?P<exp1>[+-]?\d+)\}|(?P<exp2>\d))"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:
      (?P<thousands>[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?)
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


_WITH_COMMA = re.compile(r"[+-]?\d+,\d+(\s*(?:\\times|\\cdot|\*)\s*10\s*\^.*)?")


def read_numbers(gold: str, pred: str) -> tuple[Fraction | None, Fraction | None]:
    """Read both sides; a comma in the prediction is a decimal point if the reference shows it.

    Four of the seven languages use a decimal comma, but only a decimal reference distinguishes it
    from the comma of a list.
    """
    g, p = to_number(gold), to_number(pred)
    if g is not None and p is None and (match := _WITH_COMMA.fullmatch(pred)):
        p = to_number(pred.replace(",", ".")) if g.denominator > 1 or match[1] else None
    elif g is not None and g.denominator > 1 and re.fullmatch(r"[+-]?\d{1,3},\d{3}", pred):
        p = g if to_number(pred.replace(",", ".")) == g else p
    return g, p


def same_number(gold: Fraction, pred: Fraction, spelling: str, places: int | None) -> bool:
    """Compare exactly, or up to the rounding that `is_rounded` accepts; `spelling` is the
    prediction as written."""
    terminates = _is_finite_decimal(gold)
    return gold == pred or is_rounded(gold, spelling, places, terminates=terminates)


_DECIMAL = re.compile(
    rf"[+-]?\s*(?P<mantissa>{DECIMAL})"
    r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{(?P<exp1>[+-]?\d+)\}|(?P<exp2>\d)))?"
)


def is_rounded(
    exact: Fraction, spelling: str, least_places: int | None, *, terminates: bool
) -> bool:
    """True if `spelling` is a decimal, possibly in scientific notation, that stands for a number
    without being equal to it:

    - the number truncated or rounded at the last digit shown, if no decimal equals the number, with
      at least `least_places` places (of the decimal or of its mantissa) and MIN_DIGITS significant
      digits; never if `least_places` is None;
    - the number up to the error of a computed float, if MIN_FLOAT_DIGITS digits or more are shown.

    Args:
        exact: the number, to 40 digits or more.
        spelling: the decimal.
        least_places: decimal places required.
        terminates: the number is a decimal itself.
    """
    match = _DECIMAL.fullmatch(spelling.strip())
    if match is None or "." not in match["mantissa"] or len(spelling) > MAX_DIGITS:
        return False
    written = to_number(spelling)
    if not written or not exact or (written > 0) != (exact > 0):
        return False
    digits, places = match["mantissa"].replace(".", ""), len(match["mantissa"].partition(".")[2])
    significant = len(digits.lstrip("0"))
    if significant >= MIN_FLOAT_DIGITS and (not terminates or _is_short(exact)):
        return abs(written - exact) <= abs(exact) * FLOAT_ERROR
    exponent = int(match["exp1"] or match["exp2"] or 0)
    if terminates or least_places is None or significant < min(MIN_DIGITS, least_places):
        return False
    if max(places, places - exponent) < least_places:
        return False
    scaled, shown = (abs(x) * Fraction(10) ** (places - exponent) for x in (exact, written))
    return shown in (int(scaled), round(scaled))


def _is_short(value: Fraction) -> bool:
    """True for a decimal that a float can hold: at most 15 significant digits."""
    scale = Fraction(10) ** (15 - len(str(int(abs(value)))))
    return (value * scale).denominator == 1 if abs(value) < 10**15 else False


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
