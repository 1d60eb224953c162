"""Tests that cannot tell a right program from a wrong one, found without running any."""

import pytest

from tramontane.verifier.code.idle import (
    NEVER_CALL,
    NO_CHECK,
    NO_OUTPUT,
    plainly_decide,
    why_idle,
)

UNIT = "import unittest\nclass Sums(unittest.TestCase):\n    def runTest(self):\n        "
UNREADABLE = ["f(", "\0", "'\ud800'", "-" * 100_000 + "1", "1" + "+1" * 20_000]


def idle(code, statement="", entry_point="f"):
    return why_idle({"code": code, "entry_point": entry_point}, statement)


def test_cases_without_any_expected_output_are_idle():
    for empty in (None, {}, {"type": "stdio"}, {"cases": []}):
        assert why_idle(empty, "") == ""
    blank = {"cases": [{"input": "1"}, {"input": "2", "output": " \n"}]}
    assert why_idle(blank, "") == NO_OUTPUT == "no test expects any output"
    assert why_idle(blank | {"checker": "lines"}, "") == NO_OUTPUT
    assert why_idle(blank | {"checker": "program"}, "") == ""  # which reads the output
    assert why_idle({"cases": [*blank["cases"], {"output": "3"}]}, "") == ""


@pytest.mark.parametrize("code", UNREADABLE, ids=["syntax", "null", "surrogate", "deep", "long"])
def test_tests_that_do_not_parse_fail_when_they_run(code):
    assert idle(code) == ""
    assert plainly_decide(code, "", "f") is False


@pytest.mark.parametrize(
    ("code", "statement", "entry_point", "reason"),
    [
        ("assert f(1) == 2", "", "", ""),
        ("assert other(1) == 2", "", "f", ""),  # nothing declares it: unscorable when it runs
        ("x = 1\nassert x == len([0])", "", "f", NEVER_CALL),
        ("import math\nassert math.pi > isclose(1, 1)", "", "f", NEVER_CALL),
        ("def g():\n    return f(1)\nassert 1 == 1 + 0", "", "f", NEVER_CALL),
        # HumanEval's, which are called with the entry point.
        ("def check(candidate):\n    assert candidate(1) == 2", "", "f", ""),
        ("def check(candidate):\n    assert candidate(1) == 2", "", "", NEVER_CALL),
        ("def tests(candidate):\n    assert candidate(1) == 2", "", "f", NEVER_CALL),
        ("async def check(candidate):\n    assert candidate(1) == 2", "", "f", ""),
        ("assert max(1, 2) == 2", "", "max", ""),  # a built-in name that is the program's
    ],
)
def test_tests_that_never_name_the_program(code, statement, entry_point, reason):
    assert (
        idle(code, statement, entry_point) == idle(code, statement, entry_point or None) == reason
    )


@pytest.mark.parametrize(
    "name", ["eval", "exec", "globals", "locals", "vars", "getattr", "__import__", "compile"]
)
def test_a_program_may_be_called_without_its_name(name):
    assert idle(f"assert {name}('g') == 2") == ""


@pytest.mark.parametrize(
    "code",
    [
        # Reached:
        "def test_f():\n    assert f(1) == 2",
        "def setup_module():\n    assert f(1) == 2",
        "def g():\n    assert f(1) == 2\ng()",
        "class C:\n    def m(self):\n        assert f(1) == 2\nC().m()",
        "class TestF:\n    def m(self):\n        assert f(1) == 2",
        f"{UNIT}assert f(1) == 2",
        "if f(1) != 2:\n    raise ValueError",
        "if True:\n    assert f(1) == 2",
        "if False:\n    pass\nelse:\n    assert f(1) == 2",
        "try:\n    assert f(1) == 2\nexcept ValueError:\n    pass",
        "try:\n    assert f(1) == 2\nexcept Exception:\n    raise",
        "try:\n    assert f(1) == 2\nexcept Exception:\n    print(1)\n    exit(1)",
        "try:\n    assert f(1) == 2\nexcept Exception:\n    failed = 1",
        "try:\n    verify(f(1), 2)\nexcept Exception:\n    pass",  # may end the process
        "try:\n    assert f(1) == 2\nfinally:\n    f(2)",
        "assert f(1) == 2\ndef g():\n    pass",
        "with open('x'):\n    assert f(1) == 2",
        "assert f(1) == 2\ntry:\n    assert f(2) == 3\nexcept Exception:\n    pass",
        f"{UNIT}try:\n            assert f(1)\n        except AssertionError:\n"
        "            self.assertTrue(failed)",
        "import contextlib\nwith contextlib.suppress(ValueError):\n    assert f(1) == 2",
        "with patch(AssertionError):\n    assert f(1) == 2",
        # Checks:
        "f(1)\nraise SystemExit(1)",
        "import sys\nf(1)\nsys.exit(f(1))",
        "import sys\nf(1)\nsys.exit('no')",
        "import os\nf(1)\nos.abort()",
        "fail(f(1))",
        "try:\n    f(1)\nexcept ValueError:\n    raise",
        f"{UNIT}self.assertTrue(f(1))",
        f"{UNIT}self.assertTrue(expr=f(1))",
        f"{UNIT}self.assertIsNotNone(f(1))",
        f"{UNIT}self.assertEqual(f(1), f(2))",
        f"{UNIT}self.assertEqual(f(1))",
        f"{UNIT}self.assertIs(f(1), f(2))",
        f"{UNIT}self.assertIn(f(1), f(1))",  # no form that is known to hold
        "assert f(1) and True",
        "assert f(1) or False",
        "assert f(1) and f",
        "assert f(1) != f(1)",
        "assert f(1) is not None",
        "assert f is None",
        "assert not f(1)",
        "assert f(1) == f(1) == 2",
        "assert callable(f(1))",
        "assert isinstance(f(1), int)",
        "x = f(1)\nassert x",
        "x = [f]\nassert f",  # which is not called, and may be missing
        "x = f(1)\nassert x is not None",
        "x = f(1)\nassert callable(x)",
        "assert f(1) and 0",
        "f(1)\nassert ()",
    ],
)
def test_checks_that_a_wrong_program_reaches_and_fails(code):
    assert idle(code) == ""


