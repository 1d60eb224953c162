r"""Units of measurement and counted things: split off an answer, so that "15 m" differs from "15
cm".

A unit is an expression: symbols with SI prefixes, names and counted things (units.txt), joined by
products, quotients and powers. Words that are not in these lists are not units, so `5 \text{
thirds}` and `5 \text{ k}` are not 5.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tramontane.verifier.math.numbers import DECIMAL, to_number

# Symbols that take an SI prefix.
_SI_SYMBOLS = "m g s A K mol cd Hz N Pa J W C V F Ω S Wb T H lm lx Bq Gy Sv L l eV cal Wh bar B b M"
_SI_PREFIXES = (*"YZEPTGMkhdcmµunpfa", "da")
_SYMBOLS = {
    prefix + symbol: (prefix.replace("u", "µ") + symbol.replace("l", "L", symbol == "l"))
    for symbol in _SI_SYMBOLS.split()
    for prefix in ("", *_SI_PREFIXES)
}
# "B" and "b" need a prefix, or a name; MM is millions.
for _other in ("B", "b", "a", "u", *(f"{prefix}M" for prefix in "YZEPTGMkhdcfa"), "daM"):
    _SYMBOLS.pop(_other, None)
_PREFIX_NAMES = {
    "": "", "kilo": "k", "mega": "M", "giga": "G", "tera": "T", "centi": "c", "deci": "d",
    "milli": "m", "micro": "µ", "nano": "n", "pico": "p", "hecto": "h",
}  # fmt: skip
_LISTS = re.sub(r"^#.*\n", "", Path(__file__).with_name("units.txt").read_text("utf-8"), flags=re.M)
_WORDS = dict(re.findall(r"\[(\w+)\]\n([^\[]*)", _LISTS))


def _named(units: str, prefixes: dict[str, str]) -> dict[str, str]:
    table = {}
    for names in units.split("|"):
        canonical, *others = names.split()
        for prefix, symbol in prefixes.items():
            for word in (canonical, *others):
                if word in _SYMBOLS or (len(word) == 1 and word.isascii() and word != "%"):
                    continue  # case matters: `k` is not kelvin
                plural = (f"{prefix}{word}s",) if len(word) > 2 else ()
                for name in (prefix + word, *plural):
                    table[name.lower()] = symbol + canonical
    return table


NAMES = _named(_WORDS["prefixable"], _PREFIX_NAMES) | _named(_WORDS["units"], {"": ""})
SYMBOLS = {**_SYMBOLS, "h": "h", "t": "t", "Å": "Å", "°": "deg"}
THINGS = {*(things := _WORDS["things"].split()), *(f"{word}s" for word in things if word.isascii())}
QUALIFIERS = frozenset(_WORDS["qualifiers"].split())
NEUTRAL = frozenset(_WORDS["neutral"].split())

NEUTRAL_NAME = "unit"
_UNNAMED = {"unit", "units", "单位"}
MAX_UNIT = 120  # characters
MAX_STARTS = 12  # positions at which a unit may begin
ATTACHED = {"m", "s", "h", "g", "L", "J", "W"}  # symbols of one letter, read as units in `3s`
SPACED = ATTACHED | {"K", "N", "V", "in"}  # … and in `3 s`
_PLAUSIBLE = SPACED | set(_WORDS["plausible"].split())
_UNMISTAKABLE = frozenset(_WORDS["unmistakable"].split())
# Products and quotients of such letters: `20 N m` is a torque, `20 L W` is not.
_PRODUCTS = {"N m", "V A", "A h", "W h", "kW h", "Pa s", "J s", "kg m", "N s", "C m", "T m", "W s"}
_DIVISORS = {"s", "h", "min", "m", "cm", "km", "kg", "L", "mL", "mol", "K", "A", "C", "ft"}
_AMBIGUOUS = {"M"}  # molar, or million: only if the other side shows it
_SHORT_NAMES = {"ft", "lb", "oz", "hr", "yd", "min", "mph", "kmh", "rpm", "cc", "usd", "eur", "gbp"}
_INNER = r"(?:[^{}]|\{[^{}]*\})*"
_TEXT = (
    r"\\(?:text(?:rm|normal|it|bf|sf)?|mathrm|mathit|mathsf|mbox|operatorname|rm)"
    rf"\s*\{{({_INNER})\}}"
)
_LETTER = r"[^\W\d_]"
_TOKEN = re.compile(
    rf"""{_TEXT}
    |(?P<fraction>\\frac\s*\{{(?P<top>{_INNER})\}}\s*\{{(?P<bottom>{_INNER})\}})
    |(?:\^|\*\*)\s*\{{?\s*(?P<power>[+-]?\d)\s*\}}?
    |(?P<degree>\^\{{\\circ\}}\s*(?P<scale>[CFK](?![A-Za-z]))?)
    |(?P<sign>\\?%|\\\$|[€£¥₹])
    |(?P<times>\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*|-(?={_LETTER}))
    |(?P<over>/|per(?![A-Za-z]))
    |(?P<bracket>[(){{}}])
    |(?P<word>{_LETTER}(?:{_LETTER}|['’.-](?={_LETTER}))*\.?)
    |(?P<space>[\s~]+|\\[ ,;:!])""",
    re.VERBOSE,
)
_START = re.compile(
    rf"\\(?!cdot|times|frac\{{\d)|\^\{{\\circ|[%€£¥₹(]|(?<!\\)(?<!{_LETTER}){_LETTER}"
)
# `\mu` and `\Omega` are letters of a symbol, also where only the rest of it is in `\text{…}`.
_GREEK = [
    (re.compile(r"\\mu(?![A-Za-z])\s*"), "µ"),
    (re.compile(r"\\(?:Omega|ohm)(?![A-Za-z])\s*"), "Ω"),
    (re.compile(r"\\(?:AA|r\{A\}|mathring\s*\{A\})(?![A-Za-z])\s*"), "Å"),
    (re.compile(r"µ\s*(\\(?:text|mathrm|mbox|rm)\s*\{)\s*"), r"\1µ"),
    (re.compile(r"(\\(?:text|mathrm|mbox|rm)\s*\{\s*[kMGmµ]?)\}\s*Ω"), r"\1Ω}"),
]
_COMPOUNDS = [
    (re.compile(r"\byears? old\b"), "years"),
    (re.compile(r"\bin (?:total|all)\b"), ""),
    (re.compile(r"(?<![A-Za-z])Nm(?![A-Za-z])"), "N m"),
    (re.compile(r"\belectron[- ]volt"), "electronvolt"),
    (re.compile(r"\bnewton[- ](?=met(?:er|re))"), "newton "),
    (re.compile(r"watt[- ]hour"), "watthour"),
]
_PREFIX = re.compile(
    r"(-?)\s*((?:R|A|C|S|NZ|HK|NT|MX)?\s?\\\$|€|£|¥|₹|Rs(?![A-Za-z])\.?|(?:USD|EUR|GBP|INR)(?![A-Za-z]))\s*(?=[\d.]|\\frac)"
)
_CURRENCIES = {
    "\\$": "usd",
    "€": "eur",
    "£": "gbp",
    "¥": "jpy",
    "₹": "inr",
    "Rs": "inr",
    "R\\$": "brl",
}
_ALONE = frozenset(
    (*_CURRENCIES.values(), "%", "deg", "degC", "degF", "degK", "cent")
)  # multiply no other unit
_WORDS_ONLY = re.compile(rf"\W|{_LETTER}+")
_ENDS = re.compile(r"(?:[\d})]|\\pi)$")  # of values before a unit in words
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_SQUARED = "squared carré carrés cuadrado cuadrados quadrado quadrados quadrati"
_CUBED = "cubed cube cubes cúbico cúbicos cubi cubici"
_RAISED = {word: power for words, power in ((_SQUARED, 2), (_CUBED, 3)) for word in words.split()}
_OF_POWER = re.compile(r"(?:(?P<square>平方|quadrat)|立方|kubik)(?P<unit>\w+)")
_QUOTIENT = re.compile(r"(\w+)每(\w+)")


class _Unit(NamedTuple):
    """A unit's canonical name, and its symbols that could be variables: letters outside of text."""

    name: str
    letters: list[str]
    is_written: bool  # in text, or with a sign
    is_attachable: bool  # not a short word: `5ant` is a product


def split_unit(text: str, *, attached: bool = False, named: str = "") -> tuple[str, str]:
    r"""Split a unit off a normalized answer: ("15", "cm") for `15\text{ cm}`; ("x", "") for `x`.

    Letters outside of text are units only after a number, as words, or as symbols that are not read
    as variables. Anything that is not a unit (`5 \text{ or not}`) stays in the answer, to be
    rejected later.

    Args:
        text: the answer.
        attached: read symbols that may be variables (`3s`, `3 mg`) as units.
        named: the other side's unit, which is recognized in any spelling.
    """
    if match := _PREFIX.match(text):
        body, rate = split_unit(match[1] + text[match.end() :])
        currency = _currency(match[2])
        return body, f"{currency}·{rate}" if "^-" in rate else currency
    spelt = text
    for pattern, replacement in (*_COMPOUNDS, *_GREEK):
        spelt = pattern.sub(replacement, spelt)
    starts = [m.start() for m in _START.finditer(spelt, max(0, len(spelt) - MAX_UNIT)) if m.start()]
    for start in starts[:MAX_STARTS]:
        body = spelt[:start].rstrip(" ~")
        unit = read_unit(spelt[start:]) if body and body[-1] not in "^_/*+-\\({" else None
        if unit is None:
            continue
        is_named = bool(named) and (unit.name == named or {unit.name, named} in _SAME)
        if is_named and _ENDS.search(body):
            return body, unit.name
        if body.endswith("\\pi"):
            word = _WORDS_ONLY.match(spelt, start)
            if word is None or (
                word[0].isalpha() and word[0] not in _UNMISTAKABLE and len(word[0]) < 4
            ):
                continue
        if not _may_follow(unit, body, spelt[start - 1].isspace(), attached):
            continue
        if unit.name.startswith("deg") and _ANGLE.search(body):
            break  # the degrees belong to the angle, not to the value
        return body.replace("µ", r"\mu ").replace("Ω", r"\Omega ").strip(), unit.name
    return text, ""


def _currency(sign: str) -> str:
    sign = sign.rstrip(".").replace(" ", "")
    return _CURRENCIES.get(sign, sign.lower())


def _may_follow(unit: _Unit, body: str, spaced: bool, attached: bool) -> bool:
    """True if a unit after `body` is one, and not a product of variables."""
    if unit.name in _AMBIGUOUS:
        return False
    if not unit.letters:
        if not (spaced or unit.is_written or unit.is_attachable):
            return False
        return unit.is_written or to_number(body) is not None or _ENDS.search(body) is not None
    if to_number(body) is None:
        return False
    if len(unit.letters) > 1:
        is_quotient = set(unit.letters[1:]) <= _DIVISORS and "^-" in unit.name
        is_quotient = is_quotient and unit.letters[0] not in ("h", "s")
        is_known = is_quotient or " ".join(unit.letters) in _PRODUCTS
        return attached and is_known and set(unit.letters) <= _PLAUSIBLE
    if not spaced:
        return attached and set(unit.letters) <= ATTACHED
    return set(unit.letters) <= (_PLAUSIBLE if attached else SPACED)


def read_unit(text: str) -> _Unit | None:
    """Read a text that is a unit from end to end; None for any other text."""
    reader = _Reader()
    if not reader.read(text, is_text=False) or reader.brackets or reader.qualified:
        return None
    if reader.joined and reader.factors:  # nothing follows the last operator
        return None
    factors = {name: power for name, power in reader.factors.items() if power}
    if len(factors) > 1 and factors.get(NEUTRAL_NAME) == 1:  # units per second
        del factors[NEUTRAL_NAME]
    above = [name for name, power in factors.items() if power > 0]
    is_marked = _ALONE.intersection(above) and (len(above) > 1 or factors[above[0]] > 1)
    if is_marked:  # 5%% and 5 $ cm
        return None
    ordered = sorted(factors.items(), key=lambda item: (-item[1], item[0]))
    name = "·".join(n if power == 1 else f"{n}^{power}" for n, power in ordered)
    return _Unit(name, reader.letters, reader.is_written, reader.is_attachable)


class _Reader:
    def __init__(self) -> None:
        self.factors: dict[str, int] = {}
        self.letters: list[str] = []
        self.is_written = self.qualified = self.of = False
        self.is_attachable = True
        self.brackets: list[int] = []  # the sign outside each
        self.sign = self.outer = 1
        self.square = 1  # the power that "square" and "cubic" announce
        self.last = ""  # the factor that a power belongs to
        self.last_power = 0
        self.thing = ""  # the counted thing that the next word may be a part of: "tennis balls"
        self.joined = True  # an operator stands before the next factor

    def read(self, text: str, *, is_text: bool) -> bool:
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None or not self._take(token, is_text):
                return False
            position = token.end()
        return True

    def _take(self, token: re.Match[str], is_text: bool) -> bool:
        if token[1] is not None:
            self.is_written = True
            return self.read(token[1], is_text=True)
        if token["fraction"]:
            top, bottom = token["top"].strip(), token["bottom"]
            above = True if top == "1" else self.read(top, is_text=is_text)
            self._open(-1)
            return above and self.read(bottom, is_text=is_text) and self._close()
        if token["power"]:
            return self._raise(int(token["power"]))
        if token["degree"]:
            self.is_written = True
            return self._factor("deg" + (token["scale"] or ""))
        if token["sign"]:
            self.is_written = True
            return self._factor(_CURRENCIES.get(token["sign"]) or NAMES[token["sign"].lstrip("\\")])
        if token["times"]:
            self.joined, self.thing = True, ""
        elif token["over"]:
            self.sign, self.joined, self.thing = -1, True, ""
        elif token["bracket"]:
            if token["bracket"] in "({":
                self._open(self.sign)
            else:
                return self._close()
        elif token["word"]:
            return self._word(token["word"], is_text)
        return True

    def _open(self, sign: int) -> None:
        self.brackets.append(self.outer)
        self.outer, self.sign = self.outer * sign, 1

    def _close(self) -> bool:
        if not self.brackets:
            return False
        self.outer = self.brackets.pop()
        self.last = ""
        return True

    def _raise(self, power: int) -> bool:
        if self.last == NEUTRAL_NAME:
            self.factors[NEUTRAL_NAME], self.joined = power, False
            return True
        if not self.last or abs(self.last_power) != 1:
            return False
        self.factors[self.last] += self.last_power * (power - 1)
        self.last = ""
        return True

    def _factor(self, name: str) -> bool:
        if not self.joined and self.last == "deg" and name in ("C", "F", "K", "degC", "degF"):
            name = f"deg{name[-1]}"
        power = self.outer * self.sign * self.square
        if not self.joined and (self.thing or (self.last == "deg" and name.startswith("deg"))):
            self.factors.pop(self.thing or self.last)
        self.factors[name] = self.factors.get(name, 0) + power
        self.last, self.last_power = name, power
        self.square = 1  # what follows a slash stays below it: J/kg K
        self.joined = self.qualified = False
        self.thing = ""
        return True

    def _below(self, word: str, is_text: bool) -> bool:
        self.sign, self.joined, self.thing = -1, True, ""
        return self._word(word, is_text)

    def _word(self, written: str, is_text: bool) -> bool:
        word = written.rstrip(".")
        lower = word.lower()
        is_symbol = word in _UNMISTAKABLE or lower in _SHORT_NAMES
        self.is_attachable &= is_symbol or len(word) > 3 or not word.isascii()
        if lower in _RAISED:
            return self._raise(_RAISED[lower])
        if lower in ("square", "sq", "cubic", "cu"):
            self.square, self.qualified = (2 if lower[0] == "s" else 3), True
            return True
        if match := _OF_POWER.fullmatch(lower):
            self.square = 2 if match["square"] else 3
            return self._word(match["unit"], is_text)
        if match := _QUOTIENT.fullmatch(lower):
            return self._word(match[1], is_text) and self._below(match[2], is_text)
        if lower in NEUTRAL:
            if self.square > 1 or lower in _UNNAMED:
                self.factors[NEUTRAL_NAME], self.joined = self.square, False
            self.qualified, self.square, self.last = False, 1, NEUTRAL_NAME
            return True
        if word in SYMBOLS:
            if not (is_text or word in _UNMISTAKABLE or "µ" in word or "Ω" in word or "Å" in word):
                self.letters.append(word)
            return self._factor(SYMBOLS[word])
        if lower in NAMES:
            if not is_text and lower.isascii() and len(lower) == 2 and lower not in _SHORT_NAMES:
                self.letters.append(lower)
            return self._factor(NAMES[lower])
        if lower[1:] in THINGS and lower[0] in THINGS:  # 个苹果
            lower = lower[1:]
        if lower == "of" and self.factors:
            self.of = self.qualified = True
            return True
        if lower in THINGS and self.of:  # gallons of milk
            self.qualified = False
            return True
        if lower in THINGS:
            self.square = 1  # square tiles
            self._factor(lower.removesuffix("s") if lower.removesuffix("s") in THINGS else lower)
            self.thing = self.last
            return True
        if lower in QUALIFIERS:
            self.qualified = True
            return True
        return False


# ---------------------------------------------------------------------------------- comparison

_PAIRS = "M mol·L^-1, C degC, K degK, F degF, deg degC, deg degF, lb gbp"
_SAME = [set(pair.split()) for pair in _PAIRS.split(", ")]


def units_clash(gold: str, pred: str) -> bool:
    """True if both sides name a unit and the units differ; `25 C` agrees with `25°C`."""
    if not (gold and pred) or gold == pred or {gold, pred} in _SAME:
        return False
    if not any(unit.partition("^")[0] == NEUTRAL_NAME for unit in (gold, pred)):
        return True
    powers = [unit.partition("^")[2] or "1" for unit in (gold, pred)]  # square units, and cm^2
    return powers[0] != powers[1] and "·" not in gold + pred


_MULTIPLE_OF_PI = re.compile(
    rf"(?P<sign>-?)\s*(?:\\frac\s*\{{\s*(?P<top>-?\d*)\s*\\pi\s*\}}\s*\{{\s*(?P<bottom>[1-9]\d*)\s*\}}"
    rf"|(?P<factor>{DECIMAL}|\\frac\s*\{{\s*-?\d+\s*\}}\s*\{{\s*[1-9]\d*\s*\}})?\s*(?:\\cdot|\*)?\s*"
    r"\\pi\s*(?:/\s*(?P<over>[1-9]\d*))?)\s*"
)


def same_angle(gold: str, gold_unit: str, pred: str, pred_unit: str) -> bool | None:
    r"""Compare degrees with an angle in radians: `120^\circ` is `\frac{2\pi}{3}`. None unless one
    side is in degrees, and the other a rational multiple of pi."""
    if {gold_unit, pred_unit} not in ({"deg", ""}, {"deg", "rad"}):
        return None
    degrees, radians = (gold, pred) if gold_unit == "deg" else (pred, gold)
    number, match = to_number(degrees), _MULTIPLE_OF_PI.fullmatch(radians)
    if match is None:
        return None
    if number is None:  # 2π/3 degrees are not 2π/3
        return False if _MULTIPLE_OF_PI.fullmatch(degrees) else None
    top = match["factor"] or {"": "1", "-": "-1"}.get(match["top"] or "", match["top"])
    factor = to_number(top)
    if factor is None:
        return None
    factor *= -1 if match["sign"] else 1
    return number == 180 * factor / int(match["bottom"] or match["over"] or 1)


def percent_scales(gold_unit: str, pred_unit: str) -> list[tuple[int, int]]:
    """Factors (reference, prediction) to try: `28\\%` is 28 and 0.28 where one side alone has %."""
    if gold_unit != "%" and pred_unit == "%":
        return [(1, 1), (100, 1)]
    return [(1, 1), (1, 100)] if gold_unit == "%" and pred_unit != "%" else [(1, 1)]
