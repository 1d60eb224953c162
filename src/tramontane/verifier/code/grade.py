"""Judgment of the first fenced program of an answer, by its tests (arXiv 2506.10910, section 2.2).

Programs run in the best sandbox that works on this machine (`sandbox`), all tests of a program in
one sandbox. A program receives inputs only: its output is compared here, outside. A trial runs a
program on inputs without expected outputs, for curation.
"""

from __future__ import annotations

import marshal
import random
import shutil
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Judgment, Outcome, Problem
from tramontane.verifier.code import functions, sandbox
from tramontane.verifier.code.comparing import fault_of, same_output
from tramontane.verifier.code.idle import NO_CHECK, plainly_decide, why_idle
from tramontane.verifier.format import Fence, fences

MAX_TIMEOUTS = 3  # afterwards the remaining tests count as failed
_CONSTANTS = ("None", "'?'")  # results by which function tests are tried
MAX_OUTPUT = 1 << 20  # bytes of one output that a trial keeps
NO_SANDBOX = "no sandbox works here, and verifier.allow_unsandboxed is false (tramontane doctor)"
Language = Literal["python", "cpp", "c"]
_YEARS = ("11", "14", "17", "20", "23")
_LANGUAGES: dict[str, Language] = {
    **dict.fromkeys(("python", "python3", "py", "py3", "pypy", "pypy3"), "python"),
    **dict.fromkeys(("cpp", "c++", "cc", "cxx"), "cpp"),
    **{name + year: "cpp" for name in ("cpp", "c++", "gnu++") for year in _YEARS},
    **dict.fromkeys(("c", "c99", "c11", "c17"), "c"),
}
# What LiveCodeBench puts before every program, and LeetCode has imported.
_STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_PRELUDE = "".join(f"from {name} import *\n" for name in _STARRED) + (
    f"import {', '.join(name for name in _STARRED if name != 'builtins')}\n"
    "sys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(50000)\n"
)


@dataclass(frozen=True)
class _Run:
    program: str
    language: Language
    problem: Problem = field(hash=False)  # has dicts
    config: VerifierConfig = field(hash=False)


def judge(answer_part: str, problem: Problem, config: VerifierConfig) -> Judgment:
    """Run the first fenced block of the answer part on the problem's tests; all must pass.

    `share` is the share of the tests passed, known for a wrong program only if all tests are run
    (`reward.code: fraction`).
    """
    blocks = fences(answer_part)
    if not blocks:
        return Judgment("wrong", "no program")
    refused = unfit(blocks[0], problem, config)
    if refused is not None:
        return refused
    program, language = blocks[0].body, language_of(blocks[0].tag or "python")
    assert language is not None
    judged = _run_tests(_Run(program, language, problem, config))
    if judged.outcome == "unscorable":  # the machine's fault: the next completion is tried again
        _run_tests.cache_clear()
    return judged._replace(answer=program)


def unfit(block: Fence, problem: Problem, config: VerifierConfig) -> Judgment | None:
    """The judgment of a program that cannot be run on its problem's tests; None if it can."""
    tag, program, tests = block.tag.lower() or "python", block.body, problem.tests
    language = language_of(tag)
    if not tests:
        return Judgment("unscorable", "the problem has no tests", program)
    if fault := fault_of(tests):
        return Judgment("unscorable", f"the tests {fault}", program)
    if language is None:
        return Judgment("wrong", f"cannot run {tag}: only Python, C++ and C are graded", program)
    if tests["type"] != "stdio" and language != "python":
        return Judgment("wrong", f"the tests are for another language than {tag}", program)
    if "code" in tests and (idle := why_idle(tests, problem.problem)):
        return Judgment("unscorable", idle, program)
    if missing := missing_compiler(language):
        return Judgment("unscorable", missing, program)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return Judgment("unscorable", NO_SANDBOX, program)
    return None


def missing_compiler(language: Language) -> str:
    """Why programs in a language cannot run on this machine; empty if they can."""
    command = sandbox.COMPILERS[language][0] if language in sandbox.COMPILERS else ""
    return f"no compiler {command} here" if command and shutil.which(command) is None else ""


