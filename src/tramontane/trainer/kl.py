"""The KL divergence from a reference policy, as a reward or as a loss (arXiv 2506.09477).

ℓ = log π_θ/π_ref. The gradient of KL(π_θ ‖ π_ref) is E[ℓ s], s = ∇ log π_θ, and over the tokens of
a sequence E[Σ_t s_t Σ_{u≥t} ℓ_u]. `docs/kl.md` has the gradient of each estimator in each place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tramontane.config.objectives import KLOptions
from tramontane.trainer.segments import sums_to_end, totals

if TYPE_CHECKING:  # objectives imports this module
    from tramontane.trainer.objectives import Metrics, Objective, Sequences, Tokens


MOST = 20.0  # |log-ratio|, beyond which a ratio no longer grows


class WithKL:
    """A policy gradient plus β · KL(π_θ ‖ π_ref)."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def advantages(self, sequences: Sequences, options: KLOptions) -> torch.Tensor:
        return self._objective.advantages(sequences, options)

    def loss(self, tokens: Tokens, options: KLOptions) -> tuple[torch.Tensor, Metrics]:
        """The objective's loss with advantages A − β (k − baseline), or plus β Σ w k, or both."""
        tokens = tokens.learnt()
        assert tokens.reference is not None  # requested by the options' `needs`
        log_ratio = tokens.logprobs - tokens.reference
        if tokens.kl_baseline is not None:
            penalty = returns(log_ratio.detach(), tokens.sequence, options) - tokens.kl_baseline
            tokens = replace(tokens, advantages=tokens.advantages - options.kl_coef * penalty)
        loss, metrics = self._objective.loss(tokens, options)
        if options.kl_as != "reward":
            penalty = differentiable(log_ratio, tokens.sequence, options)
            loss = loss + options.kl_coef * (tokens.weights * penalty).sum()
        count = torch.tensor(float(len(log_ratio)), device=log_ratio.device)
        return loss, metrics | {"kl_reference": (estimate(log_ratio.detach(), "k3").sum(), count)}


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """π/μ from log π/μ, in the same shape; constant outside e⁻²⁰ to e²⁰.

    A float32 overflows at e⁸⁹, and the gradient of an overflow is NaN even where it is clipped
    away. Infinite and NaN log-ratios are errors and are passed through.
    """
    return _bounded(log_ratio).exp()


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.where(log_ratio.isfinite(), log_ratio.clamp(-MOST, MOST), log_ratio)


def estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(π ‖ π_ref) of each token, estimated from samples of π: [N] of ℓ = log π/π_ref [N]; k3
    within the bounds of `ratio`."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio + torch.expm1(_bounded(-log_ratio))


def returns(log_ratio: torch.Tensor, sequence: torch.Tensor, options: KLOptions) -> torch.Tensor:
    """The penalty assigned to each token: that of itself and the tokens after it, or the whole
    sequence's.

    Args:
        log_ratio: [N] ℓ.
        sequence: [N] int64, each token's sequence, in ascending order.
        options: estimator and level.

    Returns:
        [N].
    """
    if options.kl_level == "sequence":
        return estimate(totals(log_ratio, sequence), options.kl_estimator)[sequence]
    return sums_to_end(estimate(log_ratio, options.kl_estimator), sequence)


def differentiable(
    log_ratio: torch.Tensor, sequence: torch.Tensor, options: KLOptions
) -> torch.Tensor:
    """The estimate with its gradient: [N]; a sequence's estimate is shared equally by its
    tokens."""
    if options.kl_level == "token":
        return estimate(log_ratio, options.kl_estimator)
    lengths = totals(torch.ones_like(log_ratio), sequence)
    estimates = estimate(totals(log_ratio, sequence), options.kl_estimator)
    return (estimates / lengths.clamp(min=1))[sequence]
