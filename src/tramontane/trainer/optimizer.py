"""AdamW and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
