"""Streams of playground problems, split so that no test problem is ever in training: chains of
arithmetic put into words, programs, tasks for tools, and pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal

from tramontane.types import Problem

from . import drawings, programs, tasks
from .arithmetic import LEVELS, Step, chain, expression
from .language import LANGUAGES, Language, language, pick

Split = Literal["train", "test"]
PROGRAMS = ("programs", "repairs")
SCENES = (*drawings.IN_WORDS, *drawings.KINDS)
KINDS = ("sums", "stories", *PROGRAMS, *tasks.KINDS, *SCENES)

# (operator, operand) → the story's event for it.
_EVENTS = {("*", 2): "double", ("*", 3): "triple", ("/", 2): "half"}
_FRAME_OPS = {"+": "plus", "-": "minus"}

MAX_FRUITLESS_DRAWS = 20_000  # consecutive draws without a new problem; then none seem to be left


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(canonical: str) -> Split:
    """The split of a problem, independent of the seed: one problem in eight is a test problem.

    It depends only on the expression (or on a program's task and constants), so that a test
    problem's arithmetic is new in every wording, language and kind.
    """
    return "test" if int(_digest(canonical)[:8], 16) % 8 == 0 else "train"


def problems(
    split: Split,
    seed: int,
    levels: tuple[int, int] = LEVELS,
    languages: Sequence[str] = LANGUAGES,
    kinds: Sequence[str] = ("sums", "stories"),
    count: int | None = None,
) -> Iterator[Problem]:
    """Problems drawn from `seed`, uniformly over levels (both ends included), languages and kinds.

    With `count` all statements differ; without it the stream is endless and may repeat statements.
    Programs are always in English. In `lookups`, `articles` and `guessing`, the notebook or the
    number to be found determines the answer, so a statement may occur with different answers.

    Raises:
        ValueError: a kind, split or level is unknown, or fewer than `count` problems exist.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, but it must be 'train' or 'test'")
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kinds {sorted(unknown)}: choose from {KINDS}")
    if not LEVELS[0] <= levels[0] <= levels[1] <= LEVELS[1]:
        raise ValueError(f"levels {levels} are not an interval within {LEVELS}")
    return _stream(split, Random(f"{split}/{seed}"), levels, languages, kinds, count)


def _stream(
    split: Split,
    rng: Random,
    levels: tuple[int, int],
    languages: Sequence[str],
    kinds: Sequence[str],
    count: int | None,
) -> Iterator[Problem]:
    seen: set[str] = set()
    fruitless = 0
    while count is None or len(seen) < count:
        level = levels[0] + int(rng.random() * (levels[1] - levels[0] + 1))
        problem = _draw(split, rng, pick(rng, kinds), pick(rng, languages), level)
        asked = problem and str(problem.metadata.get("text", problem.problem))
        if problem is not None and (count is None or asked not in seen):
            fruitless = 0
            if count is not None:
                seen.add(str(asked))
            yield problem
            continue
        fruitless += 1
        if fruitless == MAX_FRUITLESS_DRAWS:
            raise ValueError(
                f"only {len(seen)} different {split} problems were found of {count} asked for, in "
                f"levels {levels}, languages {tuple(languages)}, kinds {tuple(kinds)}: "
                "ask for fewer, or for more levels, languages or kinds"
            )


def _draw(split: Split, rng: Random, kind: str, code: str, level: int) -> Problem | None:
    """One problem, or None if the draw belongs to the other split."""
    if kind in PROGRAMS:
        program = programs.draw(rng, level)
        if split_of(program.canonical) != split:
            return None
        problem = programs.problem(program)
        if kind == "repairs":
            problem.metadata.update(kind=kind, environment="repair")
        return problem
    if kind in tasks.KINDS:
        task = tasks.draw(rng, kind, language(code), level)
        if split_of(task.canonical) != split:
            return None
        return _problem(kind, code, level, task)
    if kind in SCENES:
        scene = drawings.draw(rng, kind, language(code), level)
        return _of_scene(kind, code, level, scene) if split_of(scene.canonical) == split else None
    if kind == "sums":
        steps = chain(rng, level)
    else:  # values of at least 2 (plurals) that are doubled, tripled or halved
        steps = chain(rng, level, low=2, factors=(2, 3), divisors=(2,))
    formula = expression(steps)
    if split_of(formula) != split:
        return None
    lang = language(code)
    if kind == "sums":
        statement = pick(rng, lang.sums).format(e=formula)
    else:
        statement = _story_statement(rng, lang, steps)
    metadata = {"steps": [list(s) for s in steps], "expression": formula}
    return _problem(kind, code, level, tasks.Task(formula, statement, str(steps[-1][3]), metadata))


def _problem(kind: str, code: str, level: int, task: tasks.Task) -> Problem:
    return Problem(
        id=f"playground-{kind}-{_digest(task.statement + task.hidden)[:16]}",
        domain="math",
        problem=task.statement,
        answer=task.answer,
        language=code,
        difficulty=level,
        source="playground",
        metadata={"kind": kind, **task.metadata},
    )


def _of_scene(kind: str, code: str, level: int, scene: drawings.Drawing) -> Problem:
    """A problem in words, or with its picture and the words in its metadata (`text`)."""
    metadata: dict[str, Any] = {"steps": [list(s) for s in scene.steps]} if scene.steps else {}
    if kind in drawings.IN_WORDS:
        task = tasks.Task(scene.canonical, scene.in_words, scene.answer, metadata)
        return _problem(kind, code, level, task)
    metadata["text"] = scene.in_words
    task = tasks.Task(scene.canonical, scene.question, scene.answer, metadata, scene.words)
    return replace(_problem(kind, code, level, task), images=[scene.picture()])


def _story_statement(rng: Random, lang: Language, steps: list[Step]) -> str:
    """Opening, one event per step, question; the same wording never comes twice in a row."""
    frame = pick(rng, list(lang.frames.values()))
    feminine = rng.random() < 0.5
    item = pick(rng, frame["items"]) if "items" in frame else {}
    slots = {"name": pick(rng, lang.names["f" if feminine else "m"])}
    slots |= item if isinstance(item, dict) else {"item": item}
    sentences = [lang.fill(pick(rng, frame["opening"]), slots, feminine, steps[0][0])]
    last = ""
    for _, op, b, _ in steps:
        event = _FRAME_OPS.get(op) or _EVENTS[op, b]
        template = pick(rng, frame[event])
        if template == last:
            template = next(t for t in frame[event] if t != last)
        last = template
        sentences.append(lang.fill(template, slots, feminine, b))
    question = pick(rng, frame["question"])
    sentences.append(lang.fill(question, slots, feminine, steps[-1][3]))
    return lang.joiner.join(sentences)
