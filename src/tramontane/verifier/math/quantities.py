r"""Values with words between them: `2 hours 30 minutes`, `30^\circ 15'`, `(a) 5 (b) 7`, `3 R 2`.

The parser would read them as a product, in which the values may change places. They are read as
items, each with the words that name it, and compared by name. Units of one dimension make one
quantity: 2 hours 30 minutes are 2.5 hours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from tramontane.verifier.math import conversions
from tramontane.verifier.math.numbers import to_number
from tramontane.verifier.math.structure import balanced, split
from tramontane.verifier.math.units import NAMES, SYMBOLS, read_unit, split_unit
from tramontane.verifier.math.wording import FUNCTIONS, WRAPPER, unwrap

_N = r"(\d+(?:\.\d+)?)"
_MINUTE, _SECOND = (
    r"(?:'(?!')|\^\s*(?:\\prime(?![A-Za-z])|\{\s*(?:\\prime|')\s*\}))",
    r"(?:''|[\"”″]|\^\s*\{\s*(?:\\prime\s*\\prime|'')\s*\})",
)
_ANGLE = re.compile(rf"(-?){_N}\s*\^\{{\\circ\}}\s*(?:{_N}\s*{_MINUTE})?\s*(?:{_N}\s*{_SECOND})?")
_FEET = re.compile(rf"{_N}\s*{_MINUTE}\s*{_N}\s*{_SECOND}")
_CLOCK = re.compile(  # 4h15m, 5m30s, 4h15
    r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m|(?<=h)(\d\d)|(?<=h )(\d\d))\s*(?:(\d+)\s*s)?"
)
_COLONS = re.compile(r"\d+(?::[0-5]\d){1,2}")
_LETTERS = ("s", "h", "m", "g", "t", "L")  # units of one letter
_PART_OF_DEGREE = {"min": "arcminute", "s": "arcsecond"}
_TOKEN = re.compile(
    rf"{WRAPPER.pattern}|\\[A-Za-z]+|(?P<bare>(?<![A-Za-z\\_^{{])[^\W\d_]+(?:[ '-]+[^\W\d_]+)*)|.",
    re.DOTALL,
)
_IN_TEXT = re.compile(r"(?<![\w^/-])(\d+(?:\.\d+)?)(?!\w)")
_HINT = re.compile(
    r"^\s*\((?:(a)|(A)|(i)|(I)|(1))\)\s*[^()\s].*\((?:(?(1)b)(?(2)B)(?(3)ii)(?(4)II)(?(5)2))\)\s*[^()\s]"
    r"|\\(?:text|mathrm|mbox)|[^\W\d_]{2}|\d\s*[Rrhm]\s*\d|['\"]"
)
_WORD = re.compile(r"\\(?:text|mathrm|mbox|circ)|[^\W\d_]{3}|^\s*\(\w{1,3}\)|['\"]|\d\s*[Rr]\s*\d")
_FULL_STOP = re.compile(r"(?<=[a-z])\.(?=\s|$)")  # of an abbreviation: 6 ft. 2 in.
_OTHER_NOTATION = re.compile(
    r"[=<>&|]|\\(?:[lgn]eq?|in|cup|begin|equiv|pm|approx)(?![A-Za-z])|mod(?![a-z])|\d[\s(]*(?:\\text\s*\{[\s(]*)?base\b|choose"
)
_IGNORED = re.compile(r"\b(?:and|the|an?|is|are|of)\b|[.,:;=]")
_LIST_LABEL = re.compile(r"\(?([a-h]|[ivx]{1,4}|[1-9])[).]|(?:part|question) \(?([a-h1-9])\)?:?")
_PLAIN_LABEL = re.compile(
    r"(?:(?<=[\s,;\d])|^)(\((?:[a-hA-H]|[ivx]{1,4}|[IVX]{1,4}|[1-9])\))\s*(?=[-\d\\])"
)
_MONEY = re.compile(r"\bcents?\b|\bdollars?\b|\\\$|USD")
_CENTS = re.compile(r"\s*(\d[\d,.]*)\s*(?:c|\\(?:text|mathrm)\s*\{\s*c\s*\})\.?\s*")
_REMAINDERS = {"r", "remainder", "rem", "mit rest", "rest", "余"}


class Item(NamedTuple):
    """A value, and the words that name it in canonical form: a unit, or a label."""

    name: str
    value: str


def with_cents(gold: str, pred: str) -> str:
    r"""`25\text{ cents}` for `25c`, if the reference is an amount of money."""
    amount = _CENTS.fullmatch(pred) if _MONEY.search(gold) else None
    return rf"{amount[1]}\text{{ cents}}" if amount else pred


def same_quantities(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare values with words between them; None if neither side has several of them."""
    if not (_HINT.search(gold) or _HINT.search(pred)):
        return None
    g = read_items(gold)
    p = _clock(g, pred) if g else None
    p = p or read_items(_with_names(g, pred) if g else pred)
    if g is None and p is None:
        return None
    totals = _total(g, gold, p), _total(p, pred, g)
    if None not in totals:
        return totals[0] == totals[1]
    if g is None or p is None:
        return _same_list(g or p or [], pred if p is None else gold, equal)
    return _same_items(g, p, equal)


