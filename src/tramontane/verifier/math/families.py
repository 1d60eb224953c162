r"""Families of solutions: `\frac{\pi}{4} + k\pi, k \in \mathbb{Z}`.

Their letter is bound, so it may have any name; two families are the same if they have the same
members, as `(2k+1)\frac{\pi}{2}` and `\frac{\pi}{2} + n\pi` do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import mpmath

from tramontane.verifier.math import descriptions, equations, items, structure
from tramontane.verifier.math.wording import unwrap

_OTHER_SET = re.compile(r"\\in\s*\\?(?:mathbb|mathbf|Bbb)?\s*\{?\s*(?:[NRQ]\b|Z\s*\}?\s*[\^_])")

_SET = r"(?:\\(?:mathbb|mathbf|Bbb)\s*\{?\s*)?[NZRℕℤℝ]\s*\}?\s*(?:[\^_]\s*(?:\{[^{}]*\}|\S))?"
_KIND = (
    r"(?:(?:[a-z-]+\s+)?integer|(?:natural|real)\s+number|(?:real\s+)?constant"
    r"|reals?(?=[\s}]+[a-z]\s*[<>\\]))"
)
_IS = r"(?:\\text\s*\{\s*)?(?:(?:is|are|be|an?|any|arbitrary)\s+)*"
_DECLARED = re.compile(
    rf"(?<![A-Za-z\\])(?P<letter>[A-Za-z])(?![A-Za-z])\s*\}}?\s*\$?\s*"
    rf"(?:(?:\\in|∈)\s*(?P<set>{_SET})|,?\s*{_IS}(?P<kind>{_KIND}))"
    rf"|(?P<before>{_KIND})s?\s*\}}?\s*\$?\s*(?<![A-Za-z])(?P<after>[A-Za-z])(?![A-Za-z])"
)
_BEFORE_BOUND = re.compile(r"integers?\s*\}?\s*[a-z]\s*(?:[<>]|\\[lg]e)")  # integers n >= 5
_NARROWER = re.compile(r"(?:positive|negative|non-?negative|odd|even|natural)(?=\s)")
_INTEGERS = "Z"
_HINT = re.compile(r"\\in(?![A-Za-z])|∈|integer|number|constant|\breals?[\s}]")
_BUILT = re.compile(
    r"^(?:\s*[A-Za-z]\s*(?:=|\\in)\s*)?\\\{(.*?)(?:[|:]|\\mid(?![A-Za-z]))\s*[A-Za-z]\s*\\in\s*"
    r"\\mathbb\{[NZ]\}(?:_\{>0\})?\s*\\\}$",
    re.DOTALL,
)
_DIRECTED = re.compile(r"^\(([^()]*,[^()]*)\)\s*\+\s*([a-z])\s*\(([^()]*,[^()]*)\)$")
_USUAL = set("jklmnt")  # letters of families that are not declared
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_SAMPLES = (0, 1, 2, 3, -4, -7, 10, 11, 100, 1001)
MAX_MEMBERS = 128  # of a family within one period
MAX_DENOMINATOR = 1000  # of the ratio of two steps
DIGITS = 30


class Progression(NamedTuple):
    """The numbers `first + k * step` of all integers k, both real."""

    first: Any
    step: Any


def same_family(
    sides: tuple[str, str], gold: str, pred: str, equal: Callable[[str, str], bool]
) -> bool | None:
    """Compare two families of one letter each, which is an integer or, if both sides say so, a real
    constant; None for other answers. A point of one real letter, `(x, 3 - x)`, needs no remark if
    the reference has one.

    A side without a remark about its letter counts as a family if the other has one, and its only
    letter is usual for an integer; a reference also needs a pi, since its letter may be given, and
    its members must be those of the prediction one by one.

    Args:
        sides: reference and prediction as written, with their remarks.
        gold: the reference normalized, without its remark.
        pred: the prediction normalized, without its remark.
        equal: compares two answers of the same letters.
    """
    if not any(map(_HINT.search, sides)):
        return None
    remarks = [_DECLARED.finditer(side) for side in sides]
    declared = [{m["letter"] or m["after"]: _domain(m) for m in found} for found in remarks]
    if not any(declared) or any(len(found) > 1 for found in declared):
        return None
    domains = {domain for found in declared for domain in found.values()}
    gold, pred = (_BUILT.sub(r"\1", side) for side in (gold, pred))
    if (
        len(domains) > 1
        or ("R" in domains and not declared[0])
        or bool(_DEGREES.search(gold)) != bool(_DEGREES.search(pred))
    ):
        return None
    if "R" in domains:
        gold, pred = (_DIRECTED.sub(_coordinates, side) for side in (gold, pred))
        gold, pred = items.with_factor(gold, pred), items.with_factor(pred, gold)
    labels, kinds, members = zip(*map(_read, (gold, pred)), strict=True)
    if (all(labels) and labels[0] != labels[1]) or not (declared[0] or "\\pi" in gold):
        return None
    is_point = "R" in domains and not declared[1]  # `(x, 3 - x)` for `(t, 3 - t), t \in \mathbb{R}`
    if is_point and kinds != ("()", "()"):
        return None
    letters = [
        set(found) or {v for v in equations.variables(" ".join(side)) if is_point or v in _USUAL}
        for found, side in zip(declared, members, strict=True)
    ]
    if any(len(found) != 1 for found in letters):
        return None
    if declared[0] and domains == {_INTEGERS} and all(len(names) < 2 for names in labels):
        of_gold, of_pred = map(_progressions, members, letters)
        if of_gold is not None and of_pred is not None:
            if kinds == ("list", "list"):
                return _same_numbers(of_gold, of_pred)
            return kinds[0] == kinds[1] and _same_tuples(of_gold, of_pred)
    if domains == {"R"} and kinds[0] == kinds[1] == "()" and all(declared):
        lines = map(partial(_progressions, is_line=True), members, letters)
        g_line, p_line = lines
        if g_line is not None and p_line is not None:
            return _same_line(g_line, p_line)
    (name,), (other,) = letters
    if name == other or name in equations.variables(pred):
        return None
    named = re.sub(rf"\\[A-Za-z]+|{other}", lambda m: name if m[0] == other else m[0], pred)
    return equal(gold, named)


def _coordinates(m: re.Match[str]) -> str:
    """`(1+(2)t, 0+(1)t)` for `(1,0)+t(2,1)`."""
    point, direction = m[1].split(","), m[3].split(",")
    if len(point) != len(direction):
        return m[0]
    parts = (f"{a}+({b}){m[2]}" for a, b in zip(point, direction, strict=True))
    return f"({','.join(parts)})"


def domains_clash(reference: str, prediction: str) -> bool:
    r"""True if both answers say what their letters stand for, and differ: `k \in \mathbb{Z}` and
    `k \in \mathbb{N}`. The natural numbers may begin with 0 or 1."""
    if not (_HINT.search(reference) and _HINT.search(prediction)):
        return False
    found = [
        {
            m["letter"] or m["after"]: _CANONICAL.get(d := _domain(m), d)
            for m in _DECLARED.finditer(side)
        }
        for side in (reference, prediction)
    ]
    if not all(found):
        return False
    g, p = ([of[k] for k in sorted(of)] for of in found)
    if found[0].keys() != found[1].keys():
        g, p = sorted(g), sorted(p)
    return len(g) != len(p) or not all(
        a == b or {a, b} in _NATURAL for a, b in zip(g, p, strict=True)
    )


def is_unused(reference: str, prediction: str) -> bool:
    r"""True if the remark of a prediction names a letter that it does not have, as in `2k\pi, n \in
    \mathbb{Z}`, and the reference's remark names its own."""
    if not (_HINT.search(reference) and _HINT.search(prediction)):
        return False
    unused = []
    for side in (reference, prediction):
        remarks = list(_DECLARED.finditer(side))
        if not remarks or remarks[0].start() == 0 or _BEFORE_BOUND.search(side):
            return False
        rest = _DECLARED.sub(" ", side)
        letters = {m["letter"] or m["after"] for m in remarks}
        unused.append(any(not re.search(rf"(?<![A-Za-z\\]){k}|(?<=\d){k}", rest) for k in letters))
    return unused == [False, True]


