"""What is decided about a program before it runs, and about its output afterwards."""

import pytest

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import (
    NO_SANDBOX,
    Trial,
    TrialOutput,
    _as_output,
    draw_tests,
    judge,
    language_of,
    missing_compiler,
    prelude_of,
    run_trial,
    seconds_for,
    time_limit,
    unfit,
)
from tramontane.verifier.code.sandbox.running import Result
from tramontane.verifier.format import fences

CONFIG = VerifierConfig(allow_unsandboxed=True)
PROGRAM = "print(3)\n"
CASES = [{"input": "1\n", "output": "2\n"}] * 3
STDIO = {"type": "stdio", "cases": CASES}
SILENT = {"type": "stdio", "cases": [{"input": "1\n", "output": ""}]}  # which curation refuses
ASSERT = {"type": "python_assert", "code": "assert f(1) == 2", "entry_point": "f"}


def problem(**tests):
    return Problem("p", "code", "?", tests=tests or None)


def refused(tag, given, config=CONFIG):
    return unfit(fences(f"```{tag}\n{PROGRAM}```")[0], given, config)


@pytest.mark.parametrize(
    ("tag", "tests", "outcome", "reason"),
    [
        ("python", {}, "unscorable", "the problem has no tests"),
        ("python", {"type": "x"}, "unscorable",
         "the tests need a type, one of stdio, python_assert"),
        ("RUST", STDIO, "wrong", "cannot run rust: only Python, C++ and C are graded"),
        ("c", ASSERT, "wrong", "the tests are for another language than c"),
        ("", ASSERT | {"code": "assert True"}, "unscorable",
         "the tests never called the program"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_be_run_on_its_tests(tag, tests, outcome, reason):
    found = refused(tag, problem(**tests))
    assert (found.outcome, found.reason, found.answer) == (outcome, reason, PROGRAM)


@pytest.mark.parametrize("tests", [STDIO, SILENT, ASSERT])
@pytest.mark.parametrize("tag", ["python", "Py3", ""])
def test_a_program_that_can_be_run(tag, tests, monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    assert refused(tag, problem(**tests)) is None
    found = refused(tag, problem(**tests), VerifierConfig())
    assert (found.outcome, found.reason, found.answer) == ("unscorable", NO_SANDBOX, PROGRAM)
    answer = f"```{tag}\n{PROGRAM}```"
    assert judge(answer, problem(**tests), VerifierConfig()) == found
    monkeypatch.setattr(sandbox, "probe", lambda: "namespaces")
    assert refused(tag, problem(**tests), VerifierConfig()) is None


def test_a_machine_without_compilers_runs_python(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_compiler("python") == ""
    assert missing_compiler("cpp") == "no compiler g++ here"
    assert missing_compiler("c") == "no compiler gcc here"
    found = refused("c", problem(**STDIO))
    assert (found.outcome, found.reason) == ("unscorable", "no compiler gcc here")
    assert found.answer == PROGRAM
    trial = Trial("cpp", "int main() {}", ["1", "2"])
    assert run_trial(trial, CONFIG) == [TrialOutput("", "no compiler g++ here")] * 2
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    trial = trial._replace(language="python")
    assert run_trial(trial, VerifierConfig()) == [TrialOutput("", NO_SANDBOX)] * 2
    for compiler in ("g++", "gcc"):
        (tmp_path / compiler).symlink_to("/bin/true")
    assert missing_compiler("cpp") == missing_compiler("c") == ""


def test_an_answer_without_a_fence_has_no_program():
    assert judge("print(3)", problem(**STDIO), CONFIG)[:2] == ("wrong", "no program")


def test_tags_name_languages_and_their_versions():
    for tag in ("python", "python3", "py", "py3", "pypy", "pypy3", "Python"):
        assert language_of(tag) == "python"
    years = ("11", "14", "17", "20", "23")
    versions = [name + year for name in ("cpp", "c++", "gnu++") for year in years]
    for tag in ("cpp", "c++", "cc", "cxx", "C++", *versions):
        assert language_of(tag) == "cpp"
    for tag in ("c", "c99", "c11", "c17", "C"):
        assert language_of(tag) == "c"
    for tag in ("", "rust", "c++98", "py2", "gnu++"):
        assert language_of(tag) is None


# What LiveCodeBench's judge imports.
IMPORTED = """string re datetime collections heapq bisect copy math random statistics itertools
functools operator io sys json builtins typing"""


def test_only_livecodebench_s_and_leetcode_s_programs_have_imports():
    prelude = prelude_of({"rules": "livecodebench"})
    *starred, plain, recursion, digits = prelude.splitlines()
    assert starred == [f"from {name} import *" for name in IMPORTED.split()]
    assert plain == f"import {', '.join(x for x in IMPORTED.split() if x != 'builtins')}"
    assert recursion == "sys.setrecursionlimit(50000)"
    assert digits == "sys.set_int_max_str_digits(50000)"
    compile(prelude, "prelude", "exec")
    assert prelude_of({"entry_point": "Solution().two"}) == prelude
    assert prelude_of({"code": "Solution().two(1)"}) == prelude
    assert prelude_of({}) == prelude_of(STDIO) == prelude_of(ASSERT) == ""


def test_the_time_of_all_tests_is_bounded():
    """Ten times its seconds and half a second for each execution, and 20 s to begin."""
    config = VerifierConfig(code_timeout_s=2.0, code_tests=2)
    compiling = sandbox.COMPILE_SECONDS
    assert seconds_for(3, compilers=2, config=config) == 3 * 20.5 + 2 * compiling + 20
    assert time_limit(problem(**STDIO), config) == 2 * 20.5 + compiling + 20
    checked = problem(**STDIO, checker="program")
    assert time_limit(checked, config) == 2 * 3 * 20.5 + 3 * compiling + 20
    one = problem(type="stdio", cases=CASES[:1])
    assert time_limit(one, config) == 20.5 + compiling + 20
    # Those of a function count as one, and are tried on two constants.
    assert time_limit(problem(**ASSERT), config) == 3 * 20.5 + compiling + 20
    assert time_limit(problem(), config) == 20.5 + compiling + 20
    trial = Trial("python", "", ["1", "2", "3", "4"])
    assert trial.time_limit(config) == 4 * 20.5 + compiling + 20
    assert (trial.max_timeouts, trial.hash_seed) == (3, 0)


def test_tests_are_numbered_from_one():
    assert draw_tests(problem(**STDIO), 3) == [(n, CASES[0]) for n in (1, 2, 3)]
    assert len(draw_tests(problem(**STDIO), 2)) == 2


def test_the_output_of_a_trial():
    assert _as_output(Result("é\n".encode(), "")) == ("é\n", "")
    assert _as_output(Result(b"x", "timed out")) == ("", "timed out")
    assert _as_output(Result(b"\xff", "")) == ("", "printed what is not UTF-8")
    assert _as_output(Result(b"x" * (1 << 20), "")).failure == ""
    assert _as_output(Result(b"x" * ((1 << 20) + 1), "")) == ("", "printed more than 1 MB")
