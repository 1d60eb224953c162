"""The comparison of two SymPy objects.

Expressions are compared by value (`values`), equations and inequalities up to a constant factor,
sets of real numbers as unions of intervals (`regions`), matrices cell by cell. SymPy never
simplifies, solves or integrates, as the cost is unbounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational, Unequality

from tramontane.verifier.math import values
from tramontane.verifier.math.numbers import DECIMAL, with_binomials
from tramontane.verifier.math.parsing import parse_answer
from tramontane.verifier.math.regions import read_region, same_region
from tramontane.verifier.math.residues import same_fingerprint
from tramontane.verifier.math.structure import (
    Refused,
    Unreadable,
    Unscorable,
    balanced,
    too_large,
)


def equal(gold: str, pred: str, scales: list[tuple[int, int]], places: int | None) -> bool:
    """Parse two answers and compare them under each pair of scales (reference, prediction).
    Decimals are rounded at `places` or later (`numbers.is_rounded`).

    Raises:
        Refused: the prediction cannot be parsed, or is too large.
        Unscorable: the reference is broken, or too large; `Unreadable` if it cannot be parsed.
    """
    gold, pred = with_binomials(gold), with_binomials(pred)
    if reason := too_large(gold):
        raise Unscorable(f"the reference cannot be judged: {reason}")
    if reason := too_large(pred):
        raise Refused(reason)
    gold_parsed = parse_answer(gold)
    if gold_parsed is None:
        is_whole = balanced(gold) and re.search(r"\w", gold)
        error = Unreadable if is_whole else Unscorable
        raise error(f"the reference cannot be parsed: {gold[:80]}")
    pred_parsed = parse_answer(pred, labeled="=" not in gold)
    if pred_parsed is None:
        raise Refused("the answer cannot be parsed")
    try:
        if any(_same_scaled(gold_parsed, pred_parsed, *scale) for scale in scales):
            return True
        if not isinstance(gold_parsed, sympy.Expr):
            return False
        if len(scales) == 1 and scales[0] != (1, 1):  # another unit
            gold_parsed = sympy.Mul(sympy.Rational(*scales[0]), gold_parsed, evaluate=False)
        return values.rounded(gold_parsed, pred, places)
    except values.TooLarge as error:
        if (decided := same_fingerprint(gold_parsed, pred_parsed)) is not None:
            return decided
        try:
            same(gold_parsed, _PROBE)
        except values.TooLarge:
            reason = "the reference cannot be judged: its value is too large"
            raise Unscorable(reason) from error
        raise Refused("the value is too large") from error


def same_set(gold: str, pred: str, solved: list[bool]) -> bool:
    """True if two answers are one set of real numbers, with the conditions of each side that is
    `solved` solved: `x^2 < 4` is (-2, 2)."""
    if too_large(gold) or too_large(pred):
        return False
    try:
        regions = [
            read_region(parse_answer(side), solved=is_solved)
            for side, is_solved in zip((gold, pred), solved, strict=True)
        ]
    except values.TooLarge:
        return False
    g, p = regions
    return g is not None and p is not None and same_region(g, p)


def _same_scaled(gold: Any, pred: Any, gold_scale: int, pred_scale: int) -> bool:
    """Compare after scaling; a scaled inequality or set is meaningless and equals nothing."""
    sides = ((gold, gold_scale), (pred, pred_scale))
    if any(k != 1 and not isinstance(e, sympy.Expr) for e, k in sides):
        return False
    return same(*(e if k == 1 else sympy.Mul(k, e, evaluate=False) for e, k in sides))


_PLAIN = re.compile(rf"[+-]?\s*(?:{DECIMAL}|\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?)")
_EVALUABLE = (
    sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.binomial | sympy.Mod | sympy.Sum
    | sympy.Product | sympy.floor | sympy.ceiling | sympy.Abs | sympy.Max | sympy.Min | sympy.log
)  # fmt: skip


def has_arithmetic(answer: str) -> bool:
    r"""True if numbers in an answer could be combined into one: `17+25`, `3 \cdot 2\sqrt{5}`, `5!`,
    `2^3`, `\frac{84}{2}`. `\sqrt{12}`, `2^{1/3}` and `6.02 \times 10^{23}` are final."""
    if _PLAIN.fullmatch(answer.strip()) or too_large(answer):
        return False
    quotients = [(m[1] or m[3], m[2] or m[4]) for m in _QUOTIENT.finditer(answer)]
    if any(math.gcd(int(a), int(b)) > 1 for a, b in quotients) or _CHOOSE.search(answer):
        return True
    parsed = parse_answer(_POWER_OF_TEN.sub("", answer))
    if not isinstance(parsed, sympy.Basic):
        return False
    return any(map(_is_undone, sympy.preorder_traversal(parsed)))


_QUOTIENT = re.compile(
    r"\\frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}|(?<![\w^}.])(\d{1,9})\s*/\s*(\d{1,9})(?![\w.])"
)
_CHOOSE = re.compile(r"\\binom\s*\{\d+\}\s*\{\d+\}|\d\s*\\choose\s*\d")
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{[+-]?\d+\}|\d)|^10\^(?:\{[+-]?\d+\}|\d)$"
)


def _is_undone(e: Any) -> bool:
    if not isinstance(e, _EVALUABLE):
        return False
    numbers = [a for a in e.args if isinstance(a, sympy.Rational)]
    if isinstance(e, sympy.Mul):
        return sum(abs(n) != 1 for n in numbers) > 1
    if isinstance(e, sympy.Add):
        return len(numbers) + sum(1 for a in e.args if _is_fraction(a)) > 1
    if len(numbers) < len(e.args):
        return False
    if isinstance(e, sympy.Pow):
        root = e.exp.q == 1 or sympy.integer_nthroot(abs(int(e.base.p)), int(e.exp.q))[1]
        return bool(e.exp != -1 and root)
    if isinstance(e, sympy.log):
        value = values.number(e)
        return value is not None and len(e.args) == 2 and value == int(value)
    return True


def _is_fraction(e: Any) -> bool:
    """True for `\frac{a}{b}` of integers, which the parser leaves as a product."""
    return isinstance(e, sympy.Mul) and all(
        isinstance(a, sympy.Rational)
        or (isinstance(a, sympy.Pow) and a.exp == -1 and a.base.is_Rational)
        for a in e.args
    )


_PROBE = sympy.Symbol("a")


def same(gold: Any, pred: Any) -> bool:
    """Compare two parsed objects.

    Raises:
        values.TooLarge: a value exceeds the bounds.
    """
    gold, pred = _align_equations(gold, pred)
    if isinstance(gold, sympy.MatrixBase) and isinstance(pred, sympy.MatrixBase):
        cells = zip(gold.flat(), pred.flat(), strict=False)
        return bool(gold.shape == pred.shape) and all(same(g, p) for g, p in cells)
    if isinstance(gold, sympy.MatrixBase) or isinstance(pred, sympy.MatrixBase):
        return False
    if gold == pred:
        return True
    if isinstance(pred, sympy.FiniteSet) and len(pred.args) == 1 and isinstance(gold, sympy.Expr):
        return same(gold, pred.args[0])
    if isinstance(pred, sympy.Complement | sympy.Intersection) and isinstance(gold, sympy.Expr):
        gold = sympy.FiniteSet(gold)  # braces of a set are groups to the parser
    if isinstance(gold, Equality) and isinstance(pred, Equality):
        return _same_equation(gold, pred)
    # The reference |x| < 3 is (-3, 3).
    g = read_region(gold, solved=isinstance(gold, Relational) and gold.has(sympy.Abs))
    if g is not None and (p := read_region(pred)) is not None:
        return same_region(g, p)
    for kind, compare in _COMPARISONS:
        if isinstance(gold, kind) and isinstance(pred, kind):
            return compare(gold, pred)
    return False


def _same_arguments(gold: Any, pred: Any) -> bool:
    unmatched = list(pred.args)
    for g in gold.args:
        found = next((k for k, p in enumerate(unmatched) if same(g, p)), None)
        if found is None:
            return False
        del unmatched[found]
    return not unmatched


# --------------------------------------------------------------------- equations, inequalities


def _align_equations(gold: Any, pred: Any) -> tuple[Any, Any]:
    """Reduce chains of equations to their ends, and labels of values (`y = 2x`) to the value."""
    g, p = _members(gold), _members(pred)
    if len(g) > 1 and len(p) > 1:
        ends = (sympy.Eq(side[0], side[-1], evaluate=False) for side in (g, p))
        return next(ends), next(ends)
    is_value = len(g) > 1 and _is_label(g[0]) and (g[0].is_Symbol or not g[-1].is_Symbol)
    if is_value and not isinstance(pred, Relational | sympy.And):
        return g[-1], pred
    if len(p) > 1 and not isinstance(gold, Relational | sympy.And):
        return gold, p[-1]
    return gold, pred


def _members(e: Any) -> list[Any]:
    """The members of `a = b = c`; any other object is its own single member."""
    if isinstance(e, Equality):
        return [e.lhs, e.rhs]
    args = getattr(e, "_unsorted_args", ())
    if isinstance(e, sympy.And) and args and all(isinstance(a, Equality) for a in args):
        return [args[0].lhs, *(a.rhs for a in args)]
    return [e]


def _is_label(e: Any) -> bool:
    """True for an object that names an answer: a letter, a ratio of letters, `f(x)`, `|AB|`."""
    if isinstance(e, AppliedUndef):
        return True
    return not e.has(sympy.Add) and all(n in (1, -1) for n in e.atoms(sympy.Number))


def _difference(e: Any) -> Any:
    return sympy.Add(e.lhs, sympy.Mul(-1, e.rhs, evaluate=False), evaluate=False)


def _same_equation(gold: Any, pred: Any) -> bool:
    """Compare up to a constant factor, or left sides as written and right sides by value."""
    sides = (gold.lhs, gold.rhs, pred.lhs, pred.rhs)
    numeric = all(isinstance(side, sympy.Expr) for side in sides)
    if numeric and values.proportional(_difference(gold), _difference(pred)):
        return True
    return bool(gold.lhs == pred.lhs) and same(gold.rhs, pred.rhs)


def _same_inequality(gold: Any, pred: Any) -> bool:
    """Compare up to a constant factor; a negative factor reverses the sign."""
    if _relation(gold) != _relation(pred):
        return False
    factor = values.proportional(_difference(gold), _difference(pred))
    if isinstance(gold, Unequality):
        return factor != 0
    same_direction = isinstance(gold, _LESS) == isinstance(pred, _LESS)
    return factor == (1 if same_direction else -1)


_LESS = (sympy.StrictLessThan, sympy.LessThan)


def _relation(e: Any) -> str:
    if isinstance(e, Equality | Unequality):
        return "=" if isinstance(e, Equality) else "≠"
    return "<" if isinstance(e, sympy.StrictLessThan | sympy.StrictGreaterThan) else "≤"


_COMPARISONS: tuple[tuple[type, Callable[[Any, Any], bool]], ...] = (
    (Relational, _same_inequality),
    (sympy.And, _same_arguments),
    (sympy.Tuple, lambda gold, pred: len(gold) == len(pred) and all(map(same, gold, pred))),
    (sympy.Set, lambda gold, pred: type(gold) is type(pred) and _same_arguments(gold, pred)),
    (sympy.Expr, values.equal),
)
