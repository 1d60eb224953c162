"""Hostile answers: every verdict takes little time and memory, and nothing in an answer is run."""

import os
import subprocess
import sys

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verifier import processor
from tramontane.config import BUILT_IN, VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import math
from tramontane.verifier.format import check_format
from tramontane.verifier.math import structure, values
from tramontane.verifier.math.normalize import normalize
from tramontane.verifier.math.numbers import to_number
from tramontane.verifier.math.parsing import parse_latex
from tramontane.verifier.math.structure import read_shape, split
from tramontane.verifier.math.units import split_unit
from tramontane.verifier.pool import VerifierPool

JUDGE_SECONDS = 3.0  # processor time that a quiet machine uses within verifier.timeout_s
MEGABYTES = 512
PATIENT = VerifierConfig(timeout_s=120.0)  # nothing here may be stopped by the clock
MATRIX = r"\begin{pmatrix}" + r"\\".join("&".join("1" * 60) for _ in range(60))
HOSTILE = [
    "9^{9^{9^9}}",
    "2^{1+9^{9}}",
    r"2^{10\cdot 10^{9}}",
    "2^{-10^{9}}",
    r"e^{e^{e^{e^{e}}}}",
    "x^" * 300 + "x",
    "(2^{20})!",
    r"\frac{10^9}{1}!",
    "(10^9+1)!",
    r"\binom{10^9}{10^8}",
    r"{1000000 \choose 500000}",
    r"\sum_{k=1}^{999}\sum_{j=1}^{999}\sum_{i=1}^{999}\frac{1}{i+j+k}",
    r"\sum_{k=1}^{10^{9}} k",
    r"\prod_{k=1}^{999}(x+k)",
    r"\int_0^1 e^{-x^2}\sin(x^3)\,dx",
    "(x+y+z+w)^{200}",
    "(((((x+1)^2+x)^3+x)^4+x)^5+x)^6",
    "+".join(rf"\frac{{1}}{{x+{i}}}" for i in range(30)),
    r"\sqrt{2+" * 11 + "2" + "}" * 11,
    r"\frac{1}{1+" * 11 + "x" + "}" * 11,
    "(" * 12 + "x" + ")" * 12,
    "[(" * 6 + "x" + ")]" * 6,
    r"\log_{" * 11 + "2" + "}2" * 11,
    r"\ln " * 150 + "2",
    "(" * 5000 + "1" + ")" * 5000,
    MATRIX + r"\end{pmatrix}",
    "+-" * 400 + "1",
    "x" * 900,
    "a " * 450,
    "1=" * 300 + "1",
    "1 " * 499,
    "," * 900,
    "1," * 400,
    r"\pm 1" * 150,
    "~" * 900,
    r"\text{" + " " * 900 + "}",
    "5" + " " * 900 + "x",
    "\ufdfa" * 900,
    "½" * 900,
    "√" * 900,
    "e" + "\u0301" * 900,
    "\\" * 999,
    "1" * 100_000,
    "x" * 100_000,
    "\\frac{" * 16_000,
    "{" * 50_000 + "}" * 50_000,
    "__import__('os').system('touch PWNED')",
]
ATTACKS = [
    "__import__('os').system('touch PWNED')",
    "eval('1+1')",
    "exec(\"open('PWNED', 'w')\")",
    "(lambda: 5)()",
    "x.__class__.__bases__[0].__subclasses__()",
    'S(\'__import__("os").system("touch PWNED")\')',
    r"\text{__import__('os').system('touch PWNED')}",
    r"\operatorname{eval}(1)",
    r"\mathrm{__import__}(os)",
    r"x_{__import__('os').system('touch PWNED')}",
    r"\sqrt{exec}(1)",
    r"\immediate\write18{touch PWNED}",
    r"\input{/etc/passwd}",
]
WATCH = """
import re, sys
from tramontane.verifier import math
REFERENCES = ["5", "x+1", "(0,1)", "x<1"]
for warm in ("1+x", r"\\frac{x}{2}", r"x \\in (0,2)", r"\\sin x"):
    math.judge_answer(warm, "x+1")
seen = []
# The LaTeX parser hands tokens of digits to SymPy's Number, which compiles them; nothing else.
DIGITS = re.compile(rb"from sympy import \\*|(Integer|Float) \\('?[0-9., ]+'? ?\\)")
def hook(event, args):
    source = args[0] if args else None
    if event == "compile" and isinstance(source, bytes) and DIGITS.fullmatch(source.strip()):
        return
    if event == "exec" and args[0].co_filename != "<stdin>":
        return  # a module imported late, or what was seen when it was compiled
    if event in ("exec", "compile", "os.system", "os.exec", "subprocess.Popen", "socket.connect"):
        seen.append((event, str(args)[:80]))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, str(args)[:80]))
sys.addaudithook(hook)
for answer in sys.stdin.read().split("\\0"):
    for reference in REFERENCES:
        math.judge_answer(answer, reference)
print(seen)
"""


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(PATIENT, 256, 32) as pool:
        started = Problem("p", "math", "How many are there?", "1", language="en")
        pool.score(started, [response("1")]).result(timeout=300)
        yield pool


def judge_in(pool, reference, answer):
    """The verdict of a worker, which must spend no more than JUDGE_SECONDS on it."""
    problem = Problem("p", "math", "How many are there?", reference, language="en")
    pid = pool._workers[0].child.process.pid
    before = processor.spent(pid)
    [verdict] = pool.score(problem, [response(answer)]).result(timeout=300)
    assert processor.spent(pid) - before < JUDGE_SECONDS, (reference[:60], answer[:60])
    return verdict.verdict


