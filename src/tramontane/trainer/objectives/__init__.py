"""Objectives by name: `trainer.objective.name: magistral` is `objectives/magistral.py`.

An objective is a module with the two functions of `Objective`, and options, which also declare what
it needs. `docs/objectives.md` shows how to write one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from tramontane.config import BUILT_IN_OBJECTIVES, ObjectiveConfig
from tramontane.errors import InputError
from tramontane.imports import import_module
from tramontane.trainer.kl import WithKL

# Inputs that an objective may request beyond log-probs, advantages and weights.
PROVIDED = frozenset(
    {
        "behavior_sums",
        "entropy",
        "kl_baseline",
        "proximal",
        "reference",
        "sequence_logprobs",
        "targets",
        "top1",
        "values",
    }
)

# A sum and its weight by name. The metric is Σ sums / Σ weights over microbatches and ranks.
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sequences:
    """The S completions of one minibatch: the input of `advantages`, identical on every rank.

    Args:
        rewards: [S] float64.
        groups: [S] int64, the group of each sequence, from 0.
        scored: [S] bool; False for a sequence without a verdict, which is not trained on.
        lengths: [S] int64, generated tokens.
        answers: [S] int64, equal for equal answers of a group; −1 for none.
        policy: [S] float64, log π_θ(o) summed over tokens, if requested; π_θ is the policy before
            the minibatch's optimizer step.
        reference: [S] float64, log π_ref(o) summed over tokens, if requested; π_ref is the policy
            at the start of the run.
        behavior: [S] float64, log μ(o) summed over tokens, if `behavior_sums` is requested.
        targets: [S] int64, number of tokens of the given answer, 0 without one; if requested.
        target_logprobs: [S] float64, log π_θ of the given answer after the sampled tokens, summed,
            if `targets` is requested.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    scored: torch.Tensor
    lengths: torch.Tensor
    answers: torch.Tensor
    policy: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    behavior: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    target_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """The N completion tokens of one microbatch, sequence after sequence, all float32 (float64 for
    a model in float64).

    Args:
        logprobs: [N] log π_θ, with gradient.
        behavior: [N] log μ, as the generator recorded it.
        advantages: [N] the advantage of each token's sequence.
        weights: [N] each token's weight in the loss, which is a sum; 0: not trained on.
        sequence: [N] int64, each token's sequence in the microbatch, from 0.
        rewards: [N] the reward of each token's sequence.
        entropy: [N] entropy of each token's distribution, with gradient if requested.
        proximal: [N] log π_old, if requested.
        reference: [N] log π_ref, if requested.
        kl_baseline: [N] baseline of the KL divergence as a reward, if requested; see `trainer.kl`.
        top1: [N] 1 for a token that is the most likely one of its distribution, else 0; if
            requested.
        values: [N] a value network's prediction from the prefix before each token, with gradient,
            if requested.
        target: [N] bool, True for the tokens of a given answer, if `targets` is requested.
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
    kl_baseline: torch.Tensor | None = None
    top1: torch.Tensor | None = None
    values: torch.Tensor | None = None
    target: torch.Tensor | None = None

    def learnt(self) -> Tokens:
        """The tokens trained on: those of weight above 0.

        A ratio of an excluded token may overflow, and 0 · inf would be NaN in loss and gradient.
        """
        mask = self.weights > 0
        fields = {name: x[mask] for name, x in vars(self).items() if x is not None}
        return Tokens(**fields)


class Objective(Protocol):
    """The interface of an objective's module. `options` is its section of the config.

    The module of a user's own objective also holds the class of its options, `Options`; those of
    the objectives in this folder are in `config/objectives.py`.
    """

    def advantages(self, sequences: Sequences, options: Any) -> torch.Tensor:
        """The advantage of each completion: [S]; or, if `targets` is requested, [S, 2]: for its
        sampled tokens, and for the tokens of its given answer."""

    def loss(self, tokens: Tokens, options: Any) -> tuple[torch.Tensor, Metrics]:
        """The microbatch's share of the loss, and metrics.

        Args:
            tokens: the microbatch's N tokens; its fields are [N].
            options: the objective's section of the config.

        Returns:
            The share of the loss: a scalar with gradient, summed over microbatches and ranks. And
            metrics, as scalar sums and weights; their names must not depend on the tokens.
        """


def load_objective(config: ObjectiveConfig) -> Objective:
    """Import the objective `config.name`: a file of this folder, or any module by its path.

    Raises:
        InputError: it needs an input that the trainer does not provide.
    """
    built_in = config.name in BUILT_IN_OBJECTIVES
    module = import_module(f"{__name__}.{config.name}" if built_in else config.name)
    if unknown := config.options.needs - PROVIDED:
        raise InputError(
            f"objective {config.name!r} needs {', '.join(sorted(unknown))}, but the trainer "
            f"provides only {', '.join(sorted(PROVIDED))}"
        )
    objective = cast(Objective, module)
    return WithKL(objective) if getattr(config.options, "kl_coef", 0.0) else objective
