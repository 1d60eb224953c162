"""Judgement of the first fenced program of an answer, by its tests (arXiv 2506.10910, section 2.2).

Programs run in the best sandbox that works on this machine (`sandbox`), all tests of a program in
one sandbox. A program receives inputs only: its output is compared here, outside.
"""

from __future__ import annotations

import marshal
import random
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.temporary import temporary_folder
from tramontane.types import Outcome, Problem
from tramontane.verifier.code import functions, sandbox
from tramontane.verifier.code.comparing import fault_of, same_output
from tramontane.verifier.format import fences

MAX_TIMEOUTS = 3  # afterwards the remaining tests count as failed
MAX_OUTPUT = 1 << 20  # bytes of one output that a trial keeps
NO_SANDBOX = "no sandbox works here, and verifier.allow_unsandboxed is false (tramontane doctor)"
NO_COMPILER = "no C++ compiler (g++) here"
Language = Literal["python", "cpp", "c"]
_YEARS = ("11", "14", "17", "20", "23")
_LANGUAGES: dict[str, Language] = {
    **dict.fromkeys(("python", "python3", "py", "py3", "pypy", "pypy3"), "python"),
    **dict.fromkeys(("cpp", "c++", "cc", "cxx"), "cpp"),
    **{name + year: "cpp" for name in ("cpp", "c++", "gnu++") for year in _YEARS},
    **dict.fromkeys(("c", "c99", "c11", "c17"), "c"),
}
# What LiveCodeBench puts before every program.
_STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_PRELUDE = "".join(f"from {name} import *\n" for name in _STARRED) + (
    f"import {', '.join(name for name in _STARRED if name != 'builtins')}\n"
    "sys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(50000)\n"
)


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
    language: Language
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
    language = language_of(tag)
    if not problem.tests:
        return Judgement("unscorable", "the problem has no tests", program)
    if fault := fault_of(problem.tests):
        return Judgement("unscorable", f"the tests {fault}", program)
    if language is None:
        return Judgement("wrong", f"cannot run {tag}: only Python, C++ and C are graded", program)
    if problem.tests["type"] != "stdio" and language != "python":
        return Judgement("wrong", f"the tests are for another language than {tag}", program)
    if language != "python" and shutil.which("g++") is None:
        return Judgement("unscorable", NO_COMPILER, program)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return Judgement("unscorable", NO_SANDBOX, program)
    outcome, reason, passed = _run_tests(_Run(program, language, problem, config))
    if outcome == "unscorable":  # the machine's fault: the next completion is tried again
        _run_tests.cache_clear()
    return Judgement(outcome, reason, program, passed)


def language_of(tag: str) -> Language | None:
    """The language of a fence's tag; versions of a language are the same one."""
    return _LANGUAGES.get(tag.lower())


def prelude_of(tests: dict[str, Any]) -> str:
    """Python source that runs before a program under the tests' rules."""
    return _PRELUDE if tests.get("rules") == "livecodebench" else ""


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """Longest time by the clock of all tests of a problem in seconds, compilers included."""
    tests = problem.tests or {}
    count = min(len(tests.get("cases") or [None]), config.code_tests)
    programs = 3 if tests.get("checker") == "program" else 1  # it may be tried on the answer
    return seconds_for(count * programs, compilers=programs, config=config)


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
    with temporary_folder("code") as folder:
        return (_run_stdio_tests if stdio else _run_function_tests)(run, Path(folder))


def _run_function_tests(run: _Run, folder: Path) -> tuple[Outcome, str, float]:
    """The code of a function test counts as one test."""
    prelude = prelude_of(run.problem.tests or {})
    outcome, reason = functions.run_tests(run.program, prelude, run.problem, run.config, folder)
    return outcome, reason, float(outcome == "right")


