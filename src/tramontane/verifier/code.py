"""Does the first fenced block of the answer part pass its tests? (arXiv 2506.10910, section 2.2.)

A program runs in its own session and private temporary directory, with a cleared environment and
rlimits on processor time, memory, file size, open files and processes; its whole process group is
killed afterwards. That bounds accidents. It is *not* a sandbox: a hostile program can read what
its user can read and reach the network (docs/rewards.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem
from tramontane.verifier.format import fences

COMPILE_SECONDS = 10.0
COMPILE_MB = 2048
OUTPUT_BYTES = 16 * 1024 * 1024
# The system counts all of a user's threads, ours included: only a fork bomb should meet this.
PROCESSES = 4096
_PYTHON = {"python", "python3", "py"}
_CPP = {"cpp", "c++", "cc", "cxx", "cpp20", "c++20"}
# The interpreter beneath a virtual environment: programs see no packages of ours, and start faster.
_INTERPRETER = getattr(sys, "_base_executable", None) or sys.executable
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class Judgement(NamedTuple):
    """What the code verifier says; `answer` is the program that was graded."""

    outcome: Outcome
    reason: str
    answer: str | None


class Finished(NamedTuple):
    """How one execution ended: its output, or in `failure` why it does not count."""

    output: bytes
    failure: str


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
    with tempfile.TemporaryDirectory(prefix="tramontane-code-") as folder:
        outcome, reason = _run_tests(program, language, problem, config, Path(folder))
    return Judgement(outcome, reason, program)


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """The longest that all of a problem's tests can take, compiler included."""
    cases = (problem.tests or {}).get("cases") or [None]
    return min(len(cases), config.code_tests) * (config.code_timeout_s + 0.5) + COMPILE_SECONDS + 5


def draw_tests(problem: Problem, n: int) -> list[tuple[int, dict[str, Any]]]:
    """The same `n` numbered tests for every completion of a problem, in their own order."""
    cases = list(enumerate((problem.tests or {})["cases"], 1))
    if len(cases) <= n:
        return cases
    return sorted(random.Random(f"tests of {problem.id}").sample(cases, n), key=lambda c: c[0])


def _run_tests(
    program: str, language: str, problem: Problem, config: VerifierConfig, folder: Path
) -> tuple[Outcome, str]:
    tests = problem.tests or {}
    nonce = ""
    if tests["type"] == "python_assert":
        # Who exits before the tests ran does not print this.
        nonce = secrets.token_hex(16)
        program = f"{program}\n\n{tests['code']}\n\nprint({nonce!r})\n"
    elif tests["type"] == "cpp_assert":
        program = f"{program}\n\n{tests['code']}\n"
    command, failure = _prepare(program, language, folder)
    if failure:
        return "wrong", failure
    cases = [(1, {"input": ""})]
    if tests["type"] == "stdio":
        cases = draw_tests(problem, config.code_tests)
    if not cases:
        return "unscorable", "the problem has no tests"
    for number, case in cases:
        ran = execute(
            command,
            folder,
            case["input"].encode(),
            seconds=config.code_timeout_s,
            memory_mb=config.code_memory_mb,
        )
        failure = ran.failure
        if not failure and tests["type"] == "stdio":
            failure = "" if same_output(ran.output, case["output"], tests) else "wrong output"
        elif not failure and nonce and not ran.output.rstrip().endswith(nonce.encode()):
            failure = "ended before its tests"
        if failure:
            total = len(tests.get("cases", cases))
            return "wrong", f"test {number} of {total}: {failure}" if total > 1 else failure
    return "right", ""


def _prepare(program: str, language: str, folder: Path) -> tuple[list[str], str]:
    """Write, and for C++ compile, the program: (command, "") or ([], why not)."""
    if language == "python":
        source = folder / "main.py"
        source.write_text(program, encoding="utf-8", errors="replace")
        return [_INTERPRETER, "-I", "-B", str(source)], ""
    source = folder / "main.cpp"
    source.write_text(program, encoding="utf-8", errors="replace")
    compiler = ["g++", "-std=c++20", "-O2", "-pipe", "-o", str(folder / "main"), str(source)]
    ran = execute(compiler, folder, b"", seconds=COMPILE_SECONDS, memory_mb=COMPILE_MB)
    return [str(folder / "main")], f"does not compile: {ran.failure}" if ran.failure else ""


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


# -------------------------------------------------------------------------------- one process


def execute(
    command: list[str], folder: Path, stdin: bytes, *, seconds: float, memory_mb: int
) -> Finished:
    """Run one command under limits, in a directory of its own, and kill all that it started."""
    home = Path(tempfile.mkdtemp(dir=folder))
    inputs, outputs, errors = folder / "stdin", folder / "stdout", folder / "stderr"
    inputs.write_bytes(stdin)
    # Output goes to files: a limit on file size holds where a pipe would fill our memory.
    with inputs.open("rb") as i, outputs.open("wb") as o, errors.open("wb") as e:
        process = subprocess.Popen(
            command,
            stdin=i,
            stdout=o,
            stderr=e,
            cwd=home,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)}
            | {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=_limits(seconds, memory_mb),
        )
        in_time = _wait(process, seconds)
        killpg_quietly(process.pid)
        code = process.wait()
    shutil.rmtree(home, ignore_errors=True)
    if not in_time:
        return Finished(b"", f"timed out after {seconds:g} s")
    if code == 0:
        return Finished(outputs.read_bytes(), "")
    if code == -signal.SIGXFSZ:
        return Finished(b"", f"printed more than {OUTPUT_BYTES >> 20} MB")
    said = errors.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    line = next((x for x in said if "error:" in x), said[-1] if said else "")
    if "MemoryError" in line or "bad_alloc" in line:
        return Finished(b"", f"needed more than {memory_mb} MB")
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return Finished(b"", f"{ended}: {line[:200]}" if line else ended)


def _limits(seconds: float, memory_mb: int) -> Callable[[], None]:
    """What the child does to itself between fork and exec."""
    cpu = math.ceil(seconds) + 1
    limits = [
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ]

    def apply() -> None:
        for which, amount in limits:
            hard = resource.getrlimit(which)[1]
            amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(which, (amount, amount))
        die_with_parent()  # a worker that is killed takes its program along

    return apply


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends, however that ends (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait without polling where the system can (Popen.wait looks only every 50 ms)."""
    if not hasattr(os, "pidfd_open"):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def killpg_quietly(group: int) -> None:
    """Kill what is left of a process group, if anything."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
