"""Does the first fenced block of the answer part pass its tests? (arXiv 2506.10910, section 2.2.)

Programs run in the best sandbox that works here (`sandbox`), all tests of a program in one, and
are told their inputs only: what they print is compared out here.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier import functions, sandbox
from tramontane.verifier.format import fences

MAX_TIMEOUTS = 3  # where a failure does not end grading; tests after that count as failed
NO_SANDBOX = "no sandbox works here, and verifier.allow_unsandboxed is false (tramontane doctor)"
_PYTHON = {"python", "python3", "py"}
_CPP = {"cpp", "c++", "cc", "cxx", "cpp20", "c++20"}


class Judgement(NamedTuple):
    """What the code verifier says; `answer` is the program that was graded, `passed` the share of
    the tests that it passed (of a wrong one only where all are run: `reward.code: fraction`)."""

    outcome: Outcome
    reason: str
    answer: str | None
    passed: float = 0.0


def judge(answer_part: str, problem: Problem, config: VerifierConfig) -> Judgement:
    """Run the first fenced block of the answer part on the problem's tests; all must pass."""
    blocks = fences(answer_part)
    if not blocks:
        return Judgement("wrong", "no program", None)
    program = blocks[0].body
    tag = blocks[0].tag.lower() or "python"
    language = "python" if tag in _PYTHON else "cpp" if tag in _CPP else None
    if not problem.tests:
        return Judgement("unscorable", "the problem has no tests", program)
    kind = problem.tests.get("type")
    if kind not in ("stdio", "python_assert", "cpp_assert"):
        return Judgement("unscorable", f"unknown type of tests: {kind}", program)
    if language is None:
        return Judgement("wrong", f"cannot run {tag}: only Python and C++ are graded", program)
    if kind != "stdio" and kind != f"{language}_assert":
        return Judgement("wrong", f"the tests are for another language than {tag}", program)
    if language == "cpp" and shutil.which("g++") is None:
        return Judgement("unscorable", "no C++ compiler (g++) here", program)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return Judgement("unscorable", NO_SANDBOX, program)
    with tempfile.TemporaryDirectory(prefix="tramontane-code-") as folder:
        run = _run_tests if kind == "stdio" else _run_functions
        outcome, reason, passed = run(program, language, problem, config, Path(folder))
    return Judgement(outcome, reason, program, passed)


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """The longest that all of a problem's tests can take, compilers included."""
    tests = problem.tests or {}
    count = min(len(tests.get("cases") or [None]), config.code_tests)
    compilers = 2 if tests.get("type") == "cpp_assert" else 1  # the program's, the tests'
    return count * (config.code_timeout_s + 0.5) + compilers * sandbox.COMPILE_SECONDS + 10


def draw_tests(problem: Problem, n: int) -> list[tuple[int, dict[str, Any]]]:
    """The same `n` numbered tests for every completion of a problem, in their own order."""
    cases = list(enumerate((problem.tests or {})["cases"], 1))
    if len(cases) <= n:
        return cases
    return sorted(random.Random(f"tests of {problem.id}").sample(cases, n), key=lambda c: c[0])


def _run_functions(
    program: str, language: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str, float]:
    """A function test is one test."""
    outcome, reason = functions.run_tests(program, language, problem, config, folder)
    return outcome, reason, float(outcome == "right")


def _run_tests(
    program: str, language: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str, float]:
    tests = problem.tests or {}
    cases = draw_tests(problem, config.code_tests)
    if not cases:
        return "unscorable", "the problem has no tests", 0.0
    total = len(tests["cases"])
    passed = late = 0
    failures: list[str] = []
    with sandbox.Execution(_job(program, language, cases, config, folder), sandbox.probe()) as runs:
        if language == "cpp" and (failure := next(runs).failure):
            return "wrong", f"does not compile: {failure}", 0.0
        for (number, case), ran in zip(cases, runs, strict=False):  # a killed sandbox ends `runs`
            failure = ran.failure
            if not failure and not same_output(ran.output, case["output"], tests):
                failure = "wrong output"
            passed += not failure
            if failure:
                failures.append(f"test {number} of {total}: {failure}" if total > 1 else failure)
                late += failure.startswith("timed out")
                if config.reward.code == "all_tests" or late == MAX_TIMEOUTS:
                    break
    if passed == len(cases):
        return "right", "", 1.0
    if config.reward.code == "all_tests":
        return "wrong", failures[0], 0.0
    return "wrong", f"{passed} of {len(cases)} tests; {failures[0]}", passed / len(cases)


def _job(
    program: str,
    language: str,
    cases: list[tuple[int, dict[str, Any]]],
    config: VerifierConfig,
    folder: Path,
) -> sandbox.Job:
    """The program, written to its folder, and its inputs."""
    inputs = [case["input"].encode() for _, case in cases]
    job = sandbox.Job(folder, inputs, config.code_timeout_s, config.code_memory_mb)
    job.keep_going = config.reward.code == "fraction"
    source = "main.py" if language == "python" else "main.cpp"
    (folder / source).write_text(program, encoding="utf-8", errors="replace")
    if language == "python":
        job.source = source
        return job
    job.compile(*sandbox.CPP_FLAGS)
    return job


def same_output(output: bytes, expected: str, tests: dict[str, Any]) -> bool:
    """Token by token; with the `float` checker within an absolute or relative tolerance."""
    got, want = output.decode(errors="replace").split(), expected.split()
    if tests.get("checker", "tokens") == "tokens":
        return got == want
    tolerance = float(tests.get("float_tolerance", 1e-6))
    return len(got) == len(want) and all(
        a == b or _close(a, b, tolerance) for a, b in zip(got, want, strict=True)
    )


def _close(a: str, b: str, tolerance: float) -> bool:
    try:
        x, y = float(a), float(b)
    except ValueError:  # words among the numbers must be equal as they stand
        return False
    return math.isfinite(x) and abs(x - y) <= tolerance * max(1.0, abs(y))
