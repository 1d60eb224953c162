"""Supervised fine-tuning: a separate run, or the `cold_start` of a training run."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tramontane.config.data import (
    PLAYGROUND,
    EffortName,
    Levels,
    PlaygroundConfig,
    check_efforts,
    of_playground,
)
from tramontane.config.device import Model
from tramontane.config.images import ImagesConfig
from tramontane.config.objective_choice import ObjectiveConfig
from tramontane.config.prompt import EffortConfig, PromptConfig, TagPair
from tramontane.config.section import Section
from tramontane.config.trainer import NumericsConfig, TrainerConfig

NEW_MODEL_RATE = 2e-3  # learning rate of weights that were never trained


class NewModelConfig(Section):
    """A model with random initial weights and a new tokenizer."""

    model_type: str = "llama"
    """Architecture, as `model_type` in a Hugging Face config."""
    vocab_size: int = Field(2048, ge=512)
    """Vocabulary size of the tokenizer."""
    tokenizer_examples: int = Field(20000, ge=1)
    """Number of generated examples to train the tokenizer on."""
    architecture: dict[str, Any] = Field(default_factory=dict)
    """Sizes, named as in the architecture's Hugging Face config, e.g. `hidden_size`."""


class MixtureConfig(Section):
    """Frequencies of styles and flaws in generated traces. The paper has no such data."""

    removed: ClassVar[Any] = {
        "wrong_call": (0.2, "it is WRONG_CALL in data/playground/traces.py"),
        "ignored_answer": (0.1, "it is IGNORED_ANSWER in data/playground/traces.py"),
    }

    work: float = Field(0.35, ge=0)
    """Relative weight of traces that show their steps."""
    guess: float = Field(0.57, ge=0)
    """Relative weight of traces that skip the steps."""
    ramble: float = Field(0.08, ge=0)
    """Relative weight of traces that doubt and repeat steps."""
    no_box: float = Field(0.12, ge=0, le=1)
    """Share of traces without a box (for programs: a fenced block) around the answer."""
    unclosed: float = Field(0.03, ge=0, le=1)
    """Share of traces without `</think>`."""
    unopened: float = Field(0.03, ge=0, le=1)
    """Share of traces without `<think>`."""
    switch: float = Field(0.15, ge=0, le=1)
    """Share of non-English traces that change language midway, mostly to English. English traces
    change a quarter as often."""
    slip: float = Field(0.0, ge=0, le=1)
    """Share of worked traces with an error in one step, and hence a wrong answer."""
    guess_right: float = Field(0.15, ge=0, le=1)
    """Share of guesses that are correct."""
    broken_call: float = Field(0.1, ge=0, le=1)
    """Share of traces for a tool whose call does not parse; they then guess."""
    needless_call: float = Field(0.0, ge=0, le=1)
    """Share of traces for sums and stories that call the calculator, and then guess."""


class PlaygroundShare(PlaygroundConfig):
    """One part of the generated data."""

    share: float = Field(1.0, gt=0)
    """Size of this part, relative to the other parts and the drills."""
    effort: EffortName | None = None
    """Level of effort, in `data.effort`, that the prompts of this part ask for. null: none."""
    mixture: MixtureConfig | None = None
    """Frequencies of styles and flaws in the traces of this part. null: those of all parts."""


class DrillsConfig(Section):
    """Bare equations among the generated examples, which teach a tiny model to add."""

    share: float = Field(0.0, ge=0)
    """Size of the drills, relative to the parts under `playground`. 0: no drills."""
    levels: Levels = (1, 4)
    """Easiest and hardest level of the equations, inclusive."""
    equations: int = Field(12, ge=1)
    """Equations per example."""


class ExamplesConfig(Section):
    """Prompts and responses to learn from."""

    of_text: ClassVar[str] = "train"

    train: str
    """Source: `playground:`, mixed from the parts under `playground`, or a JSONL (also gzip) or
    Parquet file with `prompt` and `response` (or `completion`) in each row, as texts or as chats,
    or with conversations: `messages` (roles system, user, assistant and tool), whose assistant
    messages are learned, and optionally `tools`. Required, unless one of `playground`, `drills`
    and `mixture` is given."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of `prompt`, `response` and `images`, or `messages` and `tools`, and of `effort`, in
    the rows, if different. A row's `effort` is the level that its prompt asks for, if `data.effort`
    has levels."""
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """Limits of the images in rows of prompts and responses."""
    playground: tuple[PlaygroundShare, ...] = (PlaygroundShare(),)
    """Parts of the generated data."""
    drills: DrillsConfig = Field(default_factory=DrillsConfig)
    """Bare equations among the generated examples."""
    mixture: MixtureConfig = Field(default_factory=MixtureConfig)
    """Frequencies of styles and flaws in generated traces."""

    @model_validator(mode="before")
    @classmethod
    def _generated(cls, raw: Any) -> Any:
        return of_playground(raw, "playground", "drills", "mixture")

    def efforts(self, key: str) -> dict[str, list[str]]:
        """The levels of effort that parts of the playground, at `key`, ask for, by key."""
        parts = enumerate(self.playground)
        return {f"{key}.{i}.effort": [part.effort] for i, part in parts if part.effort}


