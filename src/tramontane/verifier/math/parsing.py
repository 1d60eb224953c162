r"""LaTeX → SymPy objects, never evaluated.

The parser (latex2sympy2_extended) drops some notation, such as primes, the sign in `\log_2+3` and
the label of an equation, and it adds neighboring numbers, as in mixed numbers. Here every token has
a meaning in the parsed object, or makes the text unreadable.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import latex2sympy2_extended
import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.relational import Relational

from tramontane.verifier.math import equations, reading, values
from tramontane.verifier.math.structure import split

_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
MAX_LABEL_WORDS = 4
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}")
_WORDS_ONLY = re.compile(
    r"(?:\\(?:text\w*|mathrm|mbox|operatorname)\s*\{[^{}]*\}|[^\W\d_]|[\s:.'-])+"
)


def parse_answer(text: str, *, labeled: bool = True) -> Any:
    """The SymPy object of an answer; None if it cannot be parsed.

    Degrees inside trigonometric functions become radians. If an equation as a whole cannot be
    parsed, and `labeled`, only its last member is read, if the others are names or words.
    """
    if (conditions := _parse_conditions(text)) is not None:
        return conditions
    text = text.replace("\\bmod", "\\mod")  # the parser knows only one of them
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"(\1 \\pi / 180)", text)
    parsed = parse_latex(text)
    if parsed is not None or not labeled:
        return parsed
    *labels, value = split(text, "=") or [""]
    if not labels or not all(map(_is_label, labels)):
        return None
    # The last member of several statements or sentences is not their value.
    is_prose = any(
        len(split(member, ",", ";")) > 1 or len(_WORD.findall(member)) > MAX_LABEL_WORDS
        for member in (*labels, value)
    )
    return None if is_prose else parse_latex(value)


def _is_label(member: str) -> bool:
    if equations.is_name(member) or _WORDS_ONLY.fullmatch(member):
        return True
    return parse_latex(member) is not None and not member.startswith("-")


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
_FUNCTION = (
    r"\\(?:log|ln|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)(?![A-Za-z])"
    r"\s*(?:[_^]\s*(?:\{[^{}]*\}|\\?\w)\s*)*"
)
_ALONE = r"(?<![\w.^\\])"  # before a number that is not an index, an exponent or a part of one
# What the parser drops, or reads as something else.
_UNREADABLE = re.compile(
    rf"{_FUNCTION}\+"  # \log_2+3
    rf"|{_ALONE}\d+\s*_"  # digits with an index
    rf"|{_ALONE}\d+(?:\.\d*)?(?:\s+\d|\s*\{{\s*[-+]?\d)"  # 5 3 is not 8
    # A derivative: x^{(2)}; other brackets.
    r"|[A-Za-z)}]\s*\^\s*\{\s*(?:\(\s*(?:\d+|[ivx]+)\s*\)|\[[^\[\]]*\])\s*\}"
    r"|\d\s*\\\$|\^\{\\circ\}\s*\^"  # two units
    r"|!\s*!"  # n!! is not (n!)!
    r"|[\"”″']|\\prime(?![A-Za-z])"  # primes of a letter are a part of its name (`_PRIMED`)
    r"|_\s*(?:\w|\{[^{}]*\})\s*_"  # two indices
    # The degrees of a whole term only: `180^\circ-x`, not `9^\circ y`.
    r"|\^\{\\circ\}(?!\s*(?:[-+)}\]=,<>]|\\[lg]e(?![A-Za-z])|$))|(?:\\sqrt|\})\s*\{[^{}]*\^\{\\circ\}"
    # A function alone: `\sin`.
    rf"|{_FUNCTION}(?:$|[-*/,;=)\]}}](?!\s*[\w(\\{{]))"
)
_MIXED = re.compile(
    rf"{_ALONE}(\d{{1,9}})(?:\s*\\frac\s*\{{\s*(\d{{1,9}})\s*\}}\s*\{{\s*(\d{{1,9}})\s*\}}"
    r"|\s+(\d{1,9})\s*/\s*(\d{1,9})(?![\w.]))"
)
# The parser reads `(-2)(3)` and `(5)2` as mixed numbers.
_BRACED = re.compile(r"(?<=[\d)])\s*\{\s*(\([^(){}]*\))\s*\}")
_PRODUCT = re.compile(
    rf"({_ALONE}(?:\d+(?:\.\d*)?)|\([^(),]*\))\s*(?=\([^(),]*\))|(\(\s*[-+]?\d[\d.]*\s*\))\s*(?=\d|\\frac)"
)
_PRIMED = re.compile(
    r"(?:\\([A-Za-z]+)|([A-Za-z]))(_(?:\w|\{\w+\}))?(?:('+)|\^\{\s*((?:\\prime\s*|')+)\})"
)
_GAMMA = re.compile(r"\\(?:gamma(?![A-Za-z])|Gamma(?![A-Za-z])(?!\s*\())")
_DECIMAL_POWER = re.compile(r"\^\s*\{\s*(-?)\s*(\d{0,9}\.\d{1,9})\s*\}")
_GCD = re.compile(
    r"(?:\\(?:operatorname|text|mathrm)\s*\{\s*(gcd|lcm)\s*\}|\\(gcd|lcm)(?![A-Za-z]))\s*(?=\()"
)
_CURRENT = re.compile(
    r"(\\(?:text\w*|math\w*|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+)|I"
)
_OF_MATRIX = re.compile(r"\\(det|dim|ker|tr|rank)\s+([A-Z])(?![A-Za-z])")
_DET_OF_PRODUCT = re.compile(r"\\det\s*\(?\s*((?:[A-Z]\s*){2,4})(?![A-Za-z^_'])\)?")
_HAS_RARE = re.compile(
    r"['()I]|\\(?:det|dim|ker|tr|rank)|\\prime|\\[gG]amma|\^\s*\{[-\s]*\d*\.|\d\s*\\frac|\d\s+\d"
)


def _spelled(text: str) -> str:
    """A text as the parser reads it: mixed numbers as fractions, products with a sign, primes and
    `\\gamma` as letters."""
    if _HAS_RARE.search(text):
        text = _MIXED.sub(_improper, text)
        text = _DET_OF_PRODUCT.sub(
            lambda m: "".join(rf"\det {letter} " for letter in m[1].replace(" ", "")), text
        )
        text = _OF_MATRIX.sub(lambda m: rf"\mathbf{{{m[1].upper()}{m[2]}}}", text)
        text = _PRODUCT.sub(r"\1\2\\cdot ", _BRACED.sub(r"\1", text))
        text = _PRIMED.sub(_primed, text)
        text = _GCD.sub(
            lambda m: (values.GCD if "gcd" in m.groups() else values.LCM).__name__, text
        )
        text = _CURRENT.sub(lambda m: m[1] or r"\mathbf{I}", text)
        text = _GAMMA.sub(lambda m: r"\mathbf{gam}" if m[0][1] == "g" else r"\mathbf{Gam}", text)
        text = _DECIMAL_POWER.sub(_exact_power, text)
    if not _DIFFERENTIAL.search(text):
        text = _LETTER_D.sub(lambda m: m[1] or r"\mathbf{d}", text)
    return text


def _improper(m: re.Match[str]) -> str:
    whole, top, bottom = int(m[1]), int(m[2] or m[4]), int(m[3] or m[5])
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}" if bottom else m[0]


def _primed(m: re.Match[str]) -> str:
    marks = m[4] or m[5]
    count = marks.count("'") + marks.count("\\prime")
    return rf"\mathbf{{{m[1] or m[2]}{'prime' * count}}}{m[3] or ''}"


def _exact_power(m: re.Match[str]) -> str:
    exponent = Fraction(m[2])
    if exponent.denominator == 1:
        return f"^{{{m[1]}{exponent}}}"
    return rf"^{{{m[1]}\frac{{{exponent.numerator}}}{{{exponent.denominator}}}}}"


_AS_WRITTEN = ConversionConfig(lowercase_symbols=False)


class _Quick(_Latex2Sympy):
    """The whole grammar, whose parser looks ahead without regard to the rules that called a rule
    (SLL), in a part of the time: it reads a text as with regard to them (LL), or finds a syntax
    error."""

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


def _by_grammar(text: str) -> Any:
    try:
        return _Quick(config=_AS_WRITTEN).parse(text)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of the syntax, perhaps in this way of looking ahead alone
        return latex2sympy2_extended.latex2sympy(
            text, normalization_config=None, conversion_config=_AS_WRITTEN
        )


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """The SymPy object of a piece of LaTeX; None if it cannot be parsed.

    Raises:
        MemoryError, RecursionError: the process is at its limits, regardless of the text.
    """
    text = _spelled(text)
    if _UNREADABLE.search(text):
        return None
    config = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    text = normalize_latex(text, config)
    try:
        if (common := reading.read(text)) is not None:
            return common
        return _by_grammar(text)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the library has no specific exception for unreadable text
        return None
