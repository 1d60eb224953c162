"""What a run reads and calls, loaded and checked without torch, whose import takes seconds: a fault
in the data, the rewards or the run's folder is reported before that."""

from __future__ import annotations

from dataclasses import dataclass

from tramontane.config import (
    HELD_OUT,
    Config,
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
)
from tramontane.data.curriculum import Curriculum
from tramontane.data.load import load_problems
from tramontane.evaluation import SamplingPlan
from tramontane.placement.place import check
from tramontane.run.trackers import check_trackers
from tramontane.types import Problem, SamplingParams
from tramontane.verifier import correctness


@dataclass(frozen=True)
class EvaluationSet:
    """Problems that a run is measured on, and how they are asked."""

    problems: list[Problem]
    plan: SamplingPlan


@dataclass(frozen=True)
class RunInput:
    """The problems of a run.

    Args:
        problems: the training problems.
        sets: problems that the run is measured on, by name; `held_out` are those of `data.eval`.
            Their plans have no prompts yet.
    """

    problems: Curriculum
    sets: dict[str, EvaluationSet]


def read_input(config: Config) -> RunInput:
    """Load the problems of a run, and check its verifiers and its libraries.

    Raises:
        InputError: any of them is wrong.
    """
    check_trackers(config)
    check(config)
    correctness.check(config.verifier)
    stages = config.by_stage()
    return RunInput(Curriculum(stages), _evaluation_sets(config, stages[-1]))


def _evaluation_sets(config: Config, last: Config) -> dict[str, EvaluationSet]:
    """The problems of `data.eval` and of `evaluation.also`.

    Completions have the length of the `last` stage: all measurements must be comparable.
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
        sampling = SamplingParams(length, settings.temperature, settings.top_p)
        sets[name] = EvaluationSet(problems, SamplingPlan(settings.samples, sampling, config.seed))

    if data.eval is not None:
        add(HELD_OUT, data.eval, data, evaluation)
    for name, also in evaluation.also.items():
        add(
            name,
            also.source,
            DataConfig(
                fields=also.fields,
                eval_split=also.split,
                sets=data.sets,
                playground=also.playground,
            ),
            also,
        )
    return sets
