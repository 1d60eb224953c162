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
from tramontane.verifier.code import functions, sandbox
from tramontane.verifier.format import fences

MAX_TIMEOUTS = 3  # where a failure does not end grading; tests after that count as failed
MAX_OUTPUT = 1 << 20  # bytes of an output that is kept
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


class Trial(NamedTuple):
    """A program to be run on inputs, with nothing to compare to; `language`: python or cpp."""

    language: str
    program: str
    inputs: list[str]

    def time_limit(self, config: VerifierConfig) -> float:
        """The longest that all of it can take, the compiler included."""
        return _limit(len(self.inputs), 1, config)


class Ran(NamedTuple):
    """What one execution printed, or in `failure` why that does not count."""

    output: str
    failure: str = ""


def try_out(trial: Trial, config: VerifierConfig) -> list[Ran]:
    """Run a program on each input, in the sandbox; after three that time out it is left alone."""
    late, found = 0, []
    if trial.language == "cpp" and shutil.which("g++") is None:
        return [Ran("", "no C++ compiler (g++) here")] * len(trial.inputs)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return [Ran("", NO_SANDBOX)] * len(trial.inputs)
    with tempfile.TemporaryDirectory(prefix="tramontane-code-") as folder:
        job = _job(trial.program, trial.language, trial.inputs, config, Path(folder))
        job.keep_going = True
        with sandbox.Execution(job, sandbox.probe()) as runs:
            if trial.language == "cpp" and (failure := next(runs).failure):
                return [Ran("", f"does not compile: {failure}")] * len(trial.inputs)
            for ran in runs:
                found.append(_ran(ran))
                late += ran.failure.startswith("timed out")
                if late == MAX_TIMEOUTS:
                    break
    # Where it was left alone, or it killed the sandbox.
    return found + [found[-1]] * (len(trial.inputs) - len(found))


def _ran(ran: sandbox.Ended) -> Ran:
    if ran.failure:
        return Ran("", ran.failure)
    if len(ran.output) > MAX_OUTPUT:
        return Ran("", f"printed more than {MAX_OUTPUT >> 20} MB")
    try:
        return Ran(ran.output.decode())
    except UnicodeDecodeError:
        return Ran("", "printed what is not UTF-8")


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """The longest that all of a problem's tests can take, compilers included."""
    tests = problem.tests or {}
    count = min(len(tests.get("cases") or [None]), config.code_tests)
    compilers = 2 if tests.get("type") == "cpp_assert" else 1  # the program's, the tests'
    return _limit(count, compilers, config)


def _limit(runs: int, compilers: int, config: VerifierConfig) -> float:
    return runs * (config.code_timeout_s + 0.5) + compilers * sandbox.COMPILE_SECONDS + 10


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
    job = _job(program, language, [case["input"] for _, case in cases], config, folder)
    with sandbox.Execution(job, sandbox.probe()) as runs:
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
    inputs: list[str],
    config: VerifierConfig,
    folder: Path,
) -> sandbox.Job:
    """The program, written to its folder, and its inputs."""
    encoded = [text.encode() for text in inputs]
    job = sandbox.Job(folder, encoded, config.code_timeout_s, config.code_memory_mb)
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
