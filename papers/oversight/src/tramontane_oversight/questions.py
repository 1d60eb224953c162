"""The questions of a comparison: generated, of public sets by short name, or of the user's files.

A layout is a function of one row that yields its questions (a row of QuALITY holds several). Other
sources are read by `plain`: rows have `question`, `choices`, `answer` and optionally `article`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tramontane.config import nearest
from tramontane.data.files import read_rows
from tramontane.errors import InputError
from tramontane_oversight.config import QuestionsConfig
from tramontane_oversight.extractive import extractive_questions
from tramontane_oversight.transcript import Question

GENERATED = "extractive:"
Row = dict[str, Any]
Layout = Callable[[Row], Iterator[Question]]


def load_questions(config: QuestionsConfig) -> list[Question]:
    """The questions, with the two answers that the seed draws.

    Raises:
        InputError: no such source or layout, or a row with a different layout.
    """
    if config.source == GENERATED:
        drawn = config.extractive
        stream = extractive_questions(
            drawn.split, config.seed, drawn.levels, drawn.languages, drawn.frames, drawn.phrasings
        )
        found = list(islice(stream, config.limit))
    else:
        found = _read(config)
    return [two_choices(question, config.seed) for question in found]


def source_of(config: QuestionsConfig) -> str:
    """The file or dataset behind `questions.source`."""
    name, _, file = config.source.partition("@")
    if name not in CATALOG:
        return config.source
    return file or CATALOG[name].source


def _read(config: QuestionsConfig) -> list[Question]:
    name = config.source.partition("@")[0]
    # A misspelled known name would query the hub for half a minute.
    path = Path(name)
    bare = name not in CATALOG and path.name == name and not path.suffix and not path.exists()
    if bare and (near := nearest(name, [GENERATED, *CATALOG])):
        raise InputError(
            f"questions.source: no set {name!r}; did you mean {near!r}? A dataset is OWNER/NAME"
        )
    known = CATALOG.get(name) or KnownSet(config.source, config.split, "plain")
    layout = config.layout or known.layout
    if layout not in LAYOUTS:
        near = nearest(layout, LAYOUTS)
        hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(LAYOUTS)}"
        raise InputError(f"questions.layout: no layout {layout!r}; {hint}")
    questions: dict[str, Question] = {}
    for place, row in read_rows(source_of(config), known.split):
        for question in converted(layout, row, place):
            # Some sets repeat an id for every question of an article.
            unique = f"{question.id}-{len(questions)}" if question.id in questions else question.id
            questions[unique] = _checked(question, unique, place)
    found = list(questions.values())
    count = min(len(found), config.limit)
    return [found[i * len(found) // count] for i in range(count)]  # the source may be sorted


def _checked(question: Question, unique: str, place: str) -> Question:
    if question.right is None and len(question.choices) > 2:
        raise InputError(
            f"{place}: no right answer, and {len(question.choices)} choices; without a right "
            f"answer a question needs exactly two"
        )
    return replace(question, id=unique)


def two_choices(question: Question, seed: int) -> Question:
    """The question with two answers, as the paper's protocols need (arXiv 2407.04622): the right
    one and one of the wrong ones, in an order; the seed and the question's id determine both. A
    choice with the words of the right one is not wrong.

    With more than two choices and no known right answer, no pair can be drawn.

    Raises:
        ValueError: fewer than two different choices, or more than two and no right one.
    """
    if len(set(question.choices)) < 2:
        raise ValueError(f"question {question.id!r} needs at least two choices that differ")
    rng = Random(f"{seed}/{question.id}/choices")
    if question.right is None:
        if len(question.choices) > 2:
            raise ValueError(
                f"question {question.id!r} has {len(question.choices)} choices and no right one"
            )
        pair = [0, 1]
    else:
        words = question.choices[question.right]
        others = [i for i, choice in enumerate(question.choices) if choice != words]
        pair = [question.right, rng.choice(others)]
    if rng.random() < 0.5:
        pair.reverse()
    right = None if question.right is None else pair.index(question.right)
    return replace(question, choices=tuple(question.choices[i] for i in pair), right=right)


class KnownSet(NamedTuple):
    """A public dataset.

    Args:
        source: Hugging Face dataset, `NAME` or `NAME#SUBSET`.
        split: the split that is read.
        layout: name of the conversion of its rows.
    """

    source: str
    split: str
    layout: str


CATALOG: dict[str, KnownSet] = {
    # With an article that the judge does not see.
    "quality": KnownSet("emozilla/quality", "validation", "quality"),
    "quality_hard": KnownSet("emozilla/quality", "validation", "quality_hard"),
    "boolq": KnownSet("google/boolq", "validation", "boolq"),
    "race": KnownSet("ehovy/race#high", "test", "race"),
    # Closed questions.
    "gpqa": KnownSet("Idavidrein/gpqa#gpqa_diamond", "train", "gpqa"),
    "mmlu": KnownSet("cais/mmlu#all", "test", "mmlu"),
    "arc": KnownSet("allenai/ai2_arc#ARC-Challenge", "test", "arc"),
    "commonsense_qa": KnownSet("tau/commonsense_qa", "validation", "arc"),
    "truthful_qa": KnownSet("truthfulqa/truthful_qa#multiple_choice", "validation", "truthful_qa"),
}


def plain(row: Row) -> Iterator[Question]:
    """Rows of this package, of RACE and of MMLU: `question`, `choices` (or `options`), optionally
    `article` (or `passage`, `context`), `language` and `id`; `answer` is an index, a letter, the
    text of a choice, or null if it is unknown."""
    choices = _first(row, "choices", "options")
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        raise ValueError("`choices` must be a list of two or more")
    texts = [str(choice) for choice in choices]
    yield _question(
        row,
        str(_first(row, "question")),
        texts,
        _index(row.get("answer"), texts),
        next((str(row[name]) for name in ("article", "passage", "context") if row.get(name)), None),
    )


def quality(row: Row) -> Iterator[Question]:
    """QuALITY: a question a row with `options` and `answer` from 0 or `gold_label` from 1 (the
    hub's copies), or an article a row with `questions` and their `gold_label` (the authors' file).
    """
    yield from _quality(row, hard=False)


def quality_hard(row: Row) -> Iterator[Question]:
    """The hard subset of QuALITY: rows of `quality` with a true `hard` (the hub's copies) or
    `difficult` (the authors' file)."""
    yield from _quality(row, hard=True)


def _quality(row: Row, *, hard: bool) -> Iterator[Question]:
    for asked in row.get("questions", [row]):
        if hard and not _first(asked, "hard", "difficult"):
            continue
        if "answer" in asked:
            right = int(asked["answer"])
        elif asked.get("gold_label") is not None:
            right = int(asked["gold_label"]) - 1
        else:  # the test split has none
            continue
        yield _question(asked, asked["question"], asked["options"], right, row["article"])


def boolq(row: Row) -> Iterator[Question]:
    """BoolQ: a yes-no question about a passage; an answer of null or −1 is unknown."""
    answer = row["answer"] if "answer" in row else row["label"]
    right = None if answer is None else {1: 0, 0: 1, -1: None}[answer]
    yield _question(row, row["question"], ["yes", "no"], right, row["passage"])


def gpqa(row: Row) -> Iterator[Question]:
    """GPQA: a right answer and three wrong ones."""
    wrong = [row[f"Incorrect Answer {i}"] for i in (1, 2, 3)]
    choices = [str(choice).strip() for choice in (row["Correct Answer"], *wrong)]
    yield _question(row, str(row["Question"]).strip(), choices, 0, name=row.get("Record ID"))


def arc(row: Row) -> Iterator[Question]:
    """ARC and CommonsenseQA: labeled choices; the answer is a label."""
    choices, key = row["choices"], row.get("answerKey")
    if key:  # the test split of CommonsenseQA has none
        right = list(choices["label"]).index(key)
        yield _question(row, row["question"], choices["text"], right)


def truthful_qa(row: Row) -> Iterator[Question]:
    """TruthfulQA, multiple choice with one right answer."""
    targets = row["mc1_targets"]
    yield _question(row, row["question"], targets["choices"], list(targets["labels"]).index(1))


LAYOUTS: dict[str, Layout] = {
    "plain": plain,
    "quality": quality,
    "quality_hard": quality_hard,
    "boolq": boolq,
    "race": plain,
    "gpqa": gpqa,
    "mmlu": plain,
    "arc": arc,
    "truthful_qa": truthful_qa,
}


def converted(layout: str, row: Row, where: str) -> list[Question]:
    """The questions of one row.

    Raises:
        InputError: the row does not have this layout; the message begins with `where`.
    """
    try:
        return list(LAYOUTS[layout](row))
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: not a row of the layout {layout!r} ({type(error).__name__}: {error}); the "
            f"row has {', '.join(sorted(row))}"
        ) from None


def _question(
    row: Row,
    text: str,
    choices: Sequence[Any],
    right: int | None,
    article: str | None = None,
    name: str | None = None,
) -> Question:
    """Build a question from the parts that each layout finds."""
    texts = [str(choice) for choice in choices]
    if len(set(texts)) < 2:
        raise ValueError("needs two choices that differ")
    if right is not None and not 0 <= right < len(texts):
        raise ValueError(f"answer {right} of {len(texts)} choices")
    digest = hashlib.sha256("\n".join([article or "", text, *texts]).encode()).hexdigest()[:16]
    language = row.get("language")
    return Question(
        id=str(name or row.get("id") or digest),
        text=text.strip(),
        choices=tuple(texts),
        right=right,
        article=article,
        language=language if isinstance(language, str) and len(language) == 2 else None,
    )


def _index(answer: Any, choices: Sequence[str]) -> int | None:
    """Index of a choice given as index, letter or text; None for null."""
    if answer is None:
        return None
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    text = str(answer)
    if text in choices:
        return list(choices).index(text)
    letter = text.strip("() .")
    if len(letter) == 1 and "A" <= letter <= "Z" and ord(letter) - ord("A") < len(choices):
        return ord(letter) - ord("A")
    raise ValueError(f"answer {text!r} is neither an index, nor a letter, nor one of the choices")


def _first(row: Row, *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(names[0])