def _clock(items: list[Item], text: str) -> list[Item] | None:
    """The items of `4:30` for a reference of 4 hours 30 minutes; None for any other."""
    names = [item.name for item in items]
    values = text.split(":") if _COLONS.fullmatch(text) else []
    if names not in (["h", "min"], ["min", "s"], ["h", "min", "s"]) or len(values) != len(names):
        return None
    return [Item(name, value) for name, value in zip(names, values, strict=True)]


def _same_items(gold: list[Item], pred: list[Item], equal: Callable[[str, str], bool]) -> bool:
    if len(gold) != len(pred):
        return False
    values = {item.name: item.value for item in pred}
    if len(values) < len(pred):  # names that recur: in order
        return all(
            a.name == b.name and equal(a.value, b.value) for a, b in zip(gold, pred, strict=True)
        )
    return {item.name for item in gold} == values.keys() and all(
        equal(item.value, values[item.name]) for item in gold
    )


def _with_names(items: list[Item], text: str) -> str:
    r"""The names of a reference's items as words, wherever they stand before a value: `row 2,
    column 5` and `mean = 5` as `\text{row} 2 \text{column} 5` and `\text{mean} 5`."""
    names = [item.name for item in items if item.name.isalpha()]
    if len(names) < len(items):
        return text
    sign = "[:=]?" if min(map(len, names)) > 2 else "[:=]"
    pattern = rf"(?i)(?<![A-Za-z\\])({'|'.join(map(re.escape, names))})\s*{sign}\s*(?=[-\d.\\(])"
    named, count = re.subn(pattern, r"\\text{ \1 }", unwrap(text))
    return named if count == len(items) else text


def _same_list(items: list[Item], other: str, equal: Callable[[str, str], bool]) -> bool:
    """`5, 7` for `(a) 5 (b) 7`, in order."""
    listed = split(other.strip("()"), ",", ";")
    if len(listed) != len(items) or not all(_LIST_LABEL.fullmatch(item.name) for item in items):
        return False
    return all(equal(item.value, value) for item, value in zip(items, listed, strict=True))


def read_items(text: str) -> list[Item] | None:
    """The values of a text with their names; None unless words separate at least two values."""
    if match := _ANGLE.fullmatch(text):
        angle = ("deg", "arcminute", "arcsecond")
        found = [Item(n, match[1] + v) for n, v in zip(angle, match.groups()[1:], strict=True) if v]
        return found if len(found) > 1 else None
    if match := _FEET.fullmatch(text):
        return [Item("ft", match[1]), Item("in", match[2])]
    if match := _CLOCK.fullmatch(unwrap(text)):
        units = zip(("h", "min", "min", "min", "s"), match.groups(), strict=True)
        found = [Item(unit, value) for unit, value in units if value]
        return found if len(found) > 1 else None
    if len(labels := _PLAIN_LABEL.findall(text)) > 1 and text.startswith(labels[0]):
        text = _PLAIN_LABEL.sub(r"\\text{\1}", text)
    text = _FULL_STOP.sub("", text)
    body, unit = split_unit(text)
    if _OTHER_NOTATION.search(text) or (unit and to_number(body) is not None):
        return None
    parts = _parts(text)
    values = [part for is_value, part in parts if is_value]
    if len(values) < 2 or not all(map(_is_value, values)) or len(parts) > 2 * len(values) + 1:
        return None
    if not _WORD.search(text) and any(
        to_number(value) is None or value.startswith("-") for value in values
    ):
        return None  # a product of letters, as in a^2+2ab-b^2
    if parts[0][0]:
        names = [parts[k + 1][1] if k + 1 < len(parts) else "" for k in range(0, len(parts), 2)]
    else:
        names = [parts[k][1] for k in range(0, len(parts) - 1, 2)]
        if not parts[-1][0]:  # `speed 60 km/h, distance 120 km`: words in order
            names[-1] = f"{names[-1]} {parts[-1][1]}"
    items = [Item(_canonical(name), value) for name, value in zip(names, values, strict=True)]
    if items[0].name != "deg":
        return items
    return [item._replace(name=_PART_OF_DEGREE.get(item.name, item.name)) for item in items]


