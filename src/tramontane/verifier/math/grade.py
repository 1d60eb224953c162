r"""Is the last `\boxed{}` of the answer part the reference? (arXiv 2506.10910, section 2.2.)

Cheap and exact rules come first (`normalize`), then lists and tuples item by item, and only what
is left is parsed as LaTeX and compared by value (`symbolic`, `values`). Every step has a cap
(`caps`); whoever calls this from a worker process kills it from outside all the same. The policies
are in docs/rewards.md.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from tramontane.types import Outcome
from tramontane.verifier.format import last_box
from tramontane.verifier.math import structure
from tramontane.verifier.math.caps import MAX_ITEMS, MAX_LENGTH, MAX_NESTING, nesting, too_large
from tramontane.verifier.math.normalize import normalize, split_unit, to_number, units_clash
from tramontane.verifier.math.structure import split
from tramontane.verifier.math.wording import WRAPPER, choice, same_text, unwrap


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
    if nesting(pred) > MAX_NESTING:
        return Judgement("wrong", f"brackets nested deeper than {MAX_NESTING}", answer)
    if nesting(gold) > MAX_NESTING:
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


def _spelling(text: str) -> str:
    return _SPACE.sub("", unwrap(text)).rstrip(".")


def _equal(gold: str, pred: str) -> bool:
    """The judge proper, on normalised strings. Each step either decides or passes on."""
    if gold == pred or _spelling(gold) == _spelling(pred):
        return True
    for rule in (choice, same_text):
        if (decided := rule(gold, pred)) is not None:
            return decided
    if "\\boxed" in pred:
        raise Refused("a box within the box")
    if _APPROXIMATELY.match(gold):
        gold, pred = _APPROXIMATELY.sub("", gold), _APPROXIMATELY.sub("", pred)
    gold, pred = (_label_first(_before_approximation(side)) for side in (gold, pred))
    for pattern, why in ((_LDOTS, "dots"), (_CLOSED_INFINITY, "infinity is not a number")):
        if pattern.search(pred) and not pattern.search(gold):
            raise Refused(why)
    if _primes(gold) != _primes(pred):  # the parser drops them
        raise Refused("a derivative, a transpose, or another name")
    for rule in (_same_congruence, _same_structure):
        if (decided := rule(gold, pred)) is not None:
            return decided
    _refuse_contradiction(pred)
    _refuse_unsolved(gold, pred)
    gold_body, gold_unit = split_unit(gold)
    pred_body, pred_unit = split_unit(pred)
    if units_clash(gold_unit, pred_unit):
        raise Refused(f"the unit is {pred_unit}, not {gold_unit}")
    for rule in (_same_base, _same_ratio):
        if (decided := rule(gold_body, pred_body)) is not None:
            return decided
    gold_number, pred_number = _numbers(gold_body, pred_body)
    if gold_number is not None and pred_number is not None:
        return any(
            _same_number(gold_number * g, pred_number * p, pred_body)
            for g, p in _scales(gold_unit, pred_unit)
        )
    if gold_number is not None and (what := _not_a_number(pred_body)):
        raise Refused(what)
    return _symbolic(gold_body, pred_body, _scales(gold_unit, pred_unit))


def _scales(gold_unit: str, pred_unit: str) -> list[tuple[int, int]]:
    """What to multiply both sides with: `28\\%` is 28 and 0.28, where only one side says %."""
    if gold_unit != "%" and pred_unit == "%":
        return [(1, 1), (100, 1)]
    return [(1, 1), (1, 100)] if gold_unit == "%" and pred_unit != "%" else [(1, 1)]


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


def _same_number(gold: Fraction, pred: Fraction, spelling: str) -> bool:
    if gold == pred:
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


_NUMERAL = re.compile(r"(?:[A-Za-z]\s*=\s*)?(-?\d[\w.]*)_\{?(\d+)\}?")


def _same_base(gold: str, pred: str) -> bool | None:
    """`204_5` is a numeral in base 5: the same digits in another base are another number."""
    gold_base, pred_base = (_NUMERAL.fullmatch(s) for s in (gold, pred))
    if not gold_base:
        return False if pred_base and to_number(gold) is not None else None
    if pred_base:
        return gold_base.groups() == pred_base.groups()
    return gold_base[1] == pred


# --------------------------------------------------------------------------- lists and tuples

_RELATION = re.compile(r"\\(?:in|cup|cap|setminus|neq?|[lg]e|mathbb)(?![A-Za-z])|<|>")
_PM = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_SIGNS = {"\\pm": "+-", "\\mp": "-+"}


def _same_structure(gold: str, pred: str) -> bool | None:
    """Item by item: lists and sets in any order, tuples and intervals in theirs."""
    gold, pred = _bare(gold, pred)
    if None not in _numbers(split_unit(gold)[0], split_unit(pred)[0]):
        return None  # 1,000 is a number, and so is 3,5 where 3.5 is asked for
    gold_kind, gold_items = _items(gold)
    pred_kind, pred_items = _items(pred)
    if max(len(gold_items), len(pred_items)) > MAX_ITEMS:
        raise Refused(f"more than {MAX_ITEMS} items")
    if max(len(gold_items), len(pred_items)) < 2:
        return None
    if min(len(gold_items), len(pred_items)) < 2:
        # One item against several may still be a set or an interval in another spelling.
        return None if _RELATION.search(gold + pred) or "matrix" in gold + pred else False
    gold_kind, gold_items, pred_kind, pred_items = _by_labels(
        gold_kind, gold_items, pred_kind, pred_items
    )
    if gold_kind != pred_kind or len(gold_items) != len(pred_items):
        return False
    if gold_kind != "list":
        return all(_equal(g, p) for g, p in zip(gold_items, pred_items, strict=True))
    left = list(pred_items)
    for item in gold_items:
        found = next((p for p in left if _equal_or_refused(item, p)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _bare(gold: str, pred: str) -> tuple[str, str]:
    """`(x, y) = (1, 2)` and `A = \\{1, 2\\}` without the label, where the other side has none."""
    g, p = structure.label(gold), structure.label(pred)
    if (g is None) == (p is None) and (g is None or p is None or g[0] != p[0]):
        return gold, pred
    if any(pair and not pair[1].startswith(("(", "[", "{", "\\{")) for pair in (g, p)):
        return gold, pred
    return (g[1] if g else gold), (p[1] if p else pred)


def _equal_or_refused(gold: str, pred: str) -> bool:
    """Against the wrong item of a list, a refusal is no more than a difference."""
    try:
        return _equal(gold, pred)
    except Refused:
        return False


def _items(text: str) -> tuple[str, list[str]]:
    """The items of an answer, each `\\pm` written out as two of them."""
    kind, items = structure.structure(text)
    if kind != "list":
        return kind, items
    out: list[str] = []
    for item in items:
        if not _PM.search(item) or len(items) > MAX_ITEMS:
            out.append(item)
        else:
            out += [_PM.sub(lambda m, k=k: _SIGNS[m[0]][k], item) for k in (0, 1)]  # type: ignore[misc]
    return kind, out


def _by_labels(
    gold_kind: str, gold: list[str], pred_kind: str, pred: list[str]
) -> tuple[str, list[str], str, list[str]]:
    """`a = 1, b = 2` against the same in another order, against `(1, 2)`, or against `1, 2`."""
    labels = [[structure.label(item) for item in side] for side in (gold, pred)]
    named = [bool(side) and all(side) for side in labels]
    if all(named):
        gold = structure.solutions(gold) or gold
        pred = structure.solutions(pred) or pred
    elif named[0]:
        gold = structure.solutions(gold) or gold
    elif named[1]:
        pred = structure.solutions(pred) or pred
    distinct = [len({pair[0] for pair in side if pair}) == len(side) for side in labels]
    if named[0] != named[1]:
        # Labels on one side only: their order is the tuple's; against a list, any order will do.
        if named[0] and pred_kind == "()" and distinct[0]:
            gold_kind, gold = "()", [pair[1] for pair in labels[0] if pair]
        elif named[1] and gold_kind == "()" and distinct[1]:
            pred_kind, pred = "()", [pair[1] for pair in labels[1] if pair]
    return gold_kind, gold, pred_kind, pred


# ------------------------------------------------------------------------ what is refused

_APPROXIMATELY = re.compile(r"\s*\\approx(?![A-Za-z])\s*")
_LDOTS = re.compile(r"\\ldots(?![A-Za-z])")
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_EQUALS = re.compile(r"(?<![<>!\\:])=")
_PRIME = re.compile(r"(?<=[A-Za-z)}])\s*\^?\{?(?:'|(?<=[\^{])T\b|\\(?:prime|top)(?![A-Za-z]))")


def _primes(text: str) -> int:
    """Those of the value: `f'(x) = 2x` is 2x."""
    return len(_PRIME.findall(_EQUALS.split(text)[-1]))


_LABEL_LAST = re.compile(r"([^=<>]+?)\s*=\s*([A-Za-z])")


def _label_first(text: str) -> str:
    """`x = 5` of `5 = x`."""
    match = _LABEL_LAST.fullmatch(text)
    return f"{match[2]} = {match[1]}" if match and not re.search("[a-zA-Z]", match[1]) else text


def _before_approximation(text: str) -> str:
    return re.split(r"\\(?:approx|simeq|doteq)(?![A-Za-z])", text)[0].strip() or text


def _refuse_contradiction(pred: str) -> None:
    """A chain such as `1 = 2 = 5` must hold: each member without variables equals the last one,
    and so does each behind the first that has the last one's variables."""
    for statement in split(pred, ",", ";"):
        members = [m for m in split(statement, "=") if m]
        for i, member in enumerate(members[:-1]):
            variables = _variables(member)
            comparable = not variables or (i > 0 and variables == _variables(members[-1]))
            if comparable and not _holds(member, members[-1]):
                raise Refused(f"contradicts itself: {member} = {members[-1]}")


