"""Function tests divided in shown and hidden ones, and what is said of a program that fails shown
ones, without running any."""

import pytest

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import NO_SANDBOX
from tramontane.verifier.code.sandbox.running import Result
from tramontane.verifier.code.shown import NO_PROGRAM, _said, _told, divide, of_case, try_program

CODE = '''\
import pytest
@pytest.mark.sums
def test_one(x):
    assert f(1) == 2

@mark(
    1)
def test_two():
    with pytest.raises(ValueError):
        f(None)

class TestThree:
    """Sums."""
    def test_three(self):
        x = 3
        assert f(x) == 4
    def helper(self):
        assert 0
    def check_it(self):
        self.assertEqual(f(5),
            6)
assert f(6) == 7; assert f(7) == 8
for x in range(9):
    assert f(x) == x + 1
def helper():
    assert 0
y = 1
'''
# Where a unit's lines are, each from 1 and up to the second one, which is outside.
UNITS = [(4, 5), (6, 11), (16, 17), (19, 22), (22, 23), (23, 25)]
CASES = [{"input": f" {n}\n", "output": f"{n + 1}\n"} for n in range(6)]


def calls(code=CODE, **tests):
    return Problem("p", "code", "?", tests={"type": "python_assert", "code": code, **tests})


def without(units):
    lines = CODE.splitlines()
    for start, stop in units:
        first = lines[start - 1]
        indentation = first[: len(first) - len(first.lstrip())]
        lines[start - 1 : stop - 1] = [indentation + "pass"] + [""] * (stop - start - 1)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 60])
def test_units_are_shown_or_hidden_as_a_whole_and_lines_keep_their_numbers(count):
    shown, hidden = divide(calls(shown=count))
    count = min(count, 5)  # never all
    assert shown.tests["code"] == without(UNITS[count:])
    assert hidden.tests["code"] == without(UNITS[:count])
    assert shown.tests | {"code": CODE} == hidden.tests | {"code": CODE}
    for problem in (shown, hidden):
        compile(problem.tests["code"], "tests", "exec")


def test_three_tests_are_shown_unless_the_row_says_otherwise():
    assert divide(calls()).shown.tests["code"] == without(UNITS[3:])
    assert divide(calls(shown=None)).shown.tests["code"] == without(UNITS[3:])
    cases = Problem("p", "code", "?", tests={"type": "stdio", "cases": CASES, "checker": "lines"})
    shown, hidden = divide(cases)
    assert shown.tests == {"type": "stdio", "cases": CASES[:3], "checker": "lines"}
    assert hidden.tests == {"type": "stdio", "cases": CASES[3:], "checker": "lines"}


@pytest.mark.parametrize(
    "problem",
    [
        calls(shown=0),
        calls(shown=-1),
        calls("assert f(1) == 2"),
        calls("x = 1"),
        calls("class A:\n    x = 1\nassert f(A.x) == 2"),
        calls("assert f("),
        calls("\0"),
        calls("'\ud800'"),
        calls("-" * 100_000 + "1"),
        calls("1" + "+1" * 20_000),
        Problem("p", "code", "?"),
        Problem("p", "code", "?", tests={"type": "stdio"}),
        Problem("p", "code", "?", tests={"type": "python_assert"}),
        Problem("p", "code", "?", tests={"type": "stdio", "cases": CASES[:1]}),
        # The code of other tests is no function test.
        Problem("p", "code", "?", tests={"type": "stdio", "code": CODE}),
    ],
)
def test_some_problems_have_no_test_to_show(problem):
    assert divide(problem) == (None, problem)


def test_a_failed_assertion_is_told_with_its_unit():
    tests = calls().tests
    assert _told("AssertionError (line 4 of the tests)", tests) == (
        "Test 1 of 6 failed: AssertionError\nassert f(1) == 2"
    )
    assert _told("KeyError: (x) (line 10 of the tests)", tests).splitlines() == [
        "Test 2 of 6 failed: KeyError: (x)",
        *CODE.splitlines()[5:10],
    ]
    assert _told("E\nF (line 21 of the tests)", tests).startswith("Test 4 of 6 failed: E\nF\ndef c")
    assert _told("E (line 22 of the tests)", tests).startswith("Test 5 of 6 failed: E\nassert f(6)")
    assert _told("E (line 26 of the tests)", tests) == "It failed: E"  # in no unit
    assert _told("SyntaxError", tests) == "It failed: SyntaxError"
    assert _told("test 1 of 2: wrong output", {"type": "stdio"}) == (
        "It failed test 1 of 2: wrong output"
    )


def test_an_assertion_made_of_a_call_is_told_as_the_call():
    code = (
        "assert _plain(_function(1, [2])) in [3]\nassert _plain(_function(\n'a')) in ['b', 'c']\n"
    )
    tests = calls(code, entry_point="add").tests
    assert _told("E (line 1 of the tests)", tests).endswith("\nadd(1, [2]) is expected to be 3")
    assert _told("E (line 3 of the tests)", tests).endswith(
        "\nadd(\n'a') is expected to be 'b', 'c'"
    )
    assert _told("E (line 1 of the tests)", calls(code).tests).endswith(
        "\n(1, [2]) is expected to be 3"
    )


def test_a_program_s_end_is_told_in_its_own_words():
    assert _said(Result(b"", "")) == ""
    assert _said(Result(b"", "timed out after 1 s")) == "timed out after 1 s"
    ended = Result(b"", "exit code 1: KeyError: 'x'", errors="Traceback\nKeyError: 'x'\n")
    assert _said(ended) == "It failed: exit code 1\nTraceback\nKeyError: 'x'"


def test_a_failed_case_is_told():
    told = "Test 2 of 6 failed.\nInput:\n1\nExpected:\n2\n"
    assert of_case(2, CASES, " 7\n") == f"{told}It printed:\n7"
    assert of_case(2, CASES, "7", "timed out") == f"{told}timed out"
    assert of_case(1, CASES, "").startswith("Test 1 of 6 failed.\nInput:\n0\n")


def test_a_program_that_cannot_be_run_is_told_or_unscorable(monkeypatch):
    cases = Problem("p", "code", "?", tests={"type": "stdio", "cases": CASES})
    config = VerifierConfig(allow_unsandboxed=True)
    assert try_program("x = 1", cases, config) == NO_PROGRAM
    refused = "cannot run java: only Python, C++ and C are graded"
    assert try_program("```java\nx\n```", cases, config) == refused
    faulty = Problem("p", "code", "?", tests={"type": "stdio", "cases": CASES, "rules": "x"})
    for problem in (Problem("p", "code", "?"), faulty):
        assert try_program("```python\nx\n```", problem, config).outcome == "unscorable"
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    judged = try_program("```python\nx\n```", cases, VerifierConfig())
    assert (judged.outcome, judged.reason) == ("unscorable", NO_SANDBOX)
