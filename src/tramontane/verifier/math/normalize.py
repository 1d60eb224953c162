r"""Rewrites math answers into a normal spelling, by rules, before any parsing.

Every rule fixes a false negative (or positive) found in practice: a trailing dot, `1\,000`,
full-width digits, `√2`, `x²`, `45°`, `6.02e23`, `0.\overline{3}`.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from tramontane.verifier.math.numbers import DECIMAL, TEXT, to_number
from tramontane.verifier.math.spelling import (
    GREEK_LETTERS,
    PLAIN_FUNCTIONS,
    RAISED,
    SUB,
    SUPER,
    SYMBOLS,
    rewritten,
)
from tramontane.verifier.math.structure import MAX_LENGTH, balanced
from tramontane.verifier.math.wording import same_phrase

# `0.333\ldots`: a block at least three times before the dots, and not of zeros.
_REPEATED = re.compile(
    r"(?<![\d.])(\d*\.\d{0,20}?)(0{0,5}?[1-9]\d{0,5}?)\2{2,40}\s*\\ldots(?![A-Za-z])"
)
# Functions and Greek letters in plain notation, only outside of text.
_PLAIN_NAME = re.compile(
    rf"{TEXT}\s*\{{[^{{}}]*\}}|\\[A-Za-z]+|(?<![A-Za-z])(?:(?P<greek>{GREEK_LETTERS})(?![A-Za-z])"
    rf"|(?P<function>{PLAIN_FUNCTIONS})(?:(?=\s*[(^_|\\{{\d])|(?=\s+(?:[A-Za-z]|{GREEK_LETTERS}"
    rf"|{PLAIN_FUNCTIONS})(?![A-Za-z]))|(?=[nxyz](?![A-Za-z]))))"
)
_OF_SEVERAL = {"min", "max", "gcd", "lcm"}
_OPENED = re.compile(r"\s*(?:[({_]|\\[{A-Za-z])")
_ARC = re.compile(r"a(?=(?:sin|cos|tan)$)")


def _command(m: re.Match[str]) -> str:
    """`\\sin ` for `sin` before its argument, `\\theta ` for `theta`."""
    if m["greek"]:
        return f"\\{m['greek']} "
    if not m["function"] or (m["function"] in _OF_SEVERAL and not _OPENED.match(m.string, m.end())):
        return m[0]  # 5 min 30 s
    name = _ARC.sub("arc", m["function"])
    return f"\\operatorname{{{name}}}" if name in ("lcm", "arccot") else f"\\{name} "


_DOUBLE_FACTORIAL = re.compile(r"(?<![\w.!)}])(\d{1,3})\s*!\s*!(?!\s*!)")
# `1 and 2`, `1 or 2`, but not `A or C`: two choices are a hedge.
_AFTER_POINT = "|".join(rf"(?<={comma}\d\) )" for comma in (",", ", ", ",-", ", -"))
_CONNECTIVE = re.compile(
    rf"{TEXT}\s*\{{[\s,]*(?:and|und|et|y|e|и|和)[\s,]*\}}|(?<=[\s,;)\]}}\d])and(?=[\s(\[{{\d])"
    rf"|(?:(?<![A-Z])(?<![A-Z)] )|{_AFTER_POINT})"
    rf"(?:{TEXT}\s*\{{[\s,]*(?:or|oder|ou|o|или|或)[\s,]*\}}"
    r"|(?<=[\s,;)\]}\d])(?<!\{ )or(?=[\s(\[{\d]))"
    r"|(?<=\d)\s*(?:und|et|oder|ou|и|или|和|及|或)\s*(?=[-\d(\\])"
)
_COUNTED_ON = re.compile(  # `1, 2, \ldots, 10`
    r"(\\?\{)?\s*(-?\d{1,6}(?:\s*,\s*-?\d{1,6})+)\s*,\s*\\ldots\s*,\s*(-?\d{1,6})\s*(\\?\})?"
)
MAX_COUNTED = 60


def _counted_on(m: re.Match[str]) -> str:
    """All numbers of an arithmetic progression with dots, unless it may be a geometric one."""
    numbers, last = [int(x) for x in m[2].split(",")], int(m[3])
    first, step = numbers[0], numbers[1] - numbers[0]
    listed = range(first, last + 1, step) if step > 0 else range(0)
    if list(listed[: len(numbers)]) != numbers or last not in listed[len(numbers) :]:
        return m[0]
    if len(listed) > MAX_COUNTED or (len(numbers) < 3 and (step > 1 or first != 1)):
        return m[0]
    if len(numbers) < 3 and last & (last - 1) == 0:  # 1, 2, ..., 64
        return m[0]
    return f"{m[1] or ''}{', '.join(map(str, listed))}{m[4] or ''}"


_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<![\d.,])({DECIMAL})(?![\d.,])\s*({TEXT}\s*\{{)?\s*(hundred|thousand|million|billion|trillion|dozen)"
    r"s?(?![A-Za-z])(\s*\})?"
)
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]e|neq?)(?![A-Za-z])")
_OR = re.compile(
    rf"{TEXT}\s*\{{[\s,]*(?:or|oder|ou|oppure|или|或|或者)[\s,]*\}}|(?<=[\s\d)}}])(?:or|oder|ou|или)(?=[\s(\d-])"
    r"|或者?|\\(?:lor|vee)(?![A-Za-z])"
)
# A closing remark that a letter is an integer, a real number or a constant.
_LETTER = r"\s*\$?\s*[A-Za-z]"
_LETTERS = rf"{_LETTER}(?:\s*,{_LETTER})*"
_SET = r"\\in\s*(?:\\(?:mathbb|mathbf|Bbb)\s*\{?\s*)?[ZNR]\s*\}?(?:\^\{?\+\}?|_\{?[+>0]+\}?)?"
_KIND = (
    r"(?:(?:(?:positive|negative|non-?negative)\s+)?integers?|reals?|(?:real|natural) numbers?"
    r"|(?:real )?constants?)"
)
_FOR = rf"[\s,;(]*(?:{TEXT}\s*\{{[\s,]*)?(?:where|for|with)\s*(?:all|any|every|some|an)?\s*"
_CONDITION = re.compile(
    rf"(?:{_FOR}{_KIND}\s*\}}?{_LETTERS}\s*\$?\s*\}}?"
    rf"|(?:{_FOR}(?:integers?)?\s*\}}?{_LETTERS}|\s*[,;(]{_LETTER})\s*\$?\s*"
    rf"(?:{_SET}|(?:{TEXT}\s*\{{)?\s*(?:(?:is|are)\s+)?(?:an?\s+)?(?:arbitrary\s+|any\s+)?"
    rf"{_KIND}\s*\}}?))[\s).]*\Z"
)
_OF_CONDITIONS = ("\\in", "integer", "real", "natural", "constant")  # one is in each
_FOR_ALL = re.compile(  # after a functional equation
    rf"(?<==)([^=]*?)[\s,;(]*(?:{TEXT}\s*\{{[\s,]*)?for\s*(?:all|any|every)\s*\}}?{_LETTERS}[\s).}}]*\Z"
)
_CONJUGATED = re.compile(r"\\(?:overline|bar)\s*\{((?=[^{}]*\d)[\d.+\s-]*i[\d.+\s-]*)\}")
_NOT_CONGRUENT = re.compile(
    r"(?P<letter>[a-z])\s*\\not\s*\\equiv\s*(?P<not>\d+)\s*"
    r"(?:\\pmod\s*\{?|\(\s*\\?mod\s*)\s*(?P<modulus>\d{1,2})\s*[})]?"
    r"|(?P<divisor>\d{1,2})\s*\\nmid\s*(?P<of>[a-z])"
    rf"|(?:{TEXT}\s*\{{)?(?:for )?(?:all |any )?(?:integers? )?\}}?\s*(?P<of2>[a-z])\s*"
    rf"(?:{TEXT}\s*\{{)?"
    r"\s*(?:(?:is |are |that are )?not (?:divisible by|an? multiples? of|multiples of)"
    r"|(?:except|other than)(?: for)? multiples of)\s*\}?\s*(?P<divisor2>\d{1,2})\}?"
)


def _other_classes(m: re.Match[str]) -> str:
    r"""`n\equiv 1,2\pmod{3}` for `n\not\equiv 0\pmod 3` and `3\nmid n`."""
    modulus = int(m["modulus"] or m["divisor"] or m["divisor2"])
    without = int(m["not"] or 0)
    if modulus < 2:
        return m[0]
    others = ",".join(str(r) for r in range(modulus) if r != without % modulus)
    return rf"{m['letter'] or m['of'] or m['of2']}\equiv {others}\pmod{{{modulus}}}"


_UNWRAP = re.compile(
    r"\$(.*)\$|\*\*(.*)\*\*|\\boxed\s*\{(?P<box>.*)\}|\\(?:underline|uuline|uwave)\s*\{(?P<line>.*)\}"
    r"|\\(?:mathbf|boldsymbol|bm)\s*\{(?![RNZQC]\})(?P<bold>.*)\}|\{(?P<braced>.*)\}",
    re.DOTALL,
)
_SET_BAR = re.compile(r"[,|:;]|\\mid(?![A-Za-z])|\\in(?![A-Za-z])")
_TUPLE = re.compile(r"\([^()]*\)|\\begin.*\\end", re.DOTALL)


def _unwrapped(text: str) -> str:
    """A text without what is around all of it; `{1, 2}` and `{x : x > 1}` are sets."""
    while match := _UNWRAP.fullmatch(text):
        content = next(group for group in match.groups() if group is not None).strip()
        kind = match.lastgroup
        if (
            (kind == "box" and "\\boxed" in content)
            or (kind in ("line", "bold", "braced") and not balanced(content))
            or (kind == "line" and re.fullmatch(r"[a-z]|[A-Z]{2,}", content))  # a vector, a segment
            or (kind == "braced" and _SET_BAR.search(_TUPLE.sub("", content)))
        ):
            break
        text = content
    return text


def _scaled(m: re.Match[str]) -> str:
    """Write out `1.2\\text{ million}`; `\\text{ million dollars}` keeps the dollars."""
    rest = "" if m[2] and m[4] else f"{m[2] or ''}{m[4] or ''}"
    if m[3] == "dozen":
        number = to_number(m[1])
        return m[0] if number is None else f"{12 * number} {rest}"
    return rf"{m[1]}\times 10^{{{_POWERS[m[3]]}}} {rest}"


# `]1, 2[` and `[1; 2[`: intervals as written in Europe.
_BEFORE_INTERVAL = r"(^\s*|[=,;({]\s*|\\(?:cup|cap|in|notin|setminus|backslash)(?![A-Za-z])\s*)"
_END = r"((?:[^\[\](),;]|\([^()]*\)|(?<=sqrt)\[\d+\])+?)"
_END_WITH_COMMA = r"((?:[^\[\](),;]|(?<=\d),(?=\d)|\([^()]*\)|(?<=sqrt)\[\d+\])+?)"
_INTERVALS = [
    re.compile(rf"{_BEFORE_INTERVAL}([\[\](])\s*{end}\s*{sign}\s*{end}\s*(?<!\\sqrt)([\[\])])")
    for end, sign in ((_END_WITH_COMMA, ";"), (_END, ","))
]


def _standard_interval(m: re.Match[str]) -> str:
    """`]1; 2[` as `(1, 2)`; a semicolon separates ends that may have decimal commas."""
    ends = (end.strip().replace(",", ".") for end in (m[3], m[4]))
    return f"{m[1]}{m[2].replace(']', '(')}{', '.join(ends)}{m[5].replace('[', ')')}"


_SYSTEM = re.compile(
    r"(?:(?:\\left\s*)?\\\{)?\s*\\begin\s*\{(cases|aligned|array)\}(?:\s*\{[lcr\s]*\})?(.*)"
    r"\\end\s*\{\1\}\s*(?:\\right\s*\.)?",
    re.DOTALL,
)
_EQUATION = re.compile(r"[^&,<>=]+&?=&?[^&,<>=]+")


def _listed(text: str) -> str:
    """A system of equations as a list: `x=1, y=2`; any other text unchanged."""
    if (match := _SYSTEM.fullmatch(text)) is None:
        return text
    rows = [row.strip(" \t\n,;") for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2])]
    rows = [row for row in rows if row]
    if not rows or "\\text" in text or not all(map(_EQUATION.fullmatch, rows)):
        return text
    return ", ".join(row.replace("&", "") for row in rows)


MAX_PASSES = 5  # two are enough for any sensible answer
MAX_REWRITTEN = 20_000  # characters; all rules together take a tenth of a second for this many


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    """Rewrite one answer, reference or prediction, into the spelling that is compared.

    The rules are repeated until nothing changes, since one rule may enable another: a box is
    unwrapped only once the full stop after it is gone. In texts much longer than an answer can be
    (`MAX_REWRITTEN`), only spaces are changed.
    """
    if len(text) > MAX_REWRITTEN:
        return " ".join(text.split())
    if "hundred" in text or "thousand" in text or " half" in text:  # before "and" is read
        text = same_phrase(text)
    for _ in range(MAX_PASSES):
        before, text = text, _apply_rules(text)
        if text == before:
            break
    return same_phrase(text)


def _apply_rules(text: str) -> str:
    text = re.sub(r"[\x00-\x1f\x7f]", " ", text)
    text = re.sub(f"[{RAISED}]+", lambda m: f"^{{{m[0].translate(SUPER)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ]+", lambda m: f"_{{{m[0].translate(SUB)}}}", text)
    text = text.translate(SYMBOLS).strip()
    text = rewritten(_listed(re.sub(r"(?<!\\)\$", " ", _unwrapped(text)).strip()))
    if "\\ldots" in text:
        text = _REPEATED.sub(r"\1\\overline{\2}", text)
        if found := _COUNTED_ON.fullmatch(text.strip()):
            text = _counted_on(found)
    if "[" in text or "]" in text or ";" in text:
        for interval in _INTERVALS:
            text = interval.sub(_standard_interval, text)
    text = _CONJUGATED.sub(lambda m: f"({m[1].replace('i', '(-i)')})", text)
    text = _PLAIN_NAME.sub(_command, text)
    text = _DOUBLE_FACTORIAL.sub(lambda m: str(math.prod(range(int(m[1]), 1, -2))), text)
    text = _SCALE.sub(_scaled, text)
    if _INEQUALITY.search(text):
        text = _OR.sub(r" \\cup ", text)
    text = re.sub(r"\s+", " ", text).strip()
    if found := _NOT_CONGRUENT.fullmatch(text):
        text = _other_classes(found)
    if any(word in text for word in _OF_CONDITIONS):
        text = _CONDITION.sub("", text)
    if "for" in text and "=" in text:
        text = _FOR_ALL.sub(r"\1", text)
    text = _CONNECTIVE.sub(" , ", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"\s+", " ", text).strip()
    # A sentence's full stop, a dangling backslash; `50.` is 50, but `\ldots` keeps its dots.
    return re.sub(r"(?:\s|[.,;:]|\\(?![A-Za-z{}|]))+$", "", text)


def vote(answer: str | None) -> str | None:
    """The key for counting an answer's votes: `0.5` and `\\frac{1}{2}` are the same vote.
    An answer too long to be judged counts as written."""
    if answer is None or len(answer) > MAX_LENGTH:
        return answer
    normalized = normalize(answer)
    number = to_number(normalized)
    return normalized if number is None else str(number)
