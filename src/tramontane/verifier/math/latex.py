"""LaTeX → SymPy objects, never evaluated."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.relational import Relational

from tramontane.verifier.math.structure import split

_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}")


def parse_answer(text: str) -> Any:
    """The SymPy object of an answer; None if it cannot be parsed.

    Degrees inside trigonometric functions become radians. Where an equation as a whole cannot be
    parsed, its last member is read alone: a label may be anything.
    """
    if (union := _parse_union(split(text, "\\cup"))) is not None:
        return union
    text = text.replace("\\bmod", "\\mod")  # the parser knows only one of them
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\1 \\pi / 180)", text)
    parsed = parse_latex(text)
    members = split(text, "=")
    labelled = parsed is None and len(members) > 1 and not members[0].startswith("-")
    return parse_latex(members[-1]) if labelled else parsed


def _parse_union(parts: list[str]) -> Any:
    """`x < 1` or `x > 2` as one object; None if a part is not an inequality.

    LaTeX has no standard notation for this, so the parser cannot read it as a whole.
    """
    parsed: list[Any] = []
    for part in parts if len(parts) > 1 else []:
        parsed.append(parse_latex(part))
        if not isinstance(parsed[-1], Relational | sympy.And):
            return None
    return sympy.Or(*parsed, evaluate=False) if parsed else None


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """The SymPy object of a piece of LaTeX; None if it cannot be parsed.

    Raises:
        MemoryError, RecursionError: the process is at its limits, regardless of the text.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    try:
        return latex2sympy(
            normalize_latex(text, config),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the library has no exception class of its own for text it cannot read
        return None
