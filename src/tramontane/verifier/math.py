r"""Is the last `\boxed{}` of the answer part the reference? (arXiv 2506.10910, section 2.2.)

Cheap and exact rules come first (`normalize`), then lists and tuples item by item, and only what
is left goes to math-verify, both sides wrapped in `\boxed{}`, its own timeouts off: whoever calls
this from a worker process kills it from outside. The policies are in docs/rewards.md.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from tramontane.types import Outcome
from tramontane.verifier.format import last_box
from tramontane.verifier.normalize import normalize, split_unit, to_number, units_clash

MAX_LENGTH = 1000
MAX_NESTING = 25
MAX_ITEMS = 64
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 500
MAX_CELLS = 100


class Judgement(NamedTuple):
    """What the maths verifier says; `answer` is the extracted answer, normalised."""

    outcome: Outcome
    reason: str
    answer: str | None


class Refused(Exception):
    """The prediction is wrong for a reason that can be told."""


class Unscorable(Exception):
    """The reference cannot be judged against."""


def judge(answer_part: str, reference: str | None) -> Judgement:
    """Compare the last balanced box of the answer part with the reference."""
    if reference is None or not reference.strip():
        return Judgement("unscorable", "the problem has no reference answer", None)
    box = last_box(answer_part)
    if box is None:
        return Judgement("wrong", "no box", None)
    return judge_answer(box, reference)


def judge_answer(prediction: str, reference: str) -> Judgement:
    """Compare two answers as strings: LaTeX or plain text, without the box."""
    if len(prediction) > MAX_LENGTH:
        return Judgement("wrong", f"the answer is longer than {MAX_LENGTH:,} characters", None)
    if len(reference) > MAX_LENGTH:
        reason = f"the reference is longer than {MAX_LENGTH:,} characters"
        return Judgement("unscorable", reason, None)
    pred, gold = normalize(prediction), normalize(reference)
    answer = pred or None
    if not gold:
        return Judgement("unscorable", "the reference is empty", answer)
    if not pred:
        return Judgement("wrong", "the box is empty", answer)
    if _nesting(pred) > MAX_NESTING:
        return Judgement("wrong", f"brackets nested deeper than {MAX_NESTING}", answer)
    if _nesting(gold) > MAX_NESTING:
        reason = f"the reference nests brackets deeper than {MAX_NESTING}"
        return Judgement("unscorable", reason, answer)
    try:
        right = _equal(gold, pred)
    except Refused as why:
        return Judgement("wrong", str(why), answer)
    except Unscorable as why:
        return Judgement("unscorable", str(why), answer)
    return Judgement("right" if right else "wrong", "" if right else "not the reference", answer)


_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # "5 6" is not 56


def _equal(gold: str, pred: str) -> bool:
    """The judge proper, on normalised strings. Each step either decides or passes on."""
    if gold == pred or _SPACE.sub("", gold) == _SPACE.sub("", pred):
        return True
    if (choice := _choice(gold, pred)) is not None:
        return choice
    if (text := _same_text(gold, pred)) is not None:
        return text
    if "\\boxed" in pred:
        raise Refused("a box within the box")
    gold, pred = _before_approximation(gold), _before_approximation(pred)
    if (structured := _same_structure(gold, pred)) is not None:
        return structured
    _refuse_contradiction(pred)
    gold_body, gold_unit = split_unit(gold)
    pred_body, pred_unit = split_unit(pred)
    if units_clash(gold_unit, pred_unit):
        raise Refused(f"the unit is {pred_unit}, not {gold_unit}")
    for rule in (_same_base, _same_ratio):
        if (decided := rule(gold_body, pred_body)) is not None:
            return decided
    gold_number, pred_number = _numbers(gold_body, pred_body)
    if gold_number is not None and pred_number is not None:
        percent = (gold_unit == "%") != (pred_unit == "%")
        return _same_number(gold_number, pred_number, pred_body, percent)
    if gold_number is not None and (what := _not_a_number(pred_body)):
        raise Refused(what)
    return _symbolic(gold_body, pred_body, gold_unit, pred_unit)


# ---------------------------------------------------------------------------------- numbers


def _numbers(gold: str, pred: str) -> tuple[Fraction | None, Fraction | None]:
    g, p = to_number(gold), to_number(pred)
    # A comma is a decimal point in four of the seven languages, but only where the reference is
    # a decimal can it be told from a list.
    if g is not None and p is None and g.denominator > 1 and re.fullmatch(r"[+-]?\d+,\d+", pred):
        p = to_number(pred.replace(",", "."))
    elif g is not None and p is not None and g != p and re.fullmatch(r"[+-]?\d{1,3},\d{3}", pred):
        as_decimal = to_number(pred.replace(",", "."))
        p = g if as_decimal == g else p
    return g, p


def _same_number(gold: Fraction, pred: Fraction, spelling: str, percent: bool) -> bool:
    if gold == pred or (percent and (gold == pred * 100 or gold * 100 == pred)):
        return True
    # A rounded decimal stands for a fraction that no decimal can write: six places or more.
    places = len(spelling.partition(".")[2])
    if "." not in spelling or not spelling[-1].isdigit() or places < 6 or _terminates(gold):
        return False
    exact = abs(gold) * 10**places
    cut_or_rounded = abs(pred) * 10**places in (int(exact), round(exact))
    return cut_or_rounded and gold * pred > 0 and abs(pred) > Fraction(1, 10)


def _terminates(value: Fraction) -> bool:
    below = value.denominator
    for factor in (2, 5):
        while below % factor == 0:
            below //= factor
    return below == 1


def _same_ratio(gold: str, pred: str) -> bool | None:
    """`6:8` is `3:4`, but `12:30` is a time of day, which nothing but itself is."""
    pattern = r"(\d{1,9})\s*:\s*(\d{1,9})"
    g, p = re.fullmatch(pattern, gold), re.fullmatch(pattern, pred)
    if not g or not p:
        return None
    a, b, c, d = (int(x) for x in (*g.groups(), *p.groups()))
    if (re.fullmatch(r"[0-5]\d", g[2]) and a < 24) or not b or not d:
        return (a, b) == (c, d)
    return a * d == b * c


def _same_base(gold: str, pred: str) -> bool | None:
    """`204_5` is a numeral in base 5: the same digits in another base are another number."""
    gold_base, pred_base = (re.fullmatch(r"(\w+)_\{?(\d+)\}?", s) for s in (gold, pred))
    if not gold_base or not gold_base[1].isalnum() or not gold_base[1][0].isdigit():
        if pred_base and pred_base[1][0].isdigit():
            return pred_base[1] == gold
        return None
    if pred_base:
        return gold_base.groups() == pred_base.groups()
    return gold_base[1] == pred


# ------------------------------------------------------------------------------------- text

_LETTER = re.compile(r"\(?([A-J])\)?")
_LETTER_WITH_TEXT = re.compile(r"\(?([A-J])([).:]?)(?:\s+|(?<=\W)|(?=\\))(\S.*)", re.DOTALL)
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FUNCTIONS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|arc\w+|mod|gcd|lcm)\b"
)


def _choice(gold: str, pred: str) -> bool | None:
    """Choice letters: `C`, `(C)`, `\\text{(C)}`, and a letter with its option's text."""
    gold, pred = _unwrap_text(gold), _unwrap_text(pred)
    g, p = _LETTER.fullmatch(gold), _LETTER.fullmatch(pred)
    if g and p:
        return g[1] == p[1]
    if g and (long := _option(pred)):
        return g[1] == long[0] and not re.search(r"\b[A-J]\b|\b(?:or|not)\b", long[1])
    if p and (long := _option(gold)):
        return p[1] == long[0]
    return None


