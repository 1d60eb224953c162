"""AdamW and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from tramontane.config import TrainerConfig
from tramontane.models.shape import load_shape


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only.

    Moments are allocated immediately, so that a state saved before the first step has them too.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def lr_at(update: int, total: int, warmup: int, schedule: str, peak: float) -> float:
    """The learning rate of update `update` (from 0) of `total`: linear warm-up, then the schedule.

    `linear` and `cosine` fall to 0 at `total`.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    done = (update - warmup) / max(1, total - warmup)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


HIGH_RATE = 30  # times the usual learning rate for the model's size


def chosen_rate(config: TrainerConfig, model: str) -> tuple[float, str]:
    """The learning rate after warm-up for a model, with a readable reason.

    Args:
        config: its `learning_rate` may be null.
        model: as in `load_shape`.

    Raises:
        InputError: see `load_shape`.
    """
    if config.learning_rate is not None:
        return config.learning_rate, f"{config.learning_rate:g}"
    parameters = load_shape(model).parameters
    rate, millions = config.peak_rate(parameters), parameters / 1e6
    size = f"{millions:,.{0 if millions >= 10 else 1}f} million parameters"
    adapters = " and LoRA" if config.lora else ""
    return rate, f"{rate:g}, as is usual for {size}{adapters}"


def rate_warnings(section: str, config: TrainerConfig, model: str) -> Iterator[str]:
    """A warning if the learning rate is far above what is usual for the model's size; `section`
    precedes its key."""
    if config.learning_rate is None:
        return
    parameters = load_shape(model).parameters
    usual = config.model_copy(update={"learning_rate": None}).peak_rate(parameters)
    times = config.learning_rate / usual
    if times >= HIGH_RATE:
        yield (
            f"{section}learning_rate {config.learning_rate:g} is {times:,.0f} times the {usual:g} "
            f"that is usual for {parameters / 1e6:,.1f} million parameters; leave it out for that "
            f"one"
        )


def warmup_warnings(key: str, warmup: int, length_key: str, length: int) -> Iterator[str]:
    """A warning if training ends before its warm-up does; the keys name the two numbers."""
    if warmup >= length:
        yield (
            f"{key} {warmup:,}: training ends after {length:,} ({length_key}), before the learning "
            f"rate has reached its value; lower it, or raise {length_key}"
        )