_CANONICAL = (
    dict.fromkeys(("Z+", "Z>0", "positiveZ", "N+", "N*", "Z≥1"), "positive")
    | dict.fromkeys(
        ("Z>=0", "Z\\ge0", "non-negativeZ", "nonnegativeZ", "N0", "Z\\geq0", "Z0+"), "non-negative"
    )
    | {"naturalZ": "N"}
)
_NATURAL = ({"N", "positive"}, {"N", "non-negative"})


def _domain(remark: re.Match[str]) -> str:
    """The set that a remark names: `Z`, `Z>0`, `positiveZ`."""
    if remark["set"]:
        plain = re.sub(r"\\(?:mathbb|mathbf|Bbb)|[\s{}^_]", "", remark["set"])
        return plain.translate(str.maketrans("ℕℤℝ", "NZR"))
    kind = remark["kind"] or remark["before"]
    if "real" in kind or "constant" in kind:
        return "R"
    narrower = _NARROWER.match(kind)
    return (narrower[0] if narrower else "") + _INTEGERS


def _read(text: str) -> tuple[set[str], str, list[str]]:
    """The names of the items of an answer, its kind, and the items without them, with `\\pm`
    written out."""
    names, found = set(), []
    shape = items.shape_with_signs(_DEGREES.sub("", text))
    for item in shape.items:
        name, value = structure.label(item) or ("", item)
        names |= {name} - {""}
        found.append(value)
    return names, shape.kind, found