def language_of(tag: str) -> Language | None:
    """The language of a fence's tag; versions of a language are the same one."""
    return _LANGUAGES.get(tag.lower())


def prelude_of(tests: dict[str, Any]) -> str:
    """Python source that runs before a program: imports, under LiveCodeBench's rules and for
    LeetCode's class `Solution`, whose programs use `List` and `inf` without importing them."""
    of_leetcode = "Solution" in f"{tests.get('entry_point')} {tests.get('code')}"
    return _PRELUDE if of_leetcode or tests.get("rules") == "livecodebench" else ""


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """Longest time by the clock of all tests of a problem in seconds, compilers included."""
    tests = problem.tests or {}
    count = min(len(tests.get("cases") or [None]), config.code_tests)
    programs = 3 if tests.get("checker") == "program" else 1  # it may be tried on the answer
    trials = len(_CONSTANTS) if "code" in tests else 0
    return seconds_for(count * programs + trials, compilers=programs, config=config)


def seconds_for(executions: int, *, compilers: int, config: VerifierConfig) -> float:
    """Longest time by the clock of these executions and compilers, in one sandbox that starts."""
    clock = config.code_timeout_s * sandbox.CLOCK_FACTOR
    return executions * (clock + 0.5) + compilers * sandbox.COMPILE_SECONDS + 20


def draw_tests(problem: Problem, n: int) -> list[tuple[int, dict[str, Any]]]:
    """`n` numbered tests in their original order, the same for every completion of a problem."""
    cases = list(enumerate((problem.tests or {})["cases"], 1))
    return sorted(random.Random(f"tests of {problem.id}").sample(cases, min(n, len(cases))))


@lru_cache(maxsize=1)  # the pool sends equal answers of a group to one worker, in a row
def _run_tests(run: _Run) -> Judgment:
    tests = run.problem.tests or {}
    if tests.get("type") == "stdio":
        return _run_stdio_tests(run)
    judged = functions.run_tests(run.program, prelude_of(tests), run.problem, run.config)
    if judged.outcome == "right" and _pass_anything(replace(run, program="")):
        return Judgment("unscorable", NO_CHECK)
    return judged


@lru_cache(maxsize=64)
def _pass_anything(run: _Run) -> bool:
    """True if programs that always return one value pass the function tests, whichever it is:
    no check is reached that could fail, or it compares the program with itself."""
    tests = run.problem.tests or {}
    if plainly_decide(tests["code"], run.problem.problem, tests.get("entry_point") or ""):
        return False
    return all(
        functions.run_tests(
            functions.doing_nothing(run.problem, value), prelude_of(tests), run.problem, run.config
        ).outcome
        == "right"
        for value in _CONSTANTS
    )


def _run_stdio_tests(run: _Run) -> Judgment:
    problem, config = run.problem, run.config
    tests = problem.tests or {}
    cases = draw_tests(problem, config.code_tests)
    total = len(tests["cases"])
    has_program = tests.get("checker") == "program"
    outputs: list[bytes] = []  # for the checker's program
    timeouts = 0
    failures: dict[int, str] = {}  # by the case's place
    inputs = [case["input"] for _, case in cases]
    job = stdio_job(run.program, run.language, inputs, config)
    job.prelude = prelude_of(tests)
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if job.compiler and (compiled := next(running.results)).failure:
            outcome: Outcome = "unscorable" if compiled.is_unjudged else "wrong"
            return Judgment(outcome, f"does not compile: {compiled.failure}")
        # A killed sandbox ends the results early.
        for place, ((number, case), result) in enumerate(zip(cases, running.results, strict=False)):
            failure = result.failure
            if result.is_unjudged:
                return Judgment("unscorable", f"test {number} of {total}: {failure}")
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
        checked = _run_checker(tests, triples, config)
        if isinstance(checked, str):
            return Judgment("unscorable", checked)
        failures |= {i: f for i, f in zip(ran, checked, strict=True) if f}
    passed = len(outputs) - len(failures)
    if passed == len(cases):
        return Judgment("right", "", share=1.0)
    place = min(failures)
    first = f"test {cases[place][0]} of {total}: {failures[place]}"
    first = first if total > 1 else failures[place]
    if config.reward.code == "all_tests":
        return Judgment("wrong", first)
    share = passed / len(cases)
    return Judgment("wrong", f"{passed} of {len(cases)} tests; {first}", share=share)


