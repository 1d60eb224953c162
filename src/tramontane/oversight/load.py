"""Loads the questions of a comparison, with two answers each."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from tramontane.config import nearest
from tramontane.data.files import read_rows
from tramontane.errors import InputError
from tramontane.oversight.config import QuestionsConfig
from tramontane.oversight.extractive import extractive_questions
from tramontane.oversight.layouts import CATALOG, LAYOUTS, KnownSet, converted, evenly
from tramontane.oversight.questions import Question, two_choices

GENERATED = "extractive:"


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
    # A misspelt known name would query the hub for half a minute.
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
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(LAYOUTS)}"
        raise InputError(f"questions.layout: no layout {layout!r}; {hint}")
    questions: dict[str, Question] = {}
    for place, row in read_rows(source_of(config), known.split):
        for question in converted(layout, row, place):
            # Some sets repeat an id for every question of an article.
            unique = f"{question.id}-{len(questions)}" if question.id in questions else question.id
            questions[unique] = _checked(question, unique, place)
    return evenly(list(questions.values()), config.limit)


def _checked(question: Question, unique: str, place: str) -> Question:
    if question.right is None and len(question.choices) > 2:
        raise InputError(
            f"{place}: no right answer, and {len(question.choices)} choices; without a right "
            f"answer a question needs exactly two"
        )
    return replace(question, id=unique)