def _progressions(
    members: list[str], letters: set[str], *, is_line: bool = False
) -> list[Progression] | None:
    """The members as progressions; None if one is not linear in the letter, alone or apart for even
    and odd numbers as `(-1)^k + 2k` is, or has another letter. In the coordinates of a line
    (`is_line`), steps may be 0."""
    from tramontane.verifier.math import parsing, values  # SymPy takes a second to import

    (letter,) = letters
    found = []
    for member in members:
        if structure.too_large(member) or (parsed := parsing.parse_latex(member)) is None:
            return None
        try:
            at = {k: values.number(parsed, {letter: mpmath.mpf(k)}) for k in _SAMPLES}
        except values.TooLarge:
            return None
        if not all(value is not None and mpmath.isfinite(value) for value in at.values()):
            return None
        with mpmath.workdps(DIGITS):
            if (line := _line(at)) is not None:
                found.append(line)
                continue
            if is_line:
                return None
            halves = [_line({k: v for k, v in at.items() if k % 2 == odd}) for odd in (0, 1)]
            for odd, half in enumerate(halves):
                if half is None:
                    return None
                found.append(Progression(half.first + odd * half.step, 2 * half.step))
    has_steps = any if is_line else all
    return found if has_steps(progression.step for progression in found) else None


def _line(at: dict[int, Any]) -> Progression | None:
    """The line through all values; None if there is none."""
    (k, a), (m, b), *_ = at.items()
    step = (b - a) / (m - k)
    first = a - k * step
    scale = mpmath.mpf(10) ** -(DIGITS - 8) * (1 + abs(first) + abs(step))
    return (
        Progression(first, step)
        if all(abs(first + n * step - value) <= scale * (1 + abs(n)) for n, value in at.items())
        else None
    )


def _same_tuples(gold: list[Progression], pred: list[Progression]) -> bool:
    """True if two families of tuples have the same tuples: `(k, k+1)` and `(-n, 1-n)`."""
    if len(gold) != len(pred):
        return False
    with mpmath.workdps(DIGITS):
        turns = {p.step / g.step for g, p in zip(gold, pred, strict=True)}
        shifts = [(p.first - g.first) / g.step for g, p in zip(gold, pred, strict=True)]
        (turn, *others), shift = turns, mpmath.nint(shifts[0])
        return abs(turn) == 1 and not others and all(abs(s - shift) < _CLOSE for s in shifts)


def _same_line(gold: list[Progression], pred: list[Progression]) -> bool:
    """True if two points that run with a real letter run through one line."""
    if len(gold) != len(pred):
        return False
    with mpmath.workdps(DIGITS):
        steps = [g.step for g in gold]
        apart = [p.first - g.first for g, p in zip(gold, pred, strict=True)]
        return _parallel(steps, [p.step for p in pred]) and _parallel(steps, apart)


def _parallel(one: list[Any], other: list[Any]) -> bool:
    return all(
        abs(a * d - b * c) < _CLOSE * (1 + abs(a * d))
        for (a, c), (b, d) in combinations(zip(one, other, strict=True), 2)
    )


def _same_numbers(gold: list[Progression], pred: list[Progression]) -> bool:
    """True if two unions of progressions have the same numbers."""
    with mpmath.workdps(DIGITS):
        unit = abs(gold[0].step)
        steps = []
        for progression in (*gold, *pred):
            ratio = abs(progression.step) / unit
            step = Fraction(int(mpmath.nint(ratio * 10**20)), 10**20)
            step = step.limit_denominator(MAX_DENOMINATOR)
            if not step or abs(ratio - mpmath.mpf(step.numerator) / step.denominator) > _CLOSE:
                return False
            steps.append(step)
        common = math.lcm(*(s.numerator for s in steps))
        period = Fraction(common, math.gcd(*(s.denominator for s in steps)))
        counts = [int(period / step) for step in steps]
        if max(sum(counts[: len(gold)]), sum(counts[len(gold) :])) > MAX_MEMBERS:
            return False
        length = unit * period.numerator / period.denominator
        of_gold, of_pred = (
            [
                (progression.first + k * progression.step) / length
                for progression, count in zip(side, of, strict=True)
                for k in range(count)
            ]
            for side, of in ((gold, counts[: len(gold)]), (pred, counts[len(gold) :]))
        )
        return all(
            any(abs((a - b) - mpmath.nint(a - b)) < _CLOSE for b in others)
            for these, others in ((of_gold, of_pred), (of_pred, of_gold))
            for a in these
        )


_CLOSE = mpmath.mpf(10) ** -18


def of_others(reference: str, prediction: str) -> bool:
    r"""True if the answer in words is about another letter (`q is prime` for `p \text{ is prime}`),
    or gives a class of remainders by a form whose letter is not any integer
    (`9k+4, k\in\mathbb{N}`)."""
    sides = [
        " ".join(unwrap(side).lower().split()).rstrip(" .") for side in (reference, prediction)
    ]
    letters = [letter for side in sides if (letter := descriptions.letter_of(side))]
    if len(letters) == 2 and letters[0] != letters[1]:
        return True
    if ("mod" in reference) == ("mod" in prediction):
        return False
    return bool(_OTHER_SET.search(reference)) != bool(_OTHER_SET.search(prediction))
