"""The plan of a run: the best split of its GPUs between generators and the trainer, by LlamaRL's
theory (arXiv 2505.24034), in whole GPUs and by the simulation; and a config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import yaml

from tramontane.config import Config, parse
from tramontane.errors import InputError
from tramontane.planning.config import PlanConfig
from tramontane.planning.families import check_families
from tramontane.planning.fit import RunMemory, run_memory
from tramontane.planning.gpus import GIB, GPUS
from tramontane.planning.machine import Machine
from tramontane.planning.simulate import Costs, Outcome, lognormal, simulate
from tramontane.trainer.context import check_sharing

UPDATES, SKIPPED = 10, 4  # simulated updates, and how many of the first are skipped
CANDIDATES = 2  # splits to simulate
POLLS = 20  # polls in which a completion of mean length is generated, in the simulation
PENALTY_SHARE = 8  # l_max / l_cache: the length penalty grows over the last eighth


def best_share(train: float, generate: float) -> float:
    """θ*, the trainer's share of the GPUs with which neither side waits for the other.

    Args:
        train: GPU-seconds of a sample in training (η_t m_t).
        generate: GPU-seconds of a sample in generation (η_g m_g).
    """
    return train / (train + generate)


def step_seconds(batch: int, gpus: int, train: float, generate: float) -> float:
    """Seconds that an update takes if no GPU ever waits, with the GPUs divided at the best share
    or doing both kinds of work in turn."""
    return batch / gpus * (train + generate)


@dataclass(frozen=True)
class Split:
    """A split into whole GPUs.

    Args:
        generators: number of generators, of `generator_gpus` GPUs and `slots` sequences each.
        generator_gpus, trainer_gpus: GPUs of one generator, and of the trainer.
        slots: sequences that one generator decodes at once.
        n_async, max_staleness: as in the config's section `pipeline`.
        seconds: time of an update by the formulas.
    """

    generators: int
    generator_gpus: int
    trainer_gpus: int
    slots: int
    n_async: int
    max_staleness: int
    seconds: float

    @property
    def gpus(self) -> int:
        """GPUs that have work, which may not be all if few groups are in flight."""
        return self.trainer_gpus + self.generators * self.generator_gpus


def cheapest(machine: Machine, in_flight: int, reserved: float) -> tuple[int, float, int] | None:
    """The cheapest size of a generator: (GPUs, GPU-seconds of a completion, slots), or None if no
    size fits. `reserved` is as in `Machine.slots`."""
    options = []
    for group in machine.generator_groups(reserved):
        slots = machine.slots(group, reserved)
        live = min(slots, max(1.0, in_flight * group / machine.config.gpus))
        options.append((machine.generate_cost(group, live), group, slots))
    if not options:
        return None
    cost, group, slots = min(options)
    return group, cost, slots


def by_time(split: Split) -> tuple[float, int]:
    """Sort key: the fastest split first, in a tie the one with the fewest GPUs."""
    return split.seconds, split.gpus


def splits_of(machine: Machine) -> Iterator[Split]:
    """All splits into whole GPUs."""
    config, least = machine.config, machine.train_group
    if least is None:
        return
    # What fits some ranks also fits more, since they share the state. Those that share rows need at
    # least one completion together.
    most = min(config.gpus, config.n_batch * machine.sharing + 1)
    for trainer in range(least, most, min(least, config.node)):
        for group in machine.generator_groups():
            generators = (config.gpus - trainer) // group
            if generators and (split := _split(machine, trainer, generators, group)):
                yield split


def _split(machine: Machine, trainer: int, generators: int, group: int) -> Split | None:
    """A split with at most `generators` generators; None if they do not hold a group each."""
    config, slots = machine.config, machine.slots(group)
    # Two batches in flight (the paper's rule), in whole groups, cannot keep more generators busy.
    generators = min(generators, 2 * config.n_batch // config.group_size)
    n_async = min(2 * config.n_batch, generators * slots)
    n_async -= n_async % config.group_size
    if n_async < generators * config.group_size:
        return None
    live = n_async / generators
    cost = machine.generate_cost(group, live)
    generating = config.n_batch * cost / (generators * group)
    # Completions, and the prompt of each group once.
    tokens = config.n_batch * (config.length_mean + config.prompt_mean / config.group_size)
    seconds = max(generating, machine.train_seconds(tokens, trainer))
    # A bound with which no update waits for the longest completion: the number of updates during
    # its generation, and one more for the queued batch.
    step = float(machine.decode(group, np.array(live), np.array(live * machine.cached)))
    return Split(
        generators=generators,
        generator_gpus=group,
        trainer_gpus=trainer,
        slots=slots,
        n_async=n_async,
        max_staleness=math.ceil(config.length_max * step / seconds) + 1,
        seconds=seconds,
    )


@dataclass(frozen=True)
class Side:
    """One way to use the GPUs.

    Args:
        generate: GPU-seconds of a completion in generation.
        split: in whole GPUs.
        simulated: outcome of the simulation of the split.
    """

    generate: float
    split: Split
    simulated: Outcome


@dataclass(frozen=True)
class Plan:
    """The best split of the GPUs, and, for comparison, all GPUs alternating between both kinds of
    work.

    Args:
        machine: the assumptions.
        apart: separate GPUs for generators and trainer: asynchronous.
        together: all GPUs in turn: synchronous; None if generators do not fit next to the trainer's
            state.
        memory: the memory of the run with separate GPUs, which it fits.
    """

    machine: Machine
    apart: Side
    together: Side | None
    memory: RunMemory

    @property
    def settings(self) -> dict[str, Any]:
        """The config of a run with separate GPUs; the user adds model and data."""
        return settings_of(self.machine, self.apart.split)

    @property
    def config_file(self) -> str:
        """The config as YAML, with the command that checks it."""
        plan, machine, used = self.machine.config, self.machine, self.apart.split.gpus
        gpu = f" --gpu {option}" if (option := _gpu_option(machine)) else ""
        text = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)
        return (
            f"# {plan.model} on {used} {machine.gpu.name} {machine.unit}s\n"
            f"# Set model and data.train. Memory, without them:\n"
            f"# tramontane train FILE --dry-run --model-shape {plan.model}{gpu}\n{text}"
        )

    @property
    def assumptions(self) -> dict[str, str]:
        """All assumptions of the plan, by the names for overriding them."""
        config, gpu = self.machine.config, self.machine.gpu
        sheet = f"({gpu.memory / GIB:.4g} GiB, {gpu.bandwidth / 1e12:.3g} TB/s, "
        sheet += f"{gpu.flops / 1e12:.3g} TFLOP/s in {gpu.dtype})"
        texts = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in config}
        return texts | {"gpu": f"{config.gpu} {sheet}"}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Rows of a table: (name, value with separate GPUs, value together)."""
        unit, train = self.machine.unit, self.machine.train_cost
        share = best_share(train, self.apart.generate)
        yield f"{unit}-seconds a completion, training", f"{train:.2f}", f"{train:.2f}"
        config = self.machine.config
        longest = self.machine.sequence_seconds(config.prompt_mean + config.length_max)
        yield "seconds of the longest sequence, training", f"{longest:.2f}", f"{longest:.2f}"
        best = f"{share:.2f} ({share * config.gpus:.0f} {unit}s)"
        yield "trainer's share θ, by the formula", best, ""
        apart, together = self._cells(self.apart), self._cells(self.together)
        for name, value in apart.items():
            yield name, value, together.get(name, "does not fit")

    def _cells(self, side: Side | None) -> dict[str, str]:
        if side is None:
            return {}
        machine, config = self.machine, self.machine.config
        unit, split, found = machine.unit, side.split, side.simulated
        # With GPUs divided without limit.
        seconds = step_seconds(config.n_batch, config.gpus, machine.train_cost, side.generate)
        return {
            f"{unit}-seconds a completion, generation": f"{side.generate:.2f}",
            "seconds an update, by the formula": f"{seconds:,.0f}",
            "trainer": f"{split.trainer_gpus} {unit}s",
            "generators": f"{split.generators} × {split.generator_gpus} {unit}s",
            "engine": machine.engines[split.generator_gpus].kind,
            "n_async": f"{split.n_async:,} ({split.slots} slots each)",
            "max_staleness": str(split.max_staleness),
            "seconds an update, simulated": f"{found.seconds_per_update:,.0f}",
            "trained tokens/s, simulated": f"{found.tokens_per_second:,.0f}",
            "generators idle": f"{found.generator_idle:.0%}",
            "trainer idle": f"{found.trainer_idle:.0%}",
            "slots in use": f"{found.utilization:.0%}",
            "staleness": f"{found.staleness_mean:.1f} (at most {found.staleness_max})",
        }


