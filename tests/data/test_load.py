import gzip
import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from tramontane.config import BUILT_IN, DataConfig, DomainConfig, PlaygroundConfig
from tramontane.data import gym
from tramontane.data.load import load_problems
from tramontane.data.stream import ProblemStream
from tramontane.errors import InputError
from tramontane.verifier.math import judge_answer

STDIO = {"type": "stdio", "cases": [{"input": "1\n", "output": "2\n"}], "checker": "tokens"}


def load(source, split="train", limit=None, seed=0, world=None, **fields):
    config = DataConfig(train="playground:", fields=fields, playground=world or PlaygroundConfig())
    return load_problems(str(source), config, split=split, limit=limit, seed=seed)


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="data.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return write


# Rows


@pytest.mark.parametrize("name", ["problem", "question", "query"])
def test_a_prompt_is_what_the_model_reads(name, write):
    """Rows of scripts for TRL keep the column that their prompt was made of."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    (problem,) = load(write({name: "1 + 1", "prompt": chat, "answer": "2"}))
    assert problem.messages == chat and problem.row[name] == "1 + 1"
    if name != "problem":
        assert problem.metadata[name] == "1 + 1"
        (problem,) = load(write({name: "1 + 1", "prompt": "1 + 1?", "answer": "2"}))
        assert problem.problem == "1 + 1?"


def test_a_whole_row(write):
    row = {"id": 7, "domain": "math", "problem": "What is 1 + 1?", "answer": "2", "license": "CC0"}
    (problem,) = load(write(row | {"language": "en", "difficulty": 3.0, "source": "mine"}))
    assert (problem.id, problem.domain, problem.answer) == ("7", "math", "2")
    assert (problem.language, problem.difficulty, problem.source) == ("en", 3, "mine")
    assert problem.metadata == {"license": "CC0"}


def test_fields_map_names_and_common_names_need_no_mapping(write):
    mapped = write({"aufgabe": "1 + 1?", "lösung": 2}, name="a.jsonl")
    known = write({"question": "1 + 1?", "final_answer": "2", "level": "Level 4"}, name="b.jsonl")
    (a,) = load(mapped, problem="aufgabe", answer="lösung")
    (b,) = load(known)
    assert (a.problem, a.answer) == (b.problem, b.answer) == ("1 + 1?", "2")
    assert b.difficulty == 4
    assert b.metadata == {}
    # The field's name precedes other names, and unused fields are kept.
    (c,) = load(write({"question": "short", "problem": "long", "answer": "1"}))
    assert c.problem == "long"
    assert c.metadata == {"question": "short"}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"query": "?", "ground_truth": 2.0}, "2"),
        ({"prompt": "?", "ground_truth": ["7"]}, "7"),
        ({"prompt": "?", "solution": "2"}, "2"),
        ({"prompt": "?", "solution": "We add.\n\nSo $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"prompt": "?", "solution": "We add.\n#### 5"}, "5"),
        ({"prompt": "?", "solution": "We add.\nIt is 5.", "ground_truth": "5"}, "5"),
        ({"prompt": "?", "solution": "It is 4.", "answer": "5"}, "5"),
        ({"prompt": "?", "solution": "It is 4.", "final_answer": "5", "answer": None}, "5"),
        ({"prompt": "?", "expected_answer": "5", "answer": math.nan}, "5"),
        ({"prompt": "?", "ground_truth": "4", "solution": "5", "answer": "6"}, "6"),
    ],
)
def test_the_answer_stands_under_many_names(write, row, answer):
    """A derivation next to the answer is metadata; alone, it states the answer."""
    (problem,) = load(write(row))
    assert (problem.problem, problem.answer) == ("?", answer)
    kept = {k: row[k] for k in ("solution", "ground_truth") if k in row}
    assert kept.items() <= problem.metadata.items()


def test_a_program_beside_tests_is_no_answer(write):
    (problem,) = load(write({"problem": "Add.", "tests": STDIO, "solution": "print(1)"}))
    assert (problem.answer, problem.metadata) == (None, {"solution": "print(1)"})


def test_a_mapped_answer_is_the_only_one(write):
    file = write({"problem": "?", "mine": None, "solution": "5"}, {"problem": "?", "mine": "1"})
    with pytest.raises(InputError, match=r":1: no answer .* in field 'mine'"):
        load(file, answer="mine")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "?", "label": "1"}, "if 'input' is it, write data.fields: {problem: input}"),
        ({"Problem": "?", "Answer": "1"}, "write data.fields: {problem: Problem}"),
        ({"problem ": "?", "answer": "1"}, "write data.fields: {problem: 'problem '}"),
        ({"problem": "?", "target": "1"}, "write data.fields: {answer: target}"),
        ({"problem": "?", "answer": ["1", "2"]}, "and its 'answer' is of type list; name the"),
        ({"problem": "?", "answer": {"value": 2}}, "and its 'answer' is of type dict"),
        ({"problem": "?", "answer": True}, "and its 'answer' is of type bool"),
        ({"problem": "?", "answer": " "}, "and its 'answer' is empty"),
        ({"problem": "?", "answer": None}, "the row has answer, problem; name the right one"),
    ],
)
def test_what_a_row_has_in_place_of_a_field_is_said(write, row, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load(write(row))


def test_evaluation_rows_may_have_names_of_their_own(write):
    train = write({"problem": "?", "answer": "1"}, name="train.jsonl")
    test = write({"aufgabe": "??", "lösung": "2"}, name="test.jsonl")
    config = DataConfig(train="playground:", eval_fields={"problem": "aufgabe", "answer": "lösung"})
    sizes = {"limit": None, "seed": 0}
    (a,) = load_problems(str(train), config, split="train", **sizes)
    (b,) = load_problems(str(test), config, split="test", **sizes)
    assert (a.problem, a.answer, b.problem, b.answer) == ("?", "1", "??", "2")
    with pytest.raises(InputError, match=r"name the right one in data\.eval_fields"):
        load_problems(str(test), DataConfig(train=str(train)), split="test", **sizes)
    graded = write({"problem": "??", "tests": STDIO}, name="graded.jsonl")
    with pytest.raises(InputError, match=r"data\.eval_fields maps 'answer' to 'x', but no row has"):
        load_problems(
            str(graded),
            DataConfig(train="playground:", eval_fields={"answer": "x"}),
            split="test",
            **sizes,
        )
    with pytest.raises(InputError, match=r"data\.eval_fields\.anwser: .*did you mean 'answer'"):
        load_problems(
            str(test),
            DataConfig(train="playground:", eval_fields={"anwser": "x"}),
            split="test",
            **sizes,
        )
    # By default the names are those of the training rows.
    config = DataConfig(train="playground:", fields={"problem": "aufgabe", "answer": "lösung"})
    assert load_problems(str(test), config, split="test", **sizes) == [b]


def test_fewer_evaluation_problems_than_asked_for_are_said(write, caplog):
    file = write(*({"problem": str(i), "answer": "1"} for i in range(7)))
    assert len(load(file, "test", limit=256)) == 7
    assert f"evaluation on {file}: all 7 problems are taken, as there are fewer than the 256" in (
        caplog.text
    )
    caplog.clear()
    load(file, "test", limit=7)
    load(file, "train", limit=256)
    assert not caplog.text


def test_gsm8k_answers_as_upstream_writes_them(write):
    worked = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 72.\n#### 1,072"
    (problem,) = load(write({"question": "How many clips?", "answer": worked}))
    assert problem.answer == "1,072"


@pytest.mark.parametrize(("value", "answer"), [(2, "2"), (2.0, "2"), (0.5, "0.5"), (" x ", "x")])
def test_answers_become_text(write, value, answer):
    assert load(write({"problem": "?", "answer": value}))[0].answer == answer


@pytest.mark.parametrize("language", ["python", "cpp", "any", "py"])
def test_the_language_of_a_program_is_not_that_of_the_statement(write, language):
    (problem,) = load(write({"problem": "Add.", "tests": STDIO, "language": language}))
    assert problem.domain == "code"
    assert problem.tests == STDIO
    assert problem.language is None
    assert problem.metadata == {"programming_language": language}


def test_the_language_of_a_statement(write):
    rows = [{"problem": "?", "answer": "1", "language": x} for x in ("fr", "pt", "English")]
    assert [p.language for p in load(write(*rows))] == ["fr", "pt", None]
    assert load(write({"problem": "?", "tests": STDIO, "language": "ru"}))[0].language == "ru"


def test_difficulty_that_is_no_whole_number_is_kept_aside(write):
    hard, half = load(
        write(
            {"problem": "a", "answer": "1", "difficulty": "hard"},
            {"problem": "b", "answer": "1", "difficulty": 2.5},
        )
    )
    assert hard.difficulty is None
    assert hard.metadata == {"difficulty": "hard"}
    assert half.difficulty is None
    assert half.metadata == {"difficulty": 2.5}


def test_ids_default_to_file_and_line_and_are_made_unique(write):
    rows = [{"problem": str(i), "answer": "1"} for i in range(5)]
    rows[1]["id"] = rows[3]["id"] = rows[4]["id"] = "a"
    found = load(write(*rows, name="set.jsonl"))
    assert [p.id for p in found] == ["set-1", "a", "set-3", "a-4", "a-5"]
    assert [p.problem for p in found] == list("01234")


def test_ids_of_a_dataset_carry_the_split(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "sums"
    copy.mkdir()
    for split in ("train", "test"):
        (copy / f"{split}.jsonl").write_text(json.dumps({"problem": split, "answer": "1"}))
    ids = [load(copy, split=split)[0].id for split in ("train", "test")]
    assert ids == [f"{copy}-train-0", f"{copy}-test-0"]


def test_parquet_fills_with_nulls_and_loses_columns_of_dates_with_a_warning(tmp_path, caplog):
    rows = [
        {"problem": "a", "answer": "1", "tests": None, "on": date(2025, 6, 12)},
        {"problem": "b", "answer": None, "tests": STDIO | {"float_tolerance": None}, "on": None},
        {"problem": "c", "answer": None, "tests": STDIO, "on": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    maths, first, second = load(tmp_path / "t.parquet")
    assert (maths.id, maths.domain, maths.tests) == ("t-0", "math", None)
    assert maths.metadata == {}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "column 'on' is skipped: it holds a value of type datetime.date" in warnings[0]
    assert first.domain == second.domain == "code"
    assert first.answer is None
    assert first.tests == second.tests == STDIO
    json.dumps([asdict(p) for p in (maths, first, second)])


def test_tests_may_be_json_text(write):
    assert load(write({"problem": "a", "tests": json.dumps(STDIO)}))[0].tests == STDIO


def test_a_limit_is_spread_over_the_source(write):
    file = write(*({"problem": str(i), "answer": "1"} for i in range(100)))
    assert [p.problem for p in load(file, limit=4)] == ["0", "25", "50", "75"]
    assert len(load(file, limit=1000)) == 100


# Rows that cannot be used: each error names file, line and field


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "?"}, r":2: no answer .* 'answer', and no tests.* the row has problem;"),
        ({"problem": "?", "answer": " "}, r":2: no answer"),
        ({"problem": "?", "answer": None}, r":2: no answer"),
        ({"problem": "?", "answer": ["1", "2"]}, r":2: no answer \(text or a number\)"),
        ({"problem": "?", "answer": math.nan}, r":2: no answer"),
        ({"problem": "?", "answer": -math.inf}, r":2: no answer"),
        ({"problem": "?", "ground_truth": math.nan}, r":2: no answer"),
        ({"problem": math.nan, "answer": "1"}, r":2: no text in field 'problem'"),
        (
            {"problem": "?", "solution": "First,\nadd.\nThen stop."},
            r":2: no answer .*'solution' states none, by a box or in one line",
        ),
        ({"problem": "?\ud800", "answer": "1"}, r":2: field 'problem' has half of a surrogate"),
        ({"problem": "?", "answer": "1", "x": ["\udc80"]}, r":2: field 'x' has half of a surrog"),
        (
            {"problem": "?", "tests": json.dumps(STDIO).replace("2", "\\ud800")},
            r":2: field 'tests' has half of a surrogate pair",
        ),
        ({"problem": "?", "answer": True}, r":2: no answer"),
        ({"problem": "?", "answer": "Long story.\n#### "}, r":2: no answer"),
        ({"answer": "1"}, r":2: no text in field 'problem'; the row has answer; name the right"),
        (
            {"problem": [{"role": "user"}], "answer": "1"},
            r":2: message 0 of the prompt is not a chat",
        ),
        ({"prompt": ["Hello?"], "answer": "1"}, r":2: message 0 of the prompt is not a chat"),
        ({"prompt": [], "answer": "1"}, r":2: the prompt's last message must be the user's"),
        (
            {"prompt": [{"role": "assistant", "content": "Hello!"}], "answer": "1"},
            r":2: the prompt's last message must be the user's",
        ),
        ({"problem": "?", "domain": "code", "answer": "1"}, r":2: no tests in field 'tests'"),
        ({"problem": "?", "tests": "assert f(1)"}, r":2: the tests are text, but not JSON"),
        (
            {"problem": "?", "tests": '{"type": "a", "type": "b"}'},
            r":2: .*key .type. is given twice",
        ),
        (
            {"problem": "?", "tests": {"type": "doctest"}},
            r":2: the tests need a type, one of stdio",
        ),
        ({"problem": "?", "tests": {"type": "stdio", "cases": []}}, r":2: the tests need cases"),
        (
            {"problem": "?", "tests": {"type": "stdio", "cases": [{"input": 1, "output": "2"}]}},
            r":2: the tests need cases, each with input and output as text",
        ),
        ({"problem": "?", "tests": {"type": "python_assert"}}, r":2: the tests need code"),
        (
            {"problem": "?", "domain": "algebra", "answer": "1"},
            r":2: unknown domain 'algebra'; known are math, code, instructions, calls",
        ),
        ({"problem": "?", "domain": "maths", "answer": "1"}, r":2: .*did you mean 'math'"),
        ({"problem": "?", "domain": ["math"], "answer": "1"}, r":2: unknown domain \['math'\]"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(write, row, message):
    file = write({"problem": "fine", "answer": "1"}, row)
    with pytest.raises(InputError, match=r"data\.jsonl" + message):
        load(file)


def test_errors_name_the_mapped_field(write):
    file = write({"question": "?", "result": "1"}, {"question": "?"})
    with pytest.raises(InputError, match=r":2: no answer .* in field 'result'"):
        load(file, answer="result")


def test_mappings_to_missing_fields_are_refused(write):
    file = write({"problem": "?", "answer": "1"})
    with pytest.raises(InputError, match=r"data\.fields\.anwser: .* did you mean 'answer'"):
        load(file, anwser="answer")
    with pytest.raises(InputError, match=r"maps 'difficulty' to 'lvl', but no row has that"):
        load(file, difficulty="lvl")
    for source in ("playground:", "reasoning_gym:chain_sum"):
        with pytest.raises(InputError, match=r"data\.fields\.anwser: .* did you mean 'answer'"):
            load(source, limit=2, anwser="answer")
        with pytest.raises(InputError, match=r"data\.fields\.anwser: .* did you mean 'answer'"):
            ProblemStream(DataConfig(train=source, fields={"anwser": "answer"}), seed=0)


def test_a_truncated_file_is_an_input_error(tmp_path):
    whole = gzip.compress(b'{"problem": "?", "answer": "1"}\n' * 500)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-15])
    with pytest.raises(InputError, match="cut off after line"):
        load(tmp_path / "cut.jsonl.gz")


# Generated sources


def test_the_playground_gives_the_requested_number_of_different_problems():
    train, test = (load("playground:", limit=200, split=split) for split in ("train", "test"))
    assert len({p.problem for p in train} | {p.problem for p in test}) == 400
    world = PlaygroundConfig(levels=(2, 3), languages=("it",), kinds=("stories",))
    drawn = load("playground:", limit=50, world=world)
    assert {(p.language, p.metadata["kind"]) for p in drawn} == {("it", "stories")}
    assert {p.difficulty for p in drawn} == {2, 3}
    assert load("playground:", limit=50, seed=1) != load("playground:", limit=50, seed=2)


def test_endless_sources_need_a_count():
    with pytest.raises(InputError, match=r"has no end: say how many problems \(data\.limit\)"):
        load("playground:")


def test_more_playground_problems_than_exist_are_refused(monkeypatch):
    monkeypatch.setattr("tramontane.data.playground.generate.MAX_FRUITLESS_DRAWS", 2_000)
    world = PlaygroundConfig(levels=(1, 1), languages=("en",), kinds=("sums",))
    with pytest.raises(InputError, match=r"different test problems were found of .*ask for fewer"):
        load("playground:", limit=10**6, split="test", world=world)


def test_text_behind_the_playground_scheme_is_refused():
    with pytest.raises(InputError, match=r"write 'playground:' alone"):
        load("playground:sums", limit=5)


def test_reasoning_gym():
    if find_spec("reasoning_gym") is None:  # not imported here, but in the process that draws
        pytest.skip("could not import 'reasoning_gym'")
    train = load("reasoning_gym:chain_sum", limit=150)
    test = load("reasoning_gym:chain_sum", limit=100, split="test", seed=1)
    assert len({p.id for p in train} | {p.id for p in test}) == 250
    assert train == load("reasoning_gym:chain_sum", limit=150)
    for p in train:
        expression = p.problem.rpartition(":")[2].strip(" =")
        assert int(p.answer) == eval(expression)


def test_reasoning_gym_outlives_the_thread_that_first_asked():
    if find_spec("reasoning_gym") is None:  # not imported here, but in the process that draws
        pytest.skip("could not import 'reasoning_gym'")
    gym._drawer.cache_clear()
    drawn = []
    first = threading.Thread(target=lambda: drawn.append(load("reasoning_gym:chain_sum", limit=5)))
    first.start()
    first.join()
    drawer = gym._drawer(os.getpid())
    with pytest.raises(subprocess.TimeoutExpired):
        drawer._process.wait(0.2)
    assert [load("reasoning_gym:chain_sum", limit=5)] == drawn


def test_reasoning_gym_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were missing
    gym._check.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[reasoning-gym\]'"):
        load("reasoning_gym:chain_sum", limit=5)


def test_the_domain_table_says_which_columns_a_row_needs(write):
    table = BUILT_IN | {"chess": DomainConfig(), "quiz": DomainConfig(needs=("answer",))}
    rows = [{"problem": "White to move.", "domain": "chess", "best": "e4"}, {"problem": "Sum?"}]
    file = str(write(*rows))
    sizes = {"split": "train", "limit": None, "seed": 0, "domains": table}
    chess, _ = load_problems(file, DataConfig(train="playground:", domain="chess"), **sizes)
    assert (chess.domain, chess.answer, chess.metadata["best"]) == ("chess", None, "e4")
    with pytest.raises(InputError, match=r":2: no answer .* domain 'math' could not grade"):
        load_problems(file, DataConfig(train="playground:"), **sizes)
    with pytest.raises(InputError, match=r":1: no answer .* domain 'quiz' could not grade"):
        load_problems(file, DataConfig(train="playground:", domain="quiz"), **sizes)
    with pytest.raises(InputError, match=r":1: unknown domain 'ches'; did you mean 'chess'"):
        load_problems(file, DataConfig(train="playground:", domain="ches"), **sizes)


def test_a_prompt_may_be_a_chat(write):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    [problem] = load(write({"prompt": chat, "answer": "2"}))
    assert (problem.problem, problem.messages, problem.prompt) == ("1 + 1?", chat, chat)
    [plain] = load(write({"prompt": "1 + 1?", "answer": "2"}))
    assert (plain.messages, plain.prompt) == (None, "1 + 1?")


def test_a_set_whose_rows_are_all_left_out(write):
    row = {"problem": "Prove it.", "answer": "proof", "problem_is_valid": "Yes"}
    file = write(row | {"solution_is_valid": "Yes"}, row | {"problem": "And this."})
    with pytest.raises(InputError, match=r"numina@.*: all 2 rows were skipped.*docs/data.md"):
        load(f"numina@{file}")


def test_a_worked_solution_is_read_for_the_answer_after_its_label(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "1 + 1?", "solution": "1 + 1 = 2.\nRéponse : 2"}))
    config = DataConfig(train=str(file))
    (problem,) = load_problems(str(file), config, split="train", limit=None, seed=0)
    assert judge_answer("2", problem.answer).outcome == "right"


def test_a_reference_stays_as_it_is_for_functions_of_the_user(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "Explain.", "answer": "Say so. Answer: 2"}))
    config, domains = DataConfig(train=str(file), domain="open"), {"open": DomainConfig()}
    (problem,) = load_problems(
        str(file), config, split="train", limit=None, seed=0, domains=domains
    )
    assert problem.answer == "Say so. Answer: 2"