def _run_checker(
    tests: dict[str, Any], triples: list[tuple[str, bytes, str]], config: VerifierConfig
) -> list[str] | str:
    """The failure of each (input, output, answer) under the row's own checker, "" if accepted.

    The checker is called like testlib's, `checker input output answer`, with file names. Exit code
    0 accepts the output, 1 and 2 reject it. If the checker ends in any other way, it is also run on
    the answer: if it accepts that, the output is rejected; else the checker is at fault, and the
    reason is returned.
    """
    if not triples:
        return []
    inputs = [
        marshal.dumps({"input": a.encode(), "output": b, "answer": c.encode()})
        for a, b, c in triples
    ]
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    job = sandbox.Job(inputs, limits, keep_going=True, has_files=True)
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
                fault = _run_checker(tests, [itself], config)
                if isinstance(fault, str) or fault[0]:
                    return f"the checker failed: {said}; it does not accept the answer either"
            said = said.removeprefix(f"exit code {result.code}").removeprefix(": ")
            checked.append(f"wrong output{said and f' ({said})'}" if result.failure else "")
    if len(checked) < len(triples):
        return "the checker ended its sandbox"
    return checked


def stdio_job(
    program: str, language: Language, inputs: list[str], config: VerifierConfig
) -> sandbox.Job:
    """The sandbox's job for a program and its inputs."""
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    job = sandbox.Job([text.encode() for text in inputs], limits)
    job.keep_going = config.reward.code == "fraction"
    job.set_program(program, language)
    return job


# ----------------------------------------------------------------------------------------- trials


class Trial(NamedTuple):
    """A program, its inputs, the number of timeouts after which the rest are not run, and the hash
    seed of Python, by which a program that prints a set is found out."""

    language: Language
    program: str
    inputs: list[str]
    max_timeouts: int = MAX_TIMEOUTS
    hash_seed: int = 0

    def time_limit(self, config: VerifierConfig) -> float:
        """Longest time of the whole trial in seconds, including the compiler."""
        return seconds_for(len(self.inputs), compilers=1, config=config)


class TrialOutput(NamedTuple):
    """The output of one execution, or in `failure` why it is not used."""

    output: str
    failure: str = ""


def run_trial(trial: Trial, config: VerifierConfig) -> list[TrialOutput]:
    """Run a program on each input, in the sandbox.

    After `max_timeouts`, or if the program kills the sandbox, the remaining inputs are not run:
    each gets the last failure.
    """
    if missing := missing_compiler(trial.language):
        return [TrialOutput("", missing)] * len(trial.inputs)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return [TrialOutput("", NO_SANDBOX)] * len(trial.inputs)
    timeouts, outputs = 0, []
    job = stdio_job(trial.program, trial.language, trial.inputs, config)
    job.keep_going, job.hash_seed = True, trial.hash_seed
    with sandbox.Sandbox(job, sandbox.probe()) as running:
        if job.compiler and (failure := next(running.results).failure):
            return [TrialOutput("", f"does not compile: {failure}")] * len(trial.inputs)
        for result in running.results:
            outputs.append(_as_output(result))
            timeouts += result.failure.startswith("timed out")
            if timeouts == trial.max_timeouts:
                break
    return outputs + [outputs[-1]] * (len(trial.inputs) - len(outputs))


def _as_output(result: sandbox.Result) -> TrialOutput:
    if result.failure:
        return TrialOutput("", result.failure)
    if len(result.output) > MAX_OUTPUT:
        return TrialOutput("", f"printed more than {MAX_OUTPUT >> 20} MB")
    try:
        return TrialOutput(result.output.decode())
    except UnicodeDecodeError:
        return TrialOutput("", "printed what is not UTF-8")
