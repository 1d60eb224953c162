"""The whole configuration of a training run: every key, its default, and the checks between keys.

`load_config` reads a YAML file and `key=value` overrides into a `Config`; whatever is wrong is one
`InputError` that names file, key and remedy. Names follow the paper (arXiv 2506.10910).
"""

from __future__ import annotations

import difflib
import pkgutil
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from tramontane.config.settings import Section, load_section, parse, parse_settings  # noqa: F401

Language = Literal["en", "fr", "es", "it", "de", "zh", "ru"]
LANGUAGES: tuple[Language, ...] = ("en", "fr", "es", "it", "de", "zh", "ru")
# A file here is an objective; listed without importing it, and so without torch.
OBJECTIVES = Path(__file__).parents[1] / "trainer" / "objectives"


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise ValueError(f"{name!r} is no device; write cpu, cuda, cuda:N or mps")
    return name


Device = Annotated[str, AfterValidator(_device)]


class PlaygroundConfig(Section):
    """What `playground:` draws from; see `tramontane.data.playground`."""

    levels: tuple[int, int] = (1, 8)
    languages: tuple[Language, ...] = LANGUAGES
    kinds: tuple[Literal["sums", "stories", "programs"], ...] = ("sums", "stories")

    @model_validator(mode="after")
    def _levels(self) -> PlaygroundConfig:
        low, high = self.levels
        if not 1 <= low <= high <= 8:
            raise ValueError(f"levels {low}–{high} must lie within 1–8, the lower one first")
        return self


class TooHard(Section):
    """A problem that nobody solved in `after` visits in a row rests: for `return_after` updates, or
    until the next `stage`. Unsolved then too, it rests again."""

    after: int = Field(ge=1)
    return_after: Annotated[int, Field(ge=1)] | Literal["stage"] = "stage"


class CurriculumConfig(Section):
    """What becomes of a problem by its own record in this run; see docs/curriculum.md.

    `retire_after`: solved by its whole group in so many visits in a row, it is not handed out
    again; null: never. `too_hard`; null: nothing rests.
    """

    retire_after: int | None = Field(None, ge=1)
    too_hard: TooHard | None = None


class DataConfig(Section):
    """Where problems come from.

    `train` and `eval` take `playground:`, `reasoning_gym:NAME`, a JSONL (also gzip) or Parquet
    file, or a Hugging Face dataset name. `fields` maps a Problem's field to the row's own name for
    it, e.g. `{problem: question}`. `system_prompt` is `magistral`, a text of your own, or null for
    whatever the model's chat template says. `max_prompt_tokens`: prompts up to this fit; null:
    the longest of a finite source, 256 for endless ones.

    Of a finite source, only problems whose pass rate lies within `min_pass_rate` and
    `max_pass_rate` are handed out: the one that is `recorded` in their row (`pass_rate`, as
    curation writes it), or the `running` one of this run, where it has one. `pass_rates`: a run's
    `problems.jsonl`, whose rates count as recorded.
    """

    train: str = "playground:"
    eval: str | None = "playground:"
    fields: dict[str, str] = Field(default_factory=dict)
    split: str = "train"
    eval_split: str = "test"
    limit: int | None = Field(None, ge=1)
    shuffle: bool = True
    system_prompt: str | None = None
    max_prompt_tokens: int | None = Field(None, ge=1)
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    pass_rate: Literal["recorded", "running"] = "recorded"
    pass_rates: str | None = None
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    playground: PlaygroundConfig = Field(default_factory=PlaygroundConfig)

    @property
    def selects(self) -> bool:
        """Whether pass rates decide what is handed out."""
        return self.min_pass_rate is not None or self.max_pass_rate is not None

    @model_validator(mode="after")
    def _range(self) -> DataConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pass_rate {low:g} is above max_pass_rate {high:g}: swap them")
        return self