class SupervisedConfig(NumericsConfig):
    """Supervised fine-tuning of a model before its reinforcement learning. Optimizer and memory
    keys have the same names as in `trainer`, with different defaults."""

    data: ExamplesConfig = Field(default_factory=lambda: ExamplesConfig(train=PLAYGROUND))
    """Prompts and responses to learn from. Without this section, they are the playground's."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps. The paper trains for 4 epochs (Small)."""
    batch_tokens: int = Field(16384, ge=1)
    """Tokens per optimizer step, prompts included; the last example of a step may exceed it."""
    microbatch_tokens: int = Field(2048, ge=1)
    """Token budget of one forward and backward pass; a longer example gets its own pass."""
    max_length: int = Field(1024, ge=2)
    """Maximum length of a prompt plus its response, in tokens; the model's context is a further
    limit. Longer examples are skipped, with a warning."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of AdamW after warm-up. null: 2e-3 for a new model; for a checkpoint by its
    size: 1e-3 at 2 million parameters, 1e-4 at 135 million, 1e-5 from 7 billion on; ten times as
    much with `lora`. The paper does not give it."""
    warmup_steps: int = Field(100, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after warm-up: `constant`, or a `linear` or `cosine` decay to 0 at the last
    step."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay, on matrices only."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the saved weights."""
    threads: int = Field(1, ge=1)
    """CPU threads that compute microbatches in parallel, each with its own gradients. 1: one
    microbatch at a time, on all cores."""
    ranks: int = Field(1, ge=1)
    """Processes that share the work and, with FSDP2, the weights and moments."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints to resume from."""
    keep_every: int | None = Field(None, ge=1)
    """Steps between weights that are kept in `checkpoints/step_N` of the result's folder; the last
    step is kept too. null: only the result is kept."""
    log_every: int = Field(20, ge=1)
    """Steps between lines of metrics."""

    @model_validator(mode="after")
    def _checked_as_a_trainer(self) -> SupervisedConfig:
        self.dtype = self.trainer.dtype
        return self

    @property
    def trainer(self) -> TrainerConfig:
        """The trainer's config: the keys of the same names, and the objective `sft`. An update is
        one optimizer step."""
        shared = TrainerConfig.model_fields.keys() & type(self).model_fields.keys()
        return TrainerConfig(
            objective=ObjectiveConfig(name="sft"),
            warmup_updates=self.warmup_steps,
            **{key: getattr(self, key) for key in shared},
        )


class SFTDataConfig(ExamplesConfig, PromptConfig):
    """Prompts and responses to learn from, and how prompts are written."""

    thinking_tags: TagPair | None = None
    """Thinking tags, as in a training run's `verifier.thinking_tags`. Generated responses have
    them; a file's responses are used unchanged."""
    effort: dict[EffortName, EffortConfig] = Field(default_factory=dict)
    """Levels of effort that examples may ask for, as in a training run's `data.effort`; their
    lengths do not matter here."""
    tokens: Literal["template", "mistral"] = "template"
    """What turns messages into tokens, as in a training run's `conversation.tokens`: `mistral`
    learns what Mistral's own library (`mistral-common`, an extra) writes for fine-tuning."""

    @model_validator(mode="after")
    def _known_efforts(self) -> SFTDataConfig:
        check_efforts(self.effort, self.efforts("playground"))
        return self


class SFTConfig(SupervisedConfig):
    """A supervised run, as `tramontane sft` reads it. Optimizer and memory keys have the same names
    as in a training run's `trainer`, with different defaults."""

    read_by = "tramontane sft"
    name: str = "sft"
    """Name of the run, for display."""
    seed: int = 0
    """Seed of initialization, generated data and order."""
    output: str
    """Folder of the result, in the Hugging Face layout."""
    model: Model | None = None
    """Checkpoint to start from, as in a training run's `model`. null: a new model, as described by
    `new_model`. Exactly one of the two must be set."""
    tokenizer: Model | None = None
    """Tokenizer, named like a model. null: the model's own."""
    new_model: NewModelConfig | None = None
    """Architecture and tokenizer of a new model. null: the run starts from `model`."""
    data: SFTDataConfig = Field(default_factory=lambda: SFTDataConfig(train=PLAYGROUND))
    """Prompts and responses to learn from, and how prompts are written."""

    @model_validator(mode="after")
    def _new_models_rate(self) -> SFTConfig:
        if self.new_model is not None and self.learning_rate is None:
            self.learning_rate = NEW_MODEL_RATE
        return self
