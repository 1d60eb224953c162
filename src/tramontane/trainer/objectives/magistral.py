"""Magistral's objective (arXiv 2506.10910, section 2.1), with the paper's ablations as options.

GRPO's clipped surrogate without KL penalty, normalized by the tokens of the group, with
advantages normalized in the minibatch and a wider upper clip bound.
"""

from __future__ import annotations

import math

import torch

from tramontane.config.objectives import MagistralOptions
from tramontane.trainer.advantages import normalized
from tramontane.trainer.objectives import Metrics, Tokens, count
from tramontane.trainer.ratios import estimate, ratio

advantages = normalized


def loss(tokens: Tokens, options: MagistralOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · c · min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â), ρ = π_θ / π_old.

    Without an importance correction π_old is the generator's μ and c = 1. With one, π_old is the
    trainer's policy at the start of the update and c = min(π_old / μ, cap), for `clipped` also
    ≥ 1/cap. `entropy_coef` subtracts the entropy.
    """
    old, correction = _old_policy(tokens, options)
    rho = ratio(tokens.logprobs - old)
    clipped = rho.clamp(1 - options.eps_low, 1 + options.eps_high)
    surrogate = torch.minimum(rho * tokens.advantages, clipped * tokens.advantages)
    token_loss = -correction * surrogate
    if options.entropy_coef:
        token_loss = token_loss - options.entropy_coef * tokens.entropy
    metrics = _metrics(tokens, rho.detach(), correction, options)
    return (tokens.weights * token_loss).sum(), metrics


def _old_policy(tokens: Tokens, options: MagistralOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_old [N], and the importance weight c [N] that corrects for sampling from μ."""
    if tokens.proximal is None:
        return tokens.behavior, torch.ones_like(tokens.behavior)
    low = 1 / options.importance_cap if options.importance_correction == "clipped" else 0.0
    weight = ratio(tokens.proximal - tokens.behavior)
    return tokens.proximal, weight.clamp(low, options.importance_cap)


@torch.no_grad()
def _metrics(
    tokens: Tokens, rho: torch.Tensor, correction: torch.Tensor, options: MagistralOptions
) -> Metrics:
    values = {
        "clip_fraction_low": (rho < 1 - options.eps_low) & (tokens.advantages < 0),
        "clip_fraction_high": (rho > 1 + options.eps_high) & (tokens.advantages > 0),
        "ratio": rho,
        "entropy": tokens.entropy,
        "kl_behavior": estimate(tokens.behavior - tokens.logprobs, "k3"),
    }
    if tokens.proximal is not None:
        drift, limit = tokens.proximal - tokens.behavior, math.log(options.importance_cap)
        both_sides = options.importance_correction == "clipped"
        values["importance_weight"] = correction
        values["importance_capped"] = (drift.abs() if both_sides else drift) > limit
    return {name: (value.float().sum(), count(rho)) for name, value in values.items()}
