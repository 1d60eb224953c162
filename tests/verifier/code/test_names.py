"""Whose name is whose in function tests, the statement's own functions, and programs that do
nothing, without running any."""

import os
import sys
from dataclasses import replace

import pytest

from tramontane.types import Problem
from tramontane.verifier.code.functions import (
    _late,
    _verdict,
    _with_helpers,
    doing_nothing,
    helper_source,
    names_of,
)
from tramontane.verifier.code.inside import records, wire
from tramontane.verifier.code.sandbox import Limits, Results
from tramontane.verifier.code.sandbox.running import Result, Times

MEAN = "assert mean([1, 2]) == 1.5"


@pytest.mark.parametrize(
    ("code", "statement", "entry_point", "program"),
    [
        ("assert f(1) == g(2)", "", "f", "f"),
        ("assert f(1) == g(2)", "Write f.", "f", "f"),  # only named, not called
        ("assert f(1) == 2", "", "Solution().f", "f"),
        ("s = Solution()\nassert s.f(1) == 2", "", "Solution().f", "Solution"),
        ("f = abs\nassert f(1) == 2", "", "f", "f"),  # assigned, and still the entry point
        ("assert Solution().f(1) == 2", "", "", "Solution"),  # LeetCode's, without an entry point
        # The tests' own, whatever the statement says.
        ("import it as g\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("import g.it\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("from it import g\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("def g(x): return x\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("async def g(x): return x\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("class g: pass\nassert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("for g in (abs, int):\n    assert f(g(1)) == 2", "Write g(x).", "f", "f"),
        ("def t(g):\n    assert f(g(1)) == 2", "Write g(x).", "f", "f"),
        # The statement defines or calls it.
        ("x = A(f(1))", "class A: ...", "f", "A f"),
        ("assert f(g(1)) == 2", "Write g(x).", "f", "f g"),
        ("assert f(1) == g(2)", "Also g(x).", "f", "f g"),
        ("assert f(1) == g(2)", "def h(): g", "f", "f"),
        # Only its examples call it, and it judges the program's result.
        ("assert near(f(1), 2)", "It passes:\nassert near(f(1), 2)", "f", "f"),
        ("assert near(f(1), 2)", ">>> near(f(1), 2)", "f", "f"),
        ("assert near(f(1).real(), 2)", "It passes:\nassert near(f(1), 2)", "f", "f"),
        ("assert f(near(1), 2)", "It passes:\nassert near(f(1), 2)", "f", "f near"),
        ("def t():\n    x = near(1)\n    assert f(x) == 2", ">>> near(f(1), 2)", "f", "f near"),
        ("assert near(f(1), 2)\nassert same(f(1), 2)", ">>> near(f(1), 2)\n>>> same(f(1), 2)", "f",
         "f"),
        ("assert f(near(f(2))) == 3", ">>> near(f(1), 2)", "f", "f near"),
        ("assert f(1) == 2\nassert g(2) == 3", "It passes:\nassert g(1) == 2", "f", "f g"),
        ("assert approx(f(1))", "Use approx(x).", "f", "f"),  # of a package
        # HumanEval's tests without the call.
        ("def check(candidate):\n    assert candidate(1) == f(2)", "def f(x):", "", "f"),
        ("def check(candidate):\n    assert candidate(1) == 2", "def f(x):", "", "f"),
        ("def check(candidate):\n    assert candidate(1) == 2", "def f(x):", "g", "g"),
        ("def check(candidate):\n    assert candidate(1) == 2", "", "Solution().f", "Solution"),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", "def f(x):", "", "f"),
        ("def check(candidate):\n    assert candidate(1) == 2", "Write f.", "", ""),
        # Caught by name.
        ("try:\n    f()\nexcept Empty:\n    pass", "Raise Empty.", "f", "Empty f"),
        ("try:\n    f()\nexcept (Full, Empty):\n    pass", "Raise Empty or Full.", "f",
         "Empty Full f"),
        ("try:\n    f()\nexcept Empty:\n    pass", "Raise Emptyness.", "f", "f"),
        ("try:\n    f()\nexcept ValueError:\n    pass", "Raise ValueError.", "f", "f"),
        # No entry point, and the statement calls nothing: the only function that is called.
        ("assert close(1, 2)", "Write a function.", "", "close"),
        ("assert one(1) == two(2)", "Write a function.", "", ""),
        ("assert one(1) == two(mean([1, 2]))", "Write a function.", "", ""),
        ("assert one(1) == two(mean([1, 2]))", "The mean of it.", "", ""),
        ("assert A(g(1)) == 2", "class A: ...", "", "A"),
        ("assert g(mean([1])) == 1", "Write g(x), like mean(x).", "", "g"),
        ("assert total([Pair(1, 2)]) == 3", "Write a function.", "", "Pair total"),
        ("assert Pair(total(1)) == 3", "Write a function.", "", "total"),
        ("assert np(one(1))", "Write a function.", "", "one"),
        # A name of the library is the program's if nothing else can be.
        ("assert gcd(4, 6) == lcm(1, 2)", "Write gcd(a, b) and lcm(a, b).", "", "gcd lcm"),
        (MEAN, "Write a function.", "", "mean"),
        ("assert sorted(mean([1, 2])) == 1.5", "Write a function.", "", "mean"),
        ("assert sorted([2, 1]) == [1, 2]", "Write a function.", "", "sorted"),
        ("assert gcd(mean([1, 2])) == 1", "The mean of a list.", "", "mean"),
        ("assert gcd(mean([1, 2])) == 1", "Write a function.", "", ""),
        ("assert max(sorted([1, 2])) == 2", "Write max.", "", "max"),
        ("assert max(sorted([1, 2])) == 2", "Write a function.", "", ""),
        ("from math import gcd\nassert gcd(mean([1]), 1)", "Write a function.", "", "mean"),
        (f"assert g(1) == 1\n{MEAN}", "Write a function.", "", "g"),
        (MEAN, "Write mean(xs), see sum(xs).", "", "mean"),
        ("assert f(", "", "f", ""),
        ("\0", "", "f", ""),
        ("'\ud800'", "", "f", ""),
        ("-" * 100_000 + "1", "", "f", ""),
        ("1" + "+1" * 20_000, "", "f", ""),
    ],
)  # fmt: skip
def test_the_program_s_names(code, statement, entry_point, program):
    names = names_of(code, statement, entry_point)
    assert sorted(names.program) == program.split()
    assert not names.library.keys() & names.program


def test_names_that_the_tests_own():
    code = (
        "import json, os.path as files, re as regex\nfrom x import y as z\n"
        "def own(a): return a\nclass Own: pass\nfor i in range(3):\n    total = i\n"
        "assert own(f(regex, files, z, total, Own, gcd(1, 2), itertools, _pickle, Fraction))"
    )
    names = names_of(code, "", "f")
    assert names.program == {"f"}
    assert names.library == {"gcd": "math", "itertools": "itertools", "Fraction": "fractions"}
    assert {"f", "own", "regex", "z", "gcd", "_pickle"} <= names.used
    assert not {"json", "y"} & names.used
    assert "total" in names.used and "Own" in names.used
    assert names.entry_point == "f"
    assert names_of("x = 1", "", "").used == set()  # read, not assigned


def test_the_entry_point_of_tests_that_are_only_defined():
    code = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert names_of(code, "def f(x):", "").entry_point == "f"
    assert names_of(code, "def f(x): def g(x):", "").entry_point == ""
    assert names_of(code, "def f(x):", "g").entry_point == "g"
    assert names_of(code + "check(f)", "def f(x):", "").entry_point == ""
    assert names_of("check(f)", "def f(x):", "").entry_point == ""


def test_a_name_is_of_the_first_library_that_has_it():
    code = "f(copy, deepcopy, sqrt, mean, chain, reduce, Decimal, date, List, Counter, heapq)"
    assert names_of(code, "", "f").library == {
        "copy": "copy", "deepcopy": "copy", "sqrt": "math", "mean": "statistics",
        "chain": "itertools", "reduce": "functools", "Decimal": "decimal", "date": "datetime",
        "List": "typing", "Counter": "collections", "heapq": "heapq",
    }  # fmt: skip
    missing = "msvcrt" if sys.platform != "win32" else "fcntl"  # on this platform
    assert names_of(f"f(abs, pow(2, 3), random_, _thread, sleep, {missing})", "", "f").library == {}


@pytest.mark.parametrize(
    "name",
    [
        "allclose",
        "approx",
        "array_equal",
        "assert_allclose",
        "assert_almost_equal",
        "assert_array_equal",
        "np",
        "numpy",
        "pd",
        "pytest",
    ],
)
def test_comparisons_of_packages_are_never_the_program_s(name):
    assert names_of(f"assert {name}(f(1))", f"Use {name}(x).", "f").program == {"f"}
    assert names_of(f"assert {name}(g(1))", "Write a function.", "").program == {"g"}


@pytest.mark.parametrize(
    "name",
    [
        "Counter",
        "abs",
        "all",
        "any",
        "deque",
        "dict",
        "float",
        "int",
        "isclose",
        "isinstance",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "print",
        "range",
        "repr",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "zip",
    ],
)
def test_what_wraps_a_library_s_name_is_not_the_program_s(name):
    assert names_of(f"assert {name}(gcd(6, 4))", "Write a function.", "").program == {"gcd"}


HELPED = """Complete it.

import math
from typing import List
import it from the
import os; import re

def poly(xs, x):
    '''At x.'''
    assert xs

    return sum(c * math.pow(x, i)
               for i, c in enumerate(xs)
)

def unfinished(x):
    '''Later.'''
    pass

def f(xs):
    return 0
define it
LIMIT = 3
"""


def test_helpers_are_the_statement_s_complete_functions_and_imports():
    found = helper_source(HELPED, {"poly"}, "f")
    assert found.startswith("import math\nfrom typing import List\ndef poly(xs, x):")
    names = {}
    exec(found, names)
    assert names["poly"]([1, 2], 3) == 7
    assert not {"f", "unfinished", "LIMIT"} & names.keys()
    assert "def f(" in helper_source(HELPED, {"poly"}, "")
    assert helper_source(HELPED, {"f", "math", "List"}, "f") == ""
    assert helper_source("def g(x):\n\treturn x\n", {"g"}, "") == "def g(x):\n\treturn x"
    assert helper_source("import math", {"math"}, "") == ""
    told = "\n  \ndef g(x):\n    print(x)"
    assert helper_source(told, {"g"}, "") == "def g(x):\n    print(x)"
    assert helper_source("", {"g"}, "") == ""
    assert names_of("assert f(poly(1))", HELPED, "f").helpers == found


def test_a_program_comes_after_the_helpers_that_it_uses_and_lacks():
    helpers = helper_source(HELPED, {"poly"}, "f")
    problem = Problem("p", "code", HELPED, tests={"entry_point": "f"})
    using = "def f(xs): return poly(xs, 1)"
    assert _with_helpers(using, problem) == f"{helpers}\n{using}"
    assert names_of("", HELPED, "f").helpers == ""
    for program in (
        "def f(xs): return 0",
        f"def poly(xs, x): return 0\n{using}",
        f"from __future__ import annotations\n{using}",
    ):
        assert _with_helpers(program, problem) == program
    assert _with_helpers("f(1)", problem) == "f(1)"  # the entry point is the program's
    assert "def f(" in _with_helpers("f(1)", replace(problem, tests=None))


def test_programs_that_do_nothing_have_all_names():
    tests = {"code": "assert f(1) == A(2).m(3)", "entry_point": "f"}
    problem = Problem("p", "code", "class A: ...", tests=tests)
    for text, value in (("None", None), ("'?'", "?")):
        names = {}
        exec(doing_nothing(problem, text), names)
        assert names["f"](1, key=2) == value
        assert names["A"](2, key=3).m(3, key=4) == value
    assert doing_nothing(problem) == doing_nothing(problem, "None")
    assert doing_nothing(Problem("q", "code", "?")) == ""
    code = "assert k(d(c(b(a(1))))) == 2"
    problem = Problem("p", "code", "Write a(x), b(x), c(x), d(x), k(x).", tests={"code": code})
    assert [line[4] for line in doing_nothing(problem).splitlines()] == [*"abcdk"]


@pytest.mark.parametrize(
    ("tests", "program", "had"),
    [
        # (processor, asleep, clock): time counts if a process ran, or both slept.
        ((0.5, 9.0, 10.0), (1.5, 2.0, 10.0), 3.0),  # the tests were awake for 1 s of it
        ((0.5, 9.0, 10.0), (0.5, 2.0, 10.0), 2.0),
        ((0.5, 9.0, 10.0), (0.25, 2.0, 10.0), None),
        ((0.5, 1.0, 10.0), (1.25, 2.0, 10.0), None),  # asleep while the tests ran or waited
        ((0.5, 1.0, 10.0), (1.5, 2.0, 10.0), 2.0),
    ],
)
def test_a_late_program_has_used_its_time_or_the_host_was_busy(tests, program, had):
    ends = [Result(b"", "late", is_clock=True, times=Times(*x)) for x in (tests, program)]
    judged = _late(*ends, Limits(1.0, 300))
    if had is None:
        assert judged[:2] == ("unscorable", "the host was too busy to run it within 10 s")
    else:
        assert judged[:2] == ("wrong", f"timed out after {had:.2g} s, most of it asleep")


def reported(status, errors, times):
    """What a sandbox says of its one execution."""
    reading, writing = os.pipe()
    for record in ((records.READY, b"", b""), (status, b"", errors)):
        records.send_record(writing, record, times)
    os.close(writing)
    return Results(reading, [Limits(1.0, 300)], keep_going=False)


def exits(code, errors=b"", times=(0.0, 0.0, 0.0)):
    return code << 8, errors, times


BUSY = "the host was too busy to run it within 10 s"


@pytest.mark.parametrize(
    ("tests", "program", "outcome", "reason"),
    [
        (exits(0), exits(3), "right", ""),
        (exits(1, b"AssertionError (line 2)"), exits(3), "wrong", "AssertionError (line 2)"),
        (exits(wire.BROKEN, b"they need f: g"), exits(3), "unscorable", "they need f: g"),
        ((records.HOST, b"", (0, 0, 0)), exits(3), "unscorable",
         "the host had no process or memory left to run it"),
        # The program ended first.
        (exits(wire.GONE), exits(0), "wrong", "ended before its tests"),
        (exits(wire.GONE), exits(3, b"E"), "wrong", "exit code 3: E"),
        (exits(wire.GONE), (9, b"", (0, 0, 0)), "wrong", "killed by signal 9"),
        (exits(wire.GONE), (records.LATE, b"", (0, 0, 0)), "wrong", "timed out after 1 s"),
        (exits(wire.GONE), (records.HOST, b"", (0, 0, 0)), "unscorable",
         "the host had no process or memory left to run it"),
        # A process was stopped asleep, or by the clock.
        ((records.BUSY, b"", (0.5, 0, 10)), exits(0, times=(0.5, 0, 10)), "unscorable", BUSY),
        ((records.ASLEEP, b"", (0.5, 0, 10)), exits(3, times=(0.5, 0, 10)), "unscorable", BUSY),
        (exits(wire.GONE, times=(1, 0, 10)), (records.BUSY, b"", (0.5, 0, 10)), "unscorable", BUSY),
        ((records.ASLEEP, b"", (1, 9, 10)), exits(0, times=(0.5, 2, 10)), "wrong",
         "timed out after 2.5 s, most of it asleep"),
    ],
)  # fmt: skip
def test_how_both_processes_ended_is_the_verdict(tests, program, outcome, reason):
    ends = [reported(*end) for end in (program, tests)]
    judged = _verdict(*ends, Limits(1.0, 300))
    for results in ends:
        results.close()
    assert (judged.outcome, judged.reason, judged.share) == (outcome, reason, outcome == "right")
