"""Which sampled tokens the objective keeps (`trainer.objective.mask`), from log-ratios of the
trainer's policy π, before the optimizer step, to the policy μ that sampled.

`docs/off-policy.md` says which mask is for which difference between the two.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int64

from tramontane.config.mask import MaskConfig
from tramontane.trainer.ratios import totals


def kept(
    config: MaskConfig,
    logprobs: Float[torch.Tensor, " N"],
    behavior: Float[torch.Tensor, " N"],
    advantages: Float[torch.Tensor, " N"],
    sequence: Int64[torch.Tensor, " N"],
) -> Bool[torch.Tensor, " N"]:
    """The sampled tokens that no mask leaves out: [N] bool.

    Args:
        config: the masks, of which `truncated` is not looked at.
        logprobs: [N] float64 log π of sampled tokens.
        behavior: [N] float64 log μ.
        advantages: [N] float64.
        sequence: [N] int64, each token's completion, from 0, in ascending order.
    """
    drift = logprobs - behavior
    result = torch.ones_like(drift, dtype=torch.bool)
    if config.token_ratio:
        result &= _within(drift, config.token_ratio)
    if config.of_completions:
        total = totals(drift, sequence)[sequence]
        mean = total / totals(torch.ones_like(drift), sequence)[sequence]
        if config.sequence_ratio:
            result &= _within(total, config.sequence_ratio)
        if config.geometric_ratio:
            result &= _within(mean, config.geometric_ratio)
        if config.off_policy:
            result &= (advantages >= 0) | (-mean <= config.off_policy)
    away = drift * advantages > 0  # the update would move π further from μ
    pi, mu = logprobs.exp(), behavior.exp()
    if config.token_tv:
        result &= ~(away & ((pi - mu).abs() > config.token_tv))
    if config.token_kl:
        result &= ~(away & (_binary_kl(mu, pi) > config.token_kl))
    return result


def _within(log_ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    low, high = bounds
    return (log_ratio >= (math.log(low) if low else -math.inf)) & (log_ratio <= math.log(high))


def _binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of Bernoulli(p) from Bernoulli(q), elementwise, in nats."""
    return torch.xlogy(p, p / q) + torch.xlogy(1 - p, (1 - p) / (1 - q))
