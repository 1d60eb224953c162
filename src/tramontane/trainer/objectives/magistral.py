"""Magistral's objective (arXiv 2506.10910, section 2.1), with what the paper ablates as options.

GRPO's clipped surrogate without KL penalty, normalised by the tokens of the group, with
advantages normalised in the minibatch and a wider upper clip bound.
"""

from __future__ import annotations

import math

import torch

from tramontane.config import ObjectiveConfig
from tramontane.trainer.advantages import group_advantages
from tramontane.trainer.objectives import Metrics, Sequences, Tokens


def needs(config: ObjectiveConfig) -> set[str]:
    wanted = {
        "entropy": config.entropy_coef != 0,
        "reference": config.kl_coef != 0,
        "proximal": config.importance_correction != "off",
    }
    return {name for name, needed in wanted.items() if needed}


def advantages(sequences: Sequences, config: ObjectiveConfig) -> torch.Tensor:
    """Ã = r − group mean, normalised as `config.advantage_normalization` says: [S]."""
    return group_advantages(
        sequences.rewards, sequences.groups, sequences.scored, config.advantage_normalization
    )


def loss(tokens: Tokens, config: ObjectiveConfig) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · c · min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â), ρ = π_θ / π_old.

    π_old is the generator's μ and c = 1, or with an importance correction π_old is the trainer's
    own at the start of the update and c = min(π_old / μ, cap), for `clipped` also ≥ 1/cap.
    `kl_coef` adds GRPO's k3 estimate of KL(π_θ ‖ π_ref), `entropy_coef` subtracts the entropy.
    """
    old, correction = tokens.behavior, torch.ones_like(tokens.behavior)
    if tokens.proximal is not None:
        old = tokens.proximal
        low = 1 / config.importance_cap if config.importance_correction == "clipped" else 0.0
        correction = (old - tokens.behavior).exp().clamp(low, config.importance_cap)
    ratio = (tokens.logprobs - old).exp()
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    surrogate = torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    token_loss = -correction * surrogate
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * tokens.entropy
    if tokens.reference is not None:
        kl = k3(tokens.logprobs, tokens.reference)
        token_loss = token_loss + config.kl_coef * kl
    with torch.no_grad():
        used = (tokens.weights > 0).float()
        count = used.sum()
        means = {
            "clip_fraction_low": ((ratio < 1 - config.eps_low) & (tokens.advantages < 0)).float(),
            "clip_fraction_high": ((ratio > 1 + config.eps_high) & (tokens.advantages > 0)).float(),
            "ratio": ratio,
            "entropy": tokens.entropy,
            "kl_behavior": k3(tokens.behavior, tokens.logprobs),
        }
        if tokens.proximal is not None:
            means["importance_weight"] = correction
            outside = (old - tokens.behavior).abs() > math.log(config.importance_cap)
            above = old - tokens.behavior > 0
            capped = outside if config.importance_correction == "clipped" else outside & above
            means["importance_capped"] = capped.float()
        if tokens.reference is not None:
            means["kl_reference"] = kl
        metrics = {name: ((value * used).sum(), count) for name, value in means.items()}
    return (tokens.weights * token_loss).sum(), metrics


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """GRPO's estimate of KL(π ‖ other) from a token of π: ℓ + e^−ℓ − 1 with ℓ = log π − log other.

    As a loss, its expected gradient is that of KL(other ‖ π) (arXiv 2506.09477).
    """
    log_ratio = logprobs - other
    return log_ratio + torch.expm1(-log_ratio)
