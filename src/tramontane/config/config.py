"""The configuration of a training run: its sections, and the checks between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tramontane.config.conversation import ConversationConfig
from tramontane.config.data import PLAYGROUND, DataConfig, check_efforts
from tramontane.config.device import Model
from tramontane.config.evaluation import EvaluationConfig
from tramontane.config.generator import GeneratorConfig
from tramontane.config.pipeline import PipelineConfig, nearest_multiple
from tramontane.config.resume import Fixed, MayChange
from tramontane.config.running import CheckpointConfig, PlacementConfig, TimeoutsConfig
from tramontane.config.section import PathPart, Section, key_error, load_section
from tramontane.config.sft import SupervisedConfig
from tramontane.config.stages import StageConfig
from tramontane.config.teacher import TeacherConfig, check_teacher
from tramontane.config.trainer import TrainerConfig
from tramontane.config.verifier import VerifierConfig
from tramontane.types import Problem

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class Config(Section):
    """A training run, as `tramontane train` reads it."""

    read_by = "tramontane train"
    name: Annotated[PathPart, Fixed("the run has its folder already")] = "run"
    """Name of the run; its folder is `runs/NAME`, unless `run_dir` names another."""
    seed: Annotated[int, Fixed("groups under way drew from it")] = 0
    """Seed of initialization, data order and sampling."""
    model: Annotated[Model, Fixed("the checkpoint holds its weights")] = "tiny"
    """Model to start from: `tiny` or `tiny_vision` (in the package), a checkpoint folder, a run
    (its newest weights) or one of its checkpoints, or a Hugging Face name, with `@REVISION` for a
    branch, tag or commit."""
    tokenizer: Annotated[Model | None, Fixed("completions were sampled in its tokens")] = None
    """Tokenizer, named like a model. null: the model's own."""
    run_dir: Annotated[str | None, Fixed("the run has its folder already")] = None
    """Folder of the run. null: `runs/NAME`."""
    rollouts: Literal["all", "sample", "none"] = "all"
    """Completions recorded in `rollouts/`: all; a sample of one in 16 groups of each update; or
    none."""
    trackers: MayChange[tuple[TrackerName, ...]] = ()
    """Experiment trackers that also get the metrics: `tensorboard`, `wandb`, `trackio`, `mlflow`.
    `metrics.jsonl` always has everything. See docs/view.md."""
    log_completions: MayChange[int] = Field(0, ge=0)
    """Updates from one table of completions that the trackers get to the next; 0: none. A table has
    the first 64 completions of its update's batch. `rollouts/` has all in any case."""
    data: Annotated[
        DataConfig, Fixed("the position in the data and the problems' records belong to it")
    ] = Field(default_factory=DataConfig.default)
    """Problem sources, and which of their problems are used. Without this section, a run trains and
    is evaluated on the playground."""
    cold_start: Annotated[
        SupervisedConfig | None, Fixed("the reinforcement learning began from its weights")
    ] = None
    """Cold start: fine-tuning of `model` before the reinforcement learning, as for Magistral Small.
    null: reinforcement learning starts from `model`."""
    conversation: Annotated[
        ConversationConfig, Fixed("conversations under way were begun with it")
    ] = Field(default_factory=ConversationConfig)
    """Limits of conversations with an environment, and their reward."""
    pipeline: Annotated[PipelineConfig, Fixed("groups under way were handed out with it")] = Field(
        default_factory=PipelineConfig
    )
    """Sizes of the asynchronous loop."""
    generator: MayChange[GeneratorConfig] = Field(default_factory=GeneratorConfig)
    """Sampling of completions."""
    verifier: Annotated[VerifierConfig, Fixed("groups under way are graded by it")] = Field(
        default_factory=VerifierConfig
    )
    """Limits of grading, and weights of the reward."""
    trainer: MayChange[TrainerConfig] = Field(default_factory=TrainerConfig)
    """Objective, optimizer, numerics and memory use of training."""
    teacher: MayChange[TeacherConfig | None] = None
    """Models that the policy is distilled from. null: none."""
    evaluation: MayChange[EvaluationConfig] = Field(default_factory=EvaluationConfig)
    """Measurements before, during and after the run."""
    checkpoint: MayChange[CheckpointConfig] = Field(default_factory=CheckpointConfig)
    """Checkpoints to resume a run from."""
    placement: MayChange[PlacementConfig] = Field(default_factory=PlacementConfig)
    """Where workers run, and how weights travel between them."""
    timeouts: MayChange[TimeoutsConfig] = Field(default_factory=TimeoutsConfig)
    """Time limits of the controller's waits."""
    stages: Annotated[tuple[StageConfig, ...], Fixed("a stage is under way with it")] = ()
    """Stages of the curriculum, in order. Empty: the whole run is one stage."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def trainer_is_apart(self) -> bool:
        """True if the trainer runs outside the controller's process."""
        return self.placement.kind != "thread" or self.trainer.ranks > 1

    @property
    def replaces_generators(self) -> bool:
        """True if generators can die independently of the controller, and are replaced."""
        return self.placement.replaces_workers or self.generator.kind == "vllm"

    @property
    def converses(self) -> bool:
        """True if completions are conversations with environments or tools."""
        return self.data.environment is not None or bool(self.data.tools)

    @property
    def environment_rewards(self) -> bool:
        """True if environments, not verifiers, give the reward of conversations."""
        return self.converses and self.conversation.reward != "verifier"

    @property
    def evaluated_rates(self) -> list[str]:
        """The figures of an evaluation, beside pass@1, that are shown (`RewardConfig.rates`)."""
        return self.verifier.reward.rates(earned=self.environment_rewards)

    @property
    def sampled_groups(self) -> int:
        """Groups of each batch that the run samples; the others are recorded trajectories."""
        trajectories, groups = self.data.trajectories, self.pipeline.groups_per_batch
        return groups - round(trajectories.share * groups) if trajectories else groups

    def lengths_at(self, efforts: Iterable[str]) -> dict[str | None, tuple[int, int]]:
        """l_max and l_cache of completions by level of effort; by None where there are none."""
        asked = self.data.at_efforts([Problem("", "", "")], efforts)
        return {p.effort: p.lengths(self.pipeline.l_max, self.pipeline.l_cache) for p in asked}

    @property
    def generates(self) -> bool:
        """True if the run samples completions, for training or evaluations."""
        evaluates = self.data.eval is not None or bool(self.evaluation.also)
        return evaluates or bool(self.sampled_groups)

    @property
    def teachers_are_apart(self) -> bool:
        """True if teachers are processes, and can be replaced."""
        several = self.teacher is not None and self.teacher.ranks > 1
        return self.placement.kind != "thread" or several

    @property
    def teachers(self) -> list[str]:
        """The models of the teachers of all stages, each once."""
        if self.teacher is None:
            return []
        default = self.teacher.model
        general = [stage.teacher or default for stage in self.stages] or [default]
        return [*dict.fromkeys([*general, *self.teacher.domains.values()])]

    @property
    def teacher_processes(self) -> int:
        """Processes of all teachers, if they are apart."""
        each = self.teacher.workers * self.teacher.ranks if self.teacher else 0
        return len(self.teachers) * each

    def by_stage(self) -> tuple[Config, ...]:
        """The config of each stage; only the config itself if it has no stages."""
        return tuple(self._in_stage(stage) for stage in self.stages) or (self,)

    def _in_stage(self, stage: StageConfig) -> Config:
        return Config.model_validate(stage.applied_to(self.model_dump(exclude={"stages"})))

    @model_validator(mode="after")
    def _no_playground_unasked(self) -> Config:
        """The playground is the default only where no data is given at all."""
        given = "data" in self.model_fields_set
        own = given and self.data.train != PLAYGROUND
        if self.cold_start and own and "data" not in self.cold_start.model_fields_set:
            raise key_error(
                "not given: name the prompts and responses to learn from before the reinforcement "
                "learning, data: {train: FILE} (`playground:` generates some)",
                "cold_start.data",
            )
        if not given and any(stage.data.train for stage in self.stages):
            raise key_error(
                "not given, but stages have data of their own: name what the others train on",
                "data.train",
                "stages",
            )
        return self

    @model_validator(mode="after")
    def _groups_and_minibatches(self) -> Config:
        minibatch, group_size = self.pipeline.minibatch, self.pipeline.group_size
        if minibatch % group_size:
            raise key_error(
                f"group_size {group_size} does not divide n_minibatch {minibatch}: a group's "
                f"tokens are normalized together, so it cannot be split over optimizer steps; "
                f"try n_minibatch {nearest_multiple(minibatch, group_size)}, or leave it out",
                "pipeline.n_minibatch",
                "pipeline.group_size",
            )
        objective = self.trainer.objective
        if objective.options.every_group and self.pipeline.diversity != "none":
            raise key_error(
                f"diversity {self.pipeline.diversity!r} drops groups that objective "
                f"{objective.name!r} learns from; write diversity: none",
                "pipeline.diversity",
                "trainer.objective.name",
            )
        if group_size % objective.options.samples:
            raise key_error(
                f"objective {objective.name!r} judges {objective.options.samples} completions "
                f"together, which does not divide group_size {group_size}; change one of them",
                "trainer.objective.name",
                "pipeline.group_size",
            )
        trajectories = self.data.trajectories
        if objective.options.of_sampler and trajectories and trajectories.behavior == "refreshed":
            raise key_error(
                f"objective {objective.name!r} weighs completions by the policy that sampled them "
                f"(initial_value: importance), which `refreshed` replaces; write recorded",
                "data.trajectories.behavior",
                f"trainer.objective.{objective.name}.initial_value",
            )
        return self

    @model_validator(mode="after")
    def _reward_alone(self) -> Config:
        """Turn off the axes of the reward that nobody asked for."""
        verifier, reward = self.verifier, self.verifier.reward
        if self.environment_rewards:
            reward = reward.alone(correctness=1.0)
        elif verifier.functions_alone(self.data.domain):
            reward = reward.alone()
        self.verifier = verifier.model_copy(update={"reward": reward})
        return self

    @model_validator(mode="after")
    def _routers(self) -> Config:
        """Give generators what the trainer's treatment of routers needs of them."""
        trainer, generator = self.trainer, self.generator
        generator.float32_router |= trainer.float32_router
        generator.return_routed_experts |= trainer.router_replay
        if trainer.router_replay and generator.kind == "vllm":
            raise key_error(
                "with vLLM, the chosen experts are not recorded: set router_replay to false, or "
                "kind to slots",
                "trainer.router_replay",
                "generator.kind",
            )
        return self

    @model_validator(mode="after")
    def _tower(self) -> Config:
        trainer, generator = self.trainer, self.generator
        if trainer.vision == "frozen":
            return self
        generator.float32_vision = True
        for key, is_unfit, remedy in (
            (
                "placement.kind",
                self.placement.kind != "thread",
                "thread, since the tower's float32 weights are not rounded to the generators' "
                "number type there",
            ),
            ("generator.kind", generator.kind != "slots", "slots"),
            ("trainer.threads", trainer.threads > 1, "1"),
            ("trainer.ranks", trainer.ranks > 1, "1"),
            (
                "trainer.objective",
                "reference" in trainer.objective.needs,
                "one without a term against the first policy, whose tower is not kept",
            ),
        ):
            if is_unfit:
                raise key_error(
                    f"a vision tower is not trained so: set it to {remedy}, or trainer.vision to "
                    f"frozen",
                    key,
                    "trainer.vision",
                )
        return self

    @model_validator(mode="after")
    def _truncation(self) -> Config:
        generator, key = self.generator, "top_k" if self.generator.top_p == 1 else "top_p"
        if not generator.truncates:
            return self
        if generator.kind == "vllm":
            raise key_error(
                "with vLLM, the tokens that it allows are not recorded, which the trainer's "
                "log-probs need: leave it out, or set kind to slots",
                f"generator.{key}",
                "generator.kind",
            )
        if self.trainer.objective.needs & {"teacher", "teacher_top"}:
            raise key_error(
                "the trainer's log-probs are over the tokens that it allows, and the teacher's "
                "over all: leave it out",
                f"generator.{key}",
                "trainer.objective",
            )
        return self

    @model_validator(mode="after")
    def _generators(self) -> Config:
        interruption = self.generator.interruption
        shortest = min(l_max for l_max, _ in self.lengths_at(self.data.effort).values())
        if interruption and shortest <= interruption.after[1]:
            raise key_error(
                f"thoughts are interrupted after up to {interruption.after[1]:,} tokens, and "
                f"completions end at l_max {shortest:,}: raise l_max by answer_tokens "
                f"({interruption.answer_tokens:,}) and the tokens of the text",
                "generator.interruption",
                "pipeline.l_max",
            )
        if self.generator.serve and self.stages:
            raise key_error(
                "requests of clients may be under way when a stage ends and the generators' slots "
                "change: remove one of the two",
                "generator.serve",
                "stages",
            )
        if interruption and self.converses:
            raise key_error(
                "interrupts the thoughts of a single turn, and the run's data name an environment "
                "or tools; leave it out",
                "generator.interruption",
                "data.environment",
            )
        trajectories, groups = self.data.trajectories, self.pipeline.groups_per_batch
        if trajectories and self.sampled_groups == groups:
            raise key_error(
                f"share {trajectories.share:g} of a batch of {groups} groups is less than half a "
                f"group: raise it, or pipeline.n_batch",
                "data.trajectories.share",
                "pipeline.n_batch",
            )
        if not self.generator.workers and self.generates:
            raise key_error(
                "workers 0: completions are sampled for training (data.trajectories.share below "
                "1) or for evaluations (data.eval, evaluation.also); give at least one, or set "
                "data.eval to null",
                "generator.workers",
                "data.eval",
            )
        groups = self.pipeline.n_async // self.pipeline.group_size
        if groups < self.generator.workers:
            raise key_error(
                f"{self.generator.workers} workers share {groups} groups (pipeline: n_async "
                f"{self.pipeline.n_async} / group_size {self.pipeline.group_size}); raise n_async",
                "generator.workers",
                "pipeline.n_async",
                "pipeline.group_size",
            )
        return self

    @model_validator(mode="after")
    def _workers(self) -> Config:
        minibatch = self.pipeline.minibatch
        ranks = self.trainer.data_ranks
        if minibatch < ranks:
            groups = " groups of" * (ranks < self.trainer.ranks)
            raise key_error(
                f"{ranks}{groups} ranks share a minibatch of {minibatch} completions, so that "
                f"some have nothing to do; change one of them",
                "trainer.ranks",
                "pipeline.n_minibatch",
                "pipeline.n_batch",
            )
        for key, sharded, gpus in (
            ("trainer", self.trainer, self.placement.trainer.gpus),
            ("teacher", self.teacher, self.placement.teacher.gpus),
        ):
            several = sharded and sharded.ranks > 1 and sharded.device.startswith("cuda")
            if several and gpus and gpus < 1:
                raise key_error(
                    f"gpus {gpus:g} lets ranks share a GPU, which NCCL cannot do; give each rank "
                    f"of the {key} 1, or leave it out",
                    f"placement.{key}.gpus",
                    f"{key}.ranks",
                )
        devices = {"generator": self.generator.device, "trainer": self.trainer.device}
        if self.teacher:
            devices["teacher"] = self.teacher.device
        for key, device in devices.items():
            if self.placement.kind == "ray" and device.startswith("cuda:"):
                raise key_error(
                    f"{device}: Ray chooses the GPU of each worker, which sees no other; write "
                    f"cuda",
                    f"{key}.device",
                    "placement.kind",
                )
        unjudged = [n for n, domain in self.verifier.domains.items() if domain.verifier is None]
        if self.conversation.reward != "verifier":
            unjudged = []  # the environment judges
        if self.pipeline.diversity == "correctness" and unjudged:
            raise key_error(
                f"correctness: nothing judges it in domain {unjudged[0]!r}, so that all its groups "
                f"would be dropped; write diversity: rewards, or name a verifier",
                "pipeline.diversity",
                f"verifier.domains.{unjudged[0]}.verifier",
            )
        return self

    @model_validator(mode="after")
    def _efforts(self) -> Config:
        levels = self.data.effort
        also = self.evaluation.also.items()
        chosen = {"data.train_effort": self.data.train_effort}
        chosen |= {"evaluation.effort": self.evaluation.effort}
        chosen |= {f"evaluation.also.{name}.effort": given.effort for name, given in also}
        check_efforts(levels, chosen)
        if self.cold_start:
            check_efforts(levels, self.cold_start.data.efforts("cold_start.data.playground"))
        for name, (l_max, l_cache) in self.lengths_at(levels).items() if levels else ():
            key = f"data.effort.{name}"
            if (own := levels[str(name)].l_max) and own > l_max:
                raise key_error(
                    f"l_max {own:,} is above pipeline.l_max {l_max:,}, the longest of all "
                    f"completions; raise that, or lower this",
                    f"{key}.l_max",
                    "pipeline.l_max",
                )
            if l_cache > l_max:
                raise key_error(
                    f"l_cache {l_cache:,} is above the level's l_max {l_max:,}: the length penalty "
                    f"would start before the first token; lower l_cache",
                    f"{key}.l_cache",
                    f"{key}.l_max",
                )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Config:
        objective, domains = self.trainer.objective, self.verifier.domains
        check_teacher(self.teacher, objective, self.stages, domains)
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Config:
        names = [stage.name for stage in self.stages]
        first_update = 0
        for number, stage in enumerate(self.stages):
            path = f"stages.{number}"
            if names.count(stage.name) > 1:
                raise key_error(f"two stages are named {stage.name!r}; rename one", f"{path}.name")
            objective = self.trainer.objective.name
            if stage.eps_high is not None and objective != "magistral":
                raise key_error(
                    f"objective {objective!r} does not read it; leave it out", f"{path}.eps_high"
                )
            is_last = number == len(names) - 1
            if is_last and stage.until is not None:
                raise key_error(
                    "leave it out: the last stage lasts until pipeline.updates", f"{path}.until"
                )
            if not is_last and stage.until is None:
                raise key_error(f"not given; say when stage {stage.name!r} ends", f"{path}.until")
            if first_update >= self.pipeline.updates:
                raise key_error(
                    f"stage {stage.name!r} would never begin: the stages before it take "
                    f"{first_update} updates, and pipeline.updates is {self.pipeline.updates}; "
                    f"raise pipeline.updates",
                    path,
                    "pipeline.updates",
                )
            first_update += (stage.until.updates or 0) if stage.until else 0
            try:
                at = self._in_stage(stage)
            except ValidationError as error:
                raise stage.located(error, path) from None
            if stage.until and stage.until.updates is None and not at.sampled_groups:
                raise key_error(
                    "all completions are recorded trajectories (data.trajectories.share), so "
                    "that it would never be reached; end the stage after a number of `updates`",
                    f"{path}.until",
                    "data.trajectories.share",
                )
        return self

    def resolved_arithmetic(self) -> dict[str, str]:
        """Sizes that follow from the config, as text; printed at the start of a run."""
        p = self.pipeline
        return {
            "prompts a batch": f"{p.groups_per_batch} × {p.group_size} completions",
            "optimizer steps an update": f"{p.n_batch // p.minibatch}",
            "policies a sequence spans": f"about {p.n_async / p.n_batch:.1f} (n_async / n_batch)",
            "in flight at most": f"{p.in_flight} completions"
            + (" (by max_staleness)" if p.n_async > p.in_flight else ""),
            "staleness at most": f"{p.max_staleness} versions"
            + (" (synchronous)" if p.max_staleness == 0 else ""),
        }


def load_config(path: str | Path, overrides: Sequence[str] | None = None) -> Config:
    """Read the config of a training run; see `load_section`."""
    return load_section(Config, path, overrides)
