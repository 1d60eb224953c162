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
_GREEK_NAMES = """
    αalpha βbeta γgamma δdelta εepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu νnu ξxi πpi
    ρrho σsigma τtau υupsilon φphi χchi ψpsi ωomega ΓGamma ΔDelta ΘTheta ΛLambda ΞXi ΠPi ΣSigma
    ΦPhi ΨPsi ΩOmega
"""
_GREEK = {name[0]: name[1:] for name in _GREEK_NAMES.split()}
_VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8),
    "⅞": (7, 8), "⅐": (1, 7), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_SYMBOLS = str.maketrans(
    {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t\n\r", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062", "")
    | dict.fromkeys("−–—﹣‐‑", "-")
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
        "⟨": r"\langle ", "⟩": r"\rangle ",
    }
)  # fmt: skip

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname|rm)"
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_BARE = r"(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)"
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # What only lays out.
        (r"\\(?:left|right|[bB]ig[lr]?)(?![A-Za-z])\.?", " "),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", " "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill)(?![A-Za-z])", " "),
        (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\(?:overline|bar)\s*(\d)(?!\d)", r"\\overline{\1}"),
        (r"\\(?:\(|\)|\[|\])|\$\$", " "),
        (r"\.{2,}|\\dots(?:c|b)?(?![A-Za-z])|\\cdots(?![A-Za-z])", r"\\ldots "),
        (r"\\frac\s*(\\(?!frac|sqrt|text|left)[A-Za-z]+|\w)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\\(?!frac|sqrt|text|left)[A-Za-z]+|\w)", r"\1{\2}"),
        (r"\{\s*(\w+|\\pi)\s*\\over\s*(\w+|\\pi)\s*\}", r"\\frac{\1}{\2}"),
        (r"\{([/:])\}", r"\1"),
        # Thousands: `1{,}000`, `1,\!000`, `1\,000`, `1 000`.
        (r"(?<=\d)(?:\{,\}|, ?\\!|\\,|\\;|\\:|\\ |~)\s*(?=\d{3}(?!\d))", "\ue000"),
        (r"(?<![\d.])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d/]))", "\\1\ue000"),
        (r"\ue000", ""),
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
        # ASCII as people and programs write it.
        (r"\*\*", "^"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\not\s*(?:=|\\eq(?![A-Za-z]))", r"\\neq "),
        (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
        (r"\\equiv(?![A-Za-z])(?!.*mod)", "="),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"==+", "="),
        (r"(?<![A-Za-z\\])(?:sqrt|√|\\sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])(?:sqrt|√)\s*({_BARE})", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (rf"∛\s*\(?({_BARE})\)?", r"\\sqrt[3]{\1}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        # `1/2 x` is half of x: from left to right, as programs read it.
        (
            r"(?<![\d.^_A-Za-z])(\d+)\s*/\s*(\d+)(?=\s*(?:\\(?:pi|sqrt)|[a-z](?![a-z])))",
            r"\\frac{\1}{\2}",
        ),
        # Scientific notation, millions.
        (rf"(?<![A-Za-z\d])({_DECIMAL})[eE]([+-]?\d+)(?![\dA-Za-z.])", r"\1 \\times 10^{\2}"),
        # Degrees, percent and text that only wraps a number or a letter.
        (r"\^\s*\{\s*\\circ\s*\}", r"^{\\circ}"),
        (r"(?:\^\s*)?\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])", r"^{\\circ}"),
        (rf"{_TEXT}\s*\{{\s*([-+]?\d[\d.,]*)\s*\}}", r"\1"),
        (rf"^\s*{_TEXT}\s*\{{\s*(\(?[A-Za-z]\)?)\s*\}}\s*$", r"\1"),
        (rf"^\s*{_TEXT}\s*\{{\s*([-+]?\d[\d.,]*)\s+([^{{}}]+)\}}\s*$", r"\1 \\text{\2}"),
        (rf"({_TEXT}\s*\{{[A-Za-z ]+)\^\s*\{{?([23])\}}?\s*\}}", r"\1}^{\2}"),
        (r"\\(?:mathrm|text|rm)\s*\{\s*([ei])\s*\}", r"\1"),
    ]
]  # fmt: skip
_CONNECTIVE = re.compile(
    rf"{_TEXT}\s*\{{[\s,]*(?:and|or|und|oder|et|ou|y|o|e|и|или|和|或)[\s,]*\}}"
    r"|(?<=[\s,;)\]}\d])(?:and|or)(?=[\s(\[{\d])"
)
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<![\d.,])({_DECIMAL})(?![\d.,])\s*({_TEXT}\s*\{{)?\s*(thousand|million|billion|trillion)"
    r"s?(?![A-Za-z])(\s*\})?"
)
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]e|neq?)(?![A-Za-z])")
_OR = re.compile(rf"{_TEXT}\s*\{{[\s,]*or[\s,]*\}}|(?<=[\s\d)}}])or(?=[\s(\d-])|\\lor(?![A-Za-z])")
# What says no more than that a letter is a whole or a real number, or what it stands for.
_LETTER = r"\s*\$?\s*[A-Za-z]"
_LETTERS = rf"{_LETTER}(?:\s*,{_LETTER})*"
_SET = r"\\in\s*\\(?:mathbb|mathbf|Bbb)\s*\{?\s*[ZNR]\s*\}?(?:\^\{?\+\}?|_\{?[+>0]+\}?)?"
_CONDITION = re.compile(
    rf"(?:[\s,;(]*(?:{_TEXT}\s*\{{[\s,]*)?(?:where|for|with)\s*(?:all|any|every|some)?\s*(?:integers?)?"
    rf"\s*\}}?{_LETTERS}|\s*[,;(]{_LETTER})\s*\$?\s*"
    rf"(?:{_SET}|(?:{_TEXT}\s*\{{)?\s*(?:is|are)\s+(?:an?\s+)?(?:arbitrary\s+|any\s+)?"
    r"(?:integers?|real numbers?|natural numbers?|constants?)\s*\}?)[\s).]*\Z"
)
_UNWRAP = re.compile(
    r"(?:\$(.*)\$|\*\*(.*)\*\*|\\boxed\s*\{(.*)\}|\\(?:mathbf|boldsymbol|bm)\s*\{([^{}]*)\})",
    re.DOTALL,
)


