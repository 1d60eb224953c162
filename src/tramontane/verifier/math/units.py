r"""Units of measurement: taken off an answer, so that "15 m" can be told from "15 cm"."""

from __future__ import annotations

import re

from tramontane.verifier.math.normalize import TEXT
from tramontane.verifier.math.numbers import to_number

# Bars and line ends separate units: first the canonical name, then the others, plural s implied.
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
ATTACHED = {"m", "s", "h", "g", "L", "J", "W"}  # symbols of one letter, read as units in `3s`
_NEUTRAL = {"unit", "units", "of", "the", "a", "an", "in", "total", "each"}
_HEDGES = re.compile(
    r"\b(?:not|no|or|maybe|perhaps|possibly|probably|sometimes|otherwise|else|if|unless"
    r"|about|approximately|nearly|almost|isn't|except|either|neither"
    r"|oder|ou|o|или|nicht|non"
    # Words that turn the number before them into another number.
    r"|dozen|hundred|lakh|crore|factorial|half|halves|minus|plus|over|mod|pi)\b|或|不"
    r"|^\s*(?:squared|cubed)\b"
)
_WORDS = r"[^\W\d_](?:[^\W\d_]|[ .'/²-])*"
_SUFFIX = re.compile(
    rf"""\s*(?:{TEXT}\s*\{{\s*(?P<text>{_WORDS}|\\?%)\s*\}}|(?P<degree>\^\{{\\circ\}}\s*(?:[CFK]\b)?)
    |(?P<percent>\\?%)|(?P<currency>€|£|¥|\\\$)|(?P<bare>(?<![A-Za-z\\]){_WORDS}))
    \s*(?:\^\s*\{{?\s*(?P<power>\d)\s*\}}?)?\s*$""",
    re.VERBOSE,
)
_PREFIX = re.compile(
    r"(-?)\s*(\\\$|€|£|¥|₹|Rs(?![A-Za-z])\.?|(?:USD|EUR|GBP|INR)(?![A-Za-z]))\s*(?=[\d.])"
)
_CURRENCIES = {
    "\\$": "usd",
    "€": "eur",
    "£": "gbp",
    "¥": "jpy",
    "₹": "inr",
    "Rs": "inr",
    "Rs.": "inr",
}


def split_unit(text: str, *, attached: bool = False) -> tuple[str, str]:
    """Take a unit off a normalised answer: ("15", "cm") of `15\\text{ cm}`; ("x", "") of `x`.

    Bare words count as a unit only after a number. A hedge (`5 \\text{ or not}`) stays in the
    answer, for the judge to refuse.

    Args:
        text: the answer.
        attached: read a letter that is attached to a number, as in `3s`, as a unit, not as a
            variable, where it is one of ATTACHED.
    """
    if match := _PREFIX.match(text):
        return match[1] + text[match.end() :], _CURRENCIES.get(match[2], match[2].lower())
    match = _SUFFIX.search(text)
    body = text[: match.start()].strip() if match else ""
    if not match or not body:
        return text, ""
    words = match["text"] or match["bare"]
    if words and _HEDGES.search(words.lower()):
        return text, ""
    if match["bare"] and not _is_unit(words, body, text[match.start("bare") - 1], attached):
        return text, ""
    if match["degree"]:
        if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", body):
            return text, ""  # the degrees belong to the angle, not to the value
        return body, "deg" + match["degree"].replace(r"^{\circ}", "").strip().lower()
    if match["currency"]:
        return body, _CURRENCIES[match["currency"]]
    return body, canonical_unit(words or "%", match["power"])


def _is_unit(words: str, body: str, before: str, attached: bool) -> bool:
    """True if bare words after `body` are a unit, and no variables; `before`: the last character
    in front of the words."""
    known = canonical_unit(words).partition("^")[0] in KNOWN_UNITS
    if words[:1].isascii() and not words[1:2].isalpha() and not before.isspace():
        symbols = words.replace(" ", "").split("/")
        return attached and symbols[0] in ATTACHED and set(symbols) <= ATTACHED | set(KNOWN_UNITS)
    if not known and words.isascii() and len(words) < 3:
        return False  # 2s, 3xy: variables
    ends_as_number = known and len(words) > 1 and body[-1] in "0123456789})"
    return to_number(body) is not None or ends_as_number


def canonical_unit(words: str, power: str | None = None) -> str:
    """`centimeters` → `cm`, `square feet` → `ft^2`, `km per hour` → `km/h`; unknown words stay."""
    names = []
    for word in re.findall(
        r"[^\W\d_][^\W\d_'.-]*|/|%|\\%|²", re.sub(r"\bper\b", "/", words.lower())
    ):
        if word in ("square", "sq", "²"):
            power = "2"
        elif word in ("cubic", "cu"):
            power = "3"
        elif word not in _NEUTRAL:
            names.append(KNOWN_UNITS.get(word.lstrip("\\"), word.removesuffix("s")))
    name = " ".join(names).replace(" / ", "/")
    return f"{name}^{power}" if power and power != "1" and name else name


def units_clash(gold: str, pred: str) -> bool:
    """True if both sides name a unit and the units differ; "green apple" agrees with "apple"."""
    return bool(gold and pred) and gold != pred and not (set(gold.split()) <= set(pred.split()))


def percent_scales(gold_unit: str, pred_unit: str) -> list[tuple[int, int]]:
    """Factors (reference, prediction) to try: `28\\%` is 28 and 0.28 where one side alone has %."""
    if gold_unit != "%" and pred_unit == "%":
        return [(1, 1), (100, 1)]
    return [(1, 1), (1, 100)] if gold_unit == "%" and pred_unit != "%" else [(1, 1)]
