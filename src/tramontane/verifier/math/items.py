r"""Lists, sets, tuples, intervals, vectors and matrices, compared item by item.

Lists and sets are compared in any order, tuples and intervals in order. Labels (`x = 1, y = 2`) are
matched by name, or read as a tuple if the other side is one.

A vector may be written as a column, as a row, or as a tuple in round or angle brackets; a column is
not a row. `[1, 2]`, which is an interval elsewhere, is a vector where the reference is a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import NamedTuple

from tramontane.verifier.math.numbers import read_numbers
from tramontane.verifier.math.structure import (
    MAX_CELLS,
    MAX_ITEMS,
    Refused,
    Shape,
    balanced,
    label,
    read_shape,
    split,
)
from tramontane.verifier.math.units import split_unit

_RELATION = re.compile(r"\\(?:in|cup|cap|setminus|neq?|[lg]e|mathbb)(?![A-Za-z])|<|>")


def same_structure(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare lists, sets, tuples and intervals item by item, each pair with `equal`.

    None if neither side has several items, or if one is an expression of sets.

    Raises:
        Refused: an answer has more than MAX_ITEMS items.
    """
    gold, pred = _named_apart(gold, pred), _named_apart(pred, gold)
    gold, pred = _without_label(gold, pred)
    if "," in gold and gold.startswith("("):
        pred = _POINT.sub(r"\1", pred)
    values = [split_unit((label(side) or ("", side))[1])[0] for side in (gold, pred)]
    numbers = read_numbers(*values)
    if None not in numbers:
        return None  # 1,000 is a number, and so is 3,5 if the reference is 3.5
    if numbers[0] is not None and "," in values[0] and _THOUSANDS.fullmatch(values[0]):
        return False  # 250,1 is not 1,250
    g, p = shape_with_signs(gold), shape_with_signs(pred)
    counts = len(g.items), len(p.items)
    if max(counts) > MAX_ITEMS:
        raise Refused(f"more than {MAX_ITEMS} items")
    is_like = gold.startswith(_BRACKETS) == pred.startswith(_BRACKETS)  # (1,250) is not 1,250
    if (
        counts[0] != counts[1]
        and is_like
        and ((joined := _join_thousands(gold, pred)) != (gold, pred))
    ):
        return equal(*joined)
    if max(counts) < 2:
        return None
    for one, several in ((p, g), (g, p)):  # `x > 0, x < 5` is an interval too
        is_one = one.kind != "list" or len(one.items) == 1
        is_list = several.kind == "list" and len(several.items) > 1
        if is_one and is_list and _same_variable(several.items):
            all_bounds = r" \land ".join(several.items)
            return equal(all_bounds, pred) if several is g else equal(gold, all_bounds)
    if min(counts) < 2:
        # A single item may be the same set or interval in another notation.
        return None if _RELATION.search(gold + pred) or "matrix" in gold + pred else False
    g, p = _without_labels(g, p), _without_labels(p, g)
    if g.kind != p.kind or len(g.items) != len(p.items):
        return False
    same = partial(_same_item, equal=equal)
    if g.kind == "list" and _is_named(g) == _is_named(p):
        return _same_in_any_order(g.items, p.items, same)
    return all(same(a, b) for a, b in zip(g.items, p.items, strict=True))


_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_POINT = re.compile(r"^[A-Z]\s*(\([^()]*,[^()]*\))$")  # P(3, -1)
_BRACKETS = ("(", "[", "{", "\\{")
_LEADING_ZERO = re.compile(r"00|0\d.", re.DOTALL)


def _join_thousands(*sides: str) -> tuple[str, ...]:
    """`1,000\\pi` as `1000\\pi`, on all sides."""
    return tuple(_THOUSANDS.sub(lambda m: m[0].replace(",", ""), side) for side in sides)


