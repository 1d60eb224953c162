"""Programs and their shown tests: what the model may read, and what only judges."""

import shutil
import time
from dataclasses import replace

import pytest

from tramontane.config import VerifierConfig
from tramontane.data.code import parse_tests
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.shown import NO_PROGRAM, divide, of_case, try_program

pytestmark = pytest.mark.skipif(sandbox.probe() == "rlimits", reason="needs root and a sandbox")
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CASES = [{"input": f"{n} 2\n", "output": f"{n + 2}\n"} for n in range(6)]
SUMS = Problem("p", "code", "Add.", tests={"type": "stdio", "cases": CASES})
CALLS = Problem(
    "q", "code", "Write f(a).",
    tests=parse_tests({"fn_name": "f", "inputs": [[1], [2], [3], [4], [5]],
                       "outputs": [2, 3, 4, 5, 6]}, "row"),
)  # fmt: skip
READ = "a, b = map(int, input().split())\n"
CHECK = """\
def helper(x):
    return x

def check(candidate):
    assert candidate(1) == 2
    assert candidate(helper(7)) == 8
    assert candidate(
        9
    ) == 10, "nine"
"""


def tried(code, problem=SUMS, tag="python", **config):
    return try_program(f"```{tag}\n{code}\n```", problem, VerifierConfig(**config))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(a * b)", "Test 1 of 3 failed.\nInput:\n0 2\nExpected:\n2\nIt printed:\n0"),
        ("print(a + b if a < 2 else 0)",
         "Test 3 of 3 failed.\nInput:\n2 2\nExpected:\n4\nIt printed:\n0"),
        ("print(c)", "NameError: name 'c' is not defined"),
        ("print(a", "SyntaxError: '(' was never closed"),
    ],
)  # fmt: skip
def test_the_first_shown_test_that_fails_is_told(code, told):
    assert told in tried(READ + code)


def test_hidden_tests_decide_and_are_not_told():
    right = READ + "print(a + b)"
    assert tried(right) == tried(right, tag="") == ("right", "", right + "\n", 1.0)
    by_heart = READ + "print(a + b if a < 3 else 0)"
    assert tried(by_heart) == ("wrong", "it fails a hidden test", by_heart + "\n", 0.0)
    half = READ + "print(a + b if a < 4 else 0)"
    assert tried(half).share == 0
    # Of the three hidden ones.
    for condition, share in (("a < 4", 1 / 3), ("a != 3", 2 / 3)):
        judged = tried(READ + f"print(a + b if {condition} else 0)", reward={"code": "fraction"})
        assert judged.share == pytest.approx(share)
    assert tried(by_heart, code_tests=2, reward={"code": "fraction"}).share == 0
    assert try_program("no program", SUMS, VerifierConfig()) == NO_PROGRAM


def test_the_first_hidden_test_that_fails_ends_the_others():
    began = time.monotonic()
    late = READ + "import time\ntime.sleep(30 * (a > 3))\nprint(a + b if a < 3 else 0)"
    assert tried(late, code_timeout_s=20.0).outcome == "wrong"
    assert time.monotonic() - began < 20


def test_what_is_no_text_is_told_as_far_as_it_is():
    told = tried("import sys\nsys.stdout.buffer.write(b'7 \\xff')")
    assert told.endswith("It printed:\n7 \ufffd")


def test_programs_have_the_imports_that_their_rules_give_them():
    livecodebench = replace(SUMS, tests=SUMS.tests | {"rules": "livecodebench"})
    counted = READ + "print(Counter('a' * (a + b))['a'])"
    assert tried(counted, livecodebench).outcome == "right"
    assert "NameError: name 'Counter' is not defined" in tried(counted)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (READ + "print(a + b)", "right"),
        (READ + "print(a * b)", "wrong"),
        ("print(2)", "right"),
        ("print(a", "SyntaxError: '(' was never closed"),
        # Of the test it could say something, if it were given it.
        ("import sys\nraise SyntaxError(sys.stdin.read() or 'nothing')", "SyntaxError: nothing"),
    ],
)
def test_of_a_single_test_nothing_is_told(code, found):
    single = replace(SUMS, tests=SUMS.tests | {"cases": CASES[:1]})
    judged = tried(code, single)
    assert found in (judged if isinstance(judged, str) else judged.outcome)


