"""Questions: the generated task, and the layouts of public sets."""

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tramontane import InputError
from tramontane.config import LANGUAGES
from tramontane.data.playground.language import language
from tramontane_oversight.config import QuestionsConfig
from tramontane_oversight.extractive import FRAMES, extractive_questions
from tramontane_oversight.questions import (
    CATALOG,
    LAYOUTS,
    converted,
    load_questions,
    two_choices,
)
from tramontane_oversight.transcript import Question


def drawn(n: int, split: str = "test", **keys: Any):
    return list(islice(extractive_questions(split, 0, **keys), n))


def test_every_answer_needs_two_facts_of_the_article() -> None:
    for question in drawn(500):
        chains = question.metadata["chains"]
        assert len(chains) == len(question.choices) == question.metadata["level"]
        right = chains[0]
        assert question.choices[question.right] == right["goal"]
        assert right["name"] in question.text
        others = [chain["name"] for chain in chains[1:] if chain["name"] not in right["name"]]
        assert not any(name in question.text for name in others)
        for chain in chains:
            assert chain["first"] in question.article and chain["second"] in question.article
            # The first fact has the name and no goal, the second the goal and no name: they share
            # a number, which no other chain has.
            assert chain["name"] in chain["first"] and chain["goal"] not in chain["first"]
            assert chain["goal"] in chain["second"] and chain["name"] not in chain["second"]
            numbers = [set(filter(str.isdigit, fact)) for fact in (chain["first"], chain["second"])]
            assert numbers[0] == numbers[1]
        assert right["goal"] not in question.text


def test_without_the_article_no_answer_is_more_likely() -> None:
    """Rooms are right as often as they are wrong, and the right one stands first half the time."""
    asked = load_questions(QuestionsConfig(limit=2000, extractive={"languages": ["en"]}))
    assert 900 < sum(q.right == 0 for q in asked) < 1100
    right = Counter(q.choices[q.right] for q in asked)
    wrong = Counter(q.choices[1 - q.right] for q in asked)
    assert len(right) == 16
    for goal in right:
        assert abs(right[goal] - wrong[goal]) < 6 * (right[goal] + wrong[goal]) ** 0.5


def test_the_streams_are_seeded_distinct_and_split() -> None:
    assert drawn(50) == drawn(50)
    texts = [f"{q.article}{q.text}" for q in drawn(400)]
    assert len(set(texts)) == 400
    train = {f"{q.article}{q.text}" for q in drawn(2000, "train", levels=(2, 2))}
    assert not train & {f"{q.article}{q.text}" for q in drawn(2000, "test", levels=(2, 2))}
    assert {q.language for q in drawn(100)} == set(LANGUAGES)
    assert {q.metadata["level"] for q in drawn(100, levels=(3, 5))} == {3, 4, 5}


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_language_has_the_same_frames(code: str) -> None:
    assert tuple(language(code).articles) == FRAMES
    for frame in language(code).articles.values():
        assert len(frame.goals) == len(set(frame.goals)) == 8
        for phrasings in (frame.first, frame.second, frame.question):
            assert len(phrasings) == 2
        # What is asked for stands behind what it is found by.
        assert frame.first[0].startswith("{name}") and frame.second[0].index("{n}") < (
            frame.second[0].index("{goal}")
        )
        assert not any(a != b and a in b for a in frame.goals for b in frame.goals)


def test_one_phrasing_is_the_first_of_its_frame() -> None:
    for question in drawn(60, languages=["en"], phrasings=1):
        for chain in question.metadata["chains"]:
            assert re.fullmatch(rf"{chain['name']} (has key|takes train) \d\d\.", chain["first"])
            assert re.fullmatch(
                rf"(Key|Train) \d\d (opens|goes to) {chain['goal']}\.", chain["second"]
            )
    starts = {q.metadata["chains"][0]["first"].split()[0] for q in drawn(60, languages=["en"])}
    assert {"Key", "The"} < starts


ARTICLE = "A long story."
ROWS: dict[str, tuple[list[dict[str, Any]], list[tuple[Any, ...]]]] = {
    "quality": (
        [{"article": ARTICLE, "question": "Who?", "options": ["a", "b", "c", "d"], "answer": 2}],
        [("Who?", "c", ARTICLE)],
    ),
    "quality_hard": (
        [{"article": ARTICLE, "question": text, "options": ["a", "b", "c", "d"], "answer": 2,
          "hard": hard} for text, hard in (("Who?", True), ("easy", False))],
        [("Who?", "c", ARTICLE)],
    ),
    "boolq": (
        [{"question": "is it", "answer": False, "passage": ARTICLE}],
        [("is it", "no", ARTICLE)],
    ),
    "race": (
        [{"article": ARTICLE, "question": "Who?", "options": ["a", "b", "c", "d"], "answer": "B",
          "example_id": "high1.txt"}],
        [("Who?", "b", ARTICLE)],
    ),
    "gpqa": (
        [{"Record ID": "r1", "Question": "Why?\n", "Correct Answer": "yes ",
          "Incorrect Answer 1": "no", "Incorrect Answer 2": "so", "Incorrect Answer 3": "ha"}],
        [("Why?", "yes", None)],
    ),
    "mmlu": (
        [{"question": "2?", "subject": "x", "choices": ["1", "2", "3", "4"], "answer": 1}],
        [("2?", "2", None)],
    ),
    "arc": (
        [{"id": "m1", "question": "2?", "choices": {"text": ["1", "2"], "label": ["1", "2"]},
          "answerKey": "2"}],
        [("2?", "2", None)],
    ),
    "truthful_qa": (
        [{"question": "so?", "mc1_targets": {"choices": ["t", "f", "g"], "labels": [1, 0, 0]}}],
        [("so?", "t", None)],
    ),
}  # fmt: skip
ROWS["commonsense_qa"] = ROWS["arc"]


