"""CISPO (MiniMax-M1, arXiv 2506.13585), as ScaleRL (arXiv 2510.13786) uses it.

    J = E[ (1/Σ|o_i|) Σ_i Σ_t sg(min(ρ_it, ε_max)) Â_i log π_θ(o_it) ],   ρ = π_θ/μ

No token's gradient is clipped away, and there is no lower bound. Â is normalised over the minibatch
and the loss divided by the tokens of the group, as ScaleRL does.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import CISPOOptions
from tramontane.trainer.advantages import normalised
from tramontane.trainer.importance import truncated_gradient
from tramontane.trainer.objectives import Metrics, Tokens

advantages = normalised


def loss(tokens: Tokens, options: CISPOOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(ρ, ε_max)) · Â · log π_θ."""
    return truncated_gradient(tokens, options.eps_max)