def plan(settings: PlanConfig | Mapping[str, Any]) -> Plan:
    """Find the best split of GPUs between generators and trainers.

    Args:
        settings: a `PlanConfig`, or its keys; `model` and `gpus` are needed.

    Raises:
        InputError: too few GPUs for the model, an unknown model, GPU or key, or a model that cannot
            be trained or sampled here.
    """
    config = settings
    if not isinstance(config, PlanConfig):
        if not isinstance(config, Mapping):
            kind = type(config).__name__
            raise InputError(f'plan of type {kind}: give its keys, e.g. {{"model": …, "gpus": 8}}')
        config = parse(PlanConfig, {**config}, "plan")
    machine = Machine(config)
    check_sharing(machine.sharing, machine.shape)
    splits = list(islice(_fitting(machine), CANDIDATES))
    found = cheapest(machine, 2 * config.n_batch, 0.0)
    if not splits or found is None:
        raise InputError(_does_not_fit(machine))
    _, generate, _ = found
    # The formulas ignore length tails, weight transfers and the rounding to whole groups.
    sides = [Side(generate, split, _simulate(machine, split)) for split in splits]
    apart = min(sides, key=lambda side: side.simulated.seconds_per_update)
    check_families(_config_of(machine, apart.split), config.model)
    return Plan(machine, apart, _together(machine), _memory_of(machine, apart.split))


