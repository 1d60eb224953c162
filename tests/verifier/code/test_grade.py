"""Programs against their tests, under limits."""

import gzip
import json
import os
import shutil
import time

import pytest

from tests.paths import DATA
from tramontane.config import VerifierConfig
from tramontane.data.code import parse_tests
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import Trial, draw_tests, judge, run_trial, same_output

CONFIG = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
SHORT = VerifierConfig(code_timeout_s=0.2, allow_unsandboxed=True)
FRACTION = CONFIG.model_copy(
    update={"reward": CONFIG.reward.model_copy(update={"code": "fraction"})}
)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SUM = Problem(
    "sum",
    "code",
    "Print the sum of two integers.",
    tests={
        "type": "stdio",
        "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}],
        "checker": "tokens",
    },
)


def run(program, problem=SUM, tag="python", config=CONFIG):
    """The verdict, from an attempt for which the host was not too busy."""
    for _ in range(20):
        verdict = judge(f"Here it is:\n```{tag}\n{program}\n```\n", problem, config)
        if "too busy" not in verdict.reason:
            break
    return verdict


def test_right_and_wrong():
    right = "print(sum(map(int, input().split())))"
    assert run(right) == run(right, tag="") == ("right", "", right + "\n", 1.0)
    assert run("print(3)")[:2] == ("wrong", "test 2 of 2: wrong output")
    failed = run("print(undefined)")
    assert failed.outcome == "wrong"
    assert "NameError" in failed.reason
    assert "SyntaxError" in run("def f(:").reason
    assert run("import sys; sys.exit(3)").reason == "test 1 of 2: exit code 3"


def test_the_first_block_counts():
    two = "```python\nprint(3)\n```\n```python\nprint(sum(map(int, input().split())))\n```"
    assert judge(two, SUM, CONFIG).outcome == "wrong"


def test_limits():
    assert run("while True: pass", config=SHORT).reason == "test 1 of 2: timed out after 0.2 s"
    asleep = run("import time; time.sleep(60)", config=SHORT).reason
    assert asleep == "test 1 of 2: timed out after 0.4 s, most of it asleep"
    assert run("x = bytearray(10**9)").reason == "test 1 of 2: needed more than 300 MB"
    assert run("while True: print('x' * 10**6)").outcome == "wrong"
    assert run("open('f', 'wb').write(bytes(10**8))").outcome == "wrong"