class PipelineConfig(Section):
    """The asynchronous loop's sizes, in completions; the paper's names (section 3).

    `max_staleness`: no token is trained on that is more than so many weight versions old; 0 makes
    the run synchronous and bit-for-bit repeatable. `diversity`: a group is dropped when all its
    rewards, or all its correctness parts, are equal (the paper's formula and prose differ here);
    `none` drops no group. `unscorable`: a group with an unscorable completion is dropped, or that
    completion is trained on as wrong, with reward 0.
    """

    updates: int = Field(100, ge=1)
    n_async: int = Field(512, ge=1)
    n_batch: int = Field(256, ge=1)
    n_minibatch: int | None = Field(None, ge=1)
    group_size: int = Field(16, ge=2)
    max_staleness: int = Field(2, ge=0)
    l_max: int = Field(256, ge=2)
    l_cache: int = Field(32, ge=0)
    diversity: Literal["rewards", "correctness", "none"] = "rewards"
    unscorable: Literal["drop", "wrong"] = "drop"

    @property
    def minibatch(self) -> int:
        """`n_minibatch`, by default `n_batch` (the paper's rule)."""
        return self.n_minibatch or self.n_batch

    @property
    def groups_per_batch(self) -> int:
        return self.n_batch // self.group_size

    @model_validator(mode="after")
    def _arithmetic(self) -> PipelineConfig:
        if self.n_batch % self.group_size:
            raise ValueError(
                f"group_size {self.group_size} does not divide n_batch {self.n_batch}: "
                f"a batch holds whole groups; try n_batch {_nearest(self.n_batch, self.group_size)}"
            )
        if self.n_batch % self.minibatch:
            raise ValueError(
                f"n_minibatch {self.minibatch} does not divide n_batch {self.n_batch}; "
                f"leave it out to take one optimizer step an update"
            )
        if self.n_async < self.group_size:
            raise ValueError(
                f"n_async {self.n_async} is below group_size {self.group_size}: "
                f"no group could ever be generated; raise n_async"
            )
        if self.l_cache > self.l_max:
            raise ValueError(
                f"l_cache {self.l_cache} is above l_max {self.l_max}: the length penalty would "
                f"start before the first token; lower l_cache"
            )
        return self


class GeneratorConfig(Section):
    """How completions are sampled. `workers` generators share `n_async`.

    `kv_cache`: after a weight update, sequences in flight `keep` their keys and values (the
    paper's choice) or `recompute` them. `steps_per_call`: decode steps between two looks at the
    mailbox, so the longest that new weights wait. `prefill_tokens`: prompt tokens at once.
    `kv_cache_mib`: the memory that all keys and values may take at most; null: any. `cuda_graphs`:
    on a GPU, record decode steps once and replay them.
    """

    temperature: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_cache: Literal["keep", "recompute"] = "keep"
    steps_per_call: int = Field(8, ge=1)
    prefill_tokens: int = Field(4096, ge=1)
    workers: int = Field(1, ge=1)
    device: Device = "cpu"
    kv_cache_mib: int | None = Field(None, ge=1)
    cuda_graphs: bool = True