def settings_of(machine: Machine, split: Split) -> dict[str, Any]:
    """The keys of a run with a split, in the form of a config file, without model and data."""
    plan, engine = machine.config, machine.engines[split.generator_gpus]
    placement: dict[str, Any] = {"kind": "ray" if machine.on_gpu else "thread"}
    if split.generator_gpus > 1:
        placement |= {"generator": {"gpus": split.generator_gpus}}
    return {
        "model": None,
        "data": {"train": None, "eval": None, "max_prompt_tokens": plan.prompt_max},
        "pipeline": {
            "group_size": plan.group_size,
            "n_batch": plan.n_batch,
            "n_async": split.n_async,
            "max_staleness": split.max_staleness,
            "l_max": plan.length_max,
            "l_cache": plan.length_max // PENALTY_SHARE,
        },
        "generator": engine.keys | {"workers": split.generators, "slots": split.slots},
        "trainer": machine.trainer_keys(split.trainer_gpus),
        "placement": placement,
    }


def _config_of(machine: Machine, split: Split) -> Config:
    """The config of a run with a split, with names in place of the model and data."""
    settings = settings_of(machine, split)
    settings |= {"model": "tiny", "data": settings["data"] | {"train": "playground:"}}
    return Config.model_validate(settings)


def _memory_of(machine: Machine, split: Split) -> RunMemory:
    """The memory of a run with a split, as `train --dry-run` computes it, on the plan's GPUs or on
    this machine."""
    config = _config_of(machine, split)
    return run_memory([config], machine.shape, [machine.lengths], _gpu_option(machine))


def _gpu_option(machine: Machine) -> str | None:
    """The option `--gpu` of `train --dry-run` for the plan's GPUs: a name, or a size in GiB."""
    if not machine.on_gpu:
        return None
    name, memory = machine.gpu.name, machine.gpu.memory
    return name if name in GPUS else f"{memory / GIB:.4f}"


def _together(machine: Machine) -> Side | None:
    """All GPUs generate and then train; None if the model does not fit. This is an ideal: work is
    perfectly divisible, no longest completion delays it, and switching is free."""
    config = machine.config
    found = cheapest(machine, config.n_batch, machine.shared)
    if found is None:
        return None
    group, cost, slots = found
    generators = config.gpus // group
    n_async = min(config.n_batch, generators * slots)
    n_async -= n_async % config.group_size
    split = Split(
        # With few groups in a batch, some generators would have no work.
        generators=min(generators, n_async // config.group_size),
        generator_gpus=group,
        trainer_gpus=config.gpus,
        slots=slots,
        n_async=n_async,
        max_staleness=0,
        seconds=step_seconds(config.n_batch, config.gpus, machine.train_cost, cost),
    )
    return Side(cost, split, _simulate(machine, split))


def _fitting(machine: Machine) -> Iterator[Split]:
    """Splits that pass the memory check of `train --dry-run`, the fastest by the formulas first."""
    for split in sorted(splits_of(machine), key=by_time):
        if not _memory_of(machine, split).refusals:
            yield split


def _does_not_fit(machine: Machine) -> str:
    config, ranks, node = machine.config, machine.train_group, machine.config.node
    text = f"{config.model} does not fit {config.gpus} {machine.gpu.name} {machine.unit}s: "
    if ranks is None:
        text += "no number of them holds a trainer with this microbatch"
    elif not machine.generator_groups():
        text += f"no generator of {config.group_size} sequences fits a node of {node}"
    else:
        text += f"the trainer takes {ranks} of them, and no generator fits the rest"
    return f"{text}; give more {machine.unit}s, more memory, or a lower length_max"


def _simulate(machine: Machine, split: Split) -> Outcome:
    plan = machine.config
    group = split.generator_gpus
    steps = max(1, plan.length_mean // POLLS)
    config = Config.model_validate(
        {
            "pipeline": {
                "updates": 10 * UPDATES,  # so that the end of the run has no effect
                "n_async": split.n_async,
                "n_batch": plan.n_batch,
                "group_size": plan.group_size,
                "max_staleness": split.max_staleness,
                "l_max": plan.length_max,
                "l_cache": 0,
            },
            "generator": {
                "workers": split.generators,
                "slots": split.slots,
                "steps_per_call": steps,
            },
            "data": {"train": "playground:"},
        }
    )
    costs = Costs(
        lambda live, cached: machine.decode(group, live, cached),
        lambda tokens: machine.prefill_seconds(tokens, group),
        lambda lengths, prompts: machine.train_seconds(sum(lengths) + prompts, split.trainer_gpus),
        fetch=machine.fetch_seconds(group),
        swap=machine.swap_seconds(group),
    )
    lengths = lognormal(plan.length_mean, plan.length_max, plan.sigma)
    return simulate(config, costs, lengths, plan.prompt_mean, SKIPPED, UPDATES)
