r"""Vectors and matrices as they are written, compared entry by entry.

A vector may be written as a column, as a row, or as a tuple in round or angle brackets; a column
is not a row. `[1, 2]`, which is an interval elsewhere, is a vector where the reference is a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tramontane.verifier.math.caps import MAX_CELLS
from tramontane.verifier.math.structure import balanced, label, read_shape, split

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
        return (
            None if inner is None else Matrix([list(row) for row in zip(*inner.rows, strict=True)])
        )
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
    """Compare matrices and vectors entry by entry; None where no side is a matrix or in angle
    brackets, or one of them is neither a matrix nor a tuple."""
    if not re.search(r"matrix|array|\\langle|<", gold + pred):
        return None
    g, p = (read_matrix(_without_name(side)) for side in (gold, pred))
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
    entries = [[cell for row in side.rows for cell in row] for side in (g, p)]
    return all(equal(a, b) for a, b in zip(*entries, strict=True))


def _without_name(text: str) -> str:
    r"""The value of `\vec{v} = …`."""
    pair = label(text)
    return pair[1] if pair else text