def _variables(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]", re.sub(r"\\[A-Za-z]+|\{[a-z]?matrix\}", "", text)))


def _holds(left: str, right: str) -> bool:
    """Both sides are the answer's: what cannot be judged here is the answer's fault."""
    try:
        return _equal(left, right)
    except Unscorable as error:
        raise Refused("the answer cannot be parsed") from error


def _not_a_number(pred: str) -> str:
    """Why this cannot stand for one number, or nothing. The parser would drop what it does not
    know: `7\\text{ or more}` is not 7."""
    value = _EQUALS.split(pred)[-1]
    if WRAPPER.search(value):
        return "words beside the number"
    if len(structure.structure(value)[1]) > 1:
        return "a list, not a number"
    if re.search(r"\\(?:lor|vee|color|cancel|prime)(?![A-Za-z])|'", value):
        return "not a number"
    return ""


_POLYNOMIAL = re.compile(r"[\dA-Za-z\s.+*/^{}()-]*")
_NAME = re.compile(r"_(?:\{[^{}]*\}|\w)|[A-Za-z]+'*\s*\([^()]*\)")  # an index; f(x)


def _refuse_unsolved(gold: str, pred: str) -> None:
    """`2x = 5` and `x = 5 - x` are not the answer 5; `x = 5` is, and so is `a + b = 5`."""
    pair = structure.label(pred)
    if pair is None or "=" in gold:
        return
    side, value = (re.sub(r"\\[A-Za-z]+", " ", part) for part in pair)
    letters = set(re.findall("[A-Za-z]", _NAME.sub("", side)))
    unsolved = len(letters) == 1 and len(side.strip()) > 1 and _POLYNOMIAL.fullmatch(side)
    if (unsolved and not _NAME.search(side)) or letters & set(re.findall("[A-Za-z]", value)):
        raise Refused(f"an equation that is not solved: {pred}")