@pytest.mark.parametrize(
    "code",
    [
        # Not reached:
        "def g():\n    assert f(1) == 2\nf(1)",
        "async def g():\n    assert f(1) == 2\nf(1)",
        "class C:\n    def m(self):\n        assert f(1) == 2\nf(1)",
        "def checks():\n    assert f(1) == 2\nf(1)",
        "class TestF:\n    class C:\n        def m(self):\n            assert f(1) == 2\nf(1)",
        "f(1)\nif 0:\n    assert f(1) == 2",
        "f(1)\nif None:\n    assert f(1) == 2\nelse:\n    f(2)",
        # Its failure is hidden:
        "try:\n    assert f(1) == 2\nexcept:\n    pass",
        "try:\n    assert f(1) == 2\nexcept BaseException:\n    pass",
        "try:\n    assert f(1) == 2\nexcept (ValueError, AssertionError) as e:\n    print(e)",
        "for x in [1]:\n    try:\n        assert f(x) == 2\n"
        "    except Exception:\n        continue",
        "try:\n    assert f(1) == 2\nexcept ValueError:\n    raise\nexcept Exception:\n    pass",
        "from contextlib import suppress\nwith suppress(Exception):\n    assert f(1) == 2",
        "import contextlib\nwith open('x'), contextlib.suppress(AssertionError):\n"
        "    assert f(1) == 2",
        # Holds whatever the program does:
        "f(1)\nassert 1",
        "f(1)\nassert 'x'",
        "assert (f(1) == 2,)",
        "f(1)\nassert not 0",
        "f(1)\nassert f and callable(f)",
        "f(1)\nassert print",
        "assert f(1) or (1 and f)",
        "f(1)\nassert f is not None",
        "assert isinstance(f(1), object)",
        "assert f(1) is f(1)",
        "assert f(1) <= f(1)",
        "assert f(1) >= f(1)",
        "f(1)\nraise SystemExit",
        "f(1)\nraise SystemExit(None)",
        "import sys\nf(1)\nsys.exit(None)",
        "f(1)\nexit()",
        "f(1)\nquit(0)",
        "import os\nf(1)\nos._exit(0)",
        "def check_it(x):\n    return x\ncheck_it(f(1))",
        f"{UNIT}self.assertTrue(f or f(1))",
        f"{UNIT}self.assertIsNotNone(f)\n        f(1)",
        f"{UNIT}self.assert_(1)\n        f(1)",
        f"{UNIT}self.assertEqual(f(1), f(1))",
        f"{UNIT}self.assertIs(f(1), f(1))",
        f"{UNIT}self.assertEquals(f(1), f(1))",
        "f(1)\nprint(f(2))",
    ],
)
def test_checks_that_no_program_reaches_or_fails(code):
    assert idle(code) == NO_CHECK == "the tests check nothing"


@pytest.mark.parametrize(
    "code",
    [
        '"""Sums."""\nassert f(1) == 2',
        "import math\nfrom math import pi\nx = 3\nassert f(x) == (1, {'a': -2})",
        "f(0)\nassert f(1) == 2",
        "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(f)",
        "def test_one():\n    assert f(1) == 2\ndef test_two():\n    assert f(2)",
        "assert f(1) > 2\nassert f(1) == 2",
    ],
)
def test_assertions_that_certainly_run_decide(code):
    assert plainly_decide(code, "", "f") is True


@pytest.mark.parametrize(
    "code",
    [
        "print(1)\nassert f(1) == 2",
        "f(1).x()\nassert f(1) == 2",
        "x = 1\nx\nassert f(1) == 2",
        "for x in [1]:\n    assert f(x) == 2",
        "if f(1):\n    assert f(1) == 2",
        "def test_f():\n    assert f(1) == 2\n    return",
        "@skip\ndef test_f():\n    assert f(1) == 2",
        "def g():\n    assert f(1) == 2",
        "class TestF:\n    def test(self):\n        assert f(1) == 2",
        "candidate = abs\nassert candidate(-1) == 1",
        "f, x = abs, 1\nassert f(-1) == 1",
        "assert f(1) != 2",
        "assert f(1) is 2",
        "assert f(1) == 2 == 3",
        "assert f(1) == x",
        "assert f(1) == [abs(1)]",
        "assert f(1) == 'a'.upper()",
        "assert g(1) == 2",
        "assert 2 == f(1)",
        "assert f.g(1) == 2",
        "x = f(1)",
    ],
)
def test_others_are_tried(code):
    assert plainly_decide(code, "", "f") is False
