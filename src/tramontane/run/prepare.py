"""Preparation of a run: its input is loaded and checked before any work, and its sizes computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from tramontane.config import (
    HELD_OUT,
    Config,
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    Until,
)
from tramontane.controller.generators import slots
from tramontane.data.curriculum import Curriculum
from tramontane.data.load import load_problems
from tramontane.data.prompts import check_prompt_length, encode_prompt
from tramontane.errors import InputError
from tramontane.evaluation import SamplingPlan
from tramontane.generator.cache import max_positions
from tramontane.models import loading
from tramontane.placement.place import check
from tramontane.run import cold_start
from tramontane.trainer import compiling
from tramontane.types import Problem, SamplingParams
from tramontane.verifier import correctness

PROBE_PROMPTS = 8
SAMPLE = 256  # problems of an endless source whose prompts are measured
ENDLESS_PROMPT = 256  # lower bound of the prompt limit of an endless source, in tokens


@dataclass(frozen=True)
class EvaluationSet:
    """Problems that a run is measured on, and how they are asked."""

    problems: list[Problem]
    plan: SamplingPlan


@dataclass
class Prepared:
    """A config whose input has been loaded and checked.

    Args:
        config: the run's config.
        tokenizer: tokenizer of the base model.
        stages: the config of each stage; a run without stages has one.
        problems: the training problems.
        sets: problems that the run is measured on, by name; `held_out` are those of `data.eval`.
        max_prompt: tokens of the longest prompt.
        probes: prompts for the parity check, as token ids.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    stages: tuple[Config, ...]
    problems: Curriculum
    sets: dict[str, EvaluationSet]
    max_prompt: int
    probes: list[list[int]]

    def encode(self, problem: Problem) -> list[int]:
        return encode_prompt(self.tokenizer, problem.problem, self.config.data.system_prompt)


def prepare(config: Config) -> Prepared:
    """Load and check all input, before any work is done.

    Raises:
        InputError: the model, the data or the sizes are wrong.
    """
    _check_machine(config)
    if config.cold_start:
        cold_start.check(config)
    data, stages = config.data, config.by_stage()
    tokenizer = loading.load_tokenizer(config.model)
    problems, sets = Curriculum(stages), _evaluation_sets(config, stages[-1].pipeline.l_max)
    train = _first_problems(problems)
    l_max, key = max(
        (stage.pipeline.l_max, f"stages.{number}.l_max" if config.stages else "pipeline.l_max")
        for number, stage in enumerate(stages)
    )
    context = loading.context_length(loading.load_config(config.model))
    longest = check_prompt_length(
        tokenizer,
        [*train, *(problem for s in sets.values() for problem in s.problems)],
        system_prompt=data.system_prompt,
        limit=data.max_prompt_tokens,
        context=context,
        max_tokens=max([l_max, *(s.plan.sampling.max_tokens for s in sets.values())]),
    )
    if data.max_prompt_tokens is not None:
        longest = data.max_prompt_tokens
    elif any(stream.problems is None for stream in problems.streams):
        longest = max(ENDLESS_PROMPT, longest)
    if context is not None and longest + l_max > context:
        raise InputError(
            f"prompts of up to {longest} tokens and completions of {l_max} "
            f"({key}) exceed the context of {config.model!r}, {context} tokens; lower "
            f"{key} or data.max_prompt_tokens"
        )
    probes = [
        encode_prompt(tokenizer, p.problem, data.system_prompt) for p in train[:PROBE_PROMPTS]
    ]
    prepared = Prepared(config, tokenizer, stages, problems, sets, longest, probes)
    _check_memory(prepared)
    return prepared


def _check_machine(config: Config) -> None:
    """Refuse devices and libraries that this machine lacks."""
    check(config)
    if config.placement.kind == "thread":  # on a cluster, workers run on other machines
        loading.check_device(config.generator.device, "generator.device")
        loading.check_device(config.trainer.device, "trainer.device")
    if config.trainer.compile:
        compiling.check(config.trainer.device)
    correctness.check(config.verifier)