_MODULUS = re.compile(
    r"(?:.*\\equiv\s*)?([+-]?\d{1,9})\s*"
    r"(?:\\pmod|\(?\s*(?:\\(?:bmod|mod)|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|mod)(?![A-Za-z]))"
    r"\s*\{?\s*(\d{1,9})\s*\}?\s*\)?"
)


def _same_congruence(gold: str, pred: str) -> bool | None:
    """`3 \\pmod 7`: against another congruence by remainder, against a number as it stands."""
    g, p = _MODULUS.fullmatch(gold), _MODULUS.fullmatch(pred)
    if g and p:
        return g[2] == p[2] and int(p[2]) > 0 and (int(g[1]) - int(p[1])) % int(g[2]) == 0
    if g or p:
        match, number = (g, to_number(pred)) if g else (p, to_number(gold))
        assert match is not None
        return None if number is None else int(match[1]) == number
    return None


# ---------------------------------------------------------------------------------- by value


def warm_up() -> None:
    """Import the parser and build its tables, so that the first verdict is as fast as others."""
    _symbolic("x+1", "1+x", [(1, 1)])


def _symbolic(gold: str, pred: str, scales: list[tuple[int, int]]) -> bool:
    import sympy

    from tramontane.verifier.math import symbolic, values

    if why := too_large(gold):
        raise Unscorable(f"the reference cannot be judged: {why}")
    if why := too_large(pred):
        raise Refused(why)
    gold_parsed = _parse(gold)
    if gold_parsed is None:
        raise Unscorable(f"the reference cannot be parsed: {gold[:80]}")
    pred_parsed = _parse(pred)
    if pred_parsed is None:
        raise Refused("the answer cannot be parsed")
    for g, p in scales:
        sides = ((g, gold_parsed), (p, pred_parsed))
        if any(k != 1 and not isinstance(e, sympy.Expr) for k, e in sides):
            continue  # a hundredth of an inequality is nothing
        try:
            scaled = [e if k == 1 else sympy.Mul(k, e, evaluate=False) for k, e in sides]
            if symbolic.same(*scaled):
                return True
        except values.TooLarge as error:
            if not symbolic.bounded(gold_parsed):
                why = "the reference cannot be judged: its value is too large"
                raise Unscorable(why) from error
            raise Refused("the value is too large") from error
    return values.rounded(gold_parsed, pred) if isinstance(gold_parsed, sympy.Expr) else False


_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}")


def _parse(text: str) -> Any:
    """The object, or what stands behind the last `=`: a label may be anything."""
    from tramontane.verifier.math.symbolic import parse_latex, union

    if (either := union(split(text, "\\cup"))) is not None:
        return either
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\1 \\pi / 180)", text)
    parsed = parse_latex(text)
    members = split(text, "=")
    labelled = parsed is None and len(members) > 1 and not members[0].startswith("-")
    return parse_latex(members[-1]) if labelled else parsed