def _run_stdio_tests(run: _Run, folder: Path) -> tuple[Outcome, str, float]:
    problem, config = run.problem, run.config
    tests = problem.tests or {}
    cases = draw_tests(problem, config.code_tests)
    total = len(tests["cases"])
    has_program = tests.get("checker") == "program"
    outputs: list[bytes] = []  # for the checker's program
    timeouts = 0
    failures: dict[int, str] = {}  # by the case's place
    inputs = [case["input"] for _, case in cases]
    job = stdio_job(run.program, run.language, inputs, config, folder / "program")
    job.prelude = prelude_of(tests)
    folder.chmod(0o711)  # the program may run as another user
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if job.compiler and (compiled := next(running.results)).failure:
            outcome: Outcome = "unscorable" if compiled.is_unjudged else "wrong"
            return outcome, f"does not compile: {compiled.failure}", 0.0
        # A killed sandbox ends the results early.
        for place, ((number, case), result) in enumerate(zip(cases, running.results, strict=False)):
            failure = result.failure
            if result.is_unjudged:
                return "unscorable", f"test {number} of {total}: {failure}", 0.0
            outputs.append(result.output)
            if (
                not failure
                and not has_program
                and not same_output(result.output, case["output"], tests)
            ):
                failure = "wrong output"
            if failure:
                failures[place] = failure
                timeouts += failure.startswith("timed out")
                if config.reward.code == "all_tests" or timeouts == MAX_TIMEOUTS:
                    break
    if has_program:
        ran = [place for place in range(len(outputs)) if place not in failures]
        triples = [(cases[i][1]["input"], outputs[i], cases[i][1]["output"]) for i in ran]
        checked = _run_checker(tests, triples, config, folder / "checker")
        if isinstance(checked, str):
            return "unscorable", checked, 0.0
        failures |= {i: f for i, f in zip(ran, checked, strict=True) if f}
    passed = len(outputs) - len(failures)
    if passed == len(cases):
        return "right", "", 1.0
    place = min(failures)
    first = f"test {cases[place][0]} of {total}: {failures[place]}"
    first = first if total > 1 else failures[place]
    if config.reward.code == "all_tests":
        return "wrong", first, 0.0
    return "wrong", f"{passed} of {len(cases)} tests; {first}", passed / len(cases)


def _run_checker(
    tests: dict[str, Any],
    triples: list[tuple[str, bytes, str]],
    config: VerifierConfig,
    folder: Path,
) -> list[str] | str:
    """A failure, "" if there is none, for each (input, output, answer), by the row's own checker.

    The checker is called as testlib's are, `checker input output answer`, with names of files; it
    accepts by exit code 0, and refuses by 1 or 2. If it ends in another way, the output is refused
    if the checker accepts the answer in its place; else the checker is at fault, and the reason is
    returned.
    """
    if not triples:
        return []
    inputs = [
        marshal.dumps({"input": a.encode(), "output": b, "answer": c.encode()})
        for a, b, c in triples
    ]
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    job = sandbox.Job(folder, inputs, limits, keep_going=True, has_files=True)
    job.set_program(tests["checker_code"], tests.get("checker_language") or "python")
    checked: list[str] = []
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if job.compiler and (compiled := next(running.results)).failure:
            return f"the checker does not compile: {compiled.failure}"
        for (text, output, answer), result in zip(triples, running.results, strict=False):
            said = result.failure
            if said and result.code not in (1, 2):
                itself = (text, answer.encode(), answer)
                if output == itself[1] or result.is_unjudged:
                    return f"the checker failed: {said}"
                fault = _run_checker(tests, [itself], config, folder.with_name("itself"))
                if isinstance(fault, str) or fault[0]:
                    return f"the checker failed: {said}; it does not accept the answer either"
            said = said.removeprefix(f"exit code {result.code}").removeprefix(": ")
            checked.append(f"wrong output{said and f' ({said})'}" if result.failure else "")
    if len(checked) < len(triples):
        return "the checker ended its sandbox"
    return checked


def stdio_job(
    program: str, language: Language, inputs: list[str], config: VerifierConfig, folder: Path
) -> sandbox.Job:
    """The sandbox's job for a program, whose source is written to `folder`, and its inputs."""
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    job = sandbox.Job(folder, [text.encode() for text in inputs], limits)
    job.keep_going = config.reward.code == "fraction"
    job.set_program(program, language)
    return job
