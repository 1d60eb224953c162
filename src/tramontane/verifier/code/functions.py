"""Function tests: the program in one sandbox, its tests in another, joined by a socket.

Expected values and comparisons exist only in the tests' process. It calls the program's process
with plain values (`inside.program_side`), through the names that are the program's (`names`). The
program can neither see the tests nor end them as passed: the verdict is how the tests' process
ended.
"""

from __future__ import annotations

import marshal
import re
import socket
from pathlib import Path

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.inside import peer
from tramontane.verifier.code.names import helper_source, names_of

# Each process sleeps while the other runs. The tests have until their clock limit; the program may
# sleep twice as long as the tests may run and sleep. `_late` decides whose fault a timeout was.
PROGRAM_ASLEEP_FACTOR = 2 * sandbox.ASLEEP_FACTOR
PROGRAM_CLOCK_FACTOR = sandbox.CLOCK_FACTOR + 1  # a safeguard: the tests end earlier
LAST_RESULT_SECONDS = 5.0  # wait for the result of a program whose tests have ended


def run_tests(
    program: str, prelude: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str]:
    """The verdict on a Python program under `tests.code`, and its reason.

    Args:
        program: the source text.
        prelude: source that runs before it.
        problem: the problem with the tests, and the statement that may define helper functions.
        config: the limits.
        folder: an empty folder, owned by the judge.
    """
    tests = problem.tests or {}
    if not isinstance(code := tests.get("code"), str):
        return "unscorable", "the problem has no tests"
    names = names_of(code, problem.problem, tests.get("entry_point") or "")
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    of_tests = limits._replace(asleep_factor=sandbox.CLOCK_FACTOR)
    of_program = limits._replace(
        asleep_factor=PROGRAM_ASLEEP_FACTOR, clock_factor=PROGRAM_CLOCK_FACTOR
    )
    tests_end, program_end = socket.socketpair()
    with tests_end, program_end:
        folder.chmod(0o711)  # the program may run as another user
        job = sandbox.Job(folder / "program", [b""], of_program, channel=program_end.fileno())
        job.set_program(_with_helpers(program, problem), "python")
        job.prelude = prelude
        settings = names._asdict() | {"code": code, "program": sorted(names.program)}
        asking = [marshal.dumps(settings)]
        tests_job = sandbox.Job(folder / "tests", asking, of_tests, channel=tests_end.fileno())
        rung = sandbox.probe()
        with sandbox.Sandbox(job, rung) as running, sandbox.Sandbox(tests_job, rung) as testing:
            program_end.close()  # the sandboxes have the ends; a copy would hide a closed one
            tests_end.close()
            return _verdict(running.results, testing.results, of_tests)


def _with_helpers(program: str, problem: Problem) -> str:
    """A Python program preceded by the statement's complete functions that it uses but does not
    define: it may complete only a statement's last function."""
    if "from __future__" in program:  # which must come first
        return program
    used = set(re.findall(r"\w+", program)) - set(re.findall(r"\bdef\s+(\w+)", program))
    entry_point = (problem.tests or {}).get("entry_point") or ""
    helpers = helper_source(problem.problem, used, entry_point)
    return f"{helpers}\n{program}" if helpers else program


def _verdict(
    program: sandbox.Results, tests: sandbox.Results, limits: sandbox.Limits
) -> tuple[Outcome, str]:
    """The verdict, from how the tests' process ended, or the program if it ended first."""
    end = next(tests)
    if not end.failure:
        return "right", ""
    if end.is_unjudged and not end.is_clock:
        return "unscorable", end.failure
    if end.code == peer.BROKEN:
        return "unscorable", end.failure.partition(": ")[2]
    if end.code == peer.GONE or end.is_clock:
        program_end = program.wait(LAST_RESULT_SECONDS)
        if end.is_clock or program_end.is_clock:
            return _late(end, program_end, limits)
        if program_end.is_unjudged:
            return "unscorable", program_end.failure
        if program_end.failure and program_end.code != 0:
            return "wrong", program_end.failure
        return "wrong", "ended before its tests" if program_end.code == 0 else "left its tests"
    return "wrong", end.failure.removeprefix("exit code 1: ")


def _late(
    tests: sandbox.Result, program: sandbox.Result, limits: sandbox.Limits
) -> tuple[Outcome, str]:
    """The verdict on a function test in which a process was stopped while asleep, or by the clock.

    The program has used its time if the processes together ran, or slept simultaneously, for as
    long as one may run and sleep; otherwise they waited for a processor.
    """
    tests_awake = tests.times.clock - tests.times.asleep
    both_asleep = max(0.0, program.times.asleep - tests_awake)
    had = tests.times.processor + program.times.processor + both_asleep
    if had >= limits.seconds * sandbox.ASLEEP_FACTOR:
        return "wrong", f"timed out after {had:.2g} s, most of it asleep"
    return "unscorable", f"the host was too busy to run it within {tests.times.clock:.2g} s"
