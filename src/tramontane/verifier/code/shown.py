"""Tests that a model may read, apart from the hidden ones that judge its program, and what it is
told about those that fail; for the environment `repair`.

The first `tests.shown` tests of a row are shown; without that field, the first `SHOWN`; never all.
A test is a case (`stdio`), or a function, method or statement that asserts (`python_assert`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Judgment, Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.comparing import same_output
from tramontane.verifier.code.grade import (
    draw_tests,
    judge,
    language_of,
    prelude_of,
    stdio_job,
    unfit,
)
from tramontane.verifier.format import Fence, fences

SHOWN = 3
NO_PROGRAM = "There is no program: write it in a fenced block with its language."
_LINE = re.compile(r"(.*) \(line (\d+) of the tests\)", re.DOTALL)
# An assertion that `data.code` made of a call and its results.
_MADE = re.compile(r"assert _plain\(_function\((.*)\)\) in \[(.*)\]", re.DOTALL)
_NOT_COMPILED = ("SyntaxError", "IndentationError", "TabError")


class Divided(NamedTuple):
    """A problem with its shown tests, None if there are none, and with its hidden ones."""

    shown: Problem | None
    hidden: Problem


def divide(problem: Problem) -> Divided:
    """The problem's tests, divided. One with a single test has none to show."""
    tests = problem.tests or {}
    cases = tests.get("cases") or []
    code = tests.get("code", "")
    units = _units(code) if tests.get("type") == "python_assert" else []
    given = tests.get("shown")
    count = min(SHOWN if given is None else int(given), len(units or cases) - 1)
    if count < 1:
        return Divided(None, problem)
    if units:
        first = tests | {"code": _without(code, units[count:])}
        rest = tests | {"code": _without(code, units[:count])}
    else:
        first, rest = tests | {"cases": cases[:count]}, tests | {"cases": cases[count:]}
    return Divided(replace(problem, tests=first), replace(problem, tests=rest))


def try_program(text: str, problem: Problem, config: VerifierConfig) -> Judgment | str:
    """What the model may read of the program in its answer; if all shown tests pass, the judgment
    of the hidden ones, or one that says why the program cannot be judged.

    Args:
        text: the answer, with the program in a fenced block.
        problem: as in its row; its tests are divided here.
        config: limits; `reward.code` counts for the hidden tests alone.
    """
    if not (blocks := fences(text)):
        return NO_PROGRAM
    shown, hidden = divide(problem)
    tests = (shown or hidden).tests or {}
    if tests.get("type") == "stdio" and tests.get("checker") != "program":
        refused = unfit(blocks[0], problem, config)
        if refused is not None:
            return refused if refused.outcome == "unscorable" else refused.reason
        return _try_cases(blocks[0], tests["cases"] if shown else [], hidden, config)
    if shown is None:
        return judge(text, hidden, config)
    reward = config.reward.model_copy(update={"code": "all_tests"})
    judged = judge(text, shown, config.model_copy(update={"reward": reward}))
    if judged.outcome == "right":
        return judge(text, hidden, config)
    return judged if judged.outcome == "unscorable" else _told(judged.reason, tests)


def _try_cases(
    block: Fence, shown: list[dict[str, str]], hidden: Problem, config: VerifierConfig
) -> Judgment | str:
    """`try_program` by inputs and outputs, in one sandbox."""
    language, program, tests = language_of(block.tag or "python"), block.body, hidden.tests or {}
    assert language is not None
    first = shown or [{"input": "", "output": ""}]  # only to see whether it compiles
    rest = [case for _, case in draw_tests(hidden, config.code_tests)]
    inputs, passed = [case["input"] for case in (*first, *rest)], 0
    job = stdio_job(program, language, inputs, config)
    job.prelude, job.keep_going = prelude_of(tests), True
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if job.compiler and (compiled := next(running.results)).failure:
            unjudged = Judgment("unscorable", compiled.failure, program)
            return unjudged if compiled.is_unjudged else _said(compiled)
        for place, result in enumerate(running.results):
            if result.is_unjudged:
                return Judgment("unscorable", result.failure, program)
            case = (*first, *rest)[place]
            right = not result.failure and same_output(result.output, case["output"], tests)
            if place >= len(first):
                passed += right
                if not right and config.reward.code == "all_tests":
                    break
            elif not shown:
                if any(sign in result.failure for sign in _NOT_COMPILED):
                    return _said(result)
            elif not right:
                printed = result.output.decode(errors="replace")
                return of_case(place + 1, shown, printed, _said(result))
    if passed == len(rest):
        return Judgment("right", "", program, 1.0)
    share = passed / len(rest) if config.reward.code == "fraction" else 0.0
    return Judgment("wrong", "it fails a hidden test", program, share)


def of_case(number: int, cases: Sequence[dict[str, str]], printed: str, failure: str = "") -> str:
    """What is said of a program that fails the shown case with this number, from 1."""
    case = cases[number - 1]
    said = failure or f"It printed:\n{printed.strip()}"
    return (
        f"Test {number} of {len(cases)} failed.\nInput:\n{case['input'].strip()}\n"
        f"Expected:\n{case['output'].strip()}\n{said}"
    )


def _said(result: sandbox.Result) -> str:
    """The end of a program or compiler that failed, in its own words; empty if it did not."""
    own = result.errors.strip()
    return f"It failed: {result.failure.partition(': ')[0]}\n{own}" if own else result.failure


def _told(reason: str, tests: dict[str, Any]) -> str:
    """What is said of a program that fails shown tests."""
    if tests["type"] == "stdio":
        return f"It failed {reason}"
    found, units = _LINE.fullmatch(reason), _units(tests["code"])
    for number, unit in enumerate(units, 1):
        if found and int(found[2]) in unit.lines:
            wanted = unit.text(tests.get("entry_point") or "")
            return f"Test {number} of {len(units)} failed: {found[1]}\n{wanted}"
    return f"It failed: {found[1] if found else reason}"  # before its tests, or instead of them


@dataclass(frozen=True)
class _Unit:
    """A part of function tests that is shown or hidden as a whole."""

    lines: range  # of the tests, from 1
    source: str

    def text(self, entry_point: str) -> str:
        """The unit as the model reads it."""
        made = _MADE.fullmatch(self.source)
        return f"{entry_point}({made[1]}) is expected to be {made[2]}" if made else self.source


def _units(code: str) -> list[_Unit]:
    """The parts of function tests, in order; none if they do not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines, units = code.splitlines(), list[_Unit]()
    for node in _asserting(tree.body):
        decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
        covered = range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)
        if not units or covered.start not in units[-1].lines:  # else on the line of the one before
            source = "\n".join(lines[covered.start - 1 : covered.stop - 1])
            units.append(_Unit(covered, source.strip()))
    return units


def _asserting(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        named = isinstance(node, ast.FunctionDef) and node.name.startswith(("test", "check"))
        if named or isinstance(node, ast.ClassDef):
            inner = list(_asserting(node.body))  # type: ignore[attr-defined]
            yield from inner or ([node] if named else [])
        elif not isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.Assert) for part in ast.walk(node)
        ):
            yield node


def _without(code: str, units: Sequence[_Unit]) -> str:
    """Tests without some of their units; their lines keep their numbers."""
    lines = code.splitlines()
    for unit in units:
        first = lines[unit.lines.start - 1]
        indentation = first[: len(first) - len(first.lstrip())]
        lines[unit.lines.start - 1 : unit.lines.stop - 1] = [
            f"{indentation}pass",
            *[""] * (len(unit.lines) - 1),
        ]
    return "\n".join(lines) + "\n"
