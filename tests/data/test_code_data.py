"""Tests and solutions in the forms of public sets of programming problems."""

import json

import pytest

from tramontane import InputError
from tramontane.config import VerifierConfig
from tramontane.data.code import Solution, parse_solutions, parse_tests
from tramontane.data.load import RowRules, parse_problem
from tramontane.types import Problem
from tramontane.verifier.code.grade import judge

CASES = [{"input": "1\n2\n", "output": "3\n"}, {"input": "4\n5\n", "output": "9\n"}]
INPUTS, OUTPUTS = ([case[name] for case in CASES] for name in ("input", "output"))


@pytest.mark.parametrize(
    "given",
    [
        {"type": "stdio", "cases": CASES},
        {"inputs": INPUTS, "outputs": OUTPUTS},  # APPS, TACO
        {"inputs": [x.split() for x in INPUTS], "outputs": [x.split() for x in OUTPUTS]},
        {"input": INPUTS, "output": OUTPUTS},  # CodeContests
        [case | {"type": "stdin_stdout"} for case in CASES],  # PrimeIntellect
        [case | {"testtype": "stdin", "metadata": {"func_name": None}} for case in CASES],
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_inputs_and_outputs_of_public_sets(given, as_text):
    tests = parse_tests(json.dumps(given) if as_text else given, "here")
    assert tests == {"type": "stdio", "cases": CASES}


@pytest.mark.parametrize(
    "given",
    [
        {"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [3, [3, 4]]},
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},  # wrapped in a list
        [{"fn_name": "add", "input": "[1]\n[2]", "output": "[1, 2]", "type": "functional"}],
        [{"input": '"a"\n"b"', "output": '"ab"', "metadata": {"func_name": "add"}}],
    ],
)
def test_calls_of_a_function_become_assertions(given):
    tests = parse_tests(given, "here")
    assert (tests["type"], tests["entry_point"]) == ("python_assert", "add")
    problem = Problem("p", "code", "Add.", tests=tests)
    programs = {
        "class Solution:\n    def add(self, a, b): return a + b": "right",
        "def add(a, b): return b": "wrong",
    }
    for program, outcome in programs.items():
        judged = judge(f"```python\n{program}\n```", problem, VerifierConfig(code_timeout_s=30))
        assert judged.outcome == outcome, judged.reason


APPS = {"fn_name": "f", "inputs": [[1]]}
LIVECODEBENCH = {"metadata": {"func_name": "f"}, "input": "1"}


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ([{**LIVECODEBENCH, "output": "[3]"}], ["[3]", "(3,)"], ["3", "'[3]'"]),
        ([{**LIVECODEBENCH, "output": '"5"'}], ["'5'"], ["5"]),
        ({**APPS, "outputs": [[3]]}, ["[3]", "3"], ["4"]),
        ({**APPS, "outputs": ["5"]}, ["'5'", "5"], ["6"]),
        ({**APPS, "outputs": [float("inf")]}, ["float('inf')"], ["0"]),
        ({**APPS, "inputs": ["abc"], "outputs": ["5"]}, ["5"], ["0"]),
        # JSON has no integer keys and no tuples.
        ({**APPS, "outputs": [{"1": [2, 3]}]}, ["{1: (2, 3)}", "{'1': [2, 3]}"], ["{2: [2, 3]}"]),
        ({**APPS, "inputs": [[{"1": {"-2": 3}}]], "outputs": [3]}, ["x[1][-2]"], ["len(x)"]),
        ({**APPS, "inputs": [[{"01": 3, "2": 4}]], "outputs": [3]}, ["x['01']"], ["0"]),
    ],
)
def test_results_of_calls(given, right, wrong):
    problem = Problem("p", "code", "f", tests=parse_tests(json.loads(json.dumps(given)), "here"))
    for results, outcome in ((right, "right"), (wrong, "wrong")):
        for result in results:
            program = f"```python\ndef f(x): return {result}\n```"
            judged = judge(program, problem, VerifierConfig(code_timeout_s=30))
            assert judged.outcome == outcome, (result, judged.reason)


@pytest.mark.parametrize(
    "given", [{"inputs": [1], "outputs": ["1"]}, {"fn_name": "a b", "inputs": [[]], "outputs": [1]},
              [{"input": "1"}], [1], {"inputs": "1", "outputs": "1"},
              {"inputs": ["1", "2", "3"], "outputs": ["1", "2"]},
              {"fn_name": "f", "inputs": [[1]], "outputs": [1, 2]},
              {"type": "stdio", "cases": CASES, "checker": "exact"},
              {"type": "stdio", "cases": CASES, "checker": ["tokens"]},
              {"type": "stdio", "cases": CASES, "checker": "float", "float_tolerance": 1.0},
              {"type": "stdio", "cases": CASES, "float_tolerance": float("inf")},
              {"type": "stdio", "cases": CASES, "float_tolerance": float("nan")},
              {"type": "stdio", "cases": CASES, "float_tolerance": "1e-3"},
              {"type": "stdio", "cases": CASES, "float_tolerance": -1e-3},
              {"type": "stdio", "cases": CASES, "ignore_case": 1},
              {"type": "stdio", "cases": CASES, "checker": "program"},
              {"type": "stdio", "cases": CASES, "checker": "program", "checker_code": "",
               "checker_language": "perl"},
              {"type": "stdio", "cases": CASES, "rules": "codeforces"},
              {"type": "cpp_assert", "code": "int main() {}"}],
)  # fmt: skip
def test_tests_of_no_known_form(given):
    with pytest.raises(InputError, match="^here: the tests "):
        parse_tests(given, "here")


@pytest.mark.parametrize("given", [None, [], {}, {"inputs": [], "outputs": []}, "[]"])
def test_no_tests(given):
    assert parse_tests(given, "here") is None


CPP = '#include <cstdio>\nint main() { puts("1"); }'


@pytest.mark.parametrize(
    ("metadata", "languages"),
    [
        ({"solutions": ["print(1)", CPP, "print(1)"]}, ["python", "cpp"]),
        ({"solutions": json.dumps(["print(1)", "print(2)"])}, ["python", "python"]),
        ({"solutions": ["```python\nprint(1)\n```", f"```cpp\n{CPP}\n```"]}, ["python", "cpp"]),
        ({"solutions": [{"language": "C++", "code": CPP}, {"language": "java", "code": "x"}]},
         ["cpp"]),
        ({"solutions": {"language": [3, 2, 1, 4], "solution": ["print(1)", CPP, "print 1", "x"]}},
         ["python", "cpp"]),
        ({"solution": "print(1)", "solution_cpp": CPP}, ["python", "cpp"]),
        ({"solution": "[print(x) for x in 'ab']"}, ["python"]),
        ({"solutions": [], "solution": " "}, []),
        ({"solutions": [None, 3, {"code": 4}]}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_solutions_in_all_their_forms(metadata, languages):
    found = parse_solutions(Problem("p", "code", "", metadata=metadata))
    assert [solution.language for solution in found] == languages
    assert all("```" not in solution.code for solution in found)


def test_fields_name_tests_and_solutions():
    row = {"description": "Add.", "input_output": {"inputs": INPUTS, "outputs": OUTPUTS}}
    row["accepted"] = ["print(1)"]
    fields = {"problem": "description", "tests": "input_output", "solutions": "accepted"}
    problem = parse_problem(row, "here", RowRules(fields), default_id="p", source="s")
    assert problem.tests == {"type": "stdio", "cases": CASES}
    assert parse_solutions(problem) == [Solution("python", "print(1)")]
    assert problem.metadata == {"solutions": ["print(1)"]}
