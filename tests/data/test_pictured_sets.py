"""Benchmarks with images, by rows of their datasets' shape.

The fields are those that the tasks `mmmu`, `mmmu_pro` and `mathvista` of lmms_eval 0.7.3, and
`mmmu_pro` of lighteval 0.13.0, read.
"""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pictures import picture
from tramontane.config import DataConfig
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.models.images import data_uri
from tramontane.verifier.math.grade import judge_answer


def stored(seed):
    """An image as datasets' Image column stores it."""
    file = io.BytesIO()
    picture(20, 20, seed=seed).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": f"{seed}.png"}


def read(folder, name, *rows):
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    config = DataConfig(train="playground:")
    return load_problems(f"{name}@{file}", config, split="test", limit=None, seed=0)


def uris(*seeds):
    return [data_uri(stored(seed)["bytes"]) for seed in seeds]


MMMU = {
    "id": "validation_Math_1",
    "question": "<image 2> shows a graph. Is it that of <image 1>?",
    "options": "['yes', 'no, <image 3>', \"it isn't\"]",
    "explanation": "",
    **{f"image_{n}": stored(n) if n <= 3 else None for n in range(1, 8)},
    "img_type": "['Plots and Charts']",
    "answer": "B",
    "topic_difficulty": "Easy",
    "question_type": "multiple-choice",
    "subfield": "Calculus",
}


@pytest.mark.parametrize("name", ["mmmu", "mmmu_pro"])
def test_places_of_mmmu_name_their_images(tmp_path, name):
    [problem] = read(tmp_path, name, MMMU)
    lines = problem.problem.splitlines()
    assert lines[0] == "<image> shows a graph. Is it that of <image>?"
    assert lines[2:5] == ["A. yes", "B. no, <image>", "C. it isn't"]
    assert problem.images == uris(2, 1, 3)
    assert problem.answer == "B" and problem.id == "validation_Math_1"


def test_rows_of_mmmu_without_one_answer_are_skipped(tmp_path, caplog):
    opened = MMMU | {"options": "[]", "question_type": "open", "question": "Its slope?"}
    rows = [opened | {"id": str(n), "answer": a} for n, a in enumerate(["3", "?", "['1', 'one']"])]
    [problem] = read(tmp_path, "mmmu", *rows)
    assert (problem.problem, problem.answer) == ("Its slope?", "3")
    assert problem.images == uris(1, 2, 3)  # none is named, so all come before the text
    assert "rows skipped that cannot be graded: 2" in caplog.text


def test_a_place_without_its_image_names_the_row(tmp_path):
    with pytest.raises(InputError, match=r"rows.parquet.0.: .*'image_2'"):
        read(tmp_path, "mmmu", MMMU | {"image_2": None})


def test_the_question_of_mmmu_pro_vision_is_in_the_image(tmp_path):
    row = {
        "id": "test_History_1", "image": stored(4), "answer": "J", "subject": "History",
        "options": str([f"choice {n}" for n in range(10)]),
    }  # fmt: skip
    [problem] = read(tmp_path, "mmmu_pro_vision", row)
    assert problem.images == uris(4) and problem.answer == "J"
    assert "choice" not in problem.problem.replace("right choice", "")
    assert judge_answer("(J)", problem.answer).outcome == "right"


MATHVISTA = {
    "pid": "1", "question": "How long is AB?", "image": "images/1.jpg", "decoded_image": stored(5),
    "choices": None, "unit": "cm", "precision": 1.0, "answer": "1.2", "question_type": "free_form",
    "answer_type": "float", "query": "Hint: …",
    "metadata": {"language": "english", "split": "testmini", "task": "geometry problem solving"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says", "answer"),
    [
        ({}, "How long is AB? Round to 1 decimals. (Unit: cm)", "1.2"),
        ({"answer_type": "integer", "answer": "7", "unit": None}, "How long is AB?", "7"),
        (
            {"answer_type": "list", "answer": "[0, 2, 3]", "unit": None},
            "as in [1, 2].",
            "[0, 2, 3]",
        ),
        ({"choices": ["3", "5", "7"], "answer": "5", "answer_type": "text"}, "B. 5", "B"),
    ],
)
def test_a_row_of_mathvista(tmp_path, changed, says, answer):
    [problem] = read(tmp_path, "mathvista", MATHVISTA | changed)
    assert says in problem.problem
    assert (problem.answer, problem.images, problem.language) == (answer, uris(5), "en")
    assert judge_answer(answer, problem.answer).outcome == "right"
    wrong = {"[0, 2, 3]": "[0, 3, 2]", "B": "C"}.get(answer, "9")
    assert judge_answer(wrong, problem.answer).outcome == "wrong"


def test_rows_of_mathvista_without_an_answer_are_skipped(tmp_path):
    assert len(read(tmp_path, "mathvista", MATHVISTA | {"answer": ""}, MATHVISTA)) == 1