def test_a_single_assertion_judges():
    tests = {"type": "python_assert", "code": "assert f(1) == 2", "entry_point": "f"}
    single = Problem("p", "code", "Write f.", tests=tests)
    assert tried("def f(x): return x + 1", single).outcome == "right"
    assert tried("def f(x): return x", single).outcome == "wrong"
    undeclared = {"code": "assert near(f(1), 2)\nassert near(f(2), 3)"}
    judged = tried("def f(x): return x + 1", replace(single, tests=tests | undeclared))
    assert judged.outcome == "unscorable" and "near" in judged.reason


CHECKER = """
import sys
given, printed, _ = (open(name).read().split() for name in sys.argv[1:])
sys.exit(int(printed[0]) <= int(given[0]))
"""


def test_shown_tests_of_a_checker_are_all_to_pass():
    tests = {"checker": "program", "checker_code": CHECKER, "cases": CASES[:3], "shown": 2}
    larger = replace(SUMS, tests=SUMS.tests | tests)
    assert tried(READ + "print(a + 9)", larger).outcome == "right"
    for reward in ({}, {"code": "fraction"}):
        told = tried(READ + "print(a)", larger, reward=reward)
        assert told == "It failed test 1 of 2: wrong output"


@needs_gpp
def test_a_compiler_is_heard_in_its_own_words():
    told = tried("int main() { retur 0; }", tag="cpp")
    assert "error: ‘retur’ was not declared" in told and "Expected" not in told
    assert "only Python, C++ and C" in tried("x", tag="java")
    added = '#include <stdio.h>\nint main() { int a; scanf("%d", &a); printf("%d", a + 2); }'
    assert tried(added, tag="c").outcome == "right"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def f(a):\n    return a", "Test 1 of 3 failed: AssertionError\nf(1) is expected to be 2"),
        ("def f(a):\n    return b", "Test 1 of 3 failed: NameError: name 'b' is not defined\nf(1)"),
        ("def g(a):\n    return a", "It failed: NameError: name 'f' is not defined"),
        ("def f(a)\n    return a", "SyntaxError"),
    ],
)
def test_functions_are_told_what_is_expected_of_them(code, told):
    assert told in tried(code, CALLS)


def test_hidden_calls_decide():
    judged = tried("def f(a):\n    return a + 1 if a < 4 else 0", CALLS)
    assert judged.outcome == "wrong"
    assert tried("def f(a):\n    return a + 1", CALLS).outcome == "right"


def test_what_hidden_tests_give_the_program_is_not_told():
    """A program that ends with what it was called with tells only of shown tests."""
    spy = "import os\ndef f(a):\n    if a > 3:\n"
    spy += "        os.write(2, b'got %d' % a)\n        os._exit(1)\n    return a + 1"
    judged = tried(spy, CALLS)
    assert not isinstance(judged, str) and judged.outcome == "wrong"


def test_tests_are_divided():
    shown, hidden = divide(SUMS)
    assert shown.tests["cases"] == CASES[:3] and hidden.tests["cases"] == CASES[3:]
    tests = {"type": "python_assert", "code": CHECK, "entry_point": "f", "shown": 2}
    shown, hidden = divide(Problem("h", "code", "?", tests=tests))
    assert "== 2" in shown.tests["code"] and "nine" not in shown.tests["code"]
    assert "nine" in hidden.tests["code"] and "== 8" not in hidden.tests["code"]
    assert "def helper" in hidden.tests["code"]
    for code in (shown.tests["code"], hidden.tests["code"]):
        compile(code, "tests", "exec")
    assert divide(Problem("1", "code", "?", tests={"type": "stdio", "cases": CASES[:1]}))[0] is None
    row = {"type": "stdio", "cases": CASES[:2], "shown": 5}
    assert len(divide(Problem("2", "code", "?", tests=row)).shown.tests["cases"]) == 1
    none = {"type": "stdio", "cases": CASES, "shown": 0}
    assert divide(Problem("3", "code", "?", tests=none)).shown is None


def test_a_case_is_told_with_what_was_printed():
    assert of_case(2, CASES, "7\n").endswith("Expected:\n3\nIt printed:\n7")