def test_environment_is_bare(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert run("import os\nassert 'SECRET_TOKEN' not in os.environ\nprint(3)").reason.startswith(
        "test 2"
    )
    assert os.listdir(os.getcwd())  # but the program starts in an empty directory
    assert run("import os\nassert os.listdir() == []\nprint(3)").reason.startswith("test 2")


def test_leaving_before_the_asserts_is_no_pass():
    tests = {"type": "python_assert", "code": "assert add(1, 2) == 3", "entry_point": "add"}
    problem = Problem("add", "code", "Write add.", tests=tests)
    assert run("def add(a, b): return a + b", problem).outcome == "right"
    assert run("def add(a, b): return a - b", problem).outcome == "wrong"
    early = run("import sys\nsys.exit(0)\ndef add(a, b): return a + b", problem)
    assert early[:2] == ("wrong", "ended before its tests")


def test_unscorable():
    assert run("print(3)", Problem("p", "code", "?")).reason == "the problem has no tests"
    assert run("print(3)", Problem("p", "code", "?", tests={"type": "x"})).outcome == "unscorable"
    empty = Problem("p", "code", "?", tests={"type": "stdio", "cases": []})
    assert run("print(3)", empty).outcome == "unscorable"
    assert run("fn main() {}", tag="rust").outcome == "wrong"


def test_tests_are_drawn_by_the_problem_s_id():
    cases = [{"input": str(i), "output": ""} for i in range(100)]
    one, two = (Problem(i, "code", "?", tests={"type": "stdio", "cases": cases}) for i in "ab")
    drawn = draw_tests(one, 20)
    assert len(drawn) == 20
    assert drawn == draw_tests(one, 20) == sorted(drawn, key=lambda case: case[0])
    assert drawn != draw_tests(two, 20)
    assert len(draw_tests(one, 1000)) == 100


def test_the_share_passed_is_of_the_tests_that_were_run():
    cases = [{"input": f"{i}\n", "output": f"{i}\n"} for i in range(5)]
    problem = Problem("echo", "code", "?", tests={"type": "stdio", "cases": cases})
    (number, wrong), _ = draw_tests(problem, 2)
    wrong["output"] = "no"
    judged = run("print(input())", problem, config=FRACTION.model_copy(update={"code_tests": 2}))
    assert (judged.outcome, judged.share) == ("wrong", 0.5)
    assert judged.reason == f"1 of 2 tests; test {number} of 5: wrong output"


def test_the_first_failed_test_ends_the_others():
    program = "import time\nn = int(input())\ntime.sleep(30 * n)\nprint(7)"
    began = time.monotonic()
    judged = run(program, stdio(("0", "0"), ("1", "7")))
    assert judged[:2] == ("wrong", "test 1 of 2: wrong output")
    assert time.monotonic() - began < 20


def test_after_three_timeouts_the_rest_counts_as_failed():
    late = "import time\nn = int(input())\ntime.sleep(9 * (n in (0, 1, 3)))\nprint(n)"
    problem = stdio(*((f"{n}", f"{n}") for n in range(5)))
    config = FRACTION.model_copy(update={"code_timeout_s": 0.1})
    judged = run(late, problem, config=config)
    assert judged.share == 1 / 5  # though the last would pass
    assert judged.reason.startswith("1 of 5 tests; test 1 of 5: timed out after 0.2 s")


def test_function_tests_are_in_python():
    tests = {"type": "python_assert", "code": "assert f() == 3"}
    judged = run("int f() { return 3; }", Problem("p", "code", "?", tests=tests), tag="cpp")
    assert judged[:2] == ("wrong", "the tests are for another language than cpp")


@pytest.mark.parametrize("tag", ["python", "cpp"])
def test_cpp_function_tests_are_refused(tag):
    tests = {"type": "cpp_assert", "code": "int main() {}"}
    judged = run("print(3)", Problem("p", "code", "?", tests=tests), tag=tag)
    assert judged.outcome == "unscorable"
    assert "give the problem stdio tests" in judged.reason
    with pytest.raises(InputError, match="here: the tests are C.. function tests"):
        parse_tests(tests, "here")


def test_checkers():
    assert same_output(b"1  2\n3", "1 2 3\n", {"checker": "tokens"})
    assert not same_output(b"1 2", "1 2 3", {"checker": "tokens"})
    floats = {"checker": "float", "float_tolerance": 1e-3}
    assert same_output(b"yes 1.0005", "yes 1", floats)
    assert same_output(b"100000.5", "100000", floats)
    assert not same_output(b"1.01", "1", floats)
    assert same_output(b"0.1005", "0.1", floats)  # absolute below 1
    assert not same_output(b"1 2", "1 2 3", floats)
    assert not same_output(b"nan", "1", floats)
    assert not same_output(b"inf", "-inf", floats)
    assert not same_output(b"1", "inf", floats)
    assert same_output(b"inf", "inf", floats)
    assert not same_output(b"no 1", "yes 1", floats)


def stdio(*cases, **rest):
    pairs = [{"input": given, "output": wanted} for given, wanted in cases]
    return Problem("p", "code", "?", tests={"type": "stdio", "cases": pairs, **rest})


def test_letters_are_compared_with_case_unless_the_row_says_otherwise():
    assert run("print('Yes')", stdio(("1", "YES"))).outcome == "wrong"
    assert run("print('Yes')", stdio(("1", "YES"), ignore_case=True)).outcome == "right"
    assert run("print('No')", stdio(("1", "YES"), ignore_case=True)).outcome == "wrong"


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n 3 \n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),  # values stay on their lines
        ("1  2", "1 2", True),  # as numbers
        ("a  b", "a b", False),
        ("1.50 2e0", "1.5 2", True),
        ("0.30000001", "0.3", False),
        ("1_0", "10", False),  # Python alone reads it
        ("１０", "10", False),
        ("nan", "sNaN", False),
        ("1" + "0" * 5000 + ".0", "1" + "0" * 5000, True),
    ],
)
def test_lines_are_compared_as_livecodebench_does(printed, wanted, same):
    assert same_output(printed.encode(), wanted, {"rules": "livecodebench"}) is same
    assert same_output(printed.encode(), wanted, {"checker": "lines"}) is same


