r"""Answers near a reference, for each class in which a wrong answer was once accepted. Each is
drawn together with whether it is right, so a check needs no judge.

Each function draws (reference, answer, is right) triples. Others that are known to be wrong or
right belong here, in the class of their fault.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator

Draw = random.Random
Case = tuple[str, str, bool]

# -------------------------------------------------------------------------------- steps of integers

_Form = tuple[str, Callable[[int, int, int], int]]
_STEPS: list[_Form] = [
    (r"\lfloor\frac{{n+{b}}}{{{a}}}\rfloor", lambda n, a, b: (n + b) // a),
    (r"\lceil\frac{{n+{b}}}{{{a}}}\rceil", lambda n, a, b: -(-(n + b) // a)),
    (r"(n+{b})\bmod {a}", lambda n, a, b: (n + b) % a),
    (r"\lfloor\sqrt{{n+{b}}}\rfloor", lambda n, a, b: math.isqrt(n + b)),
    (r"\lfloor\log_2(n+{b})\rfloor", lambda n, a, b: (n + b).bit_length() - 1),
    (r"\binom{{n+{b}}}{{{a}}}", lambda n, a, b: math.comb(n + b, a)),
    (r"\max(n,{a})", lambda n, a, b: max(n, a)),
    (r"\gcd(n+{b},{a})", lambda n, a, b: math.gcd(n + b, a)),
]


def steps(draw: Draw) -> Iterator[Case]:
    """Floors, remainders, binomials, divisors: the same with a number changed by one, or the value
    that they have at n = 1."""
    form, value = draw.choice(_STEPS)
    a, b = draw.choice([2, 3, 5, 7, 10, 12, 30, 60, 97]), draw.randint(1, 6)
    changed = draw.choice([(a + 1, b), (a, b + 1), (a, b - 1)])
    numbers = range(1, 101)
    reference = form.format(a=a, b=b)
    yield reference, re.sub(r"(?<![A-Za-z\\])n", "n+0", reference), True
    if any(value(n, a, b) != value(n, *changed) for n in numbers):
        yield reference, form.format(a=changed[0], b=changed[1]), False
    if any(value(n, a, b) != value(1, a, b) for n in numbers):
        yield reference, str(value(1, a, b)), False


# ------------------------------------------------------------------------------------ letters

_LETTERS = [
    "alpha", "beta", "gamma", "Gamma", "delta", "Delta", "zeta", "eta", "lambda", "mu", "psi",
    "rho", "sigma", "Sigma", "phi", "omega",
]  # fmt: skip
_CONSTANTS = [0, 1, 2, 0.5772156649015329, 1.618033988749895, 2.718281828459045]


def letters(draw: Draw) -> Iterator[Case]:
    """Greek letters, which are neither constants nor other letters."""
    name, other = draw.sample(_LETTERS, 2)
    k = draw.randint(2, 9)
    form, value = draw.choice([
        (rf"\{{}}^2+{k}", lambda x: x * x + k),
        (rf"{k}\{{}}", lambda x: k * x),
        (rf"\frac{{{{\{{}}}}}}{{{{{k}}}}}", lambda x: x / k),
        (rf"{k}-\{{}}", lambda x: k - x),
    ])  # fmt: skip
    reference = form.format(name)
    yield reference, rf"0+{reference}", True
    yield reference, form.format(other), False
    number = value(draw.choice(_CONSTANTS))
    yield reference, f"{number:.15g}", False


# -------------------------------------------------------------------------------------- words

_PARTS = [
    r"{x}\text{{ hours }}{y}\text{{ minutes}}", r"{x}\text{{ feet }}{y}\text{{ inches}}",
    r"{x}\text{{ m }}{y}\text{{ cm}}", r"{x}\text{{ dollars }}{y}\text{{ cents}}",
    r"{x}\text{{ weeks }}{y}\text{{ days}}", r"{x} hours {y} minutes", r"{x} pounds {y} ounces",
    r"{x}\text{{ red and }}{y}\text{{ blue}}", r"{x}\text{{ wins and }}{y}\text{{ losses}}",
    r"\text{{(a) }}{x}\text{{ (b) }}{y}", r"(i) {x}, (ii) {y}", r"{x}\text{{ R }}{y}",
    r"\text{{mean }}{x}\text{{ and variance }}{y}", r"\text{{row }}{x}\text{{ column }}{y}",
    r"{x}\text{{ out of }}{y}", r"{x}\text{{ to }}{y}", r"{x}^\circ {y}'",
    r"\text{{Team A: }}{x}\text{{ Team B: }}{y}", "P(X=1)=0.{x}, P(X=2)=0.{y}",
    "f(1)={x}, f(2)={y}", "a_1={x}, a_2={y}", "x={x}, y={y}",
]  # fmt: skip


def words(draw: Draw) -> Iterator[Case]:
    """Two values with words or names between them, in each other's place, and combined."""
    form = draw.choice(_PARTS)
    x, y = draw.sample(range(2, 10), 2)
    reference = form.format(x=x, y=y)
    yield reference, re.sub(r"\\text\{ ", r"\\text{  ", reference), True
    yield reference, form.format(x=y, y=x), False
    yield reference, str(x * y), False
    if "out of" not in form and "to" not in form:
        yield reference, form.format(x=x + 1, y=y), False