def _option(text: str) -> tuple[str, str] | None:
    """A letter with its option's text: `C) 12`, `(C) Cecile`, `C Cecile`; not `C + 12`."""
    match = _LETTER_WITH_TEXT.fullmatch(text)
    if match is None or not (match[2] or _is_words(match[3])):
        return None
    return match[1], match[3]


def _same_text(gold: str, pred: str) -> bool | None:
    """A reference in words is compared as words; letters are never multiplied together."""
    bare = _unwrap_text(gold)
    if not _is_words(bare):
        return None
    return _words(bare) == _words(_unwrap_text(pred))


def _unwrap_text(text: str) -> str:
    return _WRAPPER.sub(r" \1 ", text).strip()


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _is_words(text: str) -> bool:
    """Words, not a product of variables: letters only, three of them with a vowel among them."""
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.;:'()!?-])*", text) or _FUNCTIONS.search(text):
        return False
    longest = max(_words(text), key=len)
    if not longest.isascii():
        return True
    return len(longest) >= 3 and bool(re.search("[aeiouy]", longest))


# --------------------------------------------------------------------------- lists and tuples

_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_TOKEN = re.compile(r"\\[{}|]|\\[A-Za-z]+|\\.|.", re.DOTALL)


def _split(text: str, separators: str) -> list[str]:
    """Split at separators that stand outside all brackets."""
    items, current, depth = [], "", 0
    for token in _TOKEN.findall(text):
        if token in ("(", "[", "{", "\\{"):
            depth += 1
        elif token in (")", "]", "}", "\\}"):
            depth -= 1
        if token in separators and depth == 0:
            items.append(current)
            current = ""
        else:
            current += token
    return [item.strip() for item in (*items, current) if item.strip()]


