"""Function tests: the program in one sandbox, its tests in another, joined by a socket.

What the tests expect is in their process alone, and so is the comparison. The program's process
is called by plain values (`inside.remote` for Python, `inside/rpc.hpp` for C++), and can neither
see the tests nor end them as passed: the verdict is how their process ended.
"""

from __future__ import annotations

import marshal
import re
import socket
from pathlib import Path

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier.code import cpp, sandbox
from tramontane.verifier.code.inside import remote

# The tests' clock bounds both; the program's is only for the case that it fails.
LONGER = 2 * sandbox.GRACE_SECONDS
LAST_WORDS_SECONDS = 1.0


def run_tests(
    program: str, language: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str]:
    """The verdict, and why, of a program under `tests.code`; `folder` is empty, and ours."""
    tests = problem.tests or {}
    if not isinstance(tests.get("code"), str):
        return "unscorable", "the problem has no tests"
    folder.chmod(0o711)  # programs may run as a user of their own
    ours, theirs = socket.socketpair()
    with ours, theirs:
        jobs: list[sandbox.Job] = []
        for name, end in (("program", theirs), ("tests", ours)):
            (folder / name).mkdir()
            job = sandbox.Job(folder / name, [b""], config.code_timeout_s, config.code_memory_mb)
            job.channel = end.fileno()
            jobs.append(job)
        jobs[0].seconds += LONGER
        run = _cpp if language == "cpp" else _python
        return run(program, problem, jobs, (theirs, ours))


def _python(
    program: str,
    problem: Problem,
    jobs: list[sandbox.Job],
    ends: tuple[socket.socket, socket.socket],
) -> tuple[Outcome, str]:
    tests = problem.tests or {}
    job, tests_job = jobs
    job.source = "main.py"
    (job.folder / job.source).write_text(program, encoding="utf-8", errors="replace")
    settings = {
        "code": tests["code"],
        "statement": problem.problem,
        "entry_point": tests.get("entry_point") or "",
    }
    tests_job.inputs = [marshal.dumps(settings)]
    rung = sandbox.probe()
    with sandbox.Execution(job, rung) as running, sandbox.Execution(tests_job, rung) as testing:
        ends[0].close()  # the sandboxes have them now, and see each other's end
        ends[1].close()
        return _verdict(running, testing)


def _cpp(
    program: str,
    problem: Problem,
    jobs: list[sandbox.Job],
    ends: tuple[socket.socket, socket.socket],
) -> tuple[Outcome, str]:
    code = (problem.tests or {})["code"]
    job, tests_job = jobs
    if "main" not in cpp.called(code):
        return "unscorable", "the tests have no main()"
    names = cpp.exported(program, code, problem.problem)
    if not names:
        return "wrong", "defines none of the functions that the tests call"
    (job.folder / "main.cpp").write_text(
        cpp.program_source(program, names, problem.problem), encoding="utf-8", errors="replace"
    )
    job.compile(*sandbox.CPP_FLAGS)
    job.compiler = cpp.telling_signatures(job.compiler)
    tests_job.compile(*cpp.TESTS_FLAGS)
    job.seconds += sandbox.COMPILE_SECONDS  # it waits for the tests' compiler
    rung = sandbox.probe()
    with sandbox.Execution(job, rung) as running:
        ends[0].close()
        compiled = next(running)
        if compiled.failure:
            return "wrong", f"does not compile: {compiled.failure}"
        signatures = cpp.signatures(compiled.output.decode(errors="replace"), names)
        for name, signature in signatures.items():
            if isinstance(signature, str):
                outcome: Outcome = (
                    "unscorable" if cpp.demanded(name, program, problem.problem) else "wrong"
                )
                return outcome, f"{name}: {signature}"
        source = cpp.tests_source(code, signatures, problem.problem)
        (tests_job.folder / "main.cpp").write_text(source, encoding="utf-8", errors="replace")
        with sandbox.Execution(tests_job, rung) as testing:
            ends[1].close()
            if failure := next(testing).failure:
                return "wrong", f"the tests do not compile against the program: {failure}"
            return _verdict(running, testing)


def _verdict(running: sandbox.Execution, testing: sandbox.Execution) -> tuple[Outcome, str]:
    ended = next(testing)
    if not ended.failure:
        return "right", ""
    if ended.code == remote.BROKEN:
        return "unscorable", ended.failure.partition(": ")[2]
    if ended.code == remote.GONE:
        own = running.next(LAST_WORDS_SECONDS)
        if own.code:
            return "wrong", own.failure
        return "wrong", "ended before its tests" if own.code == 0 else "left its tests"
    if line := re.search(r"tests:(\d+): .*Assertion", ended.failure):
        return "wrong", f"assertion failed (line {line[1]} of the tests)"
    return "wrong", ended.failure.removeprefix("exit code 1: ")