# ---------------------------------------------------------------------------- products, fractions


def products(draw: Draw) -> Iterator[Case]:
    """Products in brackets, and mixed numbers, which are sums."""
    a, b = (draw.choice([-1, 1]) * draw.randint(2, 9) for _ in range(2))
    yield str(a * b), f"({a})({b})", True
    if a + b != a * b:
        yield str(a + b), f"({a})({b})", False
    yield str(a * b), f"({a})({b + 1})", False
    if b > 0:
        yield str(a * b), f"({a}){b}", True
        yield str(a + b if a + b != a * b else 0), f"({a}){b}", False
    whole, (top, bottom) = draw.randint(1, 7), sorted(draw.sample(range(1, 9), 2))
    factor = draw.choice(["x", r"\pi", r"\sqrt{2}", r"\sqrt3", "xy", ""])
    mixed = rf"{whole}\frac{{{top}}}{{{bottom}}}{factor}"
    improper = rf"\frac{{{whole * bottom + top}}}{{{bottom}}}{factor}"
    yield mixed, improper, True
    yield improper, mixed, True
    if whole * top != whole * bottom + top:
        yield mixed, rf"\frac{{{whole * top}}}{{{bottom}}}{factor}", False
    yield mixed, rf"\frac{{{whole * bottom + top + 1}}}{{{bottom}}}{factor}", False


# -------------------------------------------------------------------------------- dropped tokens

REFERENCES = [
    "42", "x=5", "(1,2)", r"\frac{3}{4}", r"2\sqrt{3}", "x^2+1", r"\log_2 3", r"\frac{\pi}{6}",
    "f(x)=2x+1", "3:4:5", r"\{1,2\}", r"[0,3)", "2+3i", r"90^\circ", r"15\text{ cm}", "-7y",
    r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor n/10\rfloor", r"\gamma^2+1", "a_n=2^n-1", "1011_2",
    r"2\text{ hours }30\text{ minutes}", r"30^\circ 15'", r"2\frac{1}{2}", r"x<3",
    r"\binom{n}{3}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"3\pmod 7", "P(X=1)=0.4, P(X=2)=0.6",
]  # fmt: skip
# Tokens that change or spoil every answer, wherever they stand.
TOKENS = [
    r"\neg ", r"\lim ", r"\sum ", r"\dot ", r"\to ", r"\star ", "'", '"', r"^{\prime}", "_7",
]  # fmt: skip
TOKEN = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[A-Za-z]+ ?|\\.|\d+|.")


def tokens(draw: Draw) -> Iterator[Case]:
    """One token more."""
    reference = draw.choice(REFERENCES)
    parts = TOKEN.findall(reference)
    place = draw.randint(0, len(parts))
    yield reference, "".join([*parts[:place], draw.choice(TOKENS), *parts[place:]]), False


