"""Splits of GPUs between generators and the trainer: by LlamaRL's theory (arXiv 2505.24034), then
in whole GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tramontane.planning.machine import Machine


def best_share(train: float, generate: float) -> float:
    """The trainer's share θ* of the GPUs at which neither side waits for the other.

    Args:
        train: GPU-seconds of a sample in training (η_t m_t).
        generate: GPU-seconds of a sample in generation (η_g m_g).
    """
    return train / (train + generate)


def step_seconds(batch: int, gpus: int, train: float, generate: float) -> float:
    """Seconds of an update in which no GPU waits: divided at the best share between both kinds of
    work, or all in turn, each with its own costs."""
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
    """The size of generator at which a completion costs least: (GPUs, GPU-seconds of a completion,
    slots); None if no size fits. `reserved` is as in `Machine.slots`."""
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
    # What fits some ranks fits more, which share the state. A rank has a completion at least.
    most = min(config.gpus, config.n_batch + 1)
    for trainer in range(least, most, min(least, config.node)):
        for group in machine.generator_groups():
            generators = (config.gpus - trainer) // group
            if generators and (split := _split(machine, trainer, generators, group)):
                yield split


def _split(machine: Machine, trainer: int, generators: int, group: int) -> Split | None:
    """A split with at most `generators` generators; None if they do not hold a group each."""
    config, slots = machine.config, machine.slots(group)
    # Two batches in flight (the paper's rule), in whole groups, give no more generators something
    # to do.
    generators = min(generators, 2 * config.n_batch // config.group_size)
    n_async = min(2 * config.n_batch, generators * slots)
    n_async -= n_async % config.group_size
    if n_async < generators * config.group_size:
        return None
    live = n_async / generators
    cost = machine.generate_cost(group, live)
    generating = config.n_batch * cost / (generators * group)
    seconds = max(generating, _training(machine, trainer))
    return Split(
        generators=generators,
        generator_gpus=group,
        trainer_gpus=trainer,
        slots=slots,
        n_async=n_async,
        max_staleness=_staleness(machine, group, live, seconds),
        seconds=seconds,
    )


def in_turn(machine: Machine) -> Split | None:
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
    return Split(
        # With few groups in a batch, some generators would have no work.
        generators=min(generators, n_async // config.group_size),
        generator_gpus=group,
        trainer_gpus=config.gpus,
        slots=slots,
        n_async=n_async,
        max_staleness=0,
        seconds=step_seconds(config.n_batch, config.gpus, machine.train_cost, cost),
    )


def _training(machine: Machine, ranks: int) -> float:
    """Seconds of training of an update: completions, and the prompt of each group once."""
    c = machine.config
    return machine.train_seconds(c.n_batch * (c.length_mean + c.prompt_mean / c.group_size), ranks)


def _staleness(machine: Machine, group: int, live: float, seconds: float) -> int:
    """The bound at which no update waits for the longest completion: the updates that happen while
    it is generated, and one more for the queued batch."""
    step = float(machine.decode(group, np.array(live), np.array(live * machine.cached)))
    return math.ceil(machine.config.length_max * step / seconds) + 1