class CustomReward(Section):
    """A reward of the user's own; see docs/rewards.md. `function` is an import path, `weight` the
    most that it adds (below 0: takes); 0 leaves it out."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    function: str = Field(pattern=r"^\w+(\.\w+)+$")
    weight: float = Field(allow_inf_nan=False)


class RewardConfig(Section):
    """The weights of the four reward axes (PAPERS: arXiv 2506.10910, section 2.2); 0 leaves one
    out. `code`: a program earns `correctness` if `all_tests` pass, or the `fraction` that does (the
    paper's negative result). `custom` adds rewards of the user's own."""

    format: float = Field(0.1, ge=0)
    correctness: float = Field(0.9, ge=0)
    length: float = Field(0.1, ge=0)
    language: float = Field(0.1, ge=0)
    code: Literal["all_tests", "fraction"] = "all_tests"
    custom: tuple[CustomReward, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a verdict's parts."""
        return ("format", "correctness", "length", "language", *(c.name for c in self.custom))

    @model_validator(mode="after")
    def _names(self) -> RewardConfig:
        if twice := {name for name in self.parts if self.parts.count(name) > 1}:
            raise ValueError(f"two rewards are named {min(twice)!r}; rename the custom one")
        return self


class VerifierConfig(Section):
    """How completions are graded. `timeout_s` and `memory_mb` bound one maths verdict;
    `code_timeout_s` and `code_memory_mb` one test of a program, of which `code_tests` are drawn.
    `allow_unsandboxed`: where no sandbox works, run programs under rlimits alone."""

    workers: int = Field(1, ge=1)
    timeout_s: float = Field(3.0, gt=0)
    memory_mb: int = Field(512, ge=256)
    code_timeout_s: float = Field(4.0, gt=0)
    code_memory_mb: int = Field(300, ge=16)
    code_tests: int = Field(20, ge=1)
    allow_unsandboxed: bool = False
    reward: RewardConfig = Field(default_factory=RewardConfig)


class ObjectiveConfig(Section):
    """The loss; defaults are the paper's (section 2.1), the alternatives what it ablates.

    `importance_correction`: `off` takes the generator's log-probs as π_old; `truncated` and
    `clipped` take the trainer's own, and weight each token by π_old/μ, capped from above at
    `importance_cap`, or from both sides at [1/importance_cap, importance_cap].
    `loss_normalization: constant` divides a group's summed token losses by G · l_max.
    """

    name: str = "magistral"
    eps_low: float = Field(0.2, ge=0, le=1)
    eps_high: float = Field(0.28, ge=0)
    advantage_normalization: Literal["minibatch", "group", "none"] = "minibatch"
    loss_normalization: Literal["group_tokens", "minibatch_tokens", "sequence", "constant"] = (
        "group_tokens"
    )
    kl_coef: float = Field(0.0, ge=0)
    entropy_coef: float = 0.0
    importance_correction: Literal["off", "truncated", "clipped"] = "off"
    importance_cap: float = Field(2.0, gt=1)


class TrainerConfig(Section):
    """Optimizer and memory. `microbatch_tokens` is the collation's token budget (section 3.3);
    `dtype: bfloat16` computes in a copy of the float32 weights; `compile` has torch.compile fuse
    each block; `ranks` above 1 shards with FSDP2, one process a rank. `parity_tolerance`: the
    largest mean |Δ log-prob| between generator and trainer that a run may start with; null: 1e-3,
    or 0.05 where bfloat16 is used."""

    learning_rate: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    microbatch_tokens: int = Field(8192, ge=1)
    gradient_checkpointing: bool = False
    compile: bool = False
    ranks: int = Field(1, ge=1)
    device: Device = "cpu"
    parity_tolerance: float | None = Field(None, gt=0)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)


class EvaluationConfig(Section):
    """The before/after measurement. `every`: also after so many updates (0: only at both ends)."""

    problems: int = Field(256, ge=1)
    samples: int = Field(4, ge=1)
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    every: int = Field(0, ge=0)


class CheckpointConfig(Section):
    """`every` so many updates (and at the end); the newest `keep` of them stay."""

    every: int = Field(20, ge=1)
    keep: int = Field(2, ge=1)


class Resources(Section):
    """What a worker takes of a Ray cluster. `cpus` is also its torch threads; `gpus` null: one
    where its device is a GPU."""

    cpus: int = Field(1, ge=1)
    gpus: float | None = Field(None, ge=0)


