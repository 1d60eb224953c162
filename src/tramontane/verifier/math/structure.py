r"""The outer form of a math answer: its size, brackets, items and labels, and the answers rejected
for it.

The size is limited before any parsing, in one pass over the text. The LaTeX parser drops unknown
notation: `7\text{ or more}` would be 7, `f'(x)` would be `f(x)`. Contradictions and unsolved
equations are handled in `equations`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tramontane.verifier.math.wording import WRAPPER

MAX_LENGTH = 1000
MAX_NESTING = 8  # the parser's time at least doubles with each level
MAX_ITEMS = 64
MAX_CELLS = 100
MAX_TOKENS = 300
MAX_OPERATORS = 150
MAX_CHAIN = 12  # consecutive commands, and a third of it for exponents, which nest like brackets

_OPERATOR = re.compile(r"[-+*/^_=<>!|%]|\\[A-Za-z]+")
_SYMBOL = re.compile(r"\\[A-Za-z]+|\d+|\S")
_CHAIN = re.compile(
    rf"(?:\\[A-Za-z]+\s?){{{MAX_CHAIN}}}|(?:\^\s?\{{?\w+\}}?\s?){{{MAX_CHAIN // 3}}}"
)
_CHOOSE = re.compile(r"\\[dt]?binom|\\choose|\\brace|\\brack")
_SMALL_BINOMIAL = re.compile(  # of letters, or of numbers whose coefficient has few thousand digits
    r"\\binom\s*(?:\{(?=[^{}]*[A-Za-z])[^{}]*\}\s*\{[^{}]*\}|\{\s*1?\d{1,4}\s*\}\s*\{\s*\d{1,5}\s*\})"
)
_OPENING = ("(", "[", "{", "\\{")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSED = frozenset(_CLOSING.values())
_TOKEN = re.compile(r"\\[{}|]|\\[A-Za-z]+|\\.|.", re.DOTALL)
_DOTS = re.compile(r"\\ldots(?![A-Za-z])")
_SCALED_INFINITY = re.compile(  # or infinity plus something
    r"\\infty\s*(?:\d|[a-z](?![a-z]))|\d\s*\\infty|(?<![\^_])(?<!\^\s)\\infty\s*[-+]|[\w)}]\s*[-+]\s*\\infty"
)
_PART_IN_DEGREES = re.compile(r"\^\{\\circ\}(?=\s*(?:[-+}]|\\cdot)\s*[\w\\{(])")
_ANGLE = re.compile(r"\\circ|\\pi|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)|\\angle|\\theta")
_UNFINISHED = re.compile(
    r"(?:(?<![\^_])[-+/^_=<>]|\\(?:equiv|approx|in|to|cup|cap|pm|cdot|times|ne|[lg]e"
    r"|sim(?:eq)?|cong|doteq|asymp|propto|setminus|neg|not|(?<!_\\)(?<!_\{\\)(?:max|min)|arg|det|lim|[bp]?mod)(?![A-Za-z])"
    r"|\\text\s*\{\s*(?:or|and|per)\s*\}|(?<=[\s\d)}\]])(?:or|and|per))[\s$]*$"
    r"|\\text\s*\{\s*(?:or|and|per)\s*\}\s*[,;)\]]|\?[\s}$.]*$"
)
_ABOUT = re.compile(
    r"(?:^|[=,;({\[])[\s$]*(?:\\(?:thick)?(?:sim(?:eq)?|cong|doteq|asymp)(?![A-Za-z])|[∼≃≅])"
)
_NO_ITEM = re.compile(r"(?<!\\)(?:[(\[,;]|\\\{)\s*[,;]")
_IN_BRACKETS = re.compile(
    r"(?:[(\[]|\\langle)(?:[^()\[\]]|\([^()]*\))*?(?:\\text\w*\s*\{[\s,]*(?:and|or|und|oder|et|ou|y|o|e|и|или|和|或)"
    r"[\s,]*\}|(?<=[\s,;}\d([])(?:and|or|und|oder|et|ou|или)(?=[\s\d({\\-])|\\(?:lor|vee|land|wedge)(?![A-Za-z])|[∨或和])"
    r"(?:[^()\[\]]|\([^()]*\))*?(?:[)\]]|\\rangle)"
)
_TUPLE = re.compile(r"(?:[(\[]|\\langle)[^()\[\]]*,")
_ORDERED = r"(?:[A-Z](?:_\{?\w\}?)?|\\(?:vec|overrightarrow)\s*\{\w+\}|\\mathbb\{\w\}|\\emptyset)"
_CROSS = re.compile(rf"(?<![\w\\])({_ORDERED})\s*\\times\s*(?=({_ORDERED})(?!\w))")
_TIMES = re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[*\s]")
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_EQUALS = re.compile(r"(?<![<>!\\:])=")
_NEGATION = re.compile(
    r"\\(?:not|neg|lnot|nequiv|ncong|nmid|nsim)(?![A-Za-z])|¬|\\text\s*\{\s*not\s*\}"
)
_PRIME = re.compile(
    r"(?<=[A-Za-z)}])\s*\^?\{?(?:'|\\prime(?![A-Za-z]))|(?<=[\w)}\]])\s*\^\s*\{?\s*(?:T\b|\\top(?![A-Za-z]))"
)
_DROPPED_INDEX = re.compile(
    r"\\(?!ln\s*_\s*\{?\s*e\b)(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|exp)\s*(?:\^\s*(?:\{[^{}]*\}|\w)\s*)?_"
    r"|\\(?:max|min|gcd|det)\s*_\s*\d|[\d)e]\s*\^\s*(?:\{[^{}]*\}|\w)\s*_"
    r"|\d\.\d+\s*_"
)
# `x3` is x_3 or x^3 rather than 3x; not of `i3`, `\\log_b3`, `5C2` and names.
_LETTER_BEFORE_NUMBER = re.compile(r"(?<![A-Za-z\\\d_^.])(?!i)[A-Za-z]\d")
_IN_TEXT = re.compile(r"\\(?:text\w*|math\w+|mbox|operatorname|begin|end)\s*\{[^{}]*\}")
_BAR = re.compile(r"\\(?:mid|vert)(?![A-Za-z])|\\text\s*\{\s*given\s*\}")
_GIVEN = re.compile(r"P\s*\}?\s*\(([^()]*)\)")


class Refused(Exception):
    """The prediction is wrong, for the reason in the message."""


class Unscorable(Exception):
    """No prediction can be judged against this reference, for the reason in the message."""


class Unreadable(Unscorable):
    """The reference is in an unknown notation; it can only be compared as written."""


# ------------------------------------------------------------------------------------------- size


def nesting(text: str) -> int:
    """The depth of the deepest bracket, of any kind."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def too_large(text: str) -> str:
    """Why an answer must not be passed to the parser; empty if it may.

    These limits bound the cost of parsing, and of functions computed while parsing. The size of
    values is bounded later, in `values`.
    """
    if sum(1 for _ in _OPERATOR.finditer(text)) > MAX_OPERATORS:
        return f"more than {MAX_OPERATORS} operators"
    if sum(1 for _ in _SYMBOL.finditer(text)) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} symbols"
    if _CHAIN.search(text):
        return "a chain of functions or exponents"
    if text.count("&") > MAX_CELLS:
        return f"a matrix of more than {MAX_CELLS} cells"
    others = _SMALL_BINOMIAL.sub(" ", text)
    if _CHOOSE.search(others) and re.search(r"\d{4}|\^|!", others):
        return "a binomial coefficient is too large"
    return ""


