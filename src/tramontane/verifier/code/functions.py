"""Function tests: the program in one sandbox, its tests in another, joined by a socket.

Expected values and comparisons are in the tests' process alone. The tests' process calls the
program's process with plain values (`inside.program_side` for Python, `inside/rpc.hpp` for C++).
The program can neither see the tests nor end them as passed: the verdict is how the tests' process
ended.
"""

from __future__ import annotations

import marshal
import re
import socket
from pathlib import Path

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier.code import cpp, sandbox
from tramontane.verifier.code.inside import peer
from tramontane.verifier.code.inside.statement import helper_source

# Each process sleeps while the other runs. The tests have until their clock's end; the program may
# sleep for as long as the tests may run and sleep, twice. `_late` decides whose fault it was.
PROGRAM_ASLEEP_FACTOR = 2 * sandbox.ASLEEP_FACTOR
PROGRAM_CLOCK_FACTOR = sandbox.CLOCK_FACTOR + 1  # a safeguard: the tests end before
LAST_RESULT_SECONDS = 5.0  # wait for the result of a program whose tests have ended


def run_tests(
    program: str, language: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str]:
    """The verdict on a program under `tests.code`, and its reason.

    Args:
        program: the source text.
        language: `python` or `cpp`.
        problem: the problem with the tests, and the statement that may define helper functions.
        config: the limits.
        folder: an empty folder of the judge's.
    """
    tests = problem.tests or {}
    if not isinstance(tests.get("code"), str):
        return "unscorable", "the problem has no tests"
    folder.chmod(0o711)  # the program may run as another user
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    of_tests = limits._replace(asleep_factor=sandbox.CLOCK_FACTOR)
    of_program = limits._replace(
        asleep_factor=PROGRAM_ASLEEP_FACTOR, clock_factor=PROGRAM_CLOCK_FACTOR
    )
    tests_end, program_end = socket.socketpair()
    with tests_end, program_end:
        jobs = [_job(folder / "program", of_program, program_end)]
        jobs += [_job(folder / "tests", of_tests, tests_end)]
        run = _run_cpp if language == "cpp" else _run_python
        return run(program, problem, jobs, (program_end, tests_end))


def _job(folder: Path, limits: sandbox.Limits, end: socket.socket) -> sandbox.Job:
    folder.mkdir()
    return sandbox.Job(folder, [b""], limits, channel=end.fileno())


def _run_python(
    program: str,
    problem: Problem,
    jobs: list[sandbox.Job],
    ends: tuple[socket.socket, socket.socket],
) -> tuple[Outcome, str]:
    tests = problem.tests or {}
    job, tests_job = jobs
    job.source = "main.py"
    source = _with_helpers(program, problem)
    (job.folder / job.source).write_text(source, encoding="utf-8", errors="replace")
    settings = {
        "code": tests["code"],
        "statement": problem.problem,
        "entry_point": tests.get("entry_point") or "",
    }
    tests_job.inputs = [marshal.dumps(settings)]
    rung = sandbox.probe()
    with sandbox.Sandbox(job, rung) as running, sandbox.Sandbox(tests_job, rung) as testing:
        ends[0].close()  # the sandboxes have the ends now; a copy here would hide a closed end
        ends[1].close()
        return _verdict(running.results, testing.results, tests_job.limits)


def _with_helpers(program: str, problem: Problem) -> str:
    """A Python program after the statement's complete functions that it uses and does not define:
    it may complete the last function of a statement alone."""
    if "from __future__" in program:  # which must come first
        return program
    used = set(re.findall(r"\w+", program)) - set(re.findall(r"\bdef\s+(\w+)", program))
    entry_point = (problem.tests or {}).get("entry_point") or ""
    helpers = helper_source(problem.problem, used, entry_point)
    return f"{helpers}\n{program}" if helpers else program