@pytest.mark.parametrize("name", CATALOG)
def test_a_known_set_is_read_from_a_file_of_its_layout(name: str, tmp_path: Path) -> None:
    given, expected = ROWS[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    found = load_questions(QuestionsConfig(source=f"{name}@{file}"))
    for question, (text, right, article) in zip(found, expected, strict=True):
        assert question.text == text and question.article == article
        assert question.right is not None and question.choices[question.right] == right
        assert len(set(question.choices)) == 2


@pytest.mark.parametrize("source", ["qualty", "mmul", "extractive"])
def test_a_misspelt_set_is_not_asked_of_the_hub(source: str) -> None:
    with pytest.raises(InputError, match=r"questions\.source: no set .* did you mean"):
        load_questions(QuestionsConfig(source=source))


def test_the_authors_file_of_quality_has_several_questions_a_row(tmp_path: Path) -> None:
    questions = [
        {"question": text, "options": ["a", "b", "c", "d"], "gold_label": label}
        for text, label in (("one", 1), ("four", 4), ("hidden", None))
    ]
    file = tmp_path / "QuALITY.jsonl"
    file.write_text(json.dumps({"article": ARTICLE, "questions": questions}) + "\n")
    found = load_questions(QuestionsConfig(source=f"quality@{file}"))
    assert [(q.text, q.choices[q.right or 0]) for q in found] == [("one", "a"), ("four", "d")]
    assert len({q.id for q in found}) == 2


def test_a_flat_copy_of_quality_counts_labels_from_one() -> None:
    row = {"article": ARTICLE, "question": "Who?", "options": ["a", "b", "c", "d"], "gold_label": 3}
    [question] = converted("quality", row, "f:1")
    assert question.right == 2
    assert converted("quality", row | {"gold_label": None}, "f:1") == []


def test_the_hard_subset_of_the_authors_file() -> None:
    questions = [
        {"question": text, "options": ["a", "b"], "gold_label": 1, "difficult": difficult}
        for text, difficult in (("easy", 0), ("hard", 1))
    ]
    row = {"article": ARTICLE, "questions": questions}
    assert [q.text for q in converted("quality_hard", row, "f:1")] == ["hard"]
    with pytest.raises(InputError, match="hard"):
        converted("quality_hard", {"article": ARTICLE, "questions": [{"question": "?"}]}, "f:1")


@pytest.mark.parametrize(
    ("answer", "right"), [(True, 0), (False, 1), (1, 0), (0, 1), (None, None), (-1, None)]
)
def test_an_answer_of_boolq_is_yes_no_or_unknown(answer: Any, right: int | None) -> None:
    for key in ("answer", "label"):
        [question] = converted("boolq", {"question": "q", "passage": "p", key: answer}, "f:1")
        assert question.right == right


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("boolq", {"question": "q", "passage": "p", "answer": "false"}),
        ("boolq", {"question": "q", "passage": "p", "label": 2}),
        ("quality", {"article": "x", "questions": ["a"]}),
        ("mmlu", {"question": None, "choices": ["a", "b"], "answer": 1}),
        ("mmlu", {"question": "q", "choices": ["a", "a"], "answer": 1}),
    ],
)
def test_a_row_of_another_layout_is_named(layout: str, row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"f:1: not a row of the layout '{layout}'"):
        converted(layout, row, "f:1")


def test_a_choice_with_the_words_of_the_right_one_is_not_offered() -> None:
    for n in range(20):
        question = Question(f"q{n}", "?", ("a", "b", "b", "d"), 1)
        assert set(two_choices(question, 0).choices) in ({"a", "b"}, {"b", "d"})


@pytest.mark.parametrize(
    ("answer", "right"), [(1, 1), ("B", 1), ("(B)", 1), ("blue", 1), (None, None)]
)
def test_rows_of_your_own(answer: Any, right: int | None, tmp_path: Path) -> None:
    row = {"id": "x", "question": "?", "options": ["red", "blue"], "answer": answer, "passage": "p"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [question] = load_questions(QuestionsConfig(source=str(file)))
    assert question.article == "p" and question.id == "x"
    chosen = None if question.right is None else question.choices[question.right]
    assert chosen == (None if right is None else "blue")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "choices": ["a"], "answer": 0}, "two or more"),
        ({"question": "?", "choices": ["a", "b"], "answer": "z"}, "neither an index"),
        ({"question": "?", "choices": ["a", "b"], "answer": 5}, "answer 5 of 2"),
        ({"choices": ["a", "b"], "answer": 0}, "question"),
        ({"question": "?", "choices": ["a", "b", "c"]}, "exactly two"),
    ],
)
def test_rows_that_are_no_questions_are_refused(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        load_questions(QuestionsConfig(source=str(file)))


def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'quality'"):
        load_questions(QuestionsConfig(source="x.jsonl", layout="qualty"))
    assert set(LAYOUTS) >= {known.layout for known in CATALOG.values()}


def test_a_long_source_is_thinned_out_evenly(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": str(i), "choices": ["a", "b"], "answer": 0} for i in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_questions(QuestionsConfig(source=str(file), limit=10))
    assert [q.text for q in found] == [str(i) for i in range(0, 100, 10)]
