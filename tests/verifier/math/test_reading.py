"""The reader of common LaTeX gives what the whole grammar gives, or nothing."""

from __future__ import annotations

import random
import re

import pytest
import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from tramontane.verifier.math import normalize, parsing
from tramontane.verifier.math.parsing import _AS_WRITTEN, _Quick
from tramontane.verifier.math.reading import read
from tramontane.verifier.math.spelling import _RULES, rewritten


def _by_grammar(text: str) -> str:
    config = ConversionConfig(lowercase_symbols=False)
    try:
        parsed = latex2sympy(text, normalization_config=None, conversion_config=config)
    except Exception as error:
        return type(error).__name__
    return str(sympy.srepr(parsed))


def _by_reader(text: str) -> str | None:
    try:
        found = read(text)
    except Exception as error:
        return type(error).__name__
    return None if found is None else str(sympy.srepr(found))


@pytest.mark.parametrize(
    "text",
    [
        r"2x^2-3xy+007",
        r"-\frac{1}{2}+\frac{x+1}{3.5y}",
        r"\frac{63}{400}/2/3",
        r"a_1+a_{12}^{n-1}",
        r"\sqrt[3]{x+1}\sqrt{2}",
        r"e^{-x}(x+1)^2",
        r"3x(3x+1)",
        r"2\sin 2x\cos x+\ln 3",
        r"\sin^2(x)+\log_2 8",
        r"\lfloor\frac{n}{2}\rfloor!",
        r"2|x-1|",
        r"\binom{n}{2}",
        r"1<x\le 2",
        r"x\in [1,2)\cup \{3\}",
        r"(-\infty,2)",
        r"(1,2,\pi)",
        r"(3,2)",
    ],
)
def test_common_texts_are_read_as_by_the_grammar(text: str) -> None:
    assert _by_reader(text) == _by_grammar(text)


@pytest.mark.parametrize(
    "text",
    [
        r"f(x)",
        r"f^2(x)",
        r"I^2",
        r"I_1",
        r"2^{T}",
        r"5\frac{1}{2}",
        r"1,000",
        r"2e5",
        r"\text{gamma}",
        r"arbitrary",
        r"x^2^3",
        r"\sin(x)^2",
        r"\int x",
        r"x = ",
        r"",
    ],
)
def test_texts_that_have_two_readings_are_left_to_the_grammar(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "is_quick"),
    [
        (r"\begin{pmatrix}1&x\\2&3\end{pmatrix}+f(x)y", True),
        (r"\int_0^1 x^2\sin(x)\,dx+1", False),
        (r"x\in\{1,2\}\cap(0,2]\setminus\{1\}", True),
        (r"f(x)=g(2x)-h_1(x,y)", True),
        (r"-2(3)(4x)/5!", True),
        (r"1,000 or 2", True),
        (r"\sum_{k=1}^{9}k^2+\lim_{x\to 0}\frac{f(x)}{x}", False),
        (r"F_n=F_{n-1}+F_{n-2}", False),
        (r"10p^2(1-p)^3", False),
        (r"C_1\cosh x+C_2\sinh x", False),
        (r"1+\circledast", False),
    ],
)
def test_the_grammar_reads_the_same_without_the_calling_rules_or_reads_again_with_them(
    text: str, is_quick: bool
) -> None:
    found = []
    for parse in (_Quick(config=_AS_WRITTEN).parse, parsing._by_grammar):
        try:
            found.append(str(sympy.srepr(parse(text))))
        except Exception as error:
            found.append(type(error).__name__)
    by_grammar = _by_grammar(text)
    assert found == [by_grammar if is_quick else "Exception", by_grammar]


_ATOMS = [
    "1", "12", "3.5", "x", "y", "a_1", "I", "i", "e", "E", "\\pi", "\\theta", "\\infty", "(x+1)",
    "(n)", "{2}", "\\text{gam}", "|x|",
]  # fmt: skip
_BETWEEN = ["", " ", "+", "-", "*", "/", "^", "\\cdot ", "=", "<", ",", "!", "_", "\\sin "]


def test_random_texts_are_read_as_by_the_grammar() -> None:
    draw = random.Random(55)
    read_here = 0
    for _ in range(80):
        parts = [draw.choice(_ATOMS) + draw.choice(_BETWEEN) for _ in range(draw.randint(1, 4))]
        text = "".join(parts) + draw.choice(_ATOMS)
        if draw.random() < 0.2:
            text = draw.choice("([") + text + "," + draw.choice(_ATOMS) + draw.choice(")]")
        found = _by_reader(text)
        if found is not None:
            read_here += 1
            assert found == _by_grammar(text), text
    assert read_here > 25


def test_rules_that_are_skipped_would_not_have_matched() -> None:
    lines = [
        r"\dfrac12",
        "5 choose 2",
        "1{,}000 m",
        "sqrt(2)/2",
        r"\mathbb{R}^{+}",
        "x<=3",
        "cis 30",
    ]
    draw = random.Random(55)
    for _ in range(300):
        text = "".join(draw.sample(lines, 2))[: draw.randint(3, 20)]
        expected = text
        for pattern, replacement in _RULES:
            expected = re.sub(pattern, replacement, expected)
        assert rewritten(text) == expected
    assert normalize.normalize("\\dfrac12") == "\\frac{1}{2}"