def response(answer):
    return (f"<think>I simply think.</think>The answer is \\boxed{{{answer}}}.", 20)


@pytest.mark.parametrize("reference", ["5", "x+1", "(0,1)"])
@pytest.mark.slow
def test_hostile_answers_through_the_pool(pool, reference):
    """None is right, and the one worker survives them all in little memory."""
    problem = Problem("p", "math", "How many are there?", reference, language="en")
    pool.score(problem, [response("1")]).result(timeout=300)
    for answer in HOSTILE:
        assert judge_in(pool, reference, answer) in ("wrong", "malformed"), answer[:60]
    assert pool.stats().restarts == 0
    with open(f"/proc/{pool._workers[0].child.process.pid}/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    assert int(peak) < MEGABYTES << 10


def test_hostile_references_through_the_pool(pool):
    for reference in HOSTILE:
        assert judge_in(pool, reference, "5") in ("wrong", "unscorable"), reference[:60]
    assert pool.stats().restarts == 0


@pytest.mark.parametrize(
    ("parser", "reference"),
    [
        ("tramontane.verifier.math.reading.read", "x+1"),
        ("tramontane.verifier.math.parsing._Quick.parse", "f(x)+1"),
        ("latex2sympy2_extended.latex2sympy", r"f(x)+\circledast 1"),
    ],
)
def test_out_of_memory_and_out_of_stack_are_never_wrong(monkeypatch, parser, reference):
    for error in (MemoryError, RecursionError):

        def fail(*_, error=error, **__):
            raise error

        parse_latex.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(parser, fail)
            with pytest.raises(error):
                math.judge_answer("2+x", reference)
    parse_latex.cache_clear()


@pytest.mark.slow
def test_nothing_in_an_answer_is_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WATCH],
        input="\0".join([*ATTACKS, *(a for a in HOSTILE if "\0" not in a and len(a) < 2000)]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=600,
    )
    assert done.stdout.strip() == "[]", (done.stdout, done.stderr[-500:])
    assert list(tmp_path.iterdir()) == []


PIECES = [
    *"xyi0123456789+-*/^_=<>!|,;:.()[]{}%'\"~& $",
    *[r"\frac{", r"\sqrt{", r"\left(", r"\right)", r"\sin", r"\log_", r"\cdot", r"\pm", r"\le"],
    *[r"\in", r"\cup", r"\infty", r"\pi", r"\\", r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}"],
    *[r"\sum_{k=1}^{9}", r"\binom{", r"\int_0^1", r"\circ", r"\boxed{", r"\%", r"\pmod", "million"],
    *["or", "and", "where", "²", "√", "½", "°"],
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=80).map("".join),
    st.sampled_from(["5", "x+1", "(0,1]"]),
)
def test_any_text_is_judged_in_bounded_time(prediction, reference):
    with processor.at_most(JUDGE_SECONDS, prediction):
        assert math.judge_answer(prediction, reference).outcome in ("right", "wrong")


@pytest.mark.parametrize("piece", [*PIECES, " ,", "1,", "1 ", "a-", "x_", "()", "\\text{a}", "\\,"])
def test_no_rule_backtracks(piece):
    """Every function that reads an answer, on repeated pieces up to the caps."""
    for text in (piece * 1000, "5" + piece * 999, piece * 999 + "x", "x = " + piece * 900 + "!"):
        text = text[: structure.MAX_LENGTH]
        with processor.at_most(1.5, text):
            normalized = normalize(text)
            for function in (to_number, split_unit, split, read_shape, structure.too_large):
                function(normalized)
            math.judge_answer(text, "5")
    long = (piece * 100_000)[:100_000]
    with processor.at_most(1, piece):
        check_format(f"<think>{long}</think>{long}", BUILT_IN["math"].format)
        assert math.judge_answer(long, "5").outcome == "wrong"


@pytest.mark.parametrize("size", ["1e-600", "0.3", "1", "1.0000001", "7", "1e600"])
def test_a_power_is_too_large_by_the_logarithm_of_its_base(size):
    for base in (mpmath.mpf(size), -mpmath.mpf(size), mpmath.mpc(size, size)):
        for factor in ("0.1", "3", "3.3", "3.4", "900", "2300", "2400", "1e9", "1e300"):
            scaled = mpmath.mpf(factor) * abs(mpmath.log(base))
            above = values._log_above(base, mpmath.mpf(factor))
            assert above == (scaled > values.MAX_MAGNITUDE * mpmath.log(10))


def test_values_refute_and_prove():
    parse = parse_latex
    assert values.equal(parse("(x+y)^{40}"), parse("(y+x)^{39}(x+y)"))
    assert not values.equal(parse("(x+y)^{40}"), parse("(x+y)^{40}+10^{-25}"))
    assert not values.equal(parse("2^{2008}-2"), parse("2^{2008}-3"))
    assert not values.equal(parse(r"e^{\pi\sqrt{163}}"), parse("262537412640768744"))
    assert values.equal(parse(r"\sqrt{3+2\sqrt{2}}"), parse(r"1+\sqrt{2}"))
    assert not values.equal(parse(r"\sqrt{x^2}"), parse("x"))
    with pytest.raises(values.TooLarge):
        values.equal(parse("2^{10^{9}}"), parse("2^{10^{9}}+1"))
