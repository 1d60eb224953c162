"""Answers in words: choice letters and text, compared as words and never as algebra."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from tramontane.config.yaml_text import read_own
from tramontane.verifier.math import descriptions
from tramontane.verifier.math.units import read_unit

_LETTER = re.compile(r"\(?([A-Z])\)?")
_SMALL = re.compile(r"\(?[a-z]\)?")  # a choice where one side has brackets, unlike `b` for `B`
_LETTER_WITH_TEXT = re.compile(r"\(?([A-Z])([).:]?)(?:\s+|(?<=\W)|(?=\\))(\S.*)", re.DOTALL)
WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
FUNCTIONS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|arc\w+|mod|gcd|lcm)\b"
)
_HEDGE = re.compile(r"\b[A-Z]\b|\b(?:or|not)\b")
_NAMED = re.compile(r"[A-Z]?[a-z]{3,} ([A-Z])")  # Group A
_NUMBERED = re.compile(  # Box 2, but no date
    r"(?!(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec))[A-Z][a-z]{2,} (\d{1,4})"
)
_CIRCLED = re.compile(r"(?:[①-⑳](?:\s|[,、，;]|and|和|\\text\s*\{\s*(?:and|和)\s*\})*)+")
_CHOICE_NAME = re.compile(r"\s*(?:option|choice|answer)\s*:?\s+(?=\(?[A-Z]\b)", re.IGNORECASE)


def choice(gold: str, pred: str) -> bool | None:
    """Compare choice letters: `C`, `(C)`, `\\text{(C)}`, and a letter with its option's text.

    None if a side is not a choice.
    """
    gold, pred = _without_name(gold), _without_name(pred)
    g = _LETTER.fullmatch(gold)
    if g and _SMALL.fullmatch(pred) and (gold[0] == "(" or ")" in pred):
        pred = pred.upper()
    p = _LETTER.fullmatch(pred)
    numbered = _NUMBERED.fullmatch(gold)
    if numbered and pred.casefold() in (gold.casefold(), numbered[1]):
        return True
    if p and (named := _NAMED.fullmatch(gold)):
        return p[1] == named[1]
    if g and p:
        return g[1] == p[1]
    if g and (option := _option(pred)):
        return g[1] == option[0] and not _HEDGE.search(option[1])
    if p and (option := _option(gold)):
        return p[1] == option[0]
    return None


def chosen(gold: str, pred: str) -> str:
    """The letter that a prediction chooses: `(C)` and `C) 12` are one answer. The unchanged
    prediction if the reference is not a letter, or no letter is chosen."""
    pred_bare = _without_name(pred)
    if not _LETTER.fullmatch(_without_name(gold)):
        return pred
    if letter := _LETTER.fullmatch(pred_bare):
        return letter[1]
    option = _option(pred_bare)
    return option[0] if option and not _HEDGE.search(option[1]) else pred


def _without_name(text: str) -> str:
    return _CHOICE_NAME.sub("", unwrap(text))


def _option(text: str) -> tuple[str, str] | None:
    """A letter and its option's text, for `C) 12`, `(C) Cecile`, `C Cecile`; None for `C + 12`."""
    match = _LETTER_WITH_TEXT.fullmatch(text)
    if match is None or match[3][0] in "+*/^_=,;" or not (match[2] or _is_words(match[3])):
        return None
    return match[1], match[3]


_LABELED = re.compile(  # one option alone
    r"(?:\(([A-J])\)|([A-J])[).:])\s+(?!.*(?:\((?:[A-J]|[IVX]+)\)|(?<!\w)[B-J][).:])\s)(\S.*)",
    re.DOTALL,
)


def without_choice(gold: str, pred: str) -> tuple[str, str]:
    """Both answers without the letters of their options: 6 for `(C) 6`; unchanged if the letters
    differ."""
    sides = [_LABELED.fullmatch(_without_name(side)) for side in (gold, pred)]
    if len({m[1] or m[2] for m in sides if m}) != 1:
        return gold, pred
    g, p = (m[3] if m else side for m, side in zip(sides, (gold, pred), strict=True))
    return g, p


def with_separate_choices(gold: str, pred: str) -> str:
    """`A, C` for `AC`, if the reference is a list of letters."""
    is_list = re.fullmatch(r"[A-J](?:\s*,\s*[A-J])+", gold)
    letters = re.fullmatch(r"[A-J](?:[\s&]*[A-J])+", unwrap(pred)) if is_list else None
    return ", ".join(re.findall("[A-J]", letters[0])) if letters else pred


