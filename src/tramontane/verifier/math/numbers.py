r"""Plain numbers, read and compared exactly.

`to_number` reads integers, decimals, fractions, mixed numbers, powers and repeating decimals as
fractions. Ratios have their own rule, and so do numerals with a base: `52_8`, `(52)_{8}`,
`52_{\text{eight}}`, `52 (base 8)`, `0x2A`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname|rm)"

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
    # Only a denominator of twos and fives divides a power of ten.
    terminates = pow(10, gold.denominator.bit_length(), gold.denominator) == 0
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


_BINOMIAL = re.compile(r"\\binom\s*\{\s*(\d{1,6})\s*\}\s*\{\s*(\d{1,6})\s*\}")
MAX_BINOMIAL = 1500  # digits of a binomial coefficient that is written out


def with_binomials(text: str) -> str:
    """Binomial coefficients of numbers written out: `(10)` for `\\binom{5}{2}`; larger ones than
    MAX_BINOMIAL are left."""
    return _BINOMIAL.sub(_binomial, text) if "\\binom" in text else text


def _binomial(m: re.Match[str]) -> str:
    n, k = int(m[1]), int(m[2])
    if min(k, n - k) * math.log10(n + 1) > MAX_BINOMIAL:
        return m[0]
    return f"({math.comb(n, k)})"


_RATIO = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9})")


def same_ratio(gold: str, pred: str) -> bool | None:
    """Compare ratios: `6:8` is `3:4`, but a time of day such as `12:30` equals only itself."""
    g, p = _RATIO.fullmatch(gold), _RATIO.fullmatch(pred)
    if not g or not p:
        return None
    a, b, c, d = (int(x) for x in (*g.groups(), *p.groups()))
    is_time = re.fullmatch(r"[0-5]\d", g[2]) and a < 24
    if is_time or not b or not d:
        return (a, g[2]) == (c, p[2]) if is_time else (a, b) == (c, d)
    return a * d == b * c


# --------------------------------------------------------------------------- numerals with a base

_BASE_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15,
    "sixteen": 16, "twenty": 20,
}  # fmt: skip
_PREFIXES = {"0x": 16, "0o": 8, "0b": 2}
_FONT = re.compile(r"\\(?:text|mathrm|textrm|mathbf|mbox|rm)(?![A-Za-z])")
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
    `lower`, so are lowercase letters.
    """
    if text.count("(") != text.count(")"):
        return None
    bare = re.sub(r"[\s{}()]", "", _FONT.sub("", text))
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
    if not 2 <= base <= len(_BASE_DIGITS) or digits.count(".") > 1:
        return None
    if not set(digits) <= set(_BASE_DIGITS[:base]) | {"."}:
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
    """Compare numerals by digits and base, as questions about bases ask for the digits; the
    prediction may omit the base. None if neither is a numeral, or if only the prediction is and the
    reference is not a number. A numeral with base 10 is the number itself."""
    g, p = read_numeral(gold), read_numeral(pred)
    if g is None:
        if p is None and _INDEXED.fullmatch(pred) and to_number(gold) is not None:
            return False  # digits that do not exist in the base
        if p is None or (number := to_number(gold)) is None:
            return None
        return p.base == 10 and numeral_value(pred) == number
    if p := read_numeral(pred, lower=True):
        return g == p
    bare = _FONT.sub("", re.sub(r"[\s{}()]", "", pred)).upper()
    sign, digits = ("-", bare[1:]) if bare.startswith("-") else ("", bare)
    return _numeral(sign, digits, g.base) == g


def residue(numerator: int, denominator: int, modulus: int) -> int | None:
    """A fraction modulo `modulus`; None if the denominator has no inverse."""
    try:
        return numerator * pow(denominator, -1, modulus) % modulus
    except ValueError:
        return None


# Thousands in a text that is a number otherwise; a single one is left to `read_numbers`.
_GROUPED = re.compile(
    rf"^((?:\\approx|\\\$|[£€¥₹+-]|\s)*)([1-9]\d{{0,2}}(?:,\d{{3}})+|[1-9]\d?(?:,\d\d)+,\d{{3}})((?:\.\d+)?\s*(?:\\?%|{TEXT}[^,]*|[A-Za-z]{{2}}[^,\d]*)?)$"
)


def with_thousands(gold: str, pred: str) -> tuple[str, str]:
    """Both sides without the commas of thousands, as in `\\approx 5,305,028 N`; the prediction only
    where the reference is not a list."""
    if "," in gold:
        gold = _GROUPED.sub(_joined, gold)
    return gold, _GROUPED.sub(_joined, pred) if "," in pred and "," not in gold else pred


def _joined(m: re.Match[str]) -> str:
    is_single = not (m[1].strip() or m[3]) and m[2].count(",") == 1
    return m[0] if is_single else f"{m[1]}{m[2].replace(',', '')}{m[3]}"


_UNIT = (
    rf"(?:\s*(?:\\?%|[€£]|\^\{{\\circ\}}\s*[CFK]?|{TEXT}\s*\{{[^{{}}\d,]*\}}|[^\W\d_]{{1,20}}\.?)"
    r"(?:\^\{?\d\}?)?)"
)
_COMMA = re.compile(rf"([-+]?(?:[A-Z]{{0,2}}\s?\\\$|[€£])?\s*)(\d+),(\d+)({_UNIT})?")
_CERTAIN = re.compile(r"0,\d\d+|\d+,0\d*")
_THOUSANDS = re.compile(r"[1-9]\d{0,2},\d{3}")
_EURO = re.compile("€|[Ee]uro|EUR|reais")
_EUROS = re.compile(  # thousands, as no amount has three decimals
    r"(?<![\d.,])([1-9]\d{0,2})\.(\d{3})(?=\s*"
    r"(?:€|\\text\{ *(?:€|euros?|Euro|EUR|reais) *\}|euros?\b|Euro\b|EUR\b|reais\b)\s*$)"
)
_POINT = re.compile(r"\d\.\d")


def with_decimal_commas(gold: str, pred: str) -> tuple[str, str]:
    """Both sides with points for decimal commas: a reference's is one if a unit follows (`2,5 kg`),
    if its digits cannot be two integers (`0,75`, `3,05`), or if the answer has a point there; an
    answer's, if the reference has a unit and a point. Digits that may be thousands are left."""
    if _EURO.search(gold):
        euros = _EUROS.sub(r"\1\2", gold)
        if euros != gold or "." not in gold:
            gold, pred = euros, _EUROS.sub(r"\1\2", pred)
    if "," not in gold and "," not in pred:
        return gold, pred
    if written := _decimal(gold):
        has_point = _POINT.search(pred) and "," not in pred
        if written[4] or has_point or _CERTAIN.fullmatch(f"{written[2]},{written[3]}"):
            gold = gold.replace(",", ".", 1)
    if (written := _decimal(pred)) and "," not in gold and (written[4] or written[1]):
        pred = pred.replace(",", ".", 1)
    return gold, pred


def _decimal(text: str) -> re.Match[str] | None:
    """A number with a comma, perhaps with a unit, that is not written with thousands."""
    match = _COMMA.fullmatch(text)
    return None if match and _THOUSANDS.fullmatch(f"{match[2]},{match[3]}") else match