def _is_value(text: str) -> bool:
    return bool(
        balanced(text)
        and re.search(r"[\dA-Za-z)}]$", text)
        and not re.match(r"[+*/^_]|\\(?:cdot|times)", text)
    )


def _parts(text: str) -> list[tuple[bool, str]]:
    """The values (True) and words (False) of a text in turn; neighbors of one kind are joined."""
    parts: list[list[str | bool]] = []

    def add(is_value: bool, part: str) -> None:
        if parts and parts[-1][0] == is_value:
            parts[-1][1] = f"{parts[-1][1]}{part}" if is_value else f"{parts[-1][1]} {part}"
        else:
            parts.append([is_value, part])

    for token in _TOKEN.finditer(text):
        if token[1] is not None:
            for piece in filter(str.strip, _IN_TEXT.split(token[1])):
                add(_IN_TEXT.fullmatch(piece) is not None, piece)
        elif token["bare"] and _is_bare(token["bare"]):
            add(False, token["bare"])
        elif token[0] == " " and not parts:
            continue
        else:
            add(True, token[0])
    stripped = [(bool(kind), str(part).strip(" ,;~")) for kind, part in parts]
    kept = [(kind, part) for kind, part in stripped if part]
    if any(a[0] == b[0] for a, b in pairwise(kept)):
        return []
    return kept


def _is_bare(words: str) -> bool:
    """True for words outside of text commands that are not letters of a formula."""
    if words in ("R", "r", "°") or (words in SYMBOLS and (len(words) > 1 or words in _LETTERS)):
        return True
    return all(
        word.lower() in NAMES
        or (len(word) > 3 and re.search("[aeiouy]", word) and not FUNCTIONS.search(word))
        or word in ("and", "red")
        or not word.isascii()
        for word in re.split(r"[ '-]+", words)
    )


def _canonical(name: str) -> str:
    if label := _LIST_LABEL.fullmatch(name.strip().lower()):
        return f"({label[1] or label[2]})"
    plain = " ".join(_IGNORED.sub(" ", name).split())
    if plain.lower() in _REMAINDERS:
        return "remainder"
    unit = read_unit(rf"\text{{{plain}}}") if plain else None
    return unit.name if unit else plain.lower()


def _total(items: list[Item] | None, text: str, other: list[Item] | None) -> Fraction | None:
    """The quantity of a side in the least unit of its dimension; a single number has the first unit
    of the other side if it names none. None for any other text."""
    if items is None:
        first = other[0].name if other else ""
        split = (split_unit(text, named=name) for name in conversions.units_of(first))
        value, unit = next((found for found in split if found[1]), (text, first))
        items = [Item(unit, value)]
    measures = [conversions.measure(item.name) for item in items]
    dimension = conversions.measure(other[0].name)[1] if other else measures[0][1]
    numbers = [to_number(item.value) for item in items]
    if None in numbers or len(dimension) != 1 or any(found != dimension for _, found in measures):
        return None
    names = [item.name for item in items]
    if len(set(names)) < len(names) or not all(map(conversions.is_known, names)):
        return None
    sign = -1 if items[0].value.startswith("-") else 1
    if sign > 0 and any(item.value.startswith("-") for item in items):  # 2 hours and -15 minutes
        return None
    sizes = (size for size, _ in measures)
    total = (abs(n) * size for n, size in zip(numbers, sizes, strict=True) if n is not None)
    return sign * sum(total, Fraction(0))


def same_ratio(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare ratios of three terms or more, up to a common factor; None if neither side is one.

    Times such as `1:05:30`, with a 0 before a digit, equal only themselves.
    """
    g, p = (split(side, ":") for side in (gold, pred))
    if max(len(g), len(p)) < 3 or re.search(r"[=\\]\{|\\text", gold + pred):
        return None
    if "=" in gold + pred:
        return _same_named_ratio(gold, pred, equal)
    if len(g) != len(p):
        return False
    if any(re.fullmatch(r"0\d", term) for term in g[1:]):
        return g == p
    if to_number(p[0]) == 0 != to_number(g[0]):  # all terms may be 0
        return False
    return all(
        equal(rf"({g[0]})\cdot({b})", rf"({p[0]})\cdot({a})")
        for a, b in zip(g[1:], p[1:], strict=True)
    )


def _same_named_ratio(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """`4:6:8` for `a:b:c = 2:3:4`; a prediction's names stand in the reference's order."""
    sides = [split(side, "=") for side in (gold, pred)]
    named = [side[0] for side in sides if len(side) == 2 and ":" in side[0]]
    if not named or any(len(side) > 2 or ":" not in side[-1] for side in sides):
        return None
    names = [re.sub(r"\s", "", name) for name in named]
    return len(set(names)) == 1 and equal(sides[0][-1], sides[1][-1])