class PlacementConfig(Section):
    """Where workers run; see docs/placement.md.

    `kind: thread`: in the controller's own process; `ray`: as actors, on the cluster at `address`
    (HOST:PORT, or auto: the one that is found), or (null) on one that starts and ends with the
    run. `lost_sequences`: what a generator that died was at goes on from the tokens that are
    known, or starts again. `weights`: how they travel between actors, through Ray's object store
    or, from GPU to GPU, by NIXL. The rest is for each generator, verifier, and rank of the trainer.
    """

    kind: Literal["thread", "ray"] = "thread"
    address: str | None = Field(None, pattern=r"^(auto|[^:/]+:\d+)$")
    weights: Literal["store", "nixl"] = "store"
    lost_sequences: Literal["continue", "restart"] = "continue"
    generator: Resources = Field(default_factory=Resources)
    verifier: Resources = Field(default_factory=Resources)
    trainer: Resources = Field(default_factory=Resources)

    @property
    def mortal(self) -> bool:
        """Whether a worker can die without the controller, and be replaced."""
        return self.kind == "ray"


class TimeoutsConfig(Section):
    """The longest that each wait may last, in seconds; a wait that lasts longer ends the run with
    an error that names it, or has the worker replaced where that can be. `heartbeat`: how long a
    process may give no sign of life, whatever it is at."""

    generation: float = Field(600.0, gt=0)
    verification: float = Field(600.0, gt=0)
    training: float = Field(3600.0, gt=0)
    weight_update: float = Field(600.0, gt=0)
    batch: float = Field(7200.0, gt=0)
    start: float = Field(600.0, gt=0)
    heartbeat: float = Field(30.0, gt=0)


class Until(Section):
    """When a stage ends; one of the three. `updates`: after so many of its own. `solved`: right
    completions, and `at_ceiling`: those of l_max − l_cache tokens or more, were this share of all
    over `window` updates, filtered groups included."""

    updates: int | None = Field(None, ge=1)
    solved: float | None = Field(None, gt=0, le=1)
    at_ceiling: float | None = Field(None, gt=0, le=1)
    window: int = Field(10, ge=1)

    @model_validator(mode="after")
    def _one(self) -> Until:
        if sum(x is not None for x in (self.updates, self.solved, self.at_ceiling)) != 1:
            raise ValueError("give exactly one of updates, solved and at_ceiling")
        return self


class StageData(Section):
    """A stage's slice of the data; the keys are those of `data`."""

    train: str | None = None
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    pass_rate: Literal["recorded", "running"] | None = None
    pass_rates: str | None = None


class StageConfig(Section):
    """A stage of the curriculum: what it sets otherwise than the rest of the config, each under its
    own name there; null: as there. The last stage has no `until`, it lasts to the end of the run.
    """

    name: str = Field(min_length=1)
    until: Until | None = None
    data: StageData = Field(default_factory=StageData)
    l_max: int | None = Field(None, ge=2)
    l_cache: int | None = Field(None, ge=0)
    n_async: int | None = Field(None, ge=1)
    n_batch: int | None = Field(None, ge=1)
    n_minibatch: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, gt=0)
    eps_high: float | None = Field(None, ge=0)