def _evaluation_sets(config: Config, l_max: int) -> dict[str, EvaluationSet]:
    """The problems of `data.eval` and of `evaluation.also`.

    Completions have the length of the last stage, `l_max`: all measurements must be comparable.
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
            seed=config.seed,
            domains=config.verifier.domains,
        )
        length = getattr(settings, "max_tokens", None) or l_max
        sampling = SamplingParams(length, settings.temperature, settings.top_p)
        plan = SamplingPlan(settings.samples, sampling, config.seed, data.system_prompt)
        sets[name] = EvaluationSet(problems, plan)

    if data.eval is not None:
        add(HELD_OUT, data.eval, data, evaluation)
    for name, also in evaluation.also.items():
        add(name, also.source, DataConfig(fields=also.fields, eval_split=also.split), also)
    return sets


def _first_problems(problems: Curriculum) -> list[Problem]:
    """All problems of the finite sources, and the first SAMPLE of each endless one."""
    position = problems.state()
    found = [
        problem
        for stream in problems.streams
        for problem in stream.problems or [stream.next() for _ in range(SAMPLE)]
    ]
    problems.load_state(position)
    return found


@dataclass(frozen=True)
class DryRunResult:
    """The sizes of a run that was checked and not started.

    Args:
        config: with every default filled in.
        lines: the sizes as text by name, as `tramontane train --dry-run` prints them.
        longest_prompt: tokens.
        kv_cache_bytes: the most that keys and values of all generators take in any stage.
        held_out: number of problems of `data.eval` that the run is measured on.
    """

    config: Config
    lines: dict[str, str]
    longest_prompt: int
    kv_cache_bytes: int
    held_out: int


def sizes(prepared: Prepared) -> DryRunResult:
    """The sizes of a prepared run."""
    return DryRunResult(
        config=prepared.config,
        lines=resolved(prepared),
        longest_prompt=prepared.max_prompt,
        kv_cache_bytes=max(_cache_bytes(prepared, stage) for stage in prepared.stages),
        held_out=len(prepared.sets[HELD_OUT].problems) if HELD_OUT in prepared.sets else 0,
    )


def resolved(prepared: Prepared) -> dict[str, str]:
    """The config's arithmetic and the memory that the generators' caches take, by stage."""
    config, workers = prepared.config, prepared.config.generator.workers
    if not config.stages:
        return config.resolved_arithmetic() | {
            "generators": f"{workers} × {slots(config)} slots",
            "longest sequence": f"{prepared.max_prompt} + {config.pipeline.l_max} tokens",
            "KV cache": f"{_cache_bytes(prepared, config) / 2**20:,.0f} MiB at most "
            f"({_bytes_per_token(config) / 1024:.1f} KiB a token)",
        }
    lines = {
        f"stage {stage.name}": f"{_until(stage.until, config)}; "
        f"l_max {p.l_max:,}, penalty from {p.l_max - p.l_cache:,}; "
        f"n_async {p.n_async:,}, n_batch {p.n_batch:,}, n_minibatch {p.minibatch:,}, "
        f"about {p.n_async / p.n_batch:.1f} policies a sequence; "
        f"KV cache {_cache_bytes(prepared, at) / 2**20:,.0f} MiB at most"
        for stage, at in zip(config.stages, prepared.stages, strict=True)
        for p in [at.pipeline]
    }
    return lines | {
        "updates": f"{config.pipeline.updates}",
        "staleness at most": config.resolved_arithmetic()["staleness at most"],
        "generators": f"{workers}, of {', '.join(str(slots(at)) for at in prepared.stages)} slots",
        "longest prompt": f"{prepared.max_prompt} tokens",
        "KV cache a token": f"{_bytes_per_token(config) / 1024:.1f} KiB",
    }


def _until(until: Until | None, config: Config) -> str:
    if until is None:
        return f"to update {config.pipeline.updates}"
    if until.updates is not None:
        return f"{until.updates} updates"
    name, share = ("solved", until.solved) if until.solved else ("at ceiling", until.at_ceiling)
    return f"until {name} ≥ {share:g} over {until.window} updates"


def _bytes_per_token(config: Config) -> int:
    """Bytes of keys and values of one token, over all layers."""
    model = loading.load_config(config.model)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    item = torch.finfo(getattr(torch, config.generator.dtype)).bits // 8
    return int(2 * model.num_hidden_layers * heads * width * item)


def _cache_bytes(prepared: Prepared, stage: Config) -> int:
    """The most that keys and values of all generators' slots take in a stage."""
    config, longest = stage.generator, prepared.max_prompt + stage.pipeline.l_max
    slab = config.cuda_graphs and config.device.startswith("cuda")
    most = slots(stage) * longest if slab else max_positions(slots(stage), longest)
    return _bytes_per_token(stage) * most * stage.generator.workers


def _check_memory(prepared: Prepared) -> None:
    budget = prepared.config.generator.kv_cache_mib
    for number, stage in enumerate(prepared.stages):
        needed = math.ceil(_cache_bytes(prepared, stage) / 2**20)
        if budget is not None and needed > budget:
            where = f"stages.{number}" if prepared.config.stages else "pipeline"
            raise InputError(
                f"{where}: keys and values take up to {needed:,} MiB, above "
                f"generator.kv_cache_mib {budget:,}; lower {where}.n_async (it is "
                f"{stage.pipeline.n_async:,}) or {where}.l_max ({stage.pipeline.l_max:,})"
            )
