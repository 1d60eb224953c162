"""Objectives by file name: `objective.name: magistral` is `objectives/magistral.py`.

An objective is a module with the three functions of `Objective`. Adding one is adding a file; see
`docs/objectives.md`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from tramontane.config import ObjectiveConfig
from tramontane.errors import InputError

# What an objective may ask for beyond log-probs, advantages and weights.
PROVIDED = frozenset({"entropy", "reference", "proximal", "sequence_logprobs", "top1"})

# By name, a sum and its weight: the metric is Σ sums / Σ weights over microbatches and ranks.
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sequences:
    """The S completions of one minibatch, on every rank the same: what advantages come from.

    Args:
        rewards: [S] float64.
        groups: [S] int64, the group of each, from 0.
        scored: [S] bool; False where the verdict is `unscorable`.
        lengths: [S] int64, generated tokens.
        proximal: [S] float64, log π_old(o) summed over tokens, if asked for; π_old are the
            trainer's weights at the start of the update.
        reference: [S] float64, log π_ref(o) likewise; π_ref are the weights the run started from.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    scored: torch.Tensor
    lengths: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """The N completion tokens of one microbatch, sequence after sequence, all float32.

    Args:
        logprobs: [N] log π_θ, with gradient.
        behavior: [N] log μ: what the generator recorded.
        advantages: [N] each token's sequence's advantage.
        weights: [N] each token's weight in the loss, which is a sum; 0: not learnt from.
        sequence: [N] int64, which sequence of the microbatch, from 0.
        rewards: [N] each token's sequence's reward.
        entropy: [N] of the distribution; with gradient if asked for.
        proximal: [N] log π_old, if asked for.
        reference: [N] log π_ref, if asked for.
        top1: [N] 1 for a token that is the most likely one of its distribution, else 0; if asked
            for.
    """

    logprobs: torch.Tensor
    behavior: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    rewards: torch.Tensor
    entropy: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    top1: torch.Tensor | None = None


class Objective(Protocol):
    """What a module in this folder defines."""

    def needs(self, config: ObjectiveConfig) -> set[str]:
        """Which of `PROVIDED` the other two functions use under this configuration."""

    def advantages(self, sequences: Sequences, config: ObjectiveConfig) -> torch.Tensor:
        """[S]: what each completion counts for."""

    def loss(self, tokens: Tokens, config: ObjectiveConfig) -> tuple[torch.Tensor, Metrics]:
        """The microbatch's share of the loss (a scalar to be summed), and metrics, whose names
        must not depend on the tokens."""


def load_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config.name` names.

    Raises:
        InputError: no such file in this folder, or it asks for what the trainer does not provide.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if config.name not in names:
        raise InputError(
            f"trainer.objective.name: no objective {config.name!r}; there are: {', '.join(names)}"
        )
    objective = cast(Objective, importlib.import_module(f"{__name__}.{config.name}"))
    if unknown := objective.needs(config) - PROVIDED:
        raise InputError(
            f"objective {config.name!r} needs {', '.join(sorted(unknown))}, but the trainer "
            f"provides only {', '.join(sorted(PROVIDED))}"
        )
    return objective