_ONLY = re.compile(r"\s+only\s*\}?\s*\.?$")
_PARTS_LISTED = re.compile(r"\(?([ivx]{1,5}|[IVX]{1,5})\)?")


def same_parts(gold: str, pred: str) -> bool | None:
    """Compare lists of numbered statements, `(i), (iii)` and `iii, i`, in any order; None if the
    reference is not such a list."""
    if gold[0] in "①②③④⑤⑥⑦⑧⑨⑩" and _CIRCLED.fullmatch(gold):
        marks = [sorted(re.findall("[①-⑳]", side)) for side in (gold, pred)]
        return bool(_CIRCLED.fullmatch(pred)) and marks[0] == marks[1]
    sides = [
        re.split(r"\s*(?:[,;]|\band\b)\s*", unwrap(side)) for side in (gold, _ONLY.sub("", pred))
    ]
    found = [[_PARTS_LISTED.fullmatch(item.strip()) for item in side] for side in sides]
    if len(found[0]) < 2 or not all(found[0]):
        return None
    return all(found[1]) and len({"".join(sorted(m[1] for m in f if m)) for f in found}) == 1


_SEGMENT = re.compile(r"\\overline\s*\{\s*[A-Z]\s*[A-Z]\s*\}|[A-Z]\s*[A-Z]")
_OF_SEGMENTS = re.compile(
    rf"\|?({_SEGMENT.pattern})\|?\s*(=|\\(?:parallel|perp|cong)(?![A-Za-z]))"
    rf"\s*\|?({_SEGMENT.pattern})\|?"
)
_OF_POINTS = re.compile(r"(?:\\text\s*\{\s*|\\)(angle|triangle)\s*\{?\s*([A-Z]{3})[\s}]*")


def same_segment(gold: str, pred: str) -> bool | None:
    r"""Compare the names of segments: `AB`, `\overline{AB}` and `\overline{BA}` are one segment,
    `AB \parallel CD` and `DC \parallel AB` one relation, and `\angle ABC` is `\angle CBA`.

    None unless both sides are two capital letters, at least one with a bar, two such names with one
    relation, or an angle or a triangle each.
    """
    related = [_OF_SEGMENTS.fullmatch(side) for side in (gold, pred)]
    if all(related):
        ends = [
            sorted("".join(sorted(re.findall("[A-Z]", m[k]))) for k in (1, 3)) for m in related if m
        ]
        return ends[0] == ends[1] and len({m[2] for m in related if m}) == 1
    points = [_OF_POINTS.fullmatch(side) for side in (gold, pred)]
    if all(points):
        (kind, g), (other, p) = (m.groups() for m in points if m)
        same = sorted(g) == sorted(p) if kind == "triangle" else p in (g, g[::-1])
        return kind == other and same
    sides = [side for side in (gold, pred) if _SEGMENT.fullmatch(side)]
    if len(sides) < 2 or "\\overline" not in gold + pred:
        return None
    return sorted(re.findall("[A-Z]", gold)) == sorted(re.findall("[A-Z]", pred))


_SHORT_WORDS = {"no", "ja", "si"}
MAX_PHRASE = 60  # characters
_LISTED = re.compile(r"[^\W\d_](?:[^\W\d_]|[ ,.;'()-])*")
_ITEM = re.compile(r"[,;、]|\b(?:and|und|et|y|e|и)\b|和")
_PRODUCT = re.compile(r"[a-z]{3,4}")
_LABELS = re.compile(r"(?=[A-H]{2})A?B?C?D?E?F?G?H?")  # of points or choices; abc is a product
# -abc and |abc| are not abc, and A'BC is not ABC.
_OPERATORS = re.compile(r"^\s*-|[|+*/^<>=~#&@]|!\s*[\w=]|\b[A-Z]+\s*'(?![A-Z][a-z])")


def same_text(gold: str, pred: str) -> bool | None:
    """Compare with a reference in words, ignoring case but that of points and
    choices; None if the reference is not words."""
    bare = unwrap(gold)
    if not _is_words(bare) or bare.startswith("("):
        return None
    other = unwrap(pred)
    if other in ("T", "F") and len(bare) > 3:
        other = {"T": "true", "F": "false"}[other]
    if _ITEM.search(bare):  # in any order; items that are not words are compared one by one
        return _items(bare) == _items(other) if _LISTED.fullmatch(other) else None
    if _same_words(_words(bare), _words(other)) and not (
        _OPERATORS.search(other) or _ITEM.search(other)
    ):
        return not (_LABELS.fullmatch(bare) and other.islower())
    return None if _is_product(gold) else False