# ------------------------------------------------------------------------------------------ items


class Shape(NamedTuple):
    """The items of an answer; `kind` is "list" (any order) or the brackets of a tuple or interval:
    "()", "[]", "[)", "(]"."""

    kind: str
    items: list[str]


def split(text: str, *separators: str) -> list[str]:
    """Split at LaTeX tokens outside of all brackets; empty items are dropped."""
    if not any(separator in text for separator in separators):
        return [text.strip()] if text.strip() else []
    items: list[str] = []
    current: list[str] = []
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSED)
        if token.startswith(("\\begin", "\\end")):
            depth += 1 if token == "\\begin" else -1
        if depth == 0 and token in separators:
            items.append("".join(current))
            current = []
        else:
            current.append(token)
    items.append("".join(current))
    return [item.strip() for item in items if item.strip()]


def read_shape(text: str) -> Shape:
    """A list for `1, 2` and `\\{1, 2\\}`, else the brackets of a tuple or interval; a single item
    is a list of one."""
    kind, inner = "list", text
    opening = re.match(r"\\?[{(\[]", text)
    closing = re.search(r"\\?[})\]]\Z", text)
    if opening and closing and closing.start() >= opening.end():
        inside = text[opening.end() : closing.start()].strip()
        is_pair = balanced(inside)
        if is_pair and _CLOSING.get(opening[0]) == closing[0] and "{" in opening[0]:
            inner = inside
        elif is_pair and opening[0] in "([" and closing[0] in ")]":
            kind, inner = opening[0] + closing[0], inside
    # `(1,2); (3,4)` and `p=5,q=2; p=7,q=2`: the semicolon is the outer separator.
    items = split(inner, ";") if kind == "list" else []
    if len(items) < 2:
        items = split(inner, ",", ";")
    return Shape(kind, items) if kind == "list" or len(items) > 1 else Shape("list", [text])


