"""Programs and their shown tests: what the model may read, and what only judges."""

import pytest

from tramontane.config import VerifierConfig
from tramontane.data.code import parse_tests
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.shown import NO_PROGRAM, divide, of_case, try_program

pytestmark = pytest.mark.skipif(sandbox.probe() == "rlimits", reason="needs root and a sandbox")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_hidden_tests_decide_and_are_not_told():
    assert tried(READ + "print(a + b)").outcome == "right"
    judged = tried(READ + "print(a + b if a < 3 else 0)")  # by heart
    assert judged.outcome == "wrong" and judged.share == 0
    judged = tried(READ + "print(a + b if a < 4 else 0)", reward={"code": "fraction"})
    assert judged.share == pytest.approx(1 / 3)  # of the three hidden ones
    assert try_program("no program", SUMS, VerifierConfig()) == NO_PROGRAM


@pytest.mark.slow
def test_a_compiler_is_heard_in_its_own_words():
    told = tried("int main() { retur 0; }", tag="cpp")
    assert "error: ‘retur’ was not declared" in told and "Expected" not in told
    assert "only Python, C++ and C" in tried("x", tag="java")


@pytest.mark.slow
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
    judged = tried("def f(a):\n    return a + 1 if a < 4 else 0", CALLS)
    assert judged.outcome == "wrong"
    assert tried("def f(a):\n    return a + 1", CALLS).outcome == "right"


@pytest.mark.slow
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
