"""Checks the form of a problem's tests, and compares outputs with expected ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

CPP_ASSERT = (
    "are C++ function tests (cpp_assert): a program could decide them itself, by defining what "
    "they compare with; give the problem stdio tests"
)
_TYPES = ("stdio", "python_assert")
_RULES = ("livecodebench",)
_LANGUAGES = ("python", "cpp", "c")


def fault_of(tests: Any) -> str:
    """What is wrong with tests that are not in the form of docs/data.md, worded to follow "the
    tests"; empty if they are valid."""
    kind = tests.get("type") if isinstance(tests, dict) else None
    if kind == "cpp_assert":
        return CPP_ASSERT
    if kind not in _TYPES:
        return f"need a type, one of {', '.join(_TYPES)}"
    if (rules := tests.get("rules")) not in (None, *_RULES):
        return f"have unknown rules {rules!r}; known rules: {', '.join(_RULES)}"
    cases = tests.get("cases")
    if kind == "python_assert":
        if not isinstance(cases, list | None):
            return "have cases that are not a list"
        return "" if isinstance(tests.get("code"), str) else "need code"
    if (
        not isinstance(cases, list)
        or not cases
        or not all(
            isinstance(case, dict)
            and all(isinstance(case.get(x), str) for x in ("input", "output"))
            for case in cases
        )
    ):
        return "need cases, each with input and output as text"
    return _checker_fault(tests)


def _checker_fault(tests: dict[str, Any]) -> str:
    checker = checker_of(tests)
    if checker not in (*_CHECKERS, "program"):
        known = ", ".join([*_CHECKERS, "program"])
        return f"name an unknown checker {checker!r}; choose from {known}"
    tolerance = tests.get("float_tolerance")
    if tolerance is not None and not (
        isinstance(tolerance, int | float)
        and not isinstance(tolerance, bool)
        and 0 <= tolerance < 1
    ):
        return f"have the float_tolerance {tolerance!r}; it must be a number from 0 to below 1"
    if not isinstance(tests.get("ignore_case"), bool | None):
        return f"have the ignore_case {tests['ignore_case']!r}; it must be true or false"
    if checker == "program":
        if not isinstance(tests.get("checker_code"), str):
            return "name the checker 'program', and need its text in checker_code"
        if (tests.get("checker_language") or "python") not in _LANGUAGES:
            return f"need a checker_language, one of {', '.join(_LANGUAGES)}"
    return ""


def checker_of(tests: dict[str, Any]) -> str:
    """The name of the tests' checker."""
    checker = tests.get("checker")
    if checker is None:
        return "lines" if tests.get("rules") == "livecodebench" else "tokens"
    return checker if isinstance(checker, str) else repr(checker)


def same_output(output: bytes, expected: str, tests: dict[str, Any]) -> bool:
    """True if an output is as expected, by the tests' checker (not `program`).

    `tokens`: the texts between white space are equal. `float`: or are numbers within a tolerance,
    `float_tolerance`, absolute below 1 and relative above. `lines`: LiveCodeBench's rule, equal
    lines up to white space at their ends, or lines of equal numbers. With `ignore_case` letters
    are compared without case.
    """
    printed = output.decode(errors="replace")
    if tests.get("ignore_case"):
        printed, expected = printed.casefold(), expected.casefold()
    return _CHECKERS[checker_of(tests)](printed, expected, tests)


def _same_floats(printed: str, expected: str, tests: dict[str, Any]) -> bool:
    given = tests.get("float_tolerance")
    tolerance = 1e-6 if given is None else given
    tokens, wanted = printed.split(), expected.split()
    return len(tokens) == len(wanted) and all(
        a == b or _close(a, b, tolerance) for a, b in zip(tokens, wanted, strict=True)
    )


def _close(printed: str, wanted: str, tolerance: float) -> bool:
    if not _is_plain(printed):
        return False
    try:
        x, y = float(printed), float(wanted)
    except ValueError:  # words between numbers must be equal
        return False
    difference = abs(x - y)  # finite only if both are finite
    return math.isfinite(difference) and difference <= tolerance * max(1.0, abs(y))


def _same_lines(printed: str, expected: str, tests: dict[str, Any]) -> bool:
    lines, wanted = ([x.strip() for x in t.strip().split("\n")] for t in (printed, expected))
    return len(lines) == len(wanted) and all(
        a == b or _same_numbers(a, b) for a, b in zip(lines, wanted, strict=True)
    )


def _is_plain(printed: str) -> bool:
    """False for numbers that only Python reads: `1_5`, full-width digits."""
    return printed.isascii() and "_" not in printed


def _same_numbers(printed: str, wanted: str) -> bool:
    if not _is_plain(printed):
        return False
    try:
        return [*map(Decimal, printed.split())] == [*map(Decimal, wanted.split())]
    except InvalidOperation:
        return False


_CHECKERS: dict[str, Callable[[str, str, dict[str, Any]], bool]] = {
    "tokens": lambda printed, expected, tests: printed.split() == expected.split(),
    "float": _same_floats,
    "lines": _same_lines,
}
