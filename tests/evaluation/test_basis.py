"""A file of completions is continued by the same evaluation only."""

import json
import shutil
from dataclasses import replace

import pytest

import tramontane
from tramontane.errors import InputError
from tramontane.evaluation.basis import problems_hash, weights_hash
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.types import Problem

ROWS = [{"problem": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(3)]
OPTIONS = {"samples": 2, "max_tokens": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "copy"
    load_model("tiny").save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


def test_a_killed_evaluation_continues_and_another_is_refused(model, tmp_path):
    file = tmp_path / "eval.jsonl"
    result = tramontane.evaluate(model, ROWS, write_to=file, **OPTIONS)
    whole = file.read_bytes()
    assert json.loads((tmp_path / "eval.json").read_text())["result"]["n_problems"] == 3
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    graded = []
    again = tramontane.evaluate(
        model, ROWS, write_to=file, on_progress=lambda done, total: graded.append(done), **OPTIONS
    )
    assert (again, file.read_bytes()) == (result, whole)
    assert min(graded) > 2  # the first problem was kept

    for rows, options, changed in (
        (ROWS, {"temperature": 0.0}, "settings.sampling.temperature"),
        (ROWS, {"overrides": {"data.system_prompt": "Add."}}, "settings.data.system_prompt"),
        (ROWS[:2], {}, "problems"),
        ([*ROWS[:2], ROWS[2] | {"answer": "5"}], {}, "problems"),
    ):
        refusal = f"eval.json: .* made with different {changed}; .* --out .*eval_2.jsonl, or"
        with pytest.raises(InputError, match=refusal):
            tramontane.evaluate(model, rows, write_to=file, **OPTIONS | options)
    other = shutil.copytree(model, tmp_path / "other")
    trained = load_model(str(other))
    trained.get_output_embeddings().weight.data[0, 0] += 1
    trained.save_pretrained(other)
    with pytest.raises(InputError, match="made with different weights"):
        tramontane.evaluate(other, ROWS, write_to=file, **OPTIONS)
    assert file.read_bytes() == whole

    rows = [json.loads(line) for line in lines]
    rows[4]["problem_id"] = "data-9"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"eval.jsonl:5: .* problem 'data-9', but expected one of"):
        tramontane.evaluate(model, ROWS, write_to=file, **OPTIONS)


def test_other_files_are_not_overwritten(tmp_path):
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    before = data.read_bytes()
    with pytest.raises(InputError, match=r"test.jsonl: there is no test.json that says"):
        tramontane.evaluate("tiny", data, write_to=data, **OPTIONS)
    problems = data.rename(tmp_path / "test.json")
    with pytest.raises(InputError, match=r"test.json: not the record of test.jsonl"):
        tramontane.evaluate("tiny", problems, write_to=data, **OPTIONS)
    with pytest.raises(InputError, match=r"test.json: completions are JSONL; name a .jsonl file"):
        tramontane.evaluate("tiny", problems, write_to=problems, **OPTIONS)
    assert problems.read_bytes() == before
    assert not data.exists()


def test_hashes_follow_the_content(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    assert weights_hash(str(copy)) == weights_hash(str(model))
    (copy / "eval.json").write_text("{}")  # no file of the model
    assert weights_hash(str(copy)) == weights_hash(str(model))
    config = copy / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    assert weights_hash(str(copy)) != weights_hash(str(model))
    problem = Problem("a", "math", "1 + 1?", "2")
    same = Problem("a", "math", "1 + 1?", "2")
    assert problems_hash([problem]) == problems_hash([same])
    question = replace(problem, renamed={"question": "1 + 1?", "answer": 2})  # names of columns
    assert problems_hash([problem]) == problems_hash([question])
    assert problems_hash([problem]) != problems_hash([Problem("a", "math", "1 + 1?", "3")])
