"""Objectives by name: `trainer.objective.name: magistral` is `objectives/magistral.py`.

An objective is a module with the two functions of `Objective`, and options, which also declare what
it needs: those of the built-in ones are in `config/objectives.py`. `docs/your-objective.md` shows
how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from tramontane.config import BUILT_IN_OBJECTIVES, ObjectiveConfig
from tramontane.config.objectives import Charge
from tramontane.errors import InputError
from tramontane.imports import import_module
from tramontane.trainer.ratios import estimate, ratio, returns

# A sum and its weight by name. The metric is Σ sums / Σ weights over microbatches and ranks.
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Objective(Protocol):
    """The interface of an objective's module. `options` is its section of the config.

    The module of a user's own objective also holds the class of its options, `Options`; those of
    the objectives in this folder are in `config/objectives.py`.
    """

    def advantages(self, sequences: Sequences, options: Any) -> torch.Tensor:
        """The advantage of each completion: [S]; or, if `targets` is requested, [S, 2]: for its
        sampled tokens, and for the tokens of its given answer."""

    def loss(self, tokens: Tokens, options: Any) -> tuple[torch.Tensor, Metrics]:
        """The microbatch's share of the loss, and metrics. It should not read values of tensors (as
        `item`, `nonzero` and indexing with a mask do), since a GPU would run out of work meanwhile.

        Args:
            tokens: the microbatch's N tokens; its fields are [N].
            options: the objective's section of the config.

        Returns:
            The share of the loss: a scalar with gradient, summed over microbatches and ranks. And
            metrics, as scalar sums and weights; their names must not depend on the tokens.
        """


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
    """The N completion tokens of one microbatch that are trained on, sequence after sequence, all
    float32 (float64 for a model in float64). Excluded tokens are not among them, since a ratio of
    one may overflow, and 0 · inf would be NaN in loss and gradient.

    Args:
        logprobs: [N] log π_θ, with gradient.
        behavior: [N] log μ, as the generator recorded it.
        advantages: [N] the advantage of each token's sequence.
        weights: [N] each token's weight in the loss, which is a sum.
        sequence: [N] int64, each token's sequence in the microbatch, from 0, in ascending order. A
            forked conversation is one sequence, if `conversations` is requested. Sequences that are
            not trained on have no tokens.
        rewards: [N] the reward of each token's sequence.
        entropy: [N] entropy of each token's distribution, with gradient if requested.
        proximal: [N] log π_old, if requested.
        reference: [N] log π_ref, if requested.
        top1: [N] 1 for a token that is the most likely one of its distribution, else 0; if
            requested.
        values: [N] a value network's prediction from the prefix before each token, with gradient,
            if requested.
        target: [N] bool, True for the tokens of a given answer, if `targets` is requested.
        teacher: [N] log π_T of a teacher, if requested.
        teacher_top: [N, k] log π_T of the teacher's k likeliest tokens at each place, or of the
            whole vocabulary, if requested.
        policy_top: [N, k] log π_θ of the same tokens, with gradient, if `teacher_top` is requested.
        baselines: [N] baseline of the charge for the distance to a policy, by the policy's name.
        added: [N] each token's weight in an added term, by the term's name; 0 for tokens that it
            does not apply to.
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
    values: torch.Tensor | None = None
    target: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    policy_top: torch.Tensor | None = None
    baselines: Mapping[str, torch.Tensor] = field(default_factory=dict)
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)


# Inputs that an objective may request beyond log-probs, advantages and weights.
PROVIDED = frozenset(
    [
        "behavior_sums",
        "conversations",
        "entropy",
        "proximal",
        "reference",
        "sequence_logprobs",
        "targets",
        "teacher",
        "teacher_top",
        "top1",
        "values",
    ]
)


class WithTerms:
    """An objective plus terms: the KL divergence, and those of `add`. All get the same tokens, with
    weights and a charge of their own."""

    def __init__(self, objective: Objective, config: ObjectiveConfig) -> None:
        self._objective = objective
        self._terms = {name: (_built_in(name), term) for name, term in config.terms.items()}

    def advantages(self, sequences: Sequences, options: Any) -> torch.Tensor:
        return self._objective.advantages(sequences, options)

    def loss(self, tokens: Tokens, options: Any) -> tuple[torch.Tensor, Metrics]:
        """The objective's loss plus each term's, times its weight."""
        loss, metrics = self._objective.loss(charged(tokens, options.charge), options)
        for name, (module, term) in self._terms.items():
            none = torch.zeros_like(tokens.advantages)
            own = replace(tokens, weights=tokens.added[name], advantages=none)
            added, found = module.loss(charged(own, term.charge), term.options)
            loss, metrics = loss + term.weight * added, found | metrics
        return loss, metrics


def charged(tokens: Tokens, charge: Charge | None) -> Tokens:
    """The tokens with advantages A − β (k − baseline), where k is what each is charged for."""
    if charge is None:
        return tokens
    log_ratio = (tokens.logprobs - getattr(tokens, charge.policy)).detach()
    costs = returns(log_ratio, tokens.sequence, charge)
    if charge.baseline:
        costs = costs - tokens.baselines[charge.policy]
    return replace(tokens, advantages=tokens.advantages - charge.coef * costs)


def load_objective(config: ObjectiveConfig) -> Objective:
    """Import the objective `config.name`: a file of this folder, or any module by its path; with
    its charge and the terms that are added to it.

    Raises:
        InputError: it needs an input that the trainer does not provide.
    """
    built_in = config.name in BUILT_IN_OBJECTIVES
    objective = _built_in(config.name) if built_in else cast(Objective, import_module(config.name))
    if unknown := config.needs - PROVIDED:
        raise InputError(
            f"objective {config.name!r} needs {', '.join(sorted(unknown))}, but the trainer "
            f"provides only {', '.join(sorted(PROVIDED))}"
        )
    return WithTerms(objective, config) if config.terms or config.charges else objective


def _built_in(name: str) -> Objective:
    return cast(Objective, import_module(f"{__name__}.{name}"))


def count(values: torch.Tensor) -> torch.Tensor:
    """The number of values, as a scalar tensor of their dtype and device; `new_tensor` would wait
    for the GPU."""
    return values.new_full((), float(values.numel()))


def truncated_gradient(tokens: Tokens, cap: float | None) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, cap)) · A · log π_θ (a scalar), and metrics; `cap` is the largest
    importance weight, None: all are 1."""
    if cap is None:
        loss = -(tokens.weights * tokens.advantages * tokens.logprobs).sum()
        return loss, ratio_metrics(tokens, {})
    rho = ratio(tokens.logprobs.detach() - tokens.behavior)
    weights = tokens.weights * rho.clamp(max=cap)
    metrics = ratio_metrics(tokens, {"ratio_capped": rho > cap})
    return -(weights * tokens.advantages * tokens.logprobs).sum(), metrics


@torch.no_grad()
def ratio_metrics(tokens: Tokens, more: dict[str, torch.Tensor]) -> Metrics:
    """Means over sampled tokens of π_θ/μ, the entropy, KL(μ ‖ π_θ) by its k3 estimate, and `more`;
    the tokens of a given answer were not sampled."""
    log_ratio = tokens.logprobs - tokens.behavior
    sampled = torch.ones_like(log_ratio) if tokens.target is None else ~tokens.target
    values = {
        "ratio": ratio(log_ratio),
        "entropy": tokens.entropy,
        "kl_behavior": estimate(-log_ratio, "k3"),
    }
    number = sampled.float().sum()
    return {
        name: ((value.float() * sampled).sum(), number) for name, value in (values | more).items()
    }
