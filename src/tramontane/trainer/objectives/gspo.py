"""GSPO (arXiv 2507.18071): the ratio of a whole sequence is clipped, not that of a token.

    J = E[ (1/G) Σ_i min(s_i Â_i, clip(s_i, 1 − ε_low, 1 + ε_high) Â_i) ]
    s_i = (π_θ(o_i)/μ(o_i))^(1/|o_i|)

In the form of its section 4.3 (GSPO-token), whose gradient is the same, and in which tokens of one
sequence may have different advantages.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import GSPOOptions
from tramontane.trainer.advantages import normalized
from tramontane.trainer.objectives import Metrics, Tokens, ratio_metrics
from tramontane.trainer.ratios import ratio, totals

advantages = normalized


def loss(tokens: Tokens, options: GSPOOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w min(s Â, clip(s, 1 − ε_low, 1 + ε_high) Â), s = sg(s_i) π_θ/sg(π_θ)."""
    current = tokens.logprobs.detach()
    sequence_ratio = ratio(_mean(current - tokens.behavior, tokens.sequence))
    s = sequence_ratio * (tokens.logprobs - current).exp()
    clipped = s.clamp(1 - options.eps_low, 1 + options.eps_high)
    surrogate = torch.minimum(s * tokens.advantages, clipped * tokens.advantages)
    metrics = ratio_metrics(
        tokens,
        {
            "clip_fraction_low": (s < 1 - options.eps_low) & (tokens.advantages < 0),
            "clip_fraction_high": (s > 1 + options.eps_high) & (tokens.advantages > 0),
            "sequence_ratio": sequence_ratio,
        },
    )
    return -(tokens.weights * surrogate).sum(), metrics


def _mean(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The mean of each token's sequence: [N]."""
    return totals(values, sequence)[sequence] / totals(torch.ones_like(values), sequence)[sequence]
