"""Settings of a harvest and of the two recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tramontane.config import Model, Section
from tramontane.config.sft import ExamplesConfig


class HarvestConfig(Section):
    """Selection of traces from a run's rollouts. The paper names the rules (arXiv 2506.10910,
    section 5) but gives no numbers: all defaults are ours."""

    early: float = Field(0.25, ge=0, le=1)
    """Share of the run's updates that count as early. An early trace is skipped if it is also short
    (`short`). 0: none are skipped."""
    short: float = Field(0.5, ge=0, le=1)
    """Quantile of the lengths of right traces after the early part, in tokens; an early trace
    below it is short."""
    per_problem: int = Field(4, ge=1)
    """Maximum number of distinct traces per problem."""
    upsample: float = Field(2.0, ge=1)
    """Copies of a trace, on average, if its problem has a pass rate close to 0. At pass rate p a
    trace is written 1 + (upsample − 1) · (1 − p) times on average. 1: every trace once."""
    limit: int | None = Field(None, ge=1)
    """Maximum total number of distinct traces, drawn with probabilities proportional to their
    copies. null: no limit."""
    seed: int = 0
    """Seed of all draws."""


def flat(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of a `set` by dotted path: `{data: {train: a}}` and `{data.train: a}` are the same."""
    values: dict[str, Any] = {}
    for key, value in keys.items():
        nested = isinstance(value, Mapping) and value
        values |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return values


class RunSettings(Section):
    """A training config with changed keys."""

    config: str | None = None
    """Path of a training config. null: the defaults."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changed keys, as `key.sub: value`."""


class MeasuredOn(Section):
    """Problems on which to evaluate models, with the prompts of the training config."""

    suites: tuple[str, ...] = Field(("playground",), min_length=1)
    """Suites (`aime24`), or sources of problems as in `data.eval`."""
    problems: int | None = Field(None, ge=1)
    """Maximum number of problems of each suite. null: all of a finite source."""
    samples: int | None = Field(None, ge=1)
    """Completions per problem. null: the suite's protocol."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. null: the suite's protocol."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass to sample from. null: the suite's protocol."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of a completion, in tokens. null: the suite's protocol."""
    slots: int = Field(128, ge=1)
    """Completions generated at once."""


class AnswersConfig(Section):
    """The teacher's answers to further prompts."""

    source: str
    """Source of the prompts, as in `data.train`; for a dataset with splits, the training split."""
    seed: int = 1
    """Seed of the answers, and of prompts from a generated source, which differ from the teacher's
    run's unless the seed is the same."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changed config keys for reading and answering them, e.g. `data.fields: {problem:
    question}`."""
    problems: int | None = Field(None, ge=1)
    """Maximum number of prompts, evenly spaced over the source. null: all of a finite source."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt."""
    keep: Literal["right", "well_formed"] = "right"
    """Answers to learn from: those that the verifier finds `right`, or all `well_formed` ones, for
    prompts without a reference answer."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature. The paper's for Medium: 0.7."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass to sample from."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of an answer, in tokens. null: the teacher's last `l_max`."""
    slots: int = Field(128, ge=1)
    """Answers generated at once."""


class GeneralConfig(ExamplesConfig):
    """General instruction data in the mixture: other kinds of prompts and responses."""

    share: float = Field(0.1, gt=0, lt=1)
    """Share of these pairs in the mixture, by number of examples. The paper: 0.1."""


class FineTuning(Section):
    """Supervised fine-tuning on the mixture."""

    epochs: int = Field(4, ge=1)
    """Passes over the mixture. The paper: 4."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of `tramontane sft`, as `key: value`, e.g. `learning_rate: 1e-5`."""


class Distillation(Section):
    """On-policy distillation from the teacher, otherwise with the training config `rl`."""

    updates: int = Field(12, ge=1)
    """Number of weight updates."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changed keys of the training config, as in `rl.set`, which apply only here. The defaults of
    `trainer.objective.distill.top_k` and `pipeline.diversity` are 16 and none."""


class MediumRecipe(Section):
    """Magistral Medium: reinforcement learning alone, in stages."""

    name: str = "medium"
    """Name of the recipe, for display."""
    out: str
    """Folder of the recipe, which gets one folder for each step."""
    model: Model
    """Checkpoint to start from, as in a training run's `model`."""
    rl: RunSettings
    """The training config; it must have `stages`."""
    compare: MeasuredOn = Field(default_factory=MeasuredOn)
    """Problems on which to compare the starting checkpoint with the result."""


class SmallRecipe(Section):
    """Magistral Small: fine-tuning on a teacher's traces, or distillation from it, then
    reinforcement learning."""

    name: str = "small"
    """Name of the recipe, for display."""
    out: str
    """Folder of the recipe, which gets one folder for each step."""
    model: Model
    """Checkpoint to start from, as in a training run's `model`."""
    teacher: str
    """Folder of the teacher's finished run: its rollouts are harvested, and its newest checkpoint
    answers additional prompts. For distillation, also any checkpoint, named like `model`."""
    distill: Literal["on_policy"] | None = None
    """`on_policy`: in place of fine-tuning on traces, the teacher scores the model's own
    completions; the sections `harvest`, `answers`, `general`, `sft` and `select` are not used.
    null: fine-tuning."""
    distillation: Distillation = Field(default_factory=Distillation)
    """The training by `distill`."""
    harvest: HarvestConfig = Field(default_factory=HarvestConfig)
    """Selection of the teacher's traces."""
    answers: AnswersConfig | None = None
    """The teacher's answers to additional prompts. null: none."""
    general: GeneralConfig | None = None
    """General instruction data. null: none."""
    sft: FineTuning = Field(default_factory=FineTuning)
    """Supervised fine-tuning on the mixture."""
    select: MeasuredOn = Field(default_factory=MeasuredOn)
    """Problems used to choose the best fine-tuning checkpoint: the highest mean pass@1. The paper:
    AIME 2024."""
    rl: RunSettings = Field(default_factory=RunSettings)
    """The training config. The defaults of `generator.temperature` and
    `trainer.objective.magistral.eps_high` are the paper's 1.0 and 0.3 here."""
    rl_only: bool = True
    """Also train without the fine-tuning, with the same config, for comparison."""
    compare: MeasuredOn = Field(default_factory=MeasuredOn)
    """Problems on which to compare all models."""
