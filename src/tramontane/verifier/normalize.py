r"""Maths answers into one spelling, by rules, before any parser sees them.

Every rule here is a false negative (or positive) that was seen: a trailing dot, `1\,000`,
full-width digits, `√2`, `x²`, `45°`, `6.02e23`, `0.\overline{3}`. `to_number` reads what is a plain
number exactly; `split_unit` takes a unit off, so that "15 m" can be told from "15 cm".
"""

from __future__ import annotations

import re
from fractions import Fraction

_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni")
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
        "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(),
        strict=True,
    )
)
_VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8),
    "⅞": (7, 8), "⅐": (1, 7), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_SYMBOLS = str.maketrans(
    {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
    | {c: " " for c in "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t\n\r"}
    | {c: "" for c in "\u200b\u200c\u200d\u2060\ufeff\u2061\u2062"}
    | {c: "-" for c in "−–—﹣‐‑"}
    | {c: f"\\{name} " for c, name in _GREEK.items()}
    | {c: rf" \frac{{{a}}}{{{b}}}" for c, (a, b) in _VULGAR.items()}
    | {
        "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
        "÷": "/", "∕": "/", "⁄": "/", "∗": "*", "∞": r"\infty ", "°": r"^{\circ}", "º": r"^{\circ}",
        "℃": r"^{\circ}C", "℉": r"^{\circ}F", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ",
        "⩾": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ", "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "。": ".", "、": ",", "٫": ".", "′": "'", "…": r"\ldots ", "∶": ":",
        "⟨": r"\langle ", "⟩": r"\rangle ", "−": "-",
    }
)  # fmt: skip

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname|rm)"
_BARE = r"(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)"
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # What only lays out.
        (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill|left|right|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\(?:overline|bar)\s*(\d)(?!\d)", r"\\overline{\1}"),
        (r"\\(?:\(|\)|\[|\])|\$\$", " "),
        # Thousands: `1{,}000`, `1,\!000`, `1\,000`, `1 000`.
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\;|\\:|\\ |~)\s*(?=\d{3}(?!\d))", "\ue000"),
        (r"(?<![\d.])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d/]))", "\\1\ue000"),
        (r"\ue000", ""),
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
        # ASCII as people and programs write it.
        (r"\*\*", "^"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\neq "),
        (r"==", "="),
        (r"(?<![A-Za-z\\])(?:sqrt|√|\\sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])(?:sqrt|√)\s*({_BARE})", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (rf"∛\s*\(?({_BARE})\)?", r"\\sqrt[3]{\1}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        # Scientific notation.
        (r"(?<![A-Za-z\d])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\dA-Za-z.])", r"\1 \\times 10^{\2}"),
        # Degrees, percent and text that only wraps a number or a letter.
        (r"\^\s*(?:\\circ|\\degree)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (rf"{_TEXT}\s*\{{\s*([-+]?\d[\d.,]*)\s*\}}", r"\1"),
        (rf"^\s*{_TEXT}\s*\{{\s*(\(?[A-Za-z]\)?)\s*\}}\s*$", r"\1"),
        (r"\\(?:mathrm|text|rm)\s*\{\s*([ei])\s*\}", r"\1"),
    ]
]  # fmt: skip
_CONNECTIVE = re.compile(
    rf"{_TEXT}\s*\{{[\s,]*(?:and|or|und|oder|et|ou|y|o|e|и|или|和|或)[\s,]*\}}"
    r"|(?<=[\s,;)\]}\d])(?:and|or)(?=[\s(\[{\d])"
)
_UNWRAP = re.compile(
    r"(?:\$(.*)\$|\*\*(.*)\*\*|\\boxed\s*\{(.*)\}|\\(?:mathbf|boldsymbol|bm)\s*\{([^{}]*)\})",
    re.DOTALL,
)


def normalize(text: str) -> str:
    """One answer, reference or prediction, in the spelling that the judge compares."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_SUPER)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ]+", lambda m: f"_{{{m[0].translate(_SUB)}}}", text)
    text = text.translate(_SYMBOLS).strip()
    while (match := _UNWRAP.fullmatch(text)) and "\\boxed" not in (match[3] or ""):
        text = next(group for group in match.groups() if group is not None).strip()
    text = re.sub(r"(?<!\\)\$", " ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _CONNECTIVE.sub(" , ", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"\s+", " ", text).strip()
    # A sentence's full stop, a dangling backslash; `50.` is 50, but `\ldots` keeps its dots.
    return re.sub(r"(?:\s|[.,;:]|\\(?![A-Za-z{}|]))+$", "", text)


# ---------------------------------------------------------------------------- plain numbers

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:
      (?P<thousands>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?)
    | (?P<lead>\d*)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot)\{{(?P<rep1>\d+)\}}|\((?P<rep2>\d+)\))
    | (?:(?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:\{{(?P<exp1>[+-]?\d+)\}}|(?P<exp2>\d))
    | (?:(?P<whole>\d+)\s*)?\\frac\s*(?:\{{\s*(?P<num>[+-]?\s*{_DECIMAL})\s*\}}|(?P<num1>\d))\s*(?:\{{\s*(?P<den>{_DECIMAL})\s*\}}|(?P<den1>\d))
    | (?:(?P<whole2>\d+)\s+)?(?P<num2>{_DECIMAL})\s*/\s*(?P<den2>{_DECIMAL})
    | (?P<base>\d{{1,6}})\s*\^\s*(?:\{{(?P<power>\d{{1,2}})\}}|(?P<power1>\d))
    | (?P<decimal>{_DECIMAL})
    )""",
    re.VERBOSE,
)
MAX_DIGITS = 400
MAX_EXPONENT = 400


def to_number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed number, power of ten or repeating
    decimal; None for anything else, and for what is too long to be an answer."""
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
        below = Fraction(denominator)
        if not below:
            return None
        above = (m["num"] or m["num1"] or m["num2"]).replace(" ", "")
        whole = m["whole"] or m["whole2"]
        if whole and above.startswith("-"):
            return None
        value = Fraction(above) / below + int(whole or 0)
    elif m["base"]:
        value = Fraction(int(m["base"]) ** int(m["power"] or m["power1"]))
    else:
        value = Fraction(m["decimal"])
    return sign * value


# ------------------------------------------------------------------------------------ units

_UNIT_NAMES = {
    "mm": "mm millimeter millimetre мм 毫米", "cm": "cm centimeter centimetre zentimeter см 厘米", "dm": "dm decimeter",
    "m": "m meter metre mètre metro м 米", "km": "km kilometer kilometre км 公里 千米", "in": "in inch inches", "ft": "ft foot feet",
    "yd": "yd yard", "mi": "mi mile", "mg": "mg milligram", "g": "g gram г 克", "kg": "kg kilogram кг 千克",
    "t": "ton tonne", "lb": "lb lbs pound", "oz": "oz ounce", "ml": "ml milliliter millilitre",
    "l": "l liter litre", "gal": "gal gallon", "s": "s sec second", "min": "min minute",
    "h": "h hr hrs hour", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "ms": "ms millisecond", "hz": "hz hertz", "n": "newton", "j": "j joule", "w": "w watt", "v": "volt",
    "pa": "pa pascal", "k": "kelvin", "deg": "deg degree grad grado degré градус 度", "rad": "rad radian", "mph": "mph",
    "usd": "usd dollar", "cent": "cent", "eur": "eur euro €", "gbp": "gbp £", "jpy": "jpy yen ¥",
    "%": "% percent pct percentage prozent", "am": "am a.m", "pm": "pm p.m", "mol": "mol mole",
}  # fmt: skip
KNOWN_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
KNOWN_UNITS |= {f"{name}s": unit for name, unit in KNOWN_UNITS.items() if len(name) > 2}
_NEUTRAL = {"unit", "units", "of", "the", "a", "an", "in", "total", "each"}
_HEDGES = re.compile(
    r"\b(?:not|no|or|maybe|perhaps|about|approximately|nearly|almost|isn't|except|either|neither"
    r"|oder|ou|o|или|nicht|non)\b|或|不"
)
_WORDS = r"[^\W\d_](?:[^\W\d_]|[ .'/²-])*"
_SUFFIX = re.compile(
    rf"""\s*(?:{_TEXT}\s*\{{\s*(?P<text>{_WORDS}|\\?%)\s*\}}|(?P<degree>\^\{{\\circ\}}\s*(?:[CFK]\b)?)
    |(?P<percent>\\?%)|(?P<currency>€|£|¥|\\\$)|(?P<bare>(?<![A-Za-z\\]){_WORDS}))
    \s*(?:\^\s*\{{?\s*(?P<power>\d)\s*\}}?)?\s*$""",
    re.VERBOSE,
)
_PREFIX = re.compile(r"(-?)\s*(\\\$|€|£|¥|(?:USD|EUR|GBP)(?![A-Za-z]))\s*(?=[\d.])")
_PREFIX_UNIT = {"\\$": "usd", "€": "eur", "£": "gbp", "¥": "jpy"}


def split_unit(text: str) -> tuple[str, str]:
    """Take a unit off a normalised answer: ("15", "cm") of `15\\text{ cm}`; ("x", "") of `x`.

    Bare words count as a unit only behind a number. What is a hedge ("5 \\text{ or not}") is left
    where it is, for the judge to refuse.
    """
    if match := _PREFIX.match(text):
        return match[1] + text[match.end() :], _PREFIX_UNIT.get(match[2], match[2].lower())
    match = _SUFFIX.search(text)
    body = text[: match.start()].strip() if match else ""
    if not match or not body:
        return text, ""
    words = match["text"] or match["bare"]
    if words and _HEDGES.search(words.lower()):
        return text, ""
    if match["bare"]:
        known = canonical_unit(words).partition("^")[0] in _UNIT_NAMES
        if to_number(body) is None or (not known and len(words) < 3):
            return text, ""
    if match["degree"]:
        return body, "deg" + match["degree"].replace(r"^{\circ}", "").strip().lower()
    if match["currency"]:
        return body, _PREFIX_UNIT[match["currency"]]
    return body, canonical_unit(words or "%", match["power"])


def canonical_unit(words: str, power: str | None = None) -> str:
    """`centimeters` → `cm`, `square feet` → `ft^2`, `km per hour` → `km/h`; other words as given."""
    out = []
    for word in re.findall(r"[^\W\d_][^\W\d_'.-]*|/|%|\\%|²", re.sub(r"\bper\b", "/", words.lower())):
        if word in ("square", "sq", "²"):
            power = "2"
        elif word in ("cubic", "cu"):
            power = "3"
        elif word not in _NEUTRAL:
            out.append(KNOWN_UNITS.get(word.lstrip("\\"), word.removesuffix("s")))
    name = " ".join(out).replace(" / ", "/")
    return f"{name}^{power}" if power and power != "1" and name else name


def units_clash(a: str, b: str) -> bool:
    """Both sides name a unit and not the same one; "green apple" agrees with "apple"."""
    return bool(a and b) and a != b and not (set(a.split()) <= set(b.split()))
