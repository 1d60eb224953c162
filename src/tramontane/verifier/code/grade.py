"""Judgement of the first fenced program of an answer, by its tests (arXiv 2506.10910, section 2.2).

Programs run in the best sandbox that works on this machine (`sandbox`), all tests of a program in
one sandbox. A program receives inputs only: its output is compared here, outside.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier.code import functions, sandbox
from tramontane.verifier.code.comparing import fault_of, same_output
from tramontane.verifier.format import fences

MAX_TIMEOUTS = 3  # afterwards the remaining tests count as failed
MAX_OUTPUT = 1 << 20  # bytes of one output that a trial keeps
NO_SANDBOX = "no sandbox works here, and verifier.allow_unsandboxed is false (tramontane doctor)"
NO_COMPILER = "no C++ compiler (g++) here"
_PYTHON = {"python", "python3", "py"}
_CPP = {"cpp", "c++", "cc", "cxx", "cpp20", "c++20"}


class Judgement(NamedTuple):
    """The code verifier's judgement.

    `answer` is the program that was graded. `passed` is the share of the tests that it passed,
    known for a wrong program only if all tests are run (`reward.code: fraction`).
    """

    outcome: Outcome
    reason: str
    answer: str | None
    passed: float = 0.0


@dataclass(frozen=True)
class _Run:
    """A program on the tests of a problem."""

    program: str
    language: str
    problem: Problem
    config: VerifierConfig

    def __hash__(self) -> int:
        return hash((self.program, self.language, self.problem.id))


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
    if fault := fault_of(problem.tests):
        return Judgement("unscorable", f"the tests {fault}", program)
    if language is None:
        return Judgement("wrong", f"cannot run {tag}: only Python and C++ are graded", program)
    if problem.tests["type"] != "stdio" and language != "python":
        return Judgement("wrong", f"the tests are for another language than {tag}", program)
    if language == "cpp" and shutil.which("g++") is None:
        return Judgement("unscorable", NO_COMPILER, program)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return Judgement("unscorable", NO_SANDBOX, program)
    outcome, reason, passed = _run_tests(_Run(program, language, problem, config))
    if outcome == "unscorable":  # the machine's fault: the next completion is tried again
        _run_tests.cache_clear()
    return Judgement(outcome, reason, program, passed)


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """Longest time by the clock of all tests of a problem in seconds, compilers included."""
    count = min(len((problem.tests or {}).get("cases") or [None]), config.code_tests)
    return seconds_for(count, compilers=1, config=config)


def seconds_for(executions: int, *, compilers: int, config: VerifierConfig) -> float:
    """Longest time by the clock of these executions and compilers, in one sandbox that starts."""
    clock = sandbox.Limits(config.code_timeout_s, 0).clock_seconds
    return executions * (clock + 0.5) + compilers * sandbox.COMPILE_SECONDS + 20


def draw_tests(problem: Problem, n: int) -> list[tuple[int, dict[str, Any]]]:
    """`n` numbered tests in their original order, the same for every completion of a problem."""
    cases = list(enumerate((problem.tests or {})["cases"], 1))
    if len(cases) <= n:
        return cases
    return sorted(random.Random(f"tests of {problem.id}").sample(cases, n), key=lambda c: c[0])


@lru_cache(maxsize=1)  # the pool hands equal answers of a group to one worker, in a row
def _run_tests(run: _Run) -> tuple[Outcome, str, float]:
    """(outcome, reason, share of the tests that are passed) of a program."""
    stdio = (run.problem.tests or {}).get("type") == "stdio"
    with tempfile.TemporaryDirectory(prefix="tramontane-code-") as folder:
        return (_run_stdio_tests if stdio else _run_function_tests)(run, Path(folder))


def _run_function_tests(run: _Run, folder: Path) -> tuple[Outcome, str, float]:
    """The code of a function test counts as one test."""
    outcome, reason = functions.run_tests(run.program, run.problem, run.config, folder)
    return outcome, reason, float(outcome == "right")


def _run_stdio_tests(run: _Run, folder: Path) -> tuple[Outcome, str, float]:
    problem, config, language = run.problem, run.config, run.language
    tests = problem.tests or {}
    cases = draw_tests(problem, config.code_tests)
    if not cases:
        return "unscorable", "the problem has no tests", 0.0
    total = len(tests["cases"])
    passed = timeouts = 0
    failures: list[str] = []
    job = stdio_job(run.program, language, [case["input"] for _, case in cases], config, folder)
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if language == "cpp" and (compiled := next(running.results)).failure:
            outcome: Outcome = "unscorable" if compiled.is_unjudged else "wrong"
            return outcome, f"does not compile: {compiled.failure}", 0.0
        # A killed sandbox ends the results early.
        for (number, case), result in zip(cases, running.results, strict=False):
            failure = result.failure
            if result.is_unjudged:
                return "unscorable", f"test {number} of {total}: {failure}", 0.0
            if not failure and not same_output(result.output, case["output"], tests):
                failure = "wrong output"
            passed += not failure
            if failure:
                failures.append(f"test {number} of {total}: {failure}" if total > 1 else failure)
                timeouts += failure.startswith("timed out")
                if config.reward.code == "all_tests" or timeouts == MAX_TIMEOUTS:
                    break
    if passed == len(cases):
        return "right", "", 1.0
    if config.reward.code == "all_tests":
        return "wrong", failures[0], 0.0
    return "wrong", f"{passed} of {len(cases)} tests; {failures[0]}", passed / len(cases)


def stdio_job(
    program: str, language: str, inputs: list[str], config: VerifierConfig, folder: Path
) -> sandbox.Job:
    """The sandbox's job for a program, whose source is written to `folder`, and its inputs."""
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    job = sandbox.Job(folder, [text.encode() for text in inputs], limits)
    job.keep_going = config.reward.code == "fraction"
    source = "main.py" if language == "python" else "main.cpp"
    job.write(source, program)
    if language == "python":
        job.source = source
    else:
        job.compile_with(*sandbox.CPP_FLAGS)
    return job