def test_livecodebench_s_programs_have_its_imports_and_limits():
    cases = [{"input": "3 4", "output": "5.0"}]
    tests = parse_tests({"rules": "livecodebench", "cases": cases}, "here")
    problem = Problem("p", "code", "?", tests=tests)
    program = (
        "class A:\n    def deep(self, n): return n and self.deep(n - 1)\n"
        "assert A().deep(40_000) == 0 and len(str(10 ** 9_000)) == 9_001\n"
        "assert Counter('aa') == collections.Counter(a=2) and sys and heappush and List[int]\n"
        "print(math.hypot(*map(int, input().split())))"
    )
    assert run(program, problem)[:2] == ("right", "")
    plain = Problem("p", "code", "?", tests={"type": "stdio", "cases": cases})
    assert "not defined" in run("print(sqrt(25))", plain).reason
    calls = [{"input": "[9]", "output": "3.0", "metadata": {"func_name": "root"}}]
    tests = parse_tests({"rules": "livecodebench", "cases": calls}, "here")
    program = "class Solution:\n    def root(self, x: List[int]) -> float: return sqrt(x[0])"
    assert run(program, Problem("p", "code", "?", tests=tests))[:2] == ("right", "")


# Testlib's way: names of the files of input, output and answer; exit code 0, 1 or 2.
PYTHON_CHECKER = """
import sys
data, output, answer = (open(name).read().split() for name in sys.argv[1:])
assert answer == ["1", "3"]
if len(output) != 2 or sum(map(int, output)) != int(data[0]) or min(map(int, output)) < 1:
    print("no such sum", file=sys.stderr)
    sys.exit(1)
"""
CPP_CHECKER = """
#include <fstream>
int main(int n, char** names) {
    std::ifstream data(names[1]), output(names[2]), answer(names[3]);
    int sum, a = 0, b = 0;
    data >> sum; output >> a >> b;
    return a + b == sum && a > 0 && b > 0 ? 0 : 2;
}
"""


@pytest.mark.parametrize(
    ("language", "code"),
    [(None, PYTHON_CHECKER), pytest.param("cpp", CPP_CHECKER, marks=needs_gpp)],
)
@pytest.mark.slow
def test_a_row_s_own_checker_decides_where_several_outputs_are_right(language, code):
    rest = {"checker": "program", "checker_code": code, "checker_language": language}
    tests = parse_tests(stdio(("4\n", "1 3\n"), ("4\n", "1 3\n"), **rest).tests, "here")
    problem = Problem("p", "code", "Print two positive integers whose sum is n.", tests=tests)
    halves = "n = int(input())\nprint(n // 2, n - n // 2)"
    assert run(halves, problem)[:2] == ("right", "")
    judged = run("print(5, -1)", problem)
    assert judged[:2] == ("wrong", "test 1 of 2: wrong output" + " (no such sum)" * (not language))
    assert run("raise ValueError", problem).reason.endswith("ValueError")
    assert run(halves, problem, config=FRACTION).share == 1.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('x')", "the checker failed: exit code 3: ValueError: x"),
        ("import os; os._exit(3)", "the checker failed: exit code 3"),
        ("while True: pass", "the checker failed: timed out"),
        ("open('/nowhere')", "the checker failed"),
        ("1 +", "the checker failed"),
    ],
)
def test_a_checker_that_fails_makes_the_answer_unscorable(code, reason):
    problem = stdio(("4", "1 3"), checker="program", checker_code=code)
    judged = run("print(2, 2)", problem, config=SHORT)
    assert judged.outcome == "unscorable"
    assert judged.reason.startswith(reason)
    assert "does not accept the answer either" in judged.reason


def test_an_output_that_a_sound_checker_cannot_read_is_wrong():
    code = "import sys\nsum(map(int, open(sys.argv[2]).read().split()))"
    problem = stdio(("4", "1 3"), checker="program", checker_code=code)
    assert run("print('one', 'three')", problem)[0] == "wrong"
    assert run("print(3, 1)", problem)[:2] == ("right", "")


NAMES = """
import sys
assert sys.argv[1:] == ["input", "output", "answer"]
given, printed, _ = (open(name).read() for name in sys.argv[1:])
sys.exit(int(printed) <= int(given) and f"not above {given}")
"""


def test_a_checker_is_told_of_what_ran_and_rejects_the_rest():
    cases = [(f"{n}", "9") for n in (3, 7, 4, 5)]
    problem = stdio(*cases, checker="program", checker_code=NAMES)
    judged = run("n = int(input())\nassert n < 7\nprint(2 * n - 4)", problem, config=FRACTION)
    assert (judged.outcome, judged.share) == ("wrong", 1 / 4)
    assert judged.reason == "1 of 4 tests; test 1 of 4: wrong output (not above 3)"


