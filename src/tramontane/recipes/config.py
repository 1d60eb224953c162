"""Settings of a harvest and of the two recipes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tramontane.config import Model, Section
from tramontane.config.sft import ExamplesConfig


class HarvestConfig(Section):
    """Selection of traces from a run's rollouts. The paper names the rules (arXiv 2506.10910,
    section 5) and prints no numbers: all defaults are ours."""

    early: float = Field(0.25, ge=0, le=1)
    """Share of the run's updates that count as early. An early trace is left out if it is also
    short (`short`). 0: none is left out."""
    short: float = Field(0.5, ge=0, le=1)
    """Quantile of the lengths of right traces after the early part, in tokens; an early trace
    below it is short."""
    per_problem: int = Field(4, ge=1)
    """Maximum number of different traces of one problem."""
    upsample: float = Field(2.0, ge=1)
    """Copies of a trace, on average, if its problem has a pass rate close to 0. At pass rate p a
    trace is written 1 + (upsample − 1) · (1 − p) times on average. 1: every trace once."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of different traces in all, drawn with probabilities proportional to their
    copies. null: no limit."""
    seed: int = 0
    """Seed of all draws."""


class RunSettings(Section):
    """A training config, and keys that are changed in it."""

    config: str | None = None
    """Path of a training config. null: the defaults."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Changed keys, as `key.sub: value`."""


class MeasuredOn(Section):
    """Problems that models are measured on, under the prompts of the training config."""

    suites: tuple[str, ...] = Field(("playground",), min_length=1)
    """Suites (`aime24`), or sources of problems as in `data.eval`."""
    problems: int | None = Field(None, ge=1)
    """Maximum number of problems of each suite. null: all of a finite source."""
    samples: int | None = Field(None, ge=1)
    """Completions of each problem. null: the suite's protocol."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. null: the suite's protocol."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass that is sampled from. null: the suite's protocol."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of a completion, in tokens. null: the suite's protocol."""
    slots: int = Field(128, ge=1)
    """Completions generated at once."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Keywords that are not null, of `evaluation.checkpoint.SamplingOptions`."""
        keys = ("problems", "samples", "temperature", "top_p", "max_tokens", "slots")
        return {k: v for k in keys if (v := getattr(self, k)) is not None}


class AnswersConfig(Section):
    """The teacher's answers to further prompts."""

    source: str
    """Source of the prompts, as in `data.train`; of a dataset with splits, the training split."""
    seed: int = 1
    """Seed of the answers, and of prompts that a generated source draws; the teacher's run drew
    others unless it had the same seed."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the config that reads and asks them, e.g. `data.fields: {problem: question}`."""
    problems: int | None = Field(None, ge=1)
    """Maximum number of prompts, evenly spaced over the source. null: all of a finite source."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt."""
    keep: Literal["right", "well_formed"] = "right"
    """Answers that are learnt: those that the verifier finds `right`, or all that are
    `well_formed`, for prompts without a reference answer."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature. The paper's for Medium: 0.7."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass that is sampled from."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of an answer, in tokens. null: the teacher's last `l_max`."""
    slots: int = Field(128, ge=1)
    """Answers generated at once."""


class GeneralConfig(ExamplesConfig):
    """General instruction data in the mixture: prompts and responses of other kinds."""

    share: float = Field(0.1, gt=0, lt=1)
    """Share of these pairs in the mixture, by number of examples. The paper: 0.1."""


class FineTuning(Section):
    """Supervised fine-tuning on the mixture."""

    epochs: int = Field(4, ge=1)
    """Passes over the mixture. The paper: 4."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of `tramontane sft`, as `key: value`, e.g. `learning_rate: 1e-5`."""


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
    """Problems that the start and the result are compared on."""


class SmallRecipe(Section):
    """Magistral Small: fine-tuning on a teacher's traces, then reinforcement learning."""

    name: str = "small"
    """Name of the recipe, for display."""
    out: str
    """Folder of the recipe, which gets one folder for each step."""
    model: Model
    """Checkpoint to start from, as in a training run's `model`."""
    teacher: str
    """Folder of the teacher's finished run: its rollouts are harvested, and its newest checkpoint
    answers further prompts."""
    harvest: HarvestConfig = Field(default_factory=HarvestConfig)
    """Selection of the teacher's traces."""
    answers: AnswersConfig | None = None
    """The teacher's answers to further prompts. null: none."""
    general: GeneralConfig | None = None
    """General instruction data. null: none."""
    sft: FineTuning = Field(default_factory=FineTuning)
    """Supervised fine-tuning on the mixture."""
    select: MeasuredOn = Field(default_factory=MeasuredOn)
    """Problems by which the best checkpoint of the fine-tuning is chosen: the highest mean pass@1.
    The paper: AIME 2024."""
    rl: RunSettings = Field(default_factory=RunSettings)
    """The training config. The defaults of `generator.temperature` and
    `trainer.objective.magistral.eps_high` are the paper's 1.0 and 0.3 here."""
    rl_only: bool = True
    """Also train without the fine-tuning, by the same config, for the comparison."""
    compare: MeasuredOn = Field(default_factory=MeasuredOn)
    """Problems that all models are compared on."""
