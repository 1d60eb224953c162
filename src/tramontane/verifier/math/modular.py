r"""Remainders: `17 \bmod 7` is the number 3, `17 \equiv 3 \pmod 7` is a class of remainders."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tramontane.verifier.math.equations import variables
from tramontane.verifier.math.numbers import residue, to_number
from tramontane.verifier.math.structure import Refused, Unscorable, balanced, split, too_large

_WORD = r"\\(?:text|mathrm|operatorname|textrm|mbox)\s*\{\s*mod\s*\}"
_MOD = rf"(?:\\[bp]?mod(?![A-Za-z])|{_WORD}|(?<![A-Za-z\\])mod(?![A-Za-z]))"
_MODULUS = r"\s*\{?\s*(\d{1,9})\s*\}?\s*"
_TEXT = r"\\(?:text|mathrm)\s*\{\s*"
_CLASS = re.compile(rf"(.*?)\s*(?:\(\s*{_MOD}{_MODULUS}\)|\\pmod{_MODULUS})\s*", re.DOTALL)
_CLASS_IN_TEXT = re.compile(
    rf"(.*?)\s*(?:\(\s*{_TEXT}|{_TEXT}\(\s*)mod\s*\}}?{_MODULUS}\)?\s*\}}?\s*\)?\s*",
    re.DOTALL,
)
_OPERATION = re.compile(rf"(.*?)\s*(?:{_MOD}|{_TEXT}mod(?=\s*\d)){_MODULUS}\}}?\s*", re.DOTALL)
_SYMBOL = r"\s*\{?\s*([A-Za-z](?:_\{?\w+\}?)?(?:\^\{?\w+\}?)?)\s*\}?\s*"
_SYMBOLIC = re.compile(
    rf"(.*?)\s*(?:\(\s*{_MOD}{_SYMBOL}\)|{_MOD}{_SYMBOL}"
    rf"|(?:\(\s*{_TEXT}|{_TEXT}\(\s*)mod\s*\}}?{_SYMBOL}\)?\s*\}}?\s*\)?)\s*",
    re.DOTALL,
)
_BOTH = re.compile(r"(^|\\equiv|,)\s*\\pm\s*(\d+)(?![\d.^])")
_INTEGER = re.compile(r"[+-]?\s*\d+")
_NO_LABEL = re.compile(
    r"\\(?:text|mbox)\s*\{(?!\s*not\b)[^{}]*\}|\\(?:vec|forall|mathrm)(?![A-Za-z])"
)
_LETTER = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?")
_KIND = re.compile(r"(?i)\b(?:prime|odd|even|composite)s?\b")
_BOUND = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_OPEN = r"(?:\\(?:text|mathrm|mbox)\s*\{\s*)?"
_KINDS = re.compile(  # `all primes `, `, where p is prime`
    rf"(?i)[\s,;(]*{_OPEN}(?:\b(?:for|all|any|every|each|the|where|with|and|if)\b\s*)*\}}?\s*"
    rf"(?:{_OPEN}\b[a-z]\b\s*\}}?\s*{_OPEN}\s*(?:(?:is|are|an?)\b\s*)*)?{_KIND.pattern[4:]}"
    r"(?:\s*(?:numbers?|integers?|and|with)\b)*\s*(?:\}\s*)?\)?"
)
_FORM = re.compile(  # `of the form `, and the letter before `with p\equiv 1`
    rf"(?i){_OPEN}\b(?:of the form|([a-z])\s+(?:with|such that|where)(?=\s*\}}?\s*\1\b))\s*\}}?"
)


class Modular(NamedTuple):
    """A number modulo `modulus`. `members` are the texts around its equivalence signs; an operation
    (`17 \\bmod 7`) has only one, and its value is the remainder itself."""

    members: list[str]
    modulus: int
    is_operation: bool


def read_modular(text: str) -> Modular | None:
    """Read a text that ends with a modulus; None for others, and for lists."""
    if "mod" not in text:
        return None
    body, is_operation = None, False
    for pattern in (_CLASS, _CLASS_IN_TEXT, _OPERATION):
        if match := pattern.fullmatch(text):
            body, modulus = match[1], next(int(x) for x in match.groups()[1:] if x)
            is_operation = pattern is _OPERATION and "\\equiv" not in body
            break
    if body is None or not modulus or "mod" in body or len(split(text, ",", ";")) > 1:
        return None
    members = [body] if is_operation else split(re.sub(r"\\equiv(?![A-Za-z])", "=", body), "=")
    if not members or (is_operation and "=" in body):
        return None
    return Modular(members, modulus, is_operation)


def same_remainder(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    r"""Compare classes of remainders with each other, and with numbers.

    A reference's class equals its written number and its remainder: `10 \pmod 7` is 10 and 3. A
    prediction's class equals only its least remainder, and must name it, or it would be two
    answers; or the general form of its numbers, `7k + 3`. An operation equals only its remainder.
    None if neither side has a modulus, or a side with one cannot be evaluated.

    Raises:
        Refused: the prediction contradicts itself, as `18 \equiv 3 \pmod 7` does.
    """
    if "mod" not in gold + pred:
        return None
    kinds, (gold, pred) = zip(*map(_of_kinds, (gold, pred)), strict=True)
    if kinds[0] != kinds[1] and (kinds != (set(), {"prime"}) or "p" not in _labels(gold)):
        raise Refused("numbers of another kind")
    gold, pred = (_BOTH.sub(r"\1\2, -\2", side) for side in (gold, pred))
    labels = _labels(gold)
    any_letter = all(map(_LETTER.fullmatch, labels))
    for label in _labels(pred) if labels else ():
        if any_letter and _LETTER.fullmatch(label):
            continue
        if not any(_same_label(other, label, equal) for other in labels):
            raise Refused(f"a congruence of something else: {label}")
    if (decided := _same_symbolic(gold, pred, equal)) is not None:
        return decided
    g_list, p_list = _classes(gold), _classes(pred)
    if g_list and p_list:
        return g_list == p_list
    g, p = read_modular(gold), read_modular(pred)
    if g_list and p is None and any(map(_LETTER.fullmatch, labels)):
        return _general(pred, g_list[0]) == g_list[1]
    if p_list and g is None and _general(gold, p_list[0]) == p_list[1]:
        return True
    if g is None and p is None:
        return None
    if p is None and g is not None and not g.is_operation and any(map(_LETTER.fullmatch, labels)):
        # All numbers of the class are the answer: one of them is not.
        return _is_general(pred, (_remainders(g) or (set(), set()))[1], g.modulus)
    g_values = _remainders(g) if g else _written(gold)
    p_values = _remainders(p) if p else _written(pred)
    if p is not None and p_values is not None:
        if len(p_values[1]) > 1:
            raise Refused(f"contradicts itself: {pred}")
        if g is None and not p.is_operation and _is_general(gold, p_values[1], p.modulus):
            return True
    if g_values is None or (p is not None and p_values is None):
        return None
    if p_values is None:
        return g is not None and not g.is_operation and _is_general(pred, g_values[1], g.modulus)
    if g and p and not (g.is_operation or p.is_operation):
        return g.modulus == p.modulus and g_values[1] == p_values[1]
    if g and p and g.is_operation != p.is_operation and g.modulus != p.modulus:
        return False
    if p and not p.is_operation:
        named = {int(m.replace(" ", "")) for m in p.members if _INTEGER.fullmatch(m.strip())}
        least = p_values[1] if not named or named & p_values[1] else set()
        return bool((g_values[0] | g_values[1]) & least)
    return bool((g_values[0] | g_values[1]) & (p_values[0] | p_values[1]))


def _same_symbolic(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    r"""Compare `-1 \pmod p` and `p - 1 \pmod{p}`: the last members are equal, or differ by one
    modulus. None unless both moduli are letters."""
    matches = [_SYMBOLIC.fullmatch(side) for side in (gold, pred)]
    if None in matches or any(len(split(side, ",", ";")) > 1 for side in (gold, pred)):
        return None
    (g, g_modulus), (p, p_modulus) = ((m[1], m[2] or m[3] or m[4]) for m in matches if m)
    if g_modulus != p_modulus:
        return False
    g, p = (split(re.sub(r"\\equiv(?![A-Za-z])", "=", side), "=")[-1] for side in (g, p))
    return any(equal(g, moved) for moved in (p, f"{p} + {g_modulus}", f"{p} - {g_modulus}"))


def _labels(text: str) -> list[str]:
    r"""What an answer says the remainders of: `n` for `n \equiv 1, 2 \pmod 3`."""
    items = split(re.sub(r"\\equiv(?![A-Za-z])", "=", text), ",", ";")
    members = [_NO_LABEL.sub(" ", m).strip() for item in items for m in split(item, "=")[:-1]]
    inner = [member[1:-1].strip() for member in members]
    pairs = zip(members, inner, strict=True)
    labels = [i if m[:1] in ("(", "{") and m[-1] in ")}" and balanced(i) else m for m, i in pairs]
    return [label for label in labels if variables(label)]


def _same_label(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool:
    if gold == pred or variables(gold) != variables(pred):
        return gold == pred
    try:
        return equal(gold, pred)
    except Unscorable:  # only known as written
        return False


def _classes(text: str) -> tuple[int, set[int]] | None:
    r"""Modulus and remainders of several classes: `1, 3 \pmod 4`, `1 \pmod 4, 3 \pmod 4`."""
    items = split(text, ",", ";")
    last = read_modular(items[-1]) if len(items) > 1 else None
    if last is None or last.is_operation:
        return None
    remainders: set[int] = set()
    for item in items:
        read = read_modular(item) or Modular(split(item, "\\equiv", "="), last.modulus, False)
        known = _remainders(read)
        if known is None or read.modulus != last.modulus or len(known[1]) > 1:
            return None
        remainders |= known[1]
    return (last.modulus, remainders) if len(remainders) == len(items) else None


def _written(text: str) -> tuple[set[int], set[int]] | None:
    """An integer, possibly with a name, as `_remainders` has it: ({5}, set()) for `x = 5`."""
    number = to_number((split(text, "=") or [""])[-1])
    if number is None or number.denominator > 1:
        return None
    return {int(number)}, set()


def _remainders(modular: Modular) -> tuple[set[int], set[int]] | None:
    """The number as written, unless an operation, and the remainders of all constant members."""
    remainders, written = set(), set()
    for member in modular.members:
        remainder = remainder_of(member, modular.modulus)
        if remainder is not None:
            remainders.add(remainder)
            number = to_number(member)
            written = {int(number)} if number is not None and number.denominator == 1 else set()
    if not remainders:
        return None
    return (set() if modular.is_operation else written), remainders


def without_kinds(gold: str, pred: str) -> tuple[str, str]:
    """Both sides without the kinds of numbers that both name beside a bound: `p > 3` for
    `\\text{all primes } p > 3`."""
    if not _BOUND.search(gold):
        return gold, pred
    (of_gold, g), (of_pred, p) = map(_of_kinds, (gold, pred))
    is_same = of_gold and of_gold == of_pred
    return (g.strip(), p.strip()) if is_same else (gold, pred)


def _is_general(text: str, remainders: set[int], modulus: int) -> bool:
    """True for all numbers of a class, such as `7k + 3`; the text may have a name."""
    return len(remainders) == 1 and _general(text, modulus) == remainders


def _general(text: str, modulus: int) -> set[int]:
    r"""The remainders of general forms, {1, 5} for `n = 6k \pm 1` and `6k+1, 6k+5`; none if a
    part has another form or factor, or two parts are the same class."""
    found: list[int] = []
    for part in split(text, ",", ";"):
        form = re.sub(r"\\cdot|\*|\s", "", (split(part, "=") or [""])[-1])
        for sign in "+-" if "\\pm" in form else "+":
            signed = form.replace("\\pm", sign)
            match = re.fullmatch(r"(\d+)[a-z]([+-]\d+)?|([+-]?\d+)[+-](\d+)[a-z]", signed)
            if match is None or int(match[1] or match[4]) != modulus:
                return set()
            found.append(int(match[2] or match[3] or 0) % modulus)
    return set(found) if len(set(found)) == len(found) else set()


def _of_kinds(text: str) -> tuple[set[str], str]:
    r"""The kinds of whole numbers that words name, and the text without them: prime, and
    `p\equiv 1\pmod 4` for `\text{all primes } p\equiv 1\pmod 4`."""
    if not _KIND.search(text):
        return set(), text
    plain = _FORM.sub(" ", _KINDS.sub(" ", text)).strip(" ,;")
    return {word.removesuffix("s") for word in _KIND.findall(text)}, plain


def remainder_of(text: str, modulus: int) -> int | None:
    """The remainder of an expression without variables, by modular arithmetic: powers may be too
    large to write out. None for other expressions."""
    if (number := to_number(text)) is not None:
        return residue(number.numerator, number.denominator, modulus)
    from tramontane.verifier.math import parsing, residues  # SymPy takes a second to import

    if too_large(text) or (parsed := parsing.parse_latex(text)) is None:
        return None
    return residues.remainder(parsed, modulus)