@needs_gpp
def test_a_checker_in_c():
    code = """
    #include <stdio.h>
    int main(int n, char **names) { return fopen(names[2], "r") ? 0 : 3; }"""
    problem = stdio(("4", "1 3"), checker="program", checker_code=code, checker_language="c")
    assert run("print(5)", problem)[:2] == ("right", "")
    problem.tests["checker_code"] = "int main() { return x; }"
    judged = run("print(6)", problem)
    assert judged.outcome == "unscorable"
    assert judged.reason.startswith("the checker does not compile: exit code 1: ")


def test_a_checker_that_rejects_its_answer_is_at_fault_for_a_failure():
    code = "import sys\nsys.exit(1 if len(open(sys.argv[2]).read().split()) == 2 else 3)"
    judged = run("print(5)", stdio(("4", "1 3"), checker="program", checker_code=code))
    assert judged.outcome == "unscorable"
    assert judged.reason == "the checker failed: exit code 3; it does not accept the answer either"


@pytest.mark.parametrize("code", [1, 2])
def test_a_checker_rejects_by_its_exit_code(code):
    exits = f"import sys\nsys.exit({code})"  # whatever it is given
    problem = stdio(("4", "1 3"), checker="program", checker_code=exits)
    assert run("print(5)", problem)[:2] == ("wrong", "wrong output")


@needs_gpp
@pytest.mark.parametrize("tag", ["py3", "pypy3", "Python", "cpp17", "C++14", "gnu++20", "c", "c11"])
def test_tags_of_languages(tag):
    programs = {
        "p": "print(sum(map(int, input().split())))",
        "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d%d", &a, &b);\n'
        'printf("%d", a + b); return 0; }',
    }
    program = programs["p" if tag[:1] in "pP" else "c"]
    if tag in ("c", "c11"):  # not C++
        program = program.replace("int a, b;", "int a, b, *new = malloc(9);")
        program = "#include <stdlib.h>\n" + program
    assert run(program, tag=tag)[:2] == ("right", "")


@needs_gpp
def test_cpp():
    program = (
        "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b; }"
    )
    assert run(program, tag="cpp").outcome == "right"
    broken = run("int main() { return undefined; }", tag="c++")
    assert broken.outcome == "wrong"
    assert broken.reason.startswith("does not compile")


def test_a_trial_goes_on_until_it_was_late_too_often():
    program = "import time\nn = int(input())\nassert n != 1, 'one'\n"
    program += "time.sleep(9 * (n in (2, 4)))\nprint(n)"
    config = VerifierConfig(code_timeout_s=0.2, allow_unsandboxed=sandbox.probe() == "rlimits")
    failed, late = (
        ("", "exit code 1: AssertionError: one"),
        ("", "timed out after 0.4 s, most of it asleep"),
    )
    trial = Trial("python", program, [f"{n}" for n in range(7)], max_timeouts=2)
    printed = run_trial(trial, config)
    assert printed == [("0\n", ""), failed, late, ("3\n", ""), late, late, late]


@needs_gpp
def test_a_trial_of_what_does_not_compile():
    one, two = run_trial(Trial("c", "int main() { return x; }", ["1", "2"]), CONFIG)
    assert one == two and one.output == ""
    assert one.failure.startswith("does not compile: exit code 1: ")


def samples(name, n):
    with gzip.open(DATA / name, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return rows[:: max(1, len(rows) // n)][:n]


@needs_data
@pytest.mark.parametrize(
    ("name", "tag", "n"),
    [
        ("humaneval_python.jsonl.gz", "python", 4),
        ("mbpp_python.jsonl.gz", "python", 4),
        ("mbpp_stdio.jsonl.gz", "python", 4),
        ("stdio_problems.jsonl.gz", "python", 2),
        pytest.param("stdio_problems.jsonl.gz", "cpp", 1, marks=needs_gpp),
    ],
)
def test_reference_solutions_pass(name, tag, n):
    config = VerifierConfig(code_tests=4, code_timeout_s=20.0, allow_unsandboxed=True)
    for row in samples(name, n):
        solution = row["solution_cpp" if tag == "cpp" else "solution"]
        problem = Problem(row["id"], "code", row["problem"], tests=row["tests"])
        assert run(solution, problem, tag, config)[:2] == ("right", ""), row["id"]


@needs_gpp
def test_without_a_c_compiler_c_is_unscorable(tmp_path, monkeypatch):
    (tmp_path / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("int main() {}", tag="c")[:2] == ("unscorable", "no compiler gcc here")