class Config(Section):
    """One training run. `model` is `tiny` (the base that ships), a folder, or a Hugging Face name.
    `run_dir` overrides `runs/NAME`. `stages`: see docs/curriculum.md."""

    name: str = "run"
    seed: int = 0
    model: str = "tiny"
    run_dir: str | None = None
    data: DataConfig = Field(default_factory=DataConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    stages: tuple[StageConfig, ...] = ()

    def by_stage(self) -> tuple[Config, ...]:
        """The config as it stands in each stage; itself alone where there are none."""
        if not self.stages:
            return (self,)
        raw = self.model_dump(exclude={"stages"})
        return tuple(Config.model_validate(_laid_over(raw, stage)) for stage in self.stages)

    @model_validator(mode="after")
    def _between_sections(self) -> Config:
        minibatch, group_size = self.pipeline.minibatch, self.pipeline.group_size
        if minibatch % group_size:
            raise ValueError(
                f"pipeline: group_size {group_size} does not divide n_minibatch {minibatch}: a "
                f"group's tokens are normalised together, so it cannot be split over optimizer "
                f"steps; try n_minibatch {_nearest(minibatch, group_size)}, or leave it out"
            )
        groups = self.pipeline.n_async // group_size
        if groups < self.generator.workers:
            raise ValueError(
                f"generator: {self.generator.workers} workers share {groups} groups (pipeline: "
                f"n_async {self.pipeline.n_async} / group_size {group_size}); raise n_async"
            )
        if minibatch % self.trainer.ranks:
            raise ValueError(
                f"trainer: ranks {self.trainer.ranks} does not divide n_minibatch {minibatch}: "
                f"every rank takes the same number of completions; change one of them"
            )
        name = self.trainer.objective.name
        names = [module.name for module in pkgutil.iter_modules([str(OBJECTIVES)])]
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            raise ValueError(f"trainer.objective.name: no objective {name!r}; {hint}")
        return self

    @model_validator(mode="after")
    def _stages(self) -> Config:
        names = [stage.name for stage in self.stages]
        begins = 0
        for number, stage in enumerate(self.stages):
            where = f"stages.{number}"
            if names.count(stage.name) > 1:
                raise ValueError(f"{where}.name: two stages are named {stage.name!r}; rename one")
            if (number == len(names) - 1) != (stage.until is None):
                raise ValueError(
                    f"{where}.until: leave it out: the last stage lasts until pipeline.updates"
                    if stage.until
                    else f"{where}.until: not given; say when stage {stage.name!r} ends"
                )
            if begins >= self.pipeline.updates:
                raise ValueError(
                    f"{where}: stage {stage.name!r} would never begin: those before it take "
                    f"{begins} updates, and pipeline.updates is {self.pipeline.updates}; raise that"
                )
            begins += (stage.until.updates or 0) if stage.until else 0
            try:
                Config.model_validate(_laid_over(self.model_dump(exclude={"stages"}), stage))
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                own = stage.model_dump(exclude_none=True)
                keys = [*own, *(f"data.{key}" for key in own["data"])]
                # The key that the message names, if the stage sets it.
                places = {
                    found.start(): f".{key}"
                    for key in keys
                    if (found := re.search(rf"\b{key.removeprefix('data.')}\b", message))
                }
                key = places[min(places)] if places else ""
                raise ValueError(f"{where}{key}: {message}") from None
        return self

    def resolved_arithmetic(self) -> dict[str, str]:
        """What the sizes come to, for people: printed at the start of a run."""
        p = self.pipeline
        return {
            "prompts a batch": f"{p.groups_per_batch} × {p.group_size} completions",
            "optimizer steps an update": f"{p.n_batch // p.minibatch}",
            "policies a sequence spans": f"about {p.n_async / p.n_batch:.1f} (n_async / n_batch)",
            "in flight at most": f"{min(p.n_async, p.n_batch * (p.max_staleness + 1))} completions"
            + (" (by max_staleness)" if p.n_async > p.n_batch * (p.max_staleness + 1) else ""),
            "staleness at most": f"{p.max_staleness} versions"
            + (" (synchronous)" if p.max_staleness == 0 else ""),
        }


def _laid_over(raw: dict[str, Any], stage: StageConfig) -> dict[str, Any]:
    """A config's values with a stage's on top."""
    own = stage.model_dump(exclude_none=True)
    keys = ("l_max", "l_cache", "n_async", "n_batch", "n_minibatch")
    objective = raw["trainer"]["objective"]
    return raw | {
        "pipeline": raw["pipeline"] | {k: own[k] for k in keys if k in own},
        "generator": raw["generator"] | {k: own[k] for k in ("temperature",) if k in own},
        "trainer": raw["trainer"]
        | {"objective": objective | {k: own[k] for k in ("eps_high",) if k in own}},
        "data": raw["data"] | own["data"],
    }


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a training config; see `load_section`."""
    return load_section(Config, path, overrides)


def _nearest(n: int, divisor: int) -> int:
    return max(divisor, round(n / divisor) * divisor)
