"""AIPO (LlamaRL, arXiv 2505.24034): a policy gradient for samples of an older policy.

    ∇J = E_μ[ Σ_t min(π_θ(y_t)/μ(y_t), ρ) · A · ∇ log π_θ(y_t) ],   A = r − mean of its group

The weight is a constant, so a truncated token still has a gradient, and it is truncated on one side
only. log μ is the generator's log-prob.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import AIPOOptions
from tramontane.trainer.advantages import normalized
from tramontane.trainer.objectives import Metrics, Tokens, truncated_gradient

advantages = normalized


def loss(tokens: Tokens, options: AIPOOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, ρ)) · A · log π_θ; the uncorrected loss has a weight of 1."""
    return truncated_gradient(tokens, options.rho if options.correction else None)