def _same_item(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool:
    """Compare two items; one such as the `000x` of `1,000x`, only as written."""
    if _LEADING_ZERO.match(gold) or _LEADING_ZERO.match(pred):
        return gold == pred
    return equal(gold, pred)


_BOUND = re.compile(
    r"\s*([A-Za-z])\s*(?:[<>]|\\(?:[lg]e|neq?)(?![A-Za-z])).*"
    r"|.*(?:[<>]|\\[lg]e(?![A-Za-z]))\s*([A-Za-z])\s*(?:(?:[<>]|\\[lg]e(?![A-Za-z])).*)?",
    re.DOTALL,
)


def _same_variable(items: list[str]) -> bool:
    """True for bounds of one letter, such as `x > 0, x \\neq 2`."""
    bounds = [_BOUND.fullmatch(item) for item in items]
    return all(bounds) and len({m[1] or m[2] for m in bounds if m}) == 1


def _same_in_any_order(gold: list[str], pred: list[str], equal: Callable[[str, str], bool]) -> bool:
    """Match each item of the reference with the first unmatched item equal to it."""

    def matches(item: str, candidate: str) -> bool:
        try:
            return equal(item, candidate)
        except Refused:  # with the wrong item of a list, a refusal is only a difference
            return False

    unmatched = list(pred)
    for item in gold:
        found = next((candidate for candidate in unmatched if matches(item, candidate)), None)
        if found is None:
            return False
        unmatched.remove(found)
    return True


def _without_label(gold: str, pred: str) -> tuple[str, str]:
    """`(x, y) = (1, 2)` and `A = \\{1, 2\\}` without labels, unless the two labels differ."""
    g, p = label(gold), label(pred)
    if (g is None) == (p is None) and (g is None or p is None or g[0] != p[0]):
        return gold, pred
    if any(pair and not pair[1].startswith(("(", "[", "{", "\\{")) for pair in (g, p)):
        return gold, pred
    return (g[1] if g else gold), (p[1] if p else pred)


def _named_apart(text: str, other: str) -> str:
    """`b = 1, a = 2` for `(b, a) = (1, 2)`, if the other side's items have a name each."""
    pair = label(text)
    if pair is None or not all(part.startswith("(") for part in pair):
        return text
    names, given = (read_shape(part).items for part in pair)
    if len(names) != len(given) or len(names) < 2 or not _labels(read_shape(other)):
        return text
    return ", ".join(f"{name} = {value}" for name, value in zip(names, given, strict=True))


_INDEXED = re.compile(r"([A-Za-z])_\{?\d\}?\s*=\s*")


def without_indices(gold: str, pred: str) -> str:
    """`x = 1, x = 2` for `x_1 = 1, x_2 = 2`, if the reference has no such names."""
    items = split(pred, ",", ";") if "_" in pred and "_" not in gold else []
    found = [_INDEXED.match(item) for item in items]
    if len(found) < 2 or len({m[1] if m else "" for m in found}) > 1 or None in found:
        return pred
    return ", ".join(_INDEXED.sub(r"\1 = ", item, count=1) for item in items)


def _without_labels(side: Shape, other: Shape) -> Shape:
    """Drop the labels of a side whose items all have one, if the other side shows how.

    Several solutions, `p=5, q=2, p=7, q=2`, become a list of tuples; `a = 1, b = 2` becomes the
    tuple (1, 2) if the other side is a tuple without labels. Otherwise labels are kept, and matched
    when the items are compared.
    """
    labels = _labels(side)
    if labels is None:
        return side
    names, values = zip(*labels, strict=True)
    if solutions := _solutions(names, values):
        return Shape(side.kind, solutions)
    if other.kind == "()" and _labels(other) is None and len(set(names)) == len(names):
        if set(names) <= set("xyz"):  # y = 7, x = 2 is (2, 7)
            return Shape("()", [value for _, value in sorted(labels)])
        return Shape("()", list(values))
    return side


def _is_named(shape: Shape) -> bool:
    """True for values of several names, unlike `x = 1, x = 2` or `x_1 = 1, x_2 = 2`."""
    names = {name.partition("_")[0].strip() for name, _ in _labels(shape) or ()}
    return len(names) == len(shape.items)


def _labels(shape: Shape) -> list[tuple[str, str]] | None:
    """The (label, value) pairs of all items; None if an item has no label."""
    pairs = [label(item) for item in shape.items]
    return None if None in pairs else [pair for pair in pairs if pair]


def _solutions(names: tuple[str, ...], values: tuple[str, ...]) -> list[str] | None:
    """`(5,2)` and `(7,2)` for `p=5, q=2, p=7, q=2`; None unless the names recur in order."""
    period = next((k for k in range(1, len(names)) if names[k] == names[0]), len(names))
    repeats = len(names) // period
    if period < 2 or repeats < 2 or names != names[:period] * repeats:
        return None
    return [f"({','.join(values[k : k + period])})" for k in range(0, len(values), period)]


_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
MAX_SIGNS = 3  # signs of an item that are written out; beyond that, all `\pm` have the same sign


def shape_with_signs(text: str) -> Shape:
    """The shape with `\\pm` written out: (±1, 2) is two points, (±1, ±2) four."""
    shape = read_shape(text)
    if shape.kind == "()" and _PLUS_MINUS.search(text):
        shape = Shape("list", [text])
    if shape.kind != "list" or len(shape.items) > MAX_ITEMS:
        return shape
    return Shape("list", [signed for item in shape.items for signed in _with_signs(item)])


def _with_signs(item: str) -> list[str]:
    found = _PLUS_MINUS.findall(item)
    if "\\mp" in found or len(found) > MAX_SIGNS:  # all upper signs, or all lower ones
        return [_with_sign(item, pm="+", mp="-"), _with_sign(item, pm="-", mp="+")]
    signs = product("+-", repeat=len(found))
    return [reduce(lambda text, sign: _PLUS_MINUS.sub(sign, text, 1), s, item) for s in signs]


def _with_sign(item: str, *, pm: str, mp: str) -> str:
    return _PLUS_MINUS.sub(lambda match: pm if match[0] == "\\pm" else mp, item)


# --------------------------------------------------------------------------------- set builder

_REAL = r"\\in\s*\\mathbb\{R\}"
_BAR = r"(?:\||:|\\(?:mid|vert|lvert|colon)(?![A-Za-z])|,?\s*\\text\s*\{\s*such that\s*\})"
_BUILDER = re.compile(
    r"(?:^\s*[A-Za-z]\s*(?:=|\\in)\s*)?(?<![\d)\]}^_])\\?\{\s*"
    rf"(?P<element>[A-Za-z]|\\[a-z]+|[A-Za-z]\s*\\in\s*\\mathbb\{{[ZN]\}}|[^{{}}|:,<>=]*[A-Za-z][^{{}}|:,<>=]*?)\s*(?:{_REAL}\s*(?:{_BAR}|,)"
    rf"|{_BAR})(?P<condition>(?:[^{{}}]|\{{[^{{}}]*\}})*?)\s*\\?\}}(?!\s*[\w^'])"
)
_PARTS = re.compile(rf"\\?\{{((?:[^{{}}|:]|\{{[^{{}}]*\}})*?){_BAR}(.*)\}}", re.DOTALL)
_REAL_LETTER = re.compile(rf"^\s*([A-Za-z])\s*{_REAL}\s*(?:[,;:|]|\\mid|\\land)(?=.*\1)")
_WHOLE = re.compile(r"\s*[a-z]\s*\\in\s*\\mathbb\{Z\}\s*")
_OF_WHOLE = re.compile(r"(.*?)\s*[,;]\s*[a-z]\s*\\in\s*\\mathbb\{Z\}", re.DOTALL)
_COUNTED = re.compile(r"(-?\d{1,9})\s*(<|\\le)\s*([a-z])\s*(<|\\le)\s*(-?\d{1,9})")
_EXCEPT = re.compile(r"([a-z])\s*\\neq?\s*(-?\d{1,9}(?:\s*,\s*-?\d{1,9})*)")
_SINGLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")


def without_builder(gold: str, pred: str) -> tuple[str, str, list[bool]]:
    r"""`\{t \in \mathbb{R} \mid t < 3\}` as the condition `t < 3`, and `\{2k : k \in \mathbb{Z}\}`
    as `2k`, on either side; and which sides were such sets. A set's letter is bound, so it takes
    the other side's name.

    Sets of pairs, and most conditions on integers, are left unchanged (`same_builder`).
    """
    sides, is_bound = [], []
    for side in (gold, pred):
        plain = _REAL_LETTER.sub("", side) if "\\mathbb{R}" in side else side
        sides.append(_BUILDER.sub(_condition, plain) if "{" in plain else plain)
        is_bound.append(sides[-1] != side and bool(_BUILDER.search(side)))
    letters = [set(_SINGLE.findall(side.replace("\\mathbb{R}", " "))) for side in sides]
    if any(is_bound) and len(letters[0]) == len(letters[1]) == 1 and letters[0] != letters[1]:
        sides[1] = re.sub(
            rf"(?<![A-Za-z\\{{]){letters[1].pop()}(?![A-Za-z])", letters[0].pop(), sides[1]
        )
    return sides[0], sides[1], is_bound


def same_builder(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare two sets of the same elements by their conditions; None if a side is not in
    set-builder notation."""
    g, p = (_PARTS.fullmatch(side) if "{" in side else None for side in (gold, pred))
    if g is None or p is None or not any(re.search("[A-Za-z]", m[1]) for m in (g, p)):
        return None
    elements = [re.sub(r"[\s,]", "", m[1]) for m in (g, p)]
    return elements[0] == elements[1] and equal(g[2].strip(" \\"), p[2].strip(" \\"))


def _condition(m: re.Match[str]) -> str:
    element, condition = m["element"].strip(), m["condition"].strip()
    if _WHOLE.fullmatch(condition):
        return m[0] if len(element) == 1 else element
    name, _, domain = element.partition("\\in")
    name = name.strip()
    if domain.strip(" {}") in ("\\mathbb{Z", "\\mathbb{N"):
        without = _EXCEPT.fullmatch(condition)
        if without and without[1] == name and "Z" in domain:
            return rf"\mathbb{{Z}}\setminus\{{{without[2]}\}}"
        return _counted(name, condition) or m[0]
    if domain or not re.fullmatch(r"[A-Za-z]|\\[a-z]+", name):
        return m[0]
    conditions = [part.strip() for part in re.split(r",|;|\\land(?![A-Za-z])", condition)]
    if (general := _OF_WHOLE.fullmatch(condition)) and general[1].startswith(f"{name} = "):
        return general[1].partition("=")[2].strip()
    kept = [c for c in conditions if c and not re.fullmatch(rf"{re.escape(name)}\s*{_REAL}", c)]
    if not kept:
        return r"\mathbb{R}"
    letter = re.compile(rf"{re.escape(name)}(?![A-Za-z])")
    if any("\\mathbb" in c or not letter.search(c) for c in kept):
        return m[0]
    return (r" \land " if _RELATION.search(condition) else ", ").join(kept)


def _counted(name: str, condition: str) -> str:
    """The integers between two bounds, `\\{0, 1\\}` for `-1 < n < 2`; empty for any other text."""
    match = _COUNTED.fullmatch(condition)
    if match is None or match[3] != name:
        return ""
    first, last = int(match[1]) + (match[2] == "<"), int(match[5]) - (match[4] == "<")
    if last - first >= MAX_ITEMS:
        return ""
    return f"\\{{{', '.join(map(str, range(first, last + 1)))}\\}}"


# --------------------------------------------------------------------------- vectors and matrices

_FACTOR = re.compile(
    r"(-?\s*(?:\d+|[a-z]|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|(?<=-)))\s*(?:\\cdot\s*)?"
    r"(\\begin\s*\{[pbB]?matrix\}.*|\(.*,.*\))",
    re.DOTALL,
)
_ROWS = re.compile(r"\s*\[([^\[\]]*;[^\[\]]*)\]\s*")


def with_factor(text: str, other: str) -> str:
    r"""`(t, 2t)` for `t(1, 2)`, and a matrix likewise, if the other side is one too."""
    match = _FACTOR.fullmatch(text)
    if match is None or not other.lstrip("-0123456789abcdefghijklmnopqrstuvwxyz ").startswith(
        ("(", "\\begin", "\\frac")
    ):
        return text
    matrix = read_matrix(match[2])
    if matrix is None or matrix.kind not in ("", "()"):
        return text
    factor = "-1" if match[1].strip() == "-" else match[1]
    rows = [[rf"{factor}\cdot ({cell})" for cell in row] for row in matrix.rows]
    if matrix.kind:
        return f"({', '.join(rows[0])})"
    cells = r" \\ ".join(" & ".join(row) for row in rows)
    return rf"\begin{{pmatrix}}{cells}\end{{pmatrix}}"


def as_rows(text: str) -> str:
    """`[[1,2],[3,4]]` for `[1,2;3,4]` and `[1 2; 3 4]`."""
    match = _ROWS.fullmatch(text)
    if match is None:
        return text
    rows = match[1] if "," in match[1] else re.sub(r"(?<=\w)\s+(?=[-\w])", ",", match[1])
    return f"[{','.join(f'[{row}]' for row in rows.split(';'))}]"


def are_alternatives(reference: str, gold: str, prediction: str, pred: str) -> bool:
    """True for `x = 3 \\text{ or } y = -2` where the reference has both."""
    if not _ALTERNATIVE.search(prediction) or _ALTERNATIVE.search(reference):
        return False
    shapes = [read_shape(side) for side in (gold, pred)]
    return all(len(shape.items) > 1 and _is_named(shape) for shape in shapes)


_ALTERNATIVE = re.compile(r"\b(?:or|oder|ou|oppure)\b|\\(?:lor|vee)(?![A-Za-z])|或|или")


_MATRIX = re.compile(
    r"(?:[\[(]\s*)?\\begin\s*\{(?P<kind>[pbB]?(?:small)?matrix|array)\}\s*(?:\{[lcr|\s]*\})?"
    r"(?P<cells>.*)\\end\s*\{(?P=kind)\}(?:\s*[\])])?",
    re.DOTALL,
)
_TRANSPOSED = re.compile(
    r"(.*)\^\s*(?:\{\s*(?:T|\\top|\\mathsf\s*\{?T\}?)\s*\}|T|\\top)", re.DOTALL
)
_ANGLED = re.compile(r"\\langle(?![A-Za-z])(.*)\\rangle|<([^<>]*)>", re.DOTALL)


class Matrix(NamedTuple):
    """Cells by row. A tuple is a row whose `kind` is its brackets; of a matrix it is ""."""

    rows: list[list[str]]
    kind: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0])


def read_matrix(text: str) -> Matrix | None:
    """Read a matrix or a tuple, perhaps transposed; None for any other text."""
    text = text.strip()
    if match := _TRANSPOSED.fullmatch(text):
        inner = read_matrix(match[1])
        return inner and Matrix([list(row) for row in zip(*inner.rows, strict=True)])
    if (match := _MATRIX.fullmatch(text)) and text.count("\\begin") == 1:
        lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?", match["cells"]) if line.strip()]
        rows = [[cell.strip() for cell in line.split("&")] for line in lines]
        return Matrix(rows) if _is_regular(rows) else None
    if (match := _ANGLED.fullmatch(text)) and balanced(inside := match[1] or match[2] or ""):
        items = split(inside, ",", ";")
        return Matrix([items], "()") if len(items) > 1 else None
    shape = read_shape(text)
    if shape.kind not in ("()", "[]"):
        return None
    nested = [read_shape(item) for item in shape.items]
    if shape.kind == "[]" and all(row.kind == "[]" for row in nested):
        rows = [row.items for row in nested]
        return Matrix(rows) if _is_regular(rows) else None
    return Matrix([shape.items], shape.kind)


def _is_regular(rows: list[list[str]]) -> bool:
    cells = sum(map(len, rows))
    return 0 < cells <= MAX_CELLS and all(
        len(row) == len(rows[0]) and all(cell.strip() for cell in row) for row in rows
    )


def same_vector(gold: str, pred: str, equal: Callable[[str, str], bool]) -> bool | None:
    """Compare matrices and vectors entry by entry; None if neither side is a matrix, in angle
    brackets or a sum of unit vectors, or one of them is neither a matrix nor a tuple."""
    if not re.search(r"matrix|array|\\langle|<|\\vec", gold + pred):
        return None
    named = [label(side) or ("", side) for side in (gold, pred)]
    names = [re.sub(r"\\(?:vec|mathbf|overrightarrow)|[{}\s]", "", name) for name, _ in named]
    if all(re.fullmatch("[A-Za-z]", name) for name in names) and names[0] != names[1]:
        return False
    sides = [side for _, side in named]
    g, p = (read_matrix(side) for side in sides)
    if (g is None) != (p is None):
        vector, text = (p, sides[0]) if g is None else (g, sides[1])
        entries = _entries(vector) if vector and vector.kind != "[]" else []
        if parts := _components(text, len(entries)):
            # Letters of terms that are 0 stand on both sides.
            entries = [rf"{entry}+0\cdot ({parts[-1]})" for entry in (*entries, "0")]
            pairs = zip(parts, entries, strict=True)
            return all(equal(a, b) if g is None else equal(b, a) for a, b in pairs)
    if g is None or p is None:
        return False if g and g.kind == "()" and "\\langle" in gold else None
    if g.kind and p.kind and g.kind != p.kind:
        return False
    if p.kind == "[]" and g.kind:  # an interval
        return False
    if g.shape != p.shape:
        is_turned = bool(g.kind) != bool(p.kind) and g.shape == p.shape[::-1] and 1 in g.shape
        if not is_turned:
            return False
    return all(_same_item(a, b, equal) for a, b in zip(_entries(g), _entries(p), strict=True))


_UNIT_VECTOR = re.compile(r"([\w})]\s*)?\\vec\{([ijk])\}")


def _components(text: str, count: int) -> list[str] | None:
    r"""The entries of a sum of unit vectors, `2\cdot 1+3\cdot 0` and `2\cdot 0+3\cdot 1` for
    `2\vec{i}+3\vec{j}`, and last the sum without any, which must be 0. None for other texts, or if
    there are not `count` entries."""
    axes = "ijk"[:count]
    names = {name for _, name in _UNIT_VECTOR.findall(text)}
    if not names or not names <= set(axes) or count != len(axes):
        return None
    return [_component(text, axis) for axis in (*axes, "")]


def _component(text: str, axis: str) -> str:
    def of(m: re.Match[str]) -> str:
        return (f"{m[1]}\\cdot " if m[1] else "") + ("1" if m[2] == axis else "0")

    return _UNIT_VECTOR.sub(of, text)


def _entries(matrix: Matrix) -> list[str]:
    return [cell for row in matrix.rows for cell in row]
