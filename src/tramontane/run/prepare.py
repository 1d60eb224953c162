"""Preparation of a run: loads and checks its input before any work, and computes its sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice

import torch

from tramontane.config import HELD_OUT, Config, Until
from tramontane.config.device import dtype_warnings, idle_gpus, multiplies_int8, number_types
from tramontane.controller.images import check_images
from tramontane.data.curriculum import Curriculum
from tramontane.data.lengths import PromptFilter, PromptLimit
from tramontane.data.prompts import PromptEncoder
from tramontane.data.stream import ProblemStream
from tramontane.environments.loading import checked_tools
from tramontane.errors import InputError
from tramontane.evaluation.calibration import calibrate, calibration_warnings
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.generator.lanes import CacheSize
from tramontane.generator.vllm import environment
from tramontane.models import int8, loading
from tramontane.models.shape import load_shape
from tramontane.placement.seats import rank_device, seats
from tramontane.planning.fit import RunMemory, generator_limits, run_memory
from tramontane.planning.memory import Lengths, cache_size
from tramontane.run import cold_start, teachers
from tramontane.run.forewarnings import forewarnings, rendered_twice
from tramontane.run.input import EvaluationSet, RunInput, read_input
from tramontane.run.trajectories import Trajectories, load_trajectories
from tramontane.trainer import forwards, lora
from tramontane.trainer.context import check_sharing
from tramontane.trainer.objectives import load_objective
from tramontane.trainer.optimizer import chosen_rate
from tramontane.types import Problem
from tramontane.verifier.pool import try_functions

PROBE_PROMPTS, PROBE_TOKENS = 8, 32
MIN_PROMPT = 32  # approximate tokens of a prompt, for combining prompts into a long probe
SAMPLE = 256  # problems of an endless source whose prompts are measured
MEMORY_TOLERANCE = 0.15  # relative error of the memory table
ENDLESS_PROMPT = 256  # lower bound of the prompt limit of an endless source, in tokens


@dataclass
class Prepared:
    """A config whose input has been loaded and checked.

    Args:
        config: the run's config, with thinking tags and learning rates filled in.
        prompts: makes the prompts, and detects those that are too long.
        stages: the config of each stage; a run without stages has one.
        problems: the training problems.
        sets: problems that the run is measured on, by name; `held_out` for `data.eval`.
        probes: prompts for the parity check, as token ids.
        long_probe: a prompt for the parity check that leaves `PROBE_TOKENS` tokens of the run's
            longest sequence.
        rates: the learning rates and the reasons for them, as text by name.
        trajectories: recorded completions, if the run is trained on any.
        warnings: warnings for the user before the run starts.
    """

    config: Config
    prompts: PromptFilter
    stages: tuple[Config, ...]
    problems: Curriculum
    sets: dict[str, EvaluationSet]
    probes: list[list[int]]
    long_probe: list[int]
    rates: dict[str, str]
    trajectories: Trajectories | None
    warnings: list[str]

    @property
    def encoder(self) -> PromptEncoder:
        """Makes the prompts; its tokenizer is the base model's."""
        return self.prompts.encoder

    @property
    def max_prompt(self) -> int:
        """Upper bound of all prompts, in tokens."""
        return self.prompts.longest

    @property
    def sample(self) -> list[Problem]:
        """All problems; of an endless source, the first ones."""
        streams = self.problems.streams
        trained = [p for s in streams for p in s.problems or _peek(s, PROBE_PROMPTS)]
        return trained + [p for s in self.sets.values() for p in s.problems]

    @property
    def evaluated_l_max(self) -> int:
        """Longest completion of evaluations during training, in tokens; 0 if there are none."""
        if not self.config.evaluation.every or HELD_OUT not in self.sets:
            return 0
        return self.sets[HELD_OUT].sampling.max_tokens

    def lengths(self, stage: Config) -> Lengths:
        """The lengths of a stage, with those of its evaluations."""
        return Lengths(self.max_prompt, max(stage.pipeline.l_max, self.evaluated_l_max))


