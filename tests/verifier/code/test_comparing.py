"""The form of a problem's tests, and outputs compared with expected ones, without programs."""

import pytest

from tramontane.verifier.code.comparing import checker_of, fault_of, same_output

CASES = [{"input": "1\n", "output": "2\n"}]


def faulty(**fields):
    return fault_of({"type": "stdio", "cases": CASES} | fields)


@pytest.mark.parametrize(
    "tests",
    [
        {"type": "stdio", "cases": CASES},
        {"type": "stdio", "cases": CASES, "rules": "livecodebench"},
        {"type": "stdio", "cases": CASES, "checker": "lines", "ignore_case": True},
        {"type": "stdio", "cases": CASES, "checker": "tokens", "ignore_case": False},
        {"type": "stdio", "cases": CASES, "checker": "float", "float_tolerance": 0},
        {"type": "stdio", "cases": CASES, "checker": "float", "float_tolerance": 0.999},
        {"type": "stdio", "cases": CASES, "checker": "program", "checker_code": "exit()"},
        {"type": "stdio", "cases": CASES, "checker": "program", "checker_code": "",
         "checker_language": "cpp"},
        {"type": "stdio", "cases": CASES, "checker": "program", "checker_code": "",
         "checker_language": "c"},
        {"type": "stdio", "cases": CASES, "checker": "program", "checker_code": "",
         "checker_language": "python"},
        {"type": "python_assert", "code": "assert f(1) == 2"},
        {"type": "python_assert", "code": "assert f(1) == 2", "cases": []},
    ],
)  # fmt: skip
def test_tests_in_the_documented_form_have_no_fault(tests):
    assert fault_of(tests) == ""


@pytest.mark.parametrize("tests", [None, "stdio", [], {}, {"type": None}, {"type": "x"}])
def test_tests_need_a_type(tests):
    assert fault_of(tests) == "need a type, one of stdio, python_assert"


def test_what_is_wrong_with_tests_is_named():
    assert faulty(rules="icpc") == "have unknown rules 'icpc'; known rules: livecodebench"
    assert fault_of({"type": "python_assert", "code": "", "cases": {}}) == (
        "have cases that are not a list"
    )
    for code in ({}, {"code": None}, {"code": 1}):
        assert fault_of({"type": "python_assert", **code}) == "need code"
    assert fault_of({"type": "cpp_assert"}).startswith("are C++ function tests (cpp_assert)")
    known = "choose from tokens, float, lines, program"
    assert faulty(checker="exact") == f"name an unknown checker 'exact'; {known}"
    assert faulty(checker=["tokens"]) == f"name an unknown checker \"['tokens']\"; {known}"
    for tolerance in (1, -0.1, True, False, "0.1"):
        assert faulty(float_tolerance=tolerance) == (
            f"have the float_tolerance {tolerance!r}; it must be a number from 0 to below 1"
        )
    for value in (1, "yes"):
        assert faulty(ignore_case=value) == (
            f"have the ignore_case {value!r}; it must be true or false"
        )
    assert faulty(checker="program") == (
        "name the checker 'program', and need its text in checker_code"
    )
    assert faulty(checker="program", checker_code="", checker_language="perl") == (
        "need a checker_language, one of python, cpp, c"
    )


@pytest.mark.parametrize(
    "cases",
    [None, [], {}, 5, "ab", [{}], [None], ["ab"], [{"input": "1"}], [{"output": "1"}],
     [{"input": 1, "output": "1"}], [{"input": "1", "output": 1}], [*CASES, {"input": "1"}]],
)  # fmt: skip
def test_cases_are_pairs_of_texts(cases):
    assert faulty(cases=cases) == "need cases, each with input and output as text"


def test_livecodebench_s_rules_compare_lines_unless_a_checker_is_named():
    assert checker_of({}) == "tokens"
    assert checker_of({"rules": "livecodebench"}) == "lines"
    assert checker_of({"rules": "livecodebench", "checker": "float"}) == "float"


def floats(printed, wanted, tolerance=None):
    tests = {"checker": "float"} | ({} if tolerance is None else {"float_tolerance": tolerance})
    return same_output(printed.encode(), wanted, tests)


def test_a_tolerance_is_absolute_up_to_one_and_relative_beyond():
    assert floats("1.5", "1", 0.5) and not floats("1.75", "1", 0.5)  # the bound itself passes
    assert floats("0.5", "0", 0.5) and not floats("0.75", "0.125", 0.5)
    assert floats("6", "4", 0.5) and not floats("6.5", "4", 0.5)
    assert floats("-6", "-4", 0.5) and not floats("-6.5", "-4", 0.5)
    assert not floats("4", "6.5", 0.25)  # relative to what is expected
    assert floats("1", "1", 0) and not floats("1.0000001", "1", 0)
    assert floats("1.0000009", "1") and not floats("1.0000011", "1")  # by default 1e-6


def test_floats_are_read_as_other_languages_print_them():
    assert not floats("1_0", "10") and not floats("１０", "10")
    assert floats("1_0", "1_0")  # a word
    assert floats("10", "1e1") and floats("inf", "inf")
    assert not floats("1", "inf") and not floats("inf", "-inf") and not floats("inf", "1")
    assert not floats("1 1", "1") and not floats("1", "1 1")
    assert not floats("x", "1") and not floats("1", "x") and not floats("nan", "NaN")


def test_outputs_are_compared_without_case_if_asked():
    tests = {"ignore_case": True}
    assert same_output(b"yes", "YES", tests) and same_output(b"YES", "yes", tests)
    assert same_output(b"STRASSE", "straße", tests)
    assert not same_output(b"yes", "YES", {"ignore_case": False})
    assert same_output(b"1E3", "1e3", tests | {"checker": "lines"})


def test_bytes_that_are_no_text_are_wrong():
    assert not same_output(b"1\xff", "1", {})
    assert not same_output(b"\xff1", "1", {"checker": "lines"})
    assert same_output(b"1\n2", "1 2", {})


def lines(printed, wanted):
    return same_output(printed.encode(), wanted, {"checker": "lines"})


def test_lines_are_equal_up_to_white_space_at_their_ends_or_as_numbers():
    assert lines("\n a \nb\n\n", "a\n b")
    assert not lines("a\nb", "a") and not lines("a", "a\nb")
    assert not lines("a\n\nb", "a\nb")
    assert lines("1.0 2\nx", "1 2.00\nx") and not lines("1.0 2\ny", "1 2\nx")
    assert not lines("1 2", "1 2 3") and not lines("1 x", "1.0 x")
    assert not lines("1_0.0", "10")
