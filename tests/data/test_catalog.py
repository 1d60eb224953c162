"""Every named set reads small files of exactly its dataset's layout."""

import base64
import json
import pickle
import zlib
from typing import get_args

import pytest

from tramontane.config import DataConfig, NamedSetConfig, VerifierConfig
from tramontane.config.data import LayoutName
from tramontane.data.catalog import CATALOG, named_source
from tramontane.data.layouts import LAYOUTS
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.verifier.code.grade import judge
from tramontane.verifier.code.shown import divide
from tramontane.verifier.math.grade import judge_answer
from tramontane.verifier.reward import grade

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}"
    '\n\nRemember to put your answer on its own line after "Answer:".'
)


def verl(statement, reference, index, **more):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": statement, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": reference, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
        **more,
    }


def encoded(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


STDIN = {
    "question_title": "Double",
    "question_content": "Print twice the number.",
    "platform": "atcoder",
    "question_id": "abc1_a",
    "contest_date": "2024-08-03T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": encoded([{"input": "5\n", "output": "10\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
FUNCTION = {
    **STDIN,
    "platform": "leetcode",
    "question_id": "3243",
    "starter_code": "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        ",
    "public_test_cases": json.dumps(
        [{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]
    ),
    "private_test_cases": encoded([{"input": "0\n[]", "output": "0", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
GPQA = {
    "Record ID": "rec1",
    "Question": "Which particle has no charge?",
    "Correct Answer": "the neutron\n",
    "Incorrect Answer 1": "the proton",
    "Incorrect Answer 2": "the electron",
    "Incorrect Answer 3": "the positron",
    "High-level domain": "Physics",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n: int) -> int:\n    """ Twice n. """\n',
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    "entry_point": "twice",
}
MBPP = {
    "source_file": "s.ipynb",
    "task_id": 2,
    "prompt": "Write a function to find the largest number.",
    "code": "def largest(x):\n    return max(x)\n",
    "test_imports": ["import math"],
    "test_list": ["assert largest([1, 3]) == 3", "assert largest([math.pi]) == math.pi"],
}
OLYMPIAD = {
    "id": 1606,
    "question": "Find all $x$ with $x^2 = 4$.",
    "final_answer": ["$2$", "$-2$"],
    "unit": None,
    "is_multiple_answer": True,
    "answer_type": "Numerical",
    "language": "English",
    "subject": "Algebra",
}

VALID = {"problem_is_valid": "Yes", "solution_is_valid": "Yes"}  # NuminaMath

# name: rows as the hub has them, and the (statement's part, answer) of each problem that is read
MATHS = {
    "polaris": ([{"problem": "1+1?", "answer": "2", "difficulty": "3/8"}], [("1+1?", "2")]),
    "deepscaler": ([{"problem": "1+1?", "answer": "2", "solution": "…"}], [("1+1?", "2")]),
    "big_math": (
        [{"problem": "1+1?", "answer": "2", "source": "omnimath",
          "domain": ["Mathematics -> Algebra -> Other"], "llama8b_solve_rate": 0.25}],
        [("1+1?", "2")],
    ),
    "dapo": (
        [verl(DAPO.format("1+1?"), "2", "a"), verl(DAPO.format("1+1?"), "2", "a")],
        [("1+1?", "2")],
    ),
    "skywork": (
        [verl("1+1?", '["2"]', 7), verl("Which x?", '["(0, 1]"]', 8)],
        [("1+1?", "2"), ("Which x?", "(0, 1]")],
    ),
    "deepmath": ([{"question": "1+1?", "final_answer": "2", "topic": "…"}], [("1+1?", "2")]),
    "openr1": ([{"problem": "1+1?", "answer": "2", "generations": ["…"]}], [("1+1?", "2")]),
    "numina": (
        [
            {"problem": "1+1?", "answer": "2", **VALID},
            {"problem": "a?", "answer": "2", **VALID, "problem_is_valid": "No"},
            {"problem": "b?", "answer": "2", **VALID, "solution_is_valid": "No"},
            {"problem": "c?", "answer": "proof", **VALID},
        ],
        [("1+1?", "2")],
    ),
    "intellect3": (
        [{"question": "1+1?", "answer": "2", "info": "{}", "avg@8_qwen3_4b_thinking_2507": 0.5}],
        [("1+1?", "2")],
    ),
    "dolci": (
        [
            {"prompt": "user: 1+1?", "ground_truth": ["2"], "dataset": ["math"]},
            {"prompt": "Be brief.", "ground_truth": ["x"], "dataset": ["ifeval"]},
        ],
        [("1+1?", "2")],
    ),
    "aime24": ([{"id": 60, "problem": "1+1?", "answer": "2", "year": "2024"}], [("1+1?", "2")]),
    "aime25": ([{"problem_idx": 1, "problem": "1+1?", "answer": 2}], [("1+1?", "2")]),
    "aime26": ([{"problem_idx": 1, "problem": "1+1?", "answer": 2}], [("1+1?", "2")]),
    "math500": (
        [{"problem": "1+1?", "answer": "2", "level": 3, "unique_id": "test/a/1.json"}],
        [("1+1?", "2")],
    ),
    "gsm8k": ([{"question": "1+1?", "answer": "So\n#### 2"}], [("1+1?", "2")]),
    "olympiadbench": ([OLYMPIAD], [("Find all", "2, -2")]),
}  # fmt: skip
# name: rows, and a program that solves all of them
PROGRAMS = {
    "skywork_code": (
        [verl("Double.", json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]}), 1)],
        "print(2 * int(input()))",
    ),
    "intellect3_code": (
        [{"question": "Double.", "info": json.dumps({"tests": json.dumps(
            {"inputs": ["2\n"], "outputs": ["4\n"]})})}],
        "print(2 * int(input()))",
    ),
    "deepcoder": (
        [{"problem": "Double.", "tests": json.dumps(
            [{"type": "stdin_stdout", "input": "2\n", "output": "4\n"}]), "solutions": ["…"]}],
        "print(2 * int(input()))",
    ),
    "deepcoder_taco": (
        [{"problem": "Double.", "tests": json.dumps(
            {"fn_name": "double", "inputs": [[2]], "outputs": [4]})}],
        "def double(n): return 2 * n",
    ),
    "deepcoder_lcb": (
        [{"problem": "Double.", "starter_code": "class Solution:\n    def double(self, n):\n",
          "tests": json.dumps([{"input": "2", "output": "4", "testtype": "functional"}]),
          "metadata": {"func_name": "double"}}],
        "class Solution:\n    def double(self, n): return 2 * n",
    ),
    "livecodebench_v5": ([STDIN], "print(2 * int(input()))"),
    "livecodebench_v6": (
        [FUNCTION], "class Solution:\n    def add(self, a, b): return a + sum(b)",
    ),
    "humaneval": ([HUMANEVAL], "def twice(n): return 2 * n"),
    "mbpp": ([MBPP], "def largest(x): return max(x)"),
}  # fmt: skip


IFEVAL = {
    "key": 1040,
    "prompt": "Write a résumé. Use fewer than 10 words in capitals. No commas.",
    "instruction_id_list": ["change_case:capital_word_frequency", "punctuation:no_comma"],
    # The hub's table has a column for every argument of every kind.
    "kwargs": [
        {
            "capital_relation": "less than",
            "capital_frequency": 10,
            "keywords": None,
            "letter": None,
        },
        {"capital_relation": None, "capital_frequency": None, "keywords": None, "letter": None},
    ],
}
BFCL = {
    "id": "parallel_7",
    "question": [[{"role": "user", "content": "Find the factorial of 5 and 10."}]],
    "function": [
        {
            "name": "math.factorial",
            "description": "The factorial of a number.",
            "parameters": {
                "type": "dict",
                "properties": {"number": {"type": "integer", "description": "The number."}},
                "required": ["number"],
            },
        }
    ],
}
BFCL_ANSWER = {
    "id": "parallel_7",
    "ground_truth": [{"math.factorial": {"number": [5]}}, {"math.factorial": {"number": [10]}}],
}
ABILITIES = {
    "ifeval", "ifeval_loose",
    "bfcl_simple", "bfcl_multiple", "bfcl_parallel", "bfcl_parallel_multiple",
}  # fmt: skip
# Tested in test_pictured_sets.py.
PICTURED = {"mmmu", "mmmu_pro", "mmmu_pro_vision", "mathvista"}


def write_bfcl(folder, question=BFCL, answer=BFCL_ANSWER):
    """The leaderboard's two files."""
    file = folder / "BFCL_v3_parallel.json"
    file.write_text(json.dumps(question) + "\n")
    (folder / "possible_answer").mkdir(exist_ok=True)
    (folder / "possible_answer" / file.name).write_text(json.dumps(answer) + "\n")
    return file


def judged(problem, response):
    return grade(problem, response, 10, VerifierConfig(), 100, 0)


def test_instructions(tmp_path):
    [problem] = read(tmp_path, "ifeval", [IFEVAL])
    assert (problem.id, problem.domain) == ("ifeval-1040", "instructions")
    first, second = problem.metadata["kwargs"]
    assert (first, second) == ({"capital_relation": "less than", "capital_frequency": 10}, {})
    right = judged(problem, "<think>commas, here, are thoughts</think>I KNOW Python.")
    assert (right.verdict, right.reason) == ("right", "")
    wrong = judged(problem, "I KNOW Python, and C.")
    assert wrong.verdict == "wrong"
    assert wrong.reason == "not followed: punctuation:no_comma"
    assert wrong.parts["correctness"] == pytest.approx(0.9 / 2)  # half of the instructions
    [loose] = read(tmp_path, "ifeval_loose", [IFEVAL])
    opened = "Sure, here it is:\nI know Python."
    assert [judged(p, opened).verdict for p in (problem, loose)] == ["wrong", "right"]
    assert judged(problem, "<think>hm</think>\n\nI KNOW Python.\n").verdict == "right"


@pytest.mark.parametrize(
    ("kinds", "kwargs", "message"),
    [
        (["punctuation:no_comma"], [], "`kwargs` must have one entry for each"),
        ([], [], "`kwargs` must have one entry for each"),
        ("punctuation:no_comma", [{}], "`kwargs` must have one entry for each"),
        (["punctuation:no_comma"], ["x"], "`kwargs` of punctuation:no_comma: 'x' is not an object"),
        (["bogus:kind"], [{}], "`instruction_id_list`: unknown kind of instruction 'bogus:kind'"),
        (["keywords:existence"], [{}], "`kwargs` of keywords:existence: no argument 'keywords'"),
        (["keywords:existence"], [{"keywords": "a"}], "keywords='a' is not valid"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": "3"}], "num_bullets='3'"),
    ],
)
def test_instructions_that_no_answer_could_follow(tmp_path, kinds, kwargs, message):
    row = {**IFEVAL, "instruction_id_list": kinds, "kwargs": kwargs}
    with pytest.raises(InputError, match=r"rows.jsonl:1: not a row of the layout 'ifeval'") as e:
        read(tmp_path, "ifeval", [row])
    assert message in str(e.value)


def test_function_calls(tmp_path):
    def load():
        source = f"bfcl_parallel@{write_bfcl(tmp_path)}"
        return load_problems(
            source, DataConfig(train="playground:"), split="test", limit=None, seed=0
        )

    [problem] = load()
    assert (problem.id, problem.domain) == ("parallel_7", "calls")
    assert problem.problem.startswith("Find the factorial of 5 and 10.\n")
    assert '"name": "math.factorial"' in problem.problem
    answer = "[math.factorial(number=10), math.factorial(number=5)]"
    assert judged(problem, f"<think>two</think>{answer}").verdict == "right"
    assert judged(problem, "[math.factorial(number=10)]").reason == "1 calls, 2 expected"
    (tmp_path / "possible_answer/BFCL_v3_parallel.json").write_text(
        '{"id": "other", "ground_truth": []}\n'
    )
    source = f"bfcl_parallel@{tmp_path / 'BFCL_v3_parallel.json'}"
    with pytest.raises(InputError, match="has no answer for id 'parallel_7'"):
        load_problems(source, DataConfig(train="playground:"), split="test", limit=None, seed=0)


FUNCTIONS = BFCL["function"]


@pytest.mark.parametrize("functions", [json.dumps(FUNCTIONS), FUNCTIONS[0]])
def test_functions_as_text_or_as_one_object(tmp_path, functions):
    source = f"bfcl_parallel@{write_bfcl(tmp_path, {**BFCL, 'function': functions})}"
    [problem] = load_problems(
        source, DataConfig(train="playground:"), split="test", limit=None, seed=0
    )
    assert problem.metadata["function"] == FUNCTIONS
    assert json.dumps(FUNCTIONS[0]) in problem.problem.splitlines()


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        (BFCL, {"id": "parallel_7"}, r"possible_answer.*json:1: an answer needs `id` and `ground"),
        (BFCL, {**BFCL_ANSWER, "id": ["a"]}, "json:1: .* has no answer for id 'parallel_7'"),
        (BFCL, {**BFCL_ANSWER, "ground_truth": [{"sin": {}}]},
         "json:1: .*'bfcl': `ground_truth` calls 'sin', which `function` does not offer"),
        ({**BFCL, "function": [{"name": "sin"}]}, BFCL_ANSWER, "json:1: .* `function` must be"),
        ({**BFCL, "function": "[{"}, BFCL_ANSWER, "json:1: not a row of the layout 'bfcl'"),
        ({**BFCL, "question": [["hi"]]}, BFCL_ANSWER, "json:1: .* `question` must be a list"),
    ],
)  # fmt: skip
def test_calls_that_no_answer_could_make(tmp_path, question, answer, message):
    source = f"bfcl_parallel@{write_bfcl(tmp_path, question, answer)}"
    with pytest.raises(InputError, match=message):
        load_problems(source, DataConfig(train="playground:"), split="test", limit=None, seed=0)


def read(tmp_path, name, rows, **config):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(
        f"{name}@{file}",
        DataConfig(train="playground:", **config),
        split="test",
        limit=None,
        seed=0,
    )


@pytest.mark.parametrize("name", MATHS)
def test_a_set_of_mathematics(name, tmp_path):
    rows, expected = MATHS[name]
    problems = read(tmp_path, name, rows)
    assert [(p.answer, p.domain, p.source) for p in problems] == [
        (answer, "math", rows[0].get("source", name)) for _, answer in expected
    ]
    assert all(p.problem.startswith(text) for p, (text, _) in zip(problems, expected, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_set_of_programs(name, tmp_path):
    rows, program = PROGRAMS[name]
    [problem] = read(tmp_path, name, rows)
    assert problem.domain == "code"
    wrong = program.replace("2 * ", "3 * ").replace("sum", "len").replace("max", "min")
    for code, outcome in ((program, "right"), (wrong, "wrong")):
        judgment = judge(f"```python\n{code}\n```", problem, VerifierConfig())
        assert judgment.outcome == outcome, judgment


def test_every_set_is_tested_and_every_layout_is_known():
    assert set(CATALOG) == set(MATHS) | {"gpqa"} | set(PROGRAMS) | ABILITIES | PICTURED
    assert set(LAYOUTS) == set(get_args(LayoutName))


def test_choices_of_gpqa_have_a_fixed_order_without_a_favorite(tmp_path):
    rows = [{**GPQA, "Question": f"{GPQA['Question']} ({i})"} for i in range(200)]
    problems = read(tmp_path, "gpqa", rows)
    assert problems == read(tmp_path, "gpqa", rows)
    for problem in problems:
        assert f"{problem.answer}. the neutron" in problem.problem.splitlines()
        other = "ABCD".replace(problem.answer, "")[0]
        assert judge_answer(problem.answer, problem.answer).outcome == "right"
        assert judge_answer(other, problem.answer).outcome == "wrong"
    counts = [sum(p.answer == letter for p in problems) for letter in "ABCD"]
    assert min(counts) > 25  # 50 expected; fewer than 25 once in 10,000 draws


def test_the_pass_rates_of_a_set_select_its_problems(tmp_path):
    rows, _ = MATHS["big_math"]
    [problem] = read(tmp_path, "big_math", rows)
    assert problem.metadata["pass_rate"] == 0.25
    assert problem.metadata["topic"] == ["Mathematics -> Algebra -> Other"]


def test_public_tests_of_livecodebench_are_the_shown_ones(tmp_path):
    (problem,) = read(tmp_path, "livecodebench_v5", [STDIN])
    shown, hidden = divide(problem)
    assert [case["output"] for case in shown.tests["cases"]] == ["4\n"]
    assert len(hidden.tests["cases"]) == len(problem.tests["cases"]) - 1 > 0


def test_deepcoders_functions_and_programs(tmp_path):
    rows, _ = PROGRAMS["deepcoder_lcb"]
    program = {
        "problem": "Halve.",
        "starter_code": "",
        "tests": [{"input": "4\n", "output": "2\n", "testtype": "stdin"}],
        "metadata": {"func_name": None},
    }
    function, stdio = read(tmp_path, "deepcoder_lcb", [*rows, program])
    assert function.problem.endswith("```python\nclass Solution:\n    def double(self, n):\n```")
    assert function.tests["entry_point"] == "double"
    assert stdio.problem.endswith("writes standard output.")
    assert (stdio.tests["type"], stdio.tests["rules"]) == ("stdio", "livecodebench")
    assert stdio.tests["cases"] == [{"input": "4\n", "output": "2\n"}]


def test_a_repeated_statement_is_left_out_of_training_files_alone(tmp_path, caplog):
    other = {**IFEVAL, "key": 7, "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    problems = read(tmp_path, "ifeval", [IFEVAL, other, IFEVAL])
    assert [p.id for p in problems] == ["ifeval-1040", "ifeval-7", "ifeval-1040-3"]
    assert not caplog.records
    rows = [verl("1+1?", answer, i) for i, answer in enumerate(["2", "2", "10"])]
    assert [p.answer for p in read(tmp_path, "dapo", rows)] == ["2", "10"]
    assert "dapo: rows skipped that repeat the statement and reference of another: 1" in caplog.text


def test_encoded_tests_that_would_run_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (len, ("run",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(InputError, match=r"rows.jsonl:1: .*livecodebench.*builtins.len"):
        read(tmp_path, "livecodebench_v5", [{**STDIN, "private_test_cases": packed}])
    frame = base64.b64encode(zlib.compress(b"\x8e" + b"\xff" * 8)).decode()  # of 2⁶⁴ bytes
    for damaged in ({"private_test_cases": packed[:-20]}, {"private_test_cases": frame},
                    {"public_test_cases": "[" * 100_000}):  # fmt: skip
        with pytest.raises(InputError, match=r"rows.jsonl:1: not a row of the layout"):
            read(tmp_path, "livecodebench_v5", [{**STDIN, **damaged}])


def test_a_row_of_another_layout_is_named(tmp_path):
    with pytest.raises(InputError, match=r"rows.jsonl:2: .*'gpqa'.*'Correct Answer'.*has Question"):
        read(tmp_path, "gpqa", [GPQA, {"Question": "?"}])
    with pytest.raises(InputError, match="no assertions in column 'test_list'"):
        read(tmp_path, "mbpp", [{**MBPP, "test_list": []}])


def test_a_config_adds_a_set_of_its_own(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"q": "1+1?", "a": 2}\n')
    mine = NamedSetConfig(source=str(file), fields={"problem": "q", "answer": "a"})
    config = DataConfig(train="playground:", sets={"mine": mine}, fields={"answer": "final"})
    [problem] = load_problems("mine", config, split="test", limit=None, seed=0)
    assert (problem.id, problem.answer, problem.source) == ("mine-1", "2", "mine")
    # A set of the config takes precedence over one of the catalog.
    assert named_source("aime24", {"aime24": mine}).source == str(file)


def test_a_field_of_a_named_set_that_no_problem_has(tmp_path):
    sets = {"mine": NamedSetConfig(source="x.jsonl", fields={"anwser": "a"})}
    with pytest.raises(InputError, match=r"data.sets.mine.fields.anwser: .* 'answer'\?"):
        load_problems(
            "mine", DataConfig(train="playground:", sets=sets), split="test", limit=None, seed=0
        )