def balanced(text: str) -> bool:
    """True if brackets are balanced; kinds are not compared."""
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSED)
        if depth < 0:
            return False
    return depth == 0


def label(item: str) -> tuple[str, str] | None:
    """("x", "5") for `x = 5`; None without exactly one `=`."""
    parts = split(item, "=")
    return (parts[0].replace(" ", ""), parts[1]) if len(parts) == 2 else None


# -------------------------------------------------------------------------------------- refusals


def is_unfinished(prediction: str, reference: str) -> bool:
    """True for an answer or item as written that ends in an operator, a relation or a connective,
    or has a connective before a comma or bracket, which rules of spelling would drop."""
    return bool(_UNFINISHED.search(prediction)) and not _UNFINISHED.search(reference)


def why_unclear(prediction: str, reference: str) -> str:
    """Why an answer as written does not say one thing, in ways that rules of spelling would hide:
    a number that is only about the value, a place without an item, a connective in a tuple. Empty
    if it does, or if the reference has the same."""
    if _ABOUT.search(prediction) and not _ABOUT.search(reference):
        return "only about the value"
    if _NO_ITEM.search(prediction) and not _NO_ITEM.search(reference):
        return "a list with an empty item"
    is_joined = _IN_BRACKETS.search(prediction) and not _IN_BRACKETS.search(reference)
    return "alternatives in brackets" if is_joined and _TUPLE.search(reference) else ""


def refuse_notation(gold: str, pred: str) -> None:
    """Reject dots, a bracket that includes infinity, primes and transposes that the reference does
    not have, since the parser drops them."""
    if "\\approx" in pred:  # left by `equations.exact`, as in `5 \approx 6`
        raise Refused("an approximation far from the value")
    if _DOTS.search(pred) and not _DOTS.search(gold):
        raise Refused("dots")
    if _CLOSED_INFINITY.search(pred) and not _CLOSED_INFINITY.search(gold):
        raise Refused("infinity is not a number")
    if _SCALED_INFINITY.search(pred) and not _SCALED_INFINITY.search(gold):
        raise Refused("calculation with infinity")
    if _PART_IN_DEGREES.search(pred) and not _ANGLE.search(pred.replace("\\circ", "") + gold):
        raise Refused("a part in degrees")
    if _DROPPED_INDEX.search(pred) and not _DROPPED_INDEX.search(gold):
        raise Refused("an index of a function or a power")
    if _LETTER_BEFORE_NUMBER.search(_IN_TEXT.sub(" ", pred)) and not (
        _LETTER_BEFORE_NUMBER.search(gold)
    ):
        raise Refused("a letter before a number")
    if "P" in gold and "P" in pred and _conditions(gold) != _conditions(pred):
        raise Refused("another condition of a probability")
    if len(_NEGATION.findall(pred)) != len(_NEGATION.findall(gold)):
        raise Refused("a negation")
    if any(_TIMES.sub("", a + b) not in _TIMES.sub("", pred) for a, b in _CROSS.findall(gold)):
        raise Refused("a product of sets or vectors in another order")
    is_letter = "T" in gold and "T" in pred
    if _count_primes(gold, is_letter) != _count_primes(pred, is_letter):
        raise Refused("a derivative, a transpose, or another name")


def _conditions(text: str) -> list[str]:
    r"""The events and conditions of each `P(A \mid B)`, in a name or an item without one."""
    names = [_EQUALS.split(item)[0] for item in split(_BAR.sub("|", text), ",", ";")]
    events = [re.sub(r"[\s{}]", "", event) for name in names for event in _GIVEN.findall(name)]
    return sorted(event for event in events if event.count("|") == 1)


def _count_primes(text: str, is_letter: bool) -> int:
    """Count the primes of the value only: `f'(x) = 2x` is 2x. T is no transpose if a letter."""
    primes = _PRIME.findall(_EQUALS.split(text)[-1])
    return sum(not (is_letter and prime.endswith("T")) for prime in primes)


_DIVISOR = re.compile(r"\\(?:operatorname|text|mathrm)\s*\{\s*(?:gcd|lcm)\s*\}(?=\s*\()")


def refuse_more_than_a_number(pred: str) -> None:
    """Reject words, lists and notation in an answer whose reference is a single number."""
    value = _EQUALS.split(pred)[-1]
    if WRAPPER.search(_DIVISOR.sub("", value)):
        raise Refused("words beside the number")
    if len(read_shape(value).items) > 1:
        raise Refused("a list, not a number")
    if re.search(r"\\(?:lor|vee|color|cancel|prime)(?![A-Za-z])|'", value):
        raise Refused("not a number")