def _structure(text: str) -> tuple[str, list[str]]:
    """("list", items) of `1, 2` and `\\{1, 2\\}`; ("()", items) of a tuple or an open interval."""
    kind, inner = "list", text
    match = re.match(r"\\?[{(\[]", text)
    end = re.search(r"\\?[})\]]$", text)
    if match and end and end.start() >= match.end():
        inside = text[match.end() : end.start()].strip()
        balanced = _balanced(inside)
        if balanced and _CLOSING.get(match[0]) == end[0] and "{" in match[0]:
            inner = inside
        elif balanced and match[0] in "([" and end[0] in ")]":
            kind, inner = match[0] + end[0], inside
    items = _split(inner, ",;")
    return (kind, items) if kind == "list" or len(items) > 1 else ("list", [text])


def _balanced(text: str) -> bool:
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth < 0:
            return False
    return depth == 0


def _same_structure(gold: str, pred: str) -> bool | None:
    """Item by item: lists and sets in any order, tuples and intervals in theirs."""
    if to_number(gold) is not None and to_number(pred) is not None:
        return None  # 1,000 is a number
    gold_kind, gold_items = _structure(gold)
    pred_kind, pred_items = _structure(pred)
    if max(len(gold_items), len(pred_items)) > MAX_ITEMS:
        raise Refused(f"more than {MAX_ITEMS} items")
    if min(len(gold_items), len(pred_items)) < 2:
        return None
    if (labelled := _same_labels(gold_items, pred_items)) is not None:
        return labelled
    # Equations and ± say the same thing in other shapes: left to the parser.
    if re.search(r"=|\\pm|\\mp|\\in(?![A-Za-z])|<|>|\\[lg]e(?![A-Za-z])", gold + pred):
        return None
    if gold_kind != pred_kind or len(gold_items) != len(pred_items):
        return False
    if gold_kind != "list":
        return all(_equal(g, p) for g, p in zip(gold_items, pred_items, strict=True))
    left = list(pred_items)
    for item in gold_items:
        found = next((p for p in left if _equal(item, p)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_labels(gold: list[str], pred: list[str]) -> bool | None:
    """`a = 1, b = 2`, in any order where no label comes twice."""
    g, p = ([tuple(_split(item, "=")) for item in side] for side in (gold, pred))
    if len(g) != len(p) or any(len(pair) != 2 for pair in g + p):
        return None
    if len({label for label, _ in g}) == len(g):
        g, p = sorted(g), sorted(p)
    if [label for label, _ in g] != [label for label, _ in p]:
        return None
    if all(_equal(a, b) for (_, a), (_, b) in zip(g, p, strict=True)):
        return True
    return None


# ------------------------------------------------------------------------ what is refused

_EQUALS = re.compile(r"(?<![<>!\\:])=")


def _before_approximation(text: str) -> str:
    return re.split(r"\\(?:approx|simeq|doteq)(?![A-Za-z])", text)[0].strip() or text


def _refuse_contradiction(pred: str) -> None:
    """A chain such as `1 = 2 = 5` must hold: each member without variables equals the last one."""
    for statement in _split(pred, ",;"):
        members = [m for m in _split(statement, "=") if m]
        for member in members[:-1]:
            constant = re.sub(r"\\[A-Za-z]+|\{[a-z]?matrix\}", "", member)
            if re.search(r"[^\W\d_]", constant) is None and not _equal(member, members[-1]):
                raise Refused(f"contradicts itself: {member} = {members[-1]}")


def _not_a_number(pred: str) -> str:
    """Why this cannot stand for one number, or nothing. The parser would drop what it does not
    know: `7\\text{ or more}` is not 7."""
    value = _EQUALS.split(pred)[-1]
    if _WRAPPER.search(value):
        return "words beside the number"
    if len(_structure(value)[1]) > 1:
        return "a list, not a number"
    if re.search(r"\\(?:lor|vee|color|cancel|prime)(?![A-Za-z])|'", value):
        return "not a number"
    return ""


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def too_large(text: str) -> str:
    """Why this may not reach the parser (which would compute it), or nothing."""
    symbols = bool(re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))
    exponents = [int(e) for e in re.findall(r"\^\s*[{(]*\s*[+-]?(\d{1,30})", text)]
    product = 1
    for exponent in exponents:
        product *= max(exponent, 1)
    if max(exponents, default=0) > MAX_EXPONENT or (not symbols and product > 100 * MAX_EXPONENT):
        return "an exponent is too large"
    if text.count("^") > 40 or re.search(r"\^\s*\{?\s*\d+\s*\^\s*\{?\s*\d+\s*\^", text):
        return "a tower of exponents"
    for base, power in re.findall(r"\^\s*[{(]?\s*(\d+)\s*\^\s*[{(]?\s*(\d+)", text):
        if len(base) > 4 or len(power) > 2 or int(base) ** int(power) > MAX_EXPONENT:
            return "a tower of exponents"
    if any(len(n) > 4 or int(n) > MAX_FACTORIAL for n in re.findall(r"(\d+)\s*[)}]*\s*!", text)):
        return "a factorial is too large"
    if re.search(r"!\s*[)}\]]*\s*!", text) or (not symbols and re.search(r"!.*\)\s*!", text)):
        return "a factorial of a factorial"
    if text.count("&") > MAX_CELLS:
        return f"a matrix of more than {MAX_CELLS} cells"
    if re.search(r"\\d?binom\s*\{?\s*\d{5}", text):
        return "a binomial coefficient is too large"
    if len(re.findall(r"\\(?:sum|prod|int|lim)(?![A-Za-z])", text)) > 3:
        return "too many sums, products or integrals"
    if re.search(r"\\(?:sum|prod).*\^\s*\{?\s*\d{4}", text):
        return "a sum or product has too many terms"
    return ""


# ------------------------------------------------------------------------------ math-verify


def warm_up() -> None:
    """Import the parser and build its tables, so that the first verdict is as fast as others."""
    parse_latex("x=1")


@lru_cache(maxsize=256)
def parse_latex(text: str) -> list[Any]:
    """Parse as a box, LaTeX only: the plain-expression parser of math-verify would pick a number
    out of any text, and calls `eval`. An empty list when it cannot be parsed."""
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig
    from sympy import Complement, Intersection, Union

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(),)
    parsed = parse(
        f"\\boxed{{{text}}}",
        extraction_config=config,
        fallback_mode="no_fallback",
        parsing_timeout=None,  # type: ignore[arg-type]
        raise_on_error=True,
    )
    # `[0, 2] \\cap (1, 3)` is parsed unevaluated, and math-verify would compare it as it stands.
    return [e.doit() if isinstance(e, Union | Intersection | Complement) else e for e in parsed]


def _symbolic(gold: str, pred: str, gold_unit: str, pred_unit: str) -> bool:
    from math_verify import verify

    if why := too_large(gold):
        raise Unscorable(f"the reference cannot be judged: {why}")
    if why := too_large(pred):
        raise Refused(why)
    gold_parsed = parse_latex(gold) or parse_latex(_split(gold, "=")[-1])  # a label may be anything
    if not gold_parsed:
        raise Unscorable(f"the reference cannot be parsed: {gold[:80]}")
    pred_parsed = parse_latex(pred) or parse_latex(_split(pred, "=")[-1])
    if not pred_parsed:
        raise Refused("the answer cannot be parsed")
    if verify(
        gold_parsed,
        pred_parsed,
        allow_set_relation_comp=True,
        timeout_seconds=None,
        raise_on_error=True,
    ):
        return True
    if (gold_unit == "%") != (pred_unit == "%"):
        percent = f"{gold}\\%" if gold_unit else f"{pred}\\%"
        pair = (
            (parse_latex(percent), pred_parsed)
            if gold_unit
            else (gold_parsed, parse_latex(percent))
        )
        return bool(verify(*pair, timeout_seconds=None, raise_on_error=True))
    return False