# (reference, right answer, wrong answer), of numbers that are drawn.
_MEANINGS = [
    ("{a}:{b}:{c}", "{a2}:{b2}:{c2}", "{a}:{c}:{b}"),
    ("{a}:{b}:{c}", "{a} : {b} : {c}", r"\frac{{{a}}}{{{bc}}}"),
    (r"{a}^\circ {b}'", r"{a}°{b}′", r"{ab}^\circ"),
    (r"{a}k+{b}, k\in\mathbb{{Z}}", r"{b}+{a}n, n\in\mathbb{{Z}}", r"{a}k+{b}, k\in\mathbb{{N}}"),
    (r"{a}k\pi, k\in\mathbb{{Z}}", r"{a}\pi n, n\in\mathbb{{Z}}", r"{a}k\pi, k\in\mathbb{{R}}"),
    ("f(x)={a}x+{b}", "f(t)={b}+{a}t", "f'(x)={a}x+{b}"),
    ("v={a}t^{b}", "{a}t^{b}", r"\dot v={a}t^{b}"),
    ("x={a}", "{a}", r"\neg x={a}"),
    ("a_n={a}n+{b}", "a_k={a}k+{b}", r"\sum a_n={a}n+{b}"),
    ("P(X=1)=.{a}, P(X=2)=.{b}", "P(X=2)=.{b}, P(X=1)=.{a}", "P(X=1)=.{b}, P(X=2)=.{a}"),
    (r"\log_{a} {b}", r"\frac{{\ln {b}}}{{\ln {a}}}", r"\log_{a}+{b}"),
    ("x^{a}", "{{x}}^{a}", "x^{{({a})}}"),
    (r"{a}\pmod {m}", r"x\equiv {a}\pmod {m}", r"x\not\equiv {a}\pmod {m}"),
    ("x={a}, y={b}", r"x={a}\text{{ and }}y={b}", r"x={a}\text{{ or }}y={b}"),
    (r"{a}\text{{ square units}}", "{a}", r"{a}\text{{ cubic units}}"),
    (r"{a}\text{{ cm}}^2", r"{a}\text{{ square centimeters}}", r"{a}\text{{ cm}}^3"),
    ("0.0{a}", r"{a}\%", r"0.0{a}\%"),
    (r"\${a},{b}50", "{a}{b}50", "{b}50,{a}"),
    ("{a},{b}50", "{a}{b}50", "{b}50,{a}"),
    ("{a}I^2", r"I^2\cdot {a}", "{a}I"),
    ("({a},{b}7)", "({a}, {b}7)", r"({a},\text{{or }}{b}7)"),
    ("[{a},{b}7]", "[{a}; {b}7]", r"[{a}\text{{ or }}{b}7]"),
    ("({a},{b})", r"\left({a},\,{b}\right)", "({a},,{b})"),
    ("x={a}", r"x\approx {a}", r"x=\sim {a}"),
    ("{a}", r"\approx {a}", r"\sim {a}"),
    (r"\vec a\times\vec b", r"\vec{{a}} \times \vec{{b}}", r"\vec b\times\vec a"),
    (r"A\times B", r"A \times B", r"B\times A"),
    (r"A\cap(B\cup C)", r"(C\cap A)\cup(A\cap B)", r"(A\cap B)\cup C"),
    (
        "|x-{a}|",
        r"\begin{{cases}}x-{a}&x\ge {a}\\{a}-x&x<{a}\end{{cases}}",
        r"\begin{{cases}}x-{a}&x>{a}\\{a}-x&x<{a}\end{{cases}}",
    ),
    (r"{a}\text{{ cents}}", "{a}c", "{b}{a}c"),
    (
        r"(k,k+{a}), k\in\mathbb{{Z}}",
        r"(n+{b},n+{ab}), n\in\mathbb{{Z}}",
        r"(k,k-{a}), k\in\mathbb{{Z}}",
    ),
    (
        r"(k,k+1), k\in\mathbb{{Z}}",
        r"(-n,1-n), n\in\mathbb{{Z}}",
        r"({b}k,k+1), k\in\mathbb{{Z}}",
    ),
    (r"n\equiv {a}\pmod {m}", r"x\equiv {a}\pmod{{{m}}}", r"{b}n\equiv {a}\pmod {m}"),
    (r"n\equiv 1,{a}\pmod {m}", r"n\equiv {a},1\pmod {m}", r"n^{b}\equiv 1,{a}\pmod {m}"),
    (r"P(A\mid B)=.{a}", "P(A|B)=0.{a}", "P(AB)=.{a}"),
    (
        r"{a}\text{{ hours and }}{b}\text{{ minutes}}",
        "{a} h {b} min",
        r"{a}\text{{ hours and }}-{b}\text{{ minutes}}",
    ),
    (r"\{{x : x>0\}}", r"(0,\infty)", r"\{{x : x>0\}}^{{{b}}}"),
    (r"\text{{even}}", "Even", "¬even"),
    (r"\triangle ABC", r"\triangle{{ABC}}", r"\triangle ABC''"),
    ("x+{a}y=0", "{a}y+x=0", r"x+{a}y=0\text{{ or more}}"),
    ("x+{a}y=0", "-x-{a}y=0", "x+{a}y=0k"),
    (r"(-\infty,{a})", "x<{a}", r"(F-\infty,{a})"),
    ("[0,{a})", "0\\le x<{a}", "[0y=,{a})"),
    (r"({a},\frac{{{b}}}{{{c}}})", r"({a},{b}/{c})", r"({a},\frac{{{b}}}{{{c}}}=)"),
    (r"\cot {a}x", r"\cot({a}x)", r"\cot_{b} {a}x"),
    ("(x+{a})^{b}", "({a}+x)^{b}", "(x+{a})^{b}_{c}"),
    ("{a}x^2+{b}", "{b}+{a}x^2", "{a}x^2+{b}^T"),
    (r"0.{a}\text{{ miles}}", "0.{a}0 miles", r"0.{a}_n\text{{ miles}}"),
    (r"n\equiv {a}\pmod {m}", r"n={m}k+{a}", "n={a}"),
    ("{a}:{b}:{c}", "{a2}:{b2}:{c2}", "0:0:0"),
    ("x:y:z={a}:{b}:{c}", "{a2}:{b2}:{c2}", "x:y:z={a}:{c}:{b}"),
    (r"{a}k\pi, k\in\mathbb{{Z}}", r"{a}n\pi, n\in\mathbb{{Z}}", r"{a}k\pi, n\in\mathbb{{Z}}"),
    (
        r"(t,{a}t), t\in\mathbb{{R}}",
        r"({b}s,{ab2}s), s\in\mathbb{{R}}",
        r"({a}t,t), t\in\mathbb{{R}}",
    ),
    ("{a},{b}50", "{a}{b}50", "({a},{b}50)"),
    ("P(X=1)=.{a}", ".{a}", "E(X)=.{a}"),
    (r"\$\frac{a}{b}\approx\$1", r"\frac{a}{b}", r"\$\frac{a}{b}\approx\${c}7"),
    (r"\{{{a}, {ab}, {abb}, \ldots\}}", r"{a}, {ab}, {abb}, \ldots", r"\{{{a}, {ab}, {abb}\}}"),
    (r"\{{{a}n : n\ge 1\}}", r"\{{ {a}n : n\ge 1 \}}", r"\{{{a}n : n\ge {b}\}}"),
    ("{a}|z|^2", r"|z|^2\cdot {a}", "{a}z^2"),
    (r"\sqrt{{{a}7}}", r"{a}7^{{1/2}}", r"\sqrt{{{a}7}}\%"),
    (r"\vec{{v}}=({a},{b})", "({a},{b})", r"\vec{{u}}=({a},{b})"),
    (
        r"\text{{speed }}{a}\text{{ km/h, distance }}{b}\text{{ km}}",
        "speed {a} km/h, distance {b} km",
        r"\text{{speed }}{b}\text{{ km/h, distance }}{a}\text{{ km}}",
    ),
    (
        r"\begin{{cases}}x^2&x\ge 0\\-{a}x&x<0\end{{cases}}",
        r"\begin{{cases}}-{a}x&x\le 0\\x^2&x>0\end{{cases}}",
        r"\begin{{cases}}x^2&x\ge 0\\-{a}x&x<{b}\end{{cases}}",
    ),
]