def prepare(config: Config, given: RunInput | None = None) -> Prepared:
    """Load and check all input, before any work is done.

    Args:
        config: the run's config.
        given: the result of `read_input` for it; None: read here.

    Raises:
        InputError: the model, the data or the sizes are invalid.
    """
    given = given or read_input(config)
    _check_machine(config)
    encoder = encoder_of(config)
    verifier = config.verifier.model_copy(update={"thinking_tags": encoder.tags})
    data = config.data
    if "strftime_now" in str(encoder.tokenizer.chat_template):  # one date for the whole run
        data = data.model_copy(update={"date": encoder.date})
    config, rates = _with_rates(config.model_copy(update={"verifier": verifier, "data": data}))
    if config.cold_start:
        cold_start.check(config, encoder)
    teachers.check(config, encoder.tokenizer)
    streams = given.problems.streams
    read = [*chain(*(s.problems or _peek(s, SAMPLE) for s in streams))]
    read += [problem for each in given.sets.values() for problem in each.problems]
    check_images(config, encoder, read, forwards.compilation(config.trainer).enabled)
    stages, problems = config.by_stage(), given.problems
    lengths = [stage.pipeline.l_max for stage in stages]
    lengths += [s.sampling.max_tokens for s in given.sets.values()]
    context = loading.context_length(loading.load_config(config.model))
    tools = checked_tools(config, encoder)
    limit = PromptLimit.of(config.data.max_prompt_tokens, context, max(lengths), tools)
    limit = teachers.limit_prompts(config, limit, tools)
    prompts = PromptFilter(encoder, limit, drop=config.data.overlong_prompts == "drop")
    sets = {k: replace(s, problems=prompts.keep(s.problems)) for k, s in given.sets.items()}
    for stream in problems.streams:
        _limit_prompts(stream, prompts, config)
    trajectories = None
    if config.data.trajectories:
        known = {problem.id: problem for s in problems.streams for problem in s.problems or ()}
        trajectories = load_trajectories(config, encoder, context, known)
    longest = prompts.longest + max(stage.pipeline.l_max for stage in stages)
    long_prompt = max(1, longest - PROBE_TOKENS)
    probes = _first_prompts(problems, encoder, PROBE_PROMPTS)
    many = _first_prompts(problems, encoder, 1 + long_prompt // MIN_PROMPT)
    prepared = Prepared(
        config=config,
        prompts=prompts,
        stages=stages,
        problems=problems,
        sets=sets,
        probes=probes,
        long_probe=list(islice(cycle(chain.from_iterable(many)), long_prompt)),
        rates=rates,
        trajectories=trajectories,
        warnings=[
            *given.warnings,
            *forewarnings(config, problems, {k: s.problems for k, s in sets.items()}),
            *rendered_twice(problems, encoder),
            *dtype_warnings(config),
            *calibration_warnings(config.verifier),
        ],
    )
    _limit_generators(prepared)
    _check_memory(prepared)
    return prepared


def _limit_generators(prepared: Prepared) -> None:
    shape = load_shape(prepared.config.model)
    lengths = [prepared.lengths(stage) for stage in prepared.stages]
    if limits := generator_limits(prepared.stages, shape, lengths):
        generator = prepared.config.generator.model_copy(update=limits)
        prepared.config = prepared.config.model_copy(update={"generator": generator})
        prepared.stages = prepared.config.by_stage()


def _with_rates(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with its learning rates filled in, and their values and reasons by name."""
    rate, reason = chosen_rate(config.trainer, config.model)
    update: dict[str, object] = {
        "trainer": config.trainer.model_copy(update={"learning_rate": rate})
    }
    reasons = {"learning rate": reason}
    if start := config.cold_start:
        rate, reasons["learning rate of the cold start"] = chosen_rate(start.trainer, config.model)
        update["cold_start"] = start.model_copy(update={"learning_rate": rate})
    return config.model_copy(update=update), reasons


def _limit_prompts(stream: ProblemStream, prompts: PromptFilter, config: Config) -> None:
    """Refuse or drop the problems of a stream whose prompts are too long."""
    if stream.problems is not None:
        kept = prompts.keep(stream.problems)
        if len(kept) < len(stream.problems):
            limit = f"prompts above {prompts.limit.tokens:,} tokens (data.max_prompt_tokens)"
            stream.keep(kept, limit)
        return
    configured = config.data.max_prompt_tokens
    prompts.bound_endless(_peek(stream, SAMPLE), configured or ENDLESS_PROMPT)
    stream.accepts = prompts.accepts


def _check_machine(config: Config) -> None:
    """Reject devices, libraries and weights that this machine lacks."""
    if config.placement.kind != "ray":  # on a cluster, workers run on other machines
        loading.check_device(config.generator.device, "generator.device")
        if config.generator.kind == "vllm":
            python = environment.find(config.generator.vllm.python)
            environment.check_device(python, config.generator.device)
        for key, sharded in (("trainer", config.trainer), ("teacher", config.teacher)):
            if sharded:
                loading.check_device(sharded.device, f"{key}.device")
                last = rank_device(sharded.device, sharded.ranks - 1)
                loading.check_device(last, f"{key}.ranks")
        seats(config, torch.cuda.device_count())
    load_objective(config.trainer.objective)
    forwards.compilation(config.trainer)
    for model in (config.model, *config.teachers):
        loading.check_files(model)
    shape = load_shape(config.model)
    check_sharing(config.trainer.context_parallel, shape)
    if config.trainer.lora:
        lora.check(config.trainer.lora, shape.linear_layers)


def _first_prompts(problems: Curriculum, encoder: PromptEncoder, count: int) -> list[list[int]]:
    problems_of_all = (p for s in problems.streams for p in (s.problems or _peek(s, count))[:count])
    encoder = next(iter(encoder.levels.values()), encoder)
    return encoder.encode_all([problem.prompt for problem in islice(problems_of_all, count)])


def _peek(stream: ProblemStream, count: int) -> list[Problem]:
    """The first problems of a stream, which remain in the stream."""
    position = stream.state()
    first = [stream.next() for _ in range(count)]
    stream.load_state(position)
    return first


@dataclass(frozen=True)
class DryRunResult:
    """The sizes of a run that was checked but not started.

    Args:
        config: with every default filled in.
        lines: the sizes as text by name, as `tramontane train --dry-run` prints them.
        longest_prompt: tokens.
        kv_cache_bytes: maximum memory of all generators' keys and values in any stage.
        held_out: number of problems of `data.eval` used for evaluation.
        memory: the memory of each worker, and an error where a device is too small.
        header: what the run trains, on what and for which reward, as text by name; empty without
            model and data.
    """

    config: Config
    lines: dict[str, str]
    longest_prompt: int
    kv_cache_bytes: int
    held_out: int
    memory: RunMemory
    header: dict[str, str] = field(default_factory=dict)


def sizes(prepared: Prepared, gpu: str | None = None) -> DryRunResult:
    """The sizes of a prepared run, on this machine's GPUs or assumed ones (`run_memory`).

    Raises:
        InputError: a user-defined verifier or reward fails, or the judge its calibration.
    """
    verifier = prepared.config.verifier
    try_functions(verifier, prepared.sample)
    lines = resolved(prepared)
    if verifier.judge and verifier.judge.calibration:
        lines["judge"] = str(calibrate(verifier))
    if prepared.warnings:
        lines["warning"] = "; ".join(prepared.warnings)
    return DryRunResult(
        config=prepared.config,
        lines=lines,
        longest_prompt=prepared.max_prompt,
        kv_cache_bytes=max(_cache_bytes(prepared, stage) for stage in prepared.stages),
        held_out=len(prepared.sets[HELD_OUT].problems) if HELD_OUT in prepared.sets else 0,
        memory=_memory(prepared, gpu),
    )


def check_devices(prepared: Prepared) -> None:
    """Reject a run that exceeds the memory of this machine's devices by more than the estimate's
    error.

    Raises:
        InputError: too little memory; the message names the keys to change.
    """
    if refusals := _memory(prepared, tolerance=MEMORY_TOLERANCE).refusals:
        raise InputError("\n".join(refusals))


def _memory(prepared: Prepared, gpu: str | None = None, tolerance: float = 0.0) -> RunMemory:
    shape = load_shape(prepared.config.model)
    lengths = [prepared.lengths(stage) for stage in prepared.stages]
    return run_memory(prepared.stages, shape, lengths, gpu, tolerance)


def sizes_of_shape(config: Config, model: str, gpu: str | None = None) -> DryRunResult:
    """The sizes of a run without its model and data: prompts are assumed to have the maximum
    length.

    Args:
        config: the run's config; its model and data are not read.
        model: as in `load_shape`.
        gpu: as in `run_memory`.

    Raises:
        InputError: no such model or GPU, lengths that exceed the model's context, or a model that
            ranks cannot share as the config says.
    """
    shape, stages = load_shape(model), config.by_stage()
    check_sharing(config.trainer.context_parallel, shape)
    longest = max(stage.pipeline.l_max for stage in stages)
    prompt = PromptLimit.of(config.data.max_prompt_tokens, shape.context, longest).tokens
    lengths = [Lengths(prompt, stage.pipeline.l_max) for stage in stages]
    limits = generator_limits(stages, shape, lengths, gpu)
    config = config.model_copy(update={"generator": config.generator.model_copy(update=limits)})
    stages = config.by_stage()
    memory = run_memory(stages, shape, lengths, gpu)
    caches = [w.number * w.memory.cache for load in memory.loads for w in load.workers]
    return DryRunResult(
        config=config,
        lines={
            "model": f"{shape.name}, {shape.parameters / 1e9:.2f} billion parameters",
            "longest prompt": f"{prompt:,} tokens (data.max_prompt_tokens)",
            "longest completion": f"{longest:,} tokens",
            **config.resolved_arithmetic(),
            "learning rate": chosen_rate(config.trainer, model)[1],
        },
        longest_prompt=prompt,
        kv_cache_bytes=int(max(caches)),
        held_out=0,
        memory=memory,
    )


def resolved(prepared: Prepared) -> dict[str, str]:
    """The config's arithmetic and the memory of the generators' caches, by stage."""
    config, workers = prepared.config, prepared.config.generator.workers
    compiled = forwards.compilation(config.trainer)
    arithmetic = {
        "devices": devices_line(config),
        **config.resolved_arithmetic(),
        "number type": _number_types_line(config),
        **_eight_bits_line(config),
        "compile": f"{'on' if compiled.enabled else 'off'} (auto: {compiled.reason})",
    }
    if not config.stages:
        on_gpu = config.generator.device.startswith("cuda")
        full = "all sequences at their longest" if on_gpu else "lanes of all lengths, each full"
        return arithmetic | {
            "generators": f"{workers} × {_cache_size(prepared, config).slots} slots",
            **prepared.rates,
            **_prompt_lines(prepared),
            "longest sequence": f"{prepared.max_prompt} + {config.pipeline.l_max} tokens",
            "KV cache": f"{_cache_line(prepared, config)} "
            f"({_bytes_per_token(config) / 1024:.1f} KiB a token, {full})",
        }
    lines = {"devices": arithmetic["devices"]} | {
        f"stage {stage.name}": f"{_until(stage.until, config)}; "
        f"l_max {p.l_max:,}, penalty from {p.l_max - p.l_cache:,}; "
        f"n_async {p.n_async:,}, n_batch {p.n_batch:,}, n_minibatch {p.minibatch:,}, "
        f"about {p.n_async / p.n_batch:.1f} policies a sequence; "
        f"KV cache {_cache_line(prepared, at)}"
        for stage, at in zip(config.stages, prepared.stages, strict=True)
        for p in [at.pipeline]
    }
    return lines | {
        "updates": f"{config.pipeline.updates}",
        **{key: arithmetic[key] for key in ("staleness at most", "number type", "compile")},
        "generators": f"{workers}, of "
        f"{', '.join(str(_cache_size(prepared, at).slots) for at in prepared.stages)} slots",
        **prepared.rates,
        **_prompt_lines(prepared),
        "longest prompt": f"{prepared.max_prompt} tokens",
        "KV cache a token": f"{_bytes_per_token(config) / 1024:.1f} KiB",
    }


def devices_line(config: Config) -> str:
    """The devices of all workers, and whether a GPU of this machine is left idle."""
    seated = seats(config, torch.cuda.device_count() or None)
    devices = {"trainer": seated.ranks, "generator": seated.generators, "teacher": seated.teachers}
    lines = [f"{name} on {', '.join(dict.fromkeys(on))}" for name, on in devices.items() if on]
    used = (*seated.of_generators, *chain(*devices.values()))
    on_ray = config.placement.kind == "ray"
    return "; ".join(filter(None, [*lines, "" if on_ray else idle_gpus(*used)]))


def _number_types_line(config: Config) -> str:
    types = number_types(config)
    if len(set(types.values())) == 1:
        return types["trainer"]
    return "; ".join(f"{name} {text}" for name, text in types.items())


def _eight_bits_line(config: Config) -> dict[str, str]:
    """How much faster `generator.weights: int8` would be on this processor; empty if it cannot be
    chosen, or if the generator computes in bfloat16."""
    generator, shape = config.generator, load_shape(config.model)
    layers = [x for x in shape.linear_layers if x.eight_bits and not x.head]
    layers = [x for x in layers if int8.layer_bytes(x.inputs, x.outputs)]
    embedded = generator.kind == "slots" and generator.device == "cpu" and not shape.stateful
    if not layers or not embedded or (generator.weights, generator.dtype) != ("full", "float32"):
        return {}
    if not (multiplies_int8() and int8.is_exact()):
        return {}
    largest = max(layers, key=lambda x: x.inputs * x.outputs)
    faster = int8.speedup(largest.inputs, largest.outputs)
    return {"int8": f"off; the largest layers {faster:.1f} times as fast (docs/off-policy.md)"}


def _prompt_lines(prepared: Prepared) -> dict[str, str]:
    """The thinking tags, the start of every response, and the problems dropped."""
    (opening, closing), prefix, others = prepared.encoder.response
    if others:
        begins = f", responses begin with {' or '.join(map(repr, (prefix, *others)))} by effort"
    else:
        begins = f", every response begins with {prefix!r}" if prefix else ""
    lines = {"thinking tags": f"{opening} … {closing}{begins}"}
    if shares := prepared.config.data.effort_shares:
        whole, lengths = sum(shares.values()), prepared.config.lengths_at(shares)
        lines["effort"] = ", ".join(
            f"{name} ({share / whole:.0%} of groups, l_max {lengths[name][0]:,})"
            for name, share in shares.items()
        )
    if pictured := [problem for problem in prepared.sample if problem.images]:
        first = pictured[0].images[0]
        lines["images"] = f"the first takes {prepared.encoder.tokens_of_image(first):,} tokens"
    if dropped := prepared.prompts.dropped:
        limit = prepared.prompts.limit.tokens
        lines["problems dropped"] = f"{dropped:,}, with prompts above {limit:,} tokens"
    if prepared.trajectories:
        lines |= prepared.trajectories.lines
    return lines


def _until(until: Until | None, config: Config) -> str:
    if until is None:
        return f"to update {config.pipeline.updates}"
    if until.updates is not None:
        return f"{until.updates} update{'s' * (until.updates != 1)}"
    name, share = ("solved", until.solved) if until.solved else ("at ceiling", until.at_ceiling)
    return f"until {name} ≥ {share:g} over {until.window} updates"


def _bytes_per_token(config: Config) -> int:
    return load_shape(config.model).kv_bytes_per_token(config.generator.dtype)


def _cache_size(prepared: Prepared, stage: Config) -> CacheSize:
    """Slots of each generator in a stage, and the maximum number of positions in its cache."""
    return cache_size(stage, _bytes_per_token(stage), prepared.lengths(stage).longest)


def _cache_bytes(prepared: Prepared, stage: Config) -> int:
    """Maximum bytes of all generators' keys and values in a stage."""
    positions = _cache_size(prepared, stage).positions
    return _bytes_per_token(stage) * positions * stage.generator.workers


def _cache_line(prepared: Prepared, stage: Config) -> str:
    """`_cache_bytes` as text; on a GPU, less memory may be free."""
    config = stage.generator
    bound = ""
    if config.device.startswith("cuda") and config.kv_cache_mib is None:
        bound = f", or {config.gpu_memory_utilization:g} of the GPU less the weights"
    return f"{_cache_bytes(prepared, stage) / 2**20:,.0f} MiB at most{bound}"


def _check_memory(prepared: Prepared) -> None:
    budget = prepared.config.generator.kv_cache_mib
    for number, stage in enumerate(prepared.stages):
        if _cache_size(prepared, stage).slots:
            continue
        where = f"stages.{number}" if prepared.config.stages else "pipeline"
        workers = f" for {stage.generator.workers} generators" * (stage.generator.workers > 1)
        longest = prepared.lengths(stage).longest
        raise InputError(
            f"{where}: generator.kv_cache_mib {budget or 0:,}{workers} does not hold the keys and "
            f"values of one sequence of {longest:,} tokens; raise it, or lower "
            f"{where}.l_max ({stage.pipeline.l_max:,})"
        )