def _scaled(m: re.Match[str]) -> str:
    """`1.2\\text{ million}`, and of `\\text{ million dollars}` the dollars."""
    rest = "" if m[2] and m[4] else f"{m[2] or ''}{m[4] or ''}"
    return rf"{m[1]}\times 10^{{{_POWERS[m[3]]}}} {rest}"


MAX_PASSES = 5  # two do for what is meant as an answer


def normalize(text: str) -> str:
    """One answer, reference or prediction, in the spelling that the judge compares.

    That spelling is its own: what one rule leaves, as a box behind whose end a full stop went, is
    work for another.
    """
    for _ in range(MAX_PASSES):
        before, text = text, _apply_rules(text)
        if text == before:
            break
    return text


def _apply_rules(text: str) -> str:
    text = re.sub(r"[\x00-\x1f\x7f]", " ", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_SUPER)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ]+", lambda m: f"_{{{m[0].translate(_SUB)}}}", text)
    text = text.translate(_SYMBOLS).strip()
    while (match := _UNWRAP.fullmatch(text)) and "\\boxed" not in (match[3] or ""):
        text = next(group for group in match.groups() if group is not None).strip()
    text = re.sub(r"(?<!\\)\$", " ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _SCALE.sub(_scaled, text)
    if _INEQUALITY.search(text):
        text = _OR.sub(r" \\cup ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = _CONDITION.sub("", text)
    text = _CONNECTIVE.sub(" , ", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"\s+", " ", text).strip()
    # A sentence's full stop, a dangling backslash; `50.` is 50, but `\ldots` keeps its dots.
    return re.sub(r"(?:\s|[.,;:]|\\(?![A-Za-z{}|]))+$", "", text)


# ---------------------------------------------------------------------------- plain numbers

_ABOVE = rf"(?:\{{\s*(?P<num>[+-]?\s*{_DECIMAL})\s*\}}|(?P<num1>\d))"
_BELOW = rf"(?:\{{\s*(?P<den>{_DECIMAL})\s*\}}|(?P<den1>\d))"
_TEN_TO = r"10\s*\^\s*(?:\{(?P<exp1>[+-]?\d+)\}|(?P<exp2>\d))"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:
      (?P<thousands>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?)
    | (?P<lead>\d*)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot)\{{(?P<rep1>\d+)\}}|\((?P<rep2>\d+)\))
    | (?:(?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?{_TEN_TO}
    | (?:(?P<whole>\d+)\s*)?\\frac\s*{_ABOVE}\s*{_BELOW}
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


def vote(answer: str | None) -> str | None:
    """An answer in the spelling that it votes under: `0.5` and `\\frac{1}{2}` are one vote."""
    if answer is None:
        return None
    spelt = normalize(answer)
    number = to_number(spelt)
    return spelt if number is None else str(number)


# ------------------------------------------------------------------------------------ units

# One unit a line, first the name that all its others become; a plural s is understood.
_UNIT_LINES = """
    mm millimeter millimetre мм 毫米 | cm centimeter centimetre zentimeter см 厘米 | dm decimeter
    m meter metre mètre metro м 米 | km kilometer kilometre км 公里 千米 | in inch inches
    ft foot feet | yd yard | mi mile | mg milligram | g gram г 克 | kg kilogram кг 千克
    t ton tonne | lb pound | oz ounce | ml milliliter millilitre | l liter litre | gal gallon
    ms millisecond | s sec second | min minute | h hr hrs hour | day | week | month | year yr
    hz hertz | newton | j joule | w watt | volt | pa pascal | kelvin | mol mole | mph
    deg degree grad grado degré градус 度 | rad radian | % percent pct percentage prozent
    usd dollar | cent | eur euro € | gbp £ | jpy yen ¥ | inr rupee rs ₹ | am a.m | pm p.m
"""
KNOWN_UNITS = {
    name: names.split()[0]
    for names in re.split(r"[|\n]", _UNIT_LINES)
    for word in names.split()
    for name in ([word, f"{word}s"] if len(word) > 1 else [word])
}
_NEUTRAL = {"unit", "units", "of", "the", "a", "an", "in", "total", "each"}
_HEDGES = re.compile(
    r"\b(?:not|no|or|maybe|perhaps|possibly|probably|sometimes|otherwise|else|if|unless"
    r"|about|approximately|nearly|almost|isn't|except|either|neither"
    r"|oder|ou|o|или|nicht|non"
    # What makes another number of it.
    r"|dozen|hundred|lakh|crore|factorial|half|halves|minus|plus|over|mod|pi)\b|或|不"
    r"|^\s*(?:squared|cubed)\b"
)
_WORDS = r"[^\W\d_](?:[^\W\d_]|[ .'/²-])*"
_SUFFIX = re.compile(
    rf"""\s*(?:{_TEXT}\s*\{{\s*(?P<text>{_WORDS}|\\?%)\s*\}}|(?P<degree>\^\{{\\circ\}}\s*(?:[CFK]\b)?)
    |(?P<percent>\\?%)|(?P<currency>€|£|¥|\\\$)|(?P<bare>(?<![A-Za-z\\]){_WORDS}))
    \s*(?:\^\s*\{{?\s*(?P<power>\d)\s*\}}?)?\s*$""",
    re.VERBOSE,
)
_PREFIX = re.compile(
    r"(-?)\s*(\\\$|€|£|¥|₹|Rs(?![A-Za-z])\.?|(?:USD|EUR|GBP|INR)(?![A-Za-z]))\s*(?=[\d.])"
)
_PREFIX_UNIT = {
    "\\$": "usd",
    "€": "eur",
    "£": "gbp",
    "¥": "jpy",
    "₹": "inr",
    "Rs": "inr",
    "Rs.": "inr",
}


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
        known = canonical_unit(words).partition("^")[0] in KNOWN_UNITS
        before = text[match.start("bare") - 1]
        attached = words[:1].isascii() and not words[1:2].isalpha() and not before.isspace()
        if attached or (not known and words.isascii() and len(words) < 3):
            return text, ""  # 2s, 3xy: variables
        if to_number(body) is None and not (
            known and len(words) > 1 and body[-1] in "0123456789})"
        ):
            return text, ""
    if match["degree"]:
        if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", body):
            return text, ""  # of the angle, not of the value
        return body, "deg" + match["degree"].replace(r"^{\circ}", "").strip().lower()
    if match["currency"]:
        return body, _PREFIX_UNIT[match["currency"]]
    return body, canonical_unit(words or "%", match["power"])


def canonical_unit(words: str, power: str | None = None) -> str:
    """`centimeters` → `cm`, `square feet` → `ft^2`, `km per hour` → `km/h`; others as given."""
    out = []
    for word in re.findall(
        r"[^\W\d_][^\W\d_'.-]*|/|%|\\%|²", re.sub(r"\bper\b", "/", words.lower())
    ):
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