def meanings(draw: Draw) -> Iterator[Case]:
    """Notation that a parser drops or reads as something else."""
    reference, right, wrong = draw.choice(_MEANINGS)
    a, b, c = draw.sample(range(2, 10), 3)
    k = draw.randint(2, 5)
    numbers = {
        "a": a, "b": b, "c": c, "a2": k * a, "b2": k * b, "c2": k * c, "bc": b * c, "ab": a + b,
        "ab2": a * b, "abb": a + 2 * b, "m": 11,
    }  # fmt: skip
    yield reference.format(**numbers), right.format(**numbers), True
    yield reference.format(**numbers), wrong.format(**numbers), False


CLASSES: dict[str, Callable[[Draw], Iterator[Case]]] = {
    "steps": steps,
    "letters": letters,
    "words": words,
    "products": products,
    "tokens": tokens,
    "meanings": meanings,
}

# ------------------------------------------------------------------------------- tests of programs

_CHECKS = ["assert f(3) == 4", "assert f(1) == 2 and f(5) == 6", "assert [f(1), f(2)] == [2, 3]"]
_STYLES = [
    "{check}", "def test_f():\n    {check}", "class TestF:\n    def test_f(self):\n        {check}",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        {check}",
    "def check(candidate):\n    f = candidate\n    {check}", "def helper():\n    {check}",
    "def main():\n    {check}\nif __name__ == '__main__':\n    main()", "if False:\n    {check}",
    "try:\n    {check}\nexcept Exception:\n    pass", "assert 1 + 1 == 2", "", "print(f(3))",
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_f(self): self.assertEqual(f(3), 4)\n"
    "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "import pytest\n@pytest.mark.parametrize('a', [3])\ndef test_f(a):\n    {check}",
    "def run_tests():\n    return f(3) == 4\nrun_tests()",
    "try:\n    {check}\nexcept AssertionError:\n    print('failed')",
    "import contextlib\nwith contextlib.suppress(AssertionError):\n    {check}",
    "class Base:\n    def test_f(self):\n        {check}\nclass TestF(Base): pass",
    "assert (f(3) == 4, 'it adds')", "assert f(3) == 4 or True", "assert f(3) == f(3)", "assert f",
    "assert callable(f)", "for x in []:\n    {check}", "while False:\n    {check}",
    "assert all(f(x) == 4 for x in [])", "[f(x) == 4 for x in [3]]", "(lambda: f(3) == 4)()",
    "import sys\nsys.exit(0)\n{check}", "def outer():\n    def inner():\n        {check}\nouter()",
    "async def test_f():\n    {check}", "async def main():\n    {check}\nmain()",
    "import pytest\n@pytest.mark.skip\ndef test_f():\n    {check}",
    "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('')\n"
    "    def test_f(self): self.assertEqual(f(3), 4)",
    "import pytest\ndef test_f():\n    pytest.skip()\n    {check}",
    "import pytest\n@pytest.mark.xfail\ndef test_f():\n    {check}",
    "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n"
    "    def test_f(self): self.assertEqual(f(3), 4)",
    "def test_f():\n    return f(3) == 4", "def test_f():\n    yield f(3) == 4",
    "try:\n    {check}\nfinally:\n    raise SystemExit(0)",
    "try:\n    {check}\nexcept:\n    quit()", "def test_f(f=lambda x: 4):\n    assert f(3) == 4",
    "import threading\nt = threading.Thread(target=lambda: f(3) / 0)\nt.start()\nt.join()",
    "import warnings\nif f(3) != 4: warnings.warn('wrong')",
    "import logging\nif f(3) != 4: logging.error('wrong')", "passed = f(3) == 4",
    "results = [f(3) == 4]\nprint(sum(results), 'passed')", '\'\'\'\n>>> f(3)\n4\n\'\'\'',
    "import random\nassert random.random() < 2", "f = lambda x: x + 1\n{check}",
    "def f(x): return x + 1\n{check}", "import math\nassert math.isnan(float('nan')) or f(3) == 4",
    "assert isinstance(f(3), object)", "assert f(3) is not NotImplemented", "assert len(str(f(3)))",
    "import math\n@__import__('functools').wraps(f)\ndef test_f():\n    {check}\n    ",
    "import pytest\nwith pytest.raises(Exception):\n    {check}", "{check}  if 0 else 1",
    "import unittest\nunittest.main(exit=False, argv=['x'])", "pass\n# {check}", "'{check}'",
    "assert f(3) == 4 if hasattr(f, 'x') else True", "match 1:\n    case 2:\n        {check}",
    "import os\nif os.environ.get('RUN_TESTS'):\n    {check}",
    "if __name__ == 'tests':\n    {check}",
]  # fmt: skip
NAMES = ["f", "gcd", "sqrt", "comb", "mean", "max", "accumulate"]


def function_tests(draw: Draw) -> tuple[str, str, str]:
    """Tests of a function, the statement, and the entry point, which may be missing: none that a
    program that returns None for everything passes."""
    code = draw.choice(_STYLES).format(check=draw.choice(_CHECKS))
    name = draw.choice(NAMES)
    code = re.sub(r"\bf\(", f"{name}(", code).replace("f = candidate", f"{name} = candidate")
    entry_point = name if name == "f" or draw.random() < 0.5 else ""
    return code, f"Write {name}(x), which adds 1.", entry_point