def _run_cpp(
    program: str,
    problem: Problem,
    jobs: list[sandbox.Job],
    ends: tuple[socket.socket, socket.socket],
) -> tuple[Outcome, str]:
    code = (problem.tests or {})["code"]
    job, tests_job = jobs
    if "main" not in cpp.called_names(code):
        return "unscorable", "the tests have no main()"
    names = cpp.exported_names(program, code, problem.problem)
    if not names:
        return "wrong", "defines none of the functions that the tests call"
    if missing := cpp.missing_names(program, code, problem.problem):
        return "wrong", f"does not define {', '.join(missing)}"
    source = cpp.program_source(program, names, problem.problem)
    (job.folder / "main.cpp").write_text(source, encoding="utf-8", errors="replace")
    job.compile_with(*sandbox.CPP_FLAGS)
    job.compiler = cpp.print_signatures(job.compiler)
    tests_job.compile_with(*cpp.TESTS_FLAGS)
    # The program waits for the tests' compiler.
    waiting = sandbox.COMPILE_SECONDS / job.limits.seconds
    job.limits = job.limits._replace(
        asleep_factor=PROGRAM_ASLEEP_FACTOR + waiting, clock_factor=PROGRAM_CLOCK_FACTOR + waiting
    )
    rung = sandbox.probe()
    with sandbox.Sandbox(job, rung) as running:
        ends[0].close()
        compiled = next(running.results)
        if compiled.failure:
            outcome: Outcome = "unscorable" if compiled.is_unjudged else "wrong"
            return outcome, f"does not compile: {compiled.failure}"
        signatures = cpp.signatures(compiled.output.decode(errors="replace"), names)
        for name, signature in signatures.items():
            if isinstance(signature, str):
                declared = cpp.is_declared(name, program, problem.problem)
                return "unscorable" if declared else "wrong", f"{name}: {signature}"
        source = cpp.tests_source(code, signatures, problem.problem)
        (tests_job.folder / "main.cpp").write_text(source, encoding="utf-8", errors="replace")
        with sandbox.Sandbox(tests_job, rung) as testing:
            ends[1].close()
            if (built := next(testing.results)).failure:
                outcome = "unscorable" if built.is_unjudged else "wrong"
                return outcome, f"the tests do not compile against the program: {built.failure}"
            return _verdict(running.results, testing.results, tests_job.limits)


def _verdict(
    program: sandbox.Results, tests: sandbox.Results, limits: sandbox.Limits
) -> tuple[Outcome, str]:
    """The verdict, by the end of the tests' process; by the program's end if that came first."""
    end = next(tests)
    if not end.failure:
        return "right", ""
    if end.code == peer.BROKEN:
        return "unscorable", end.failure.partition(": ")[2]
    if end.code == peer.GONE or end.is_clock:
        program_end = program.wait(LAST_RESULT_SECONDS)
        if end.is_clock or program_end.is_clock:
            return _late(end, program_end, limits)
        if program_end.failure and program_end.code != 0:
            return "wrong", program_end.failure
        return "wrong", "ended before its tests" if program_end.code == 0 else "left its tests"
    if line := re.search(r"tests:(\d+): .*Assertion", end.failure):
        return "wrong", f"assertion failed (line {line[1]} of the tests)"
    return "wrong", end.failure.removeprefix("exit code 1: ")


def _late(
    tests: sandbox.Result, program: sandbox.Result, limits: sandbox.Limits
) -> tuple[Outcome, str]:
    """The verdict on a function test in which a process was stopped asleep, or by the clock.

    The program has had its time if both processes together ran, or slept at once, for as long as
    one may run and sleep; if not, they waited for a processor.
    """
    tests_awake = tests.times.clock - tests.times.asleep
    both_asleep = max(0.0, program.times.asleep - tests_awake)
    had = tests.times.processor + program.times.processor + both_asleep
    if had >= limits.seconds * sandbox.ASLEEP_FACTOR:
        return "wrong", f"timed out after {had:.2g} s, most of it asleep"
    return "unscorable", f"the host was too busy to run it within {tests.times.clock:.2g} s"
