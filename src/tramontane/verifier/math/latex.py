"""LaTeX → SymPy objects, never evaluated."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.relational import Relational

from tramontane.verifier.math.structure import split

_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ITERATED = re.compile(r"!\s*!")
MAX_LABEL_WORDS = 4
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}")


def parse_answer(text: str) -> Any:
    """The SymPy object of an answer; None if it cannot be parsed.

    Degrees inside trigonometric functions become radians. If an equation as a whole cannot be
    parsed, only its last member is read, since a label may be anything.
    """
    if _ITERATED.search(text):
        return None  # the parser reads n!! as (n!)!
    if (conditions := _parse_conditions(text)) is not None:
        return conditions
    text = text.replace("\\bmod", "\\mod")  # the parser knows only one of them
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\1 \\pi / 180)", text)
    parsed = parse_latex(text)
    members = split(text, "=")
    labelled = parsed is None and len(members) > 1 and not members[0].startswith("-")
    return parse_latex(members[-1]) if labelled and not any(map(_is_prose, members)) else parsed


def _is_prose(label: str) -> bool:
    """True for several statements or sentences, whose last member is not their value."""
    return len(split(label, ",", ";")) > 1 or len(_WORD.findall(label)) > MAX_LABEL_WORDS


def _parse_conditions(text: str) -> Any:
    r"""`x < 1` or `x > 2` (`\cup`), `x > 0` and `x \neq 2` (`\land`) as one object; None if a part
    is not an inequality.

    LaTeX has no standard notation for this, so the parser cannot read it as a whole.
    """
    for separator, join in (("\\cup", sympy.Or), ("\\land", sympy.And)):
        if len(parts := split(text, separator)) > 1:
            parsed = [_parse_conditions(part) or parse_latex(part) for part in parts]
            if all(isinstance(p, Relational | sympy.And | sympy.Or) for p in parsed):
                return join(*parsed, evaluate=False)
            return None
    return None


# The parser reads `dn` as a differential, but only an integral or a derivative has one.
_DIFFERENTIAL = re.compile(
    r"\\i+nt(?![A-Za-z])|\\oint|\\partial|\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d|\\(?:mathrm|text|rm)\s*\{\s*d\s*\}"
)
_LETTER_D = re.compile(
    r"(\\(?:text|textbf|textrm|mathrm|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|_\s*d)|d"
)


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """The SymPy object of a piece of LaTeX; None if it cannot be parsed.

    Raises:
        MemoryError, RecursionError: the process is at its limits, regardless of the text.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if not _DIFFERENTIAL.search(text):
        text = _LETTER_D.sub(lambda m: m[1] or r"\mathbf{d}", text)
    config = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    try:
        return latex2sympy(
            normalize_latex(text, config),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the library has no specific exception for unreadable text
        return None