# Words before a noun, and nouns after an adjective, that make no difference.
_BEFORE = {
    "a", "an", "the", "to", "due", "on", "in", "at", "is", "it", "le", "la", "les", "un", "une",
    "el", "los", "las", "il", "lo", "der", "die", "das", "ein", "eine",
}  # fmt: skip
_NOUNS = {
    "triangle", "triangles", "quadrilateral", "function", "number", "numbers", "line", "lines",
    "angle", "angles", "series", "sequence", "form", "solution", "one",
}  # fmt: skip


# Kinds of triangles: each names one without its noun.
_TRIANGLES = {"isosceles", "equilateral", "scalene", "acute", "obtuse", "right"}


def _same_words(gold: list[str], pred: list[str]) -> bool:
    """Compare words without articles before them; an adjective agrees with its noun (`isosceles
    triangle`)."""
    g, p = (list(dropwhile(_BEFORE.__contains__, side)) or side for side in (gold, pred))
    g, p = ([word.removesuffix("条件") or word for word in side] for side in (g, p))
    if "triangle" in gold + pred:
        g, p = ([word for word in side if word not in ("angled", "angle")] for side in (g, p))
        if len(p) == 1 and p[0] in _TRIANGLES:
            p = [*p, "triangle"]
    return g == p or (
        len(g) == 1 and g[0] not in _NOUNS and p[:1] == g and len(p) == 2 and p[1] in _NOUNS
    )


def _is_product(text: str) -> bool:
    """True for letters that are variables rather than a word: `xyz`, `abc`."""
    is_run = "".join(map(chr, range(ord(text[0]), ord(text[-1]) + 1))) == text
    is_ordered = re.search("[xz]", text) and not re.search("[eiou]", text)
    return bool(_PRODUCT.fullmatch(text)) and (
        is_run or bool(is_ordered and list(text) == sorted(text))
    )


_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBERS = [*_UNITS, *(f"{t} {u}".removesuffix(" zero") for t in _TENS for u in _UNITS[:10])]
_PARTS = [
    "half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
]  # fmt: skip


def _read_numbers() -> Iterator[tuple[str, str]]:
    """Numbers up to one hundred, their negatives, and fractions of parts down to the twelfth."""
    for number, word in enumerate([*_NUMBERS, "one hundred"]):
        yield word, str(number)
        yield f"negative {word}", str(-number)
        yield f"minus {word}", str(-number)
    for below, part in enumerate(_PARTS, 2):
        for name in (part, "quarter") if below == 4 else (part,):
            yield f"{'an' if name[0] == 'e' else 'a'} {name}", rf"\frac{{1}}{{{below}}}"
            yield f"one {name}", rf"\frac{{1}}{{{below}}}"
            names = "halves" if name == "half" else f"{name}s"
            for above, word in enumerate(_UNITS[2:], 2):
                yield f"{word} {names}", rf"\frac{{{above}}}{{{below}}}"


_NUMBER_WORDS = dict(_read_numbers())
_POWERS = {"thousand": 1000, "million": 10**6}
MAX_NUMBER_WORDS = 20


def _number_in_words(text: str) -> str:
    """The digits of a whole number from one hundred to a billion in words, `two hundred and five`;
    empty for any other words."""
    words = text.split()
    if len(words) > MAX_NUMBER_WORDS or not {"hundred", *_POWERS} & set(words):
        return ""
    total, group, last = 0, "", 10**9
    for word in [*words, ""]:
        if word and word not in _POWERS:
            group = f"{group} {word}".strip()
            continue
        value, scale = _below_thousand(group), _POWERS.get(word, 1)
        if (value is None and (group or word)) or scale >= last:
            return ""
        total, group, last = total + (value or 0) * scale, "", scale
    return str(total)


def _below_thousand(words: str) -> int | None:
    hundreds, has_hundred, rest = words.removeprefix("and ").rpartition("hundred")
    rest = rest.strip().removeprefix("and ").strip()
    below = _NUMBER_WORDS.get(rest, "") if rest else "0" if has_hundred else ""
    above = _NUMBER_WORDS.get(hundreds.strip(), "") if has_hundred else "0"
    if not (below.isdigit() and above.isdigit()) or (has_hundred and above == "0"):
        return None
    return 100 * int(above) + int(below)


