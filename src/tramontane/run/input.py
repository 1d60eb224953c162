"""Loads and checks a run's data, rewards and folder without importing torch, which takes seconds,
so that errors in them are reported first."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain

from tramontane.config import (
    HELD_OUT,
    Config,
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
)
from tramontane.data.curriculum import Curriculum
from tramontane.data.files import name_of
from tramontane.data.load import load_problems
from tramontane.data.similarity import near_copies
from tramontane.data.stream import ProblemStream
from tramontane.environments.loading import check as check_environments
from tramontane.environments.loading import check_rows
from tramontane.errors import InputError
from tramontane.evaluation.settings import Sampling
from tramontane.placement.place import check
from tramontane.run.trackers import check_trackers
from tramontane.types import Problem
from tramontane.verifier import correctness


@dataclass(frozen=True)
class EvaluationSet:
    """Problems that a run is measured on, and their sampling settings."""

    problems: list[Problem]
    sampling: Sampling


@dataclass(frozen=True)
class RunInput:
    """The problems of a run.

    Args:
        problems: the training problems.
        sets: problems that the run is measured on, by name; `held_out` for `data.eval`.
        warnings: warnings about them for the user.
    """

    problems: Curriculum
    sets: dict[str, EvaluationSet]
    warnings: list[str] = field(default_factory=list)


def read_input(config: Config) -> RunInput:
    """Load the problems of a run, and check its verifiers, environments and libraries.

    Raises:
        InputError: any of them is invalid.
    """
    check_trackers(config)
    check(config)
    correctness.check(config.verifier)
    stages = config.by_stage()
    # First without rows, which may lack what only another reward needs.
    check_environments(stages[-1].data, reward_is_set=config.conversation.reward_is_set)
    problems, sets = Curriculum(stages), _evaluation_sets(config, stages[-1])
    measured = [problem for each in sets.values() for problem in each.problems]
    trained = (problem for stream in problems.streams for problem in stream.problems or ())
    check_rows(stages[-1].data, chain(trained, measured), config.conversation.reward_is_set)
    overlaps = [_separate(stream, measured) for stream in problems.streams]
    return RunInput(problems, sets, [warning for warning in overlaps if warning])


def _separate(stream: ProblemStream, measured: list[Problem]) -> str:
    """Treat evaluation problems in a stream as `data.eval_overlap` says; returns a warning, or an
    empty text."""
    choice, problems = stream.config.eval_overlap, stream.problems
    if problems is None or not measured or choice == "ignore":
        return ""
    copies = near_copies([*map(_asked, problems)], [*map(_asked, measured)])
    if not copies:
        return ""
    known = {copy.original for copy in copies.values()}
    place, copy = next(iter(copies.items()))
    first, original = problems[place], measured[copy.original]
    likeness = "the same" if copy.similarity == 1 else f"similarity {copy.similarity:.2f}"
    found = (
        f"{len(copies):,} of {len(problems):,} training problems are also evaluation problems, or "
        f"nearly, the first at {_place(first)} and {_place(original)} ({likeness})"
    )
    if len(known) == len(measured) > 1:
        found += f"; the evaluation has no other problems ({len(measured):,})"
    source = f"data {name_of(stream.config.train)!r}"
    if choice == "drop":
        if len(copies) == len(problems):
            raise InputError(f"{source}: {found}: dropped (data.eval_overlap), none is left")
        kept = [p for number, p in enumerate(problems) if number not in copies]
        stream.keep(kept, "also in the evaluation (data.eval_overlap)")
        return f"{source}: {found}; they are dropped from training"
    remedy = "set data.eval_overlap to `drop` to exclude them from training"
    if choice == "refuse":
        raise InputError(f"{source}: {found}; {remedy}, or give other data")
    return f"{source}: {found}: evaluations will flatter the model; {remedy}, or to `ignore`"


def _asked(problem: Problem) -> str:
    """What a problem asks: its statement, or its chat without the system prompt; and a number for
    each image, since the same question about another image is another problem."""
    texts = [m["content"] for m in problem.messages or () if m["role"] != "system"]
    images = [str(int(sha256(image.encode()).hexdigest(), 16)) for image in problem.images]
    return "\n\n".join([*(texts or [problem.problem]), *images])


def _place(problem: Problem) -> str:
    return problem.where or f"problem {problem.id!r}"


def _evaluation_sets(config: Config, last: Config) -> dict[str, EvaluationSet]:
    """The problems of `data.eval` and of `evaluation.also`.

    Completions have the `last` stage's length, so that all measurements are comparable.
    """
    data, evaluation, sets = config.data, config.evaluation, {}

    def add(
        name: str, source: str, rows: DataConfig, settings: EvaluationConfig | EvaluationSetConfig
    ) -> None:
        problems = load_problems(
            source,
            rows,
            split="test",
            limit=settings.problems,
            seed=config.seed if evaluation.problems_seed is None else evaluation.problems_seed,
            domains=config.verifier.domains,
        )
        length = getattr(settings, "max_tokens", None) or last.pipeline.l_max
        sampling = Sampling(
            samples=settings.samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=length,
            seed=config.seed,
        )
        asked = data.at_efforts(problems, settings.effort or data.effort)
        sets[name] = EvaluationSet(asked, sampling)

    if data.eval is not None:
        add(HELD_OUT, data.eval, data, evaluation)
    for name, also in evaluation.also.items():
        add(
            name,
            also.source,
            DataConfig(
                train=also.source,
                fields=also.fields,
                eval_split=also.split,
                sets=data.sets,
                playground=also.playground,
            ),
            also,
        )
    return sets