_PHRASES = {
    phrase.strip(): meaning
    for meaning, phrases in read_own(Path(__file__).with_name("phrases.yaml").read_bytes()).items()
    for phrase in phrases.split("|")
}
_EXCEPT = re.compile(
    r"(?:all|any|every) (?:real(?: numbers?| values)?|reals)(?: of)?(?: x)?,?"
    r" (?:except|but|other than)(?: for)?(?: x ?=)? ((?:-?\d+(?:/\d+)?|[, ]|and)+)"
)
_DIGITS = "零一二三四五六七八九"
_COUNTED = re.compile(r"([〇零一二两三四五六七八九十百千]+)[个只本人张条块件名位种次岁]")
_CHINESE = {  # 十一 to 九十九
    f"{'' if tens == 1 else _DIGITS[tens]}十{_DIGITS[units] if units else ''}": str(
        10 * tens + units
    )
    for tens in range(1, 10)
    for units in range(10)
}
_AND_A_HALF = re.compile(
    r"(one|two|three|four|five|six|seven|eight|nine|ten) and a half(?: ([a-z ]+))?"
)
_PLAIN_WORDS = re.compile(r"[^\W\d_]+(?:[\s'’,.‐-]+[^\W\d_]+)*[\s.!]*")


def same_phrase(text: str) -> str:
    """One spelling for phrases with the same meaning, such as `DNE`; any other text unchanged."""
    if len(text) > MAX_PHRASE or text.count("\\") > 2:
        return text
    bare = re.sub(r"\s+", " ", unwrap(text)).lower()
    if match := _EXCEPT.fullmatch(bare):
        return rf"\mathbb{{R}}\setminus\{{{match[1].replace('and', ',')}\}}"
    if not _PLAIN_WORDS.fullmatch(bare):
        return text
    if match := _COUNTED.fullmatch(bare):  # 五个
        return _PHRASES.get(match[1]) or _CHINESE.get(match[1], text)
    counted = re.sub(r"\s*[‐-]\s*", " ", bare).rstrip(" .!")
    if match := _AND_A_HALF.fullmatch(counted):
        whole = _NUMBER_WORDS.get(match[1], match[1])
        return rf"{whole}\frac{{1}}{{2}}" + (rf" \text{{{match[2]}}}" if match[2] else "")
    parts = counted.split()
    for k in (2, 1):  # three weeks, forty-five minutes
        several, rest = _NUMBER_WORDS.get(" ".join(parts[:k]), ""), " ".join(parts[k:])
        if several.isdigit() and rest and read_unit(rf"\text{{{rest}}}"):
            return rf"{several} \text{{{rest}}}"
    number = (
        _NUMBER_WORDS.get(counted)
        or _CHINESE.get(counted)
        or _number_in_words(counted.replace(",", " "))
    )
    words = " ".join(_words(bare))
    return number or _PHRASES.get(words) or descriptions.canonical(words) or text


_REASON = re.compile(
    r"(?:\\text\s*\{\s*)?([^\W\d_]+)\s*\}?\s*[,.;:]?\s*(?:\\text\s*\{\s*)?"
    r"(?:(?:because|since|as|for|weil|denn|da|car|parce que|porque|pues|ya que|perché|poiché"
    r"|потому что|так как|поскольку)\b|因为).*",
    re.IGNORECASE | re.DOTALL,
)


def without_reason(gold: str, pred: str) -> str:
    """`Yes` for `Yes, because 7 is prime`, if the reference is one word."""
    is_word = _PLAIN_WORDS.fullmatch(unwrap(gold)) and len(_words(unwrap(gold))) == 1
    match = _REASON.fullmatch(pred) if is_word else None
    return match[1] if match else pred


def unwrap(text: str) -> str:
    """Replace text commands such as `\\text{…}` with their content."""
    return WRAPPER.sub(r" \1 ", text).strip()


def _items(text: str) -> list[list[str]]:
    items = [words for item in _ITEM.split(text) if (words := _words(item))]
    # Items that recur are answers in order: `yes, no, yes`.
    return items if any(items.count(item) > 1 for item in items) else sorted(items)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _is_words(text: str) -> bool:
    """True for words; in ASCII one of at least three letters with a vowel, so not `xyz`."""
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.;:'()!?-])*", text) or FUNCTIONS.search(text):
        return False
    longest = max(_words(text), key=len)
    if not longest.isascii():
        return True
    if text.casefold() in _SHORT_WORDS:
        return True
    return len(longest) >= 3 and bool(re.search("[aeiouy]", longest))
