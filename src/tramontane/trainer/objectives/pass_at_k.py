"""Training for pass@k (arXiv 2503.19595): the greatest reward among k samples.

    max E[f(y_1, …, y_k)],   f = max_i r_i
    ∇ = E[ Σ_i A_i ∇ log π_θ(y_i) ],   A_i = f(y) − f(y without i)

Only the best of the k samples has an advantage: its reward less the second best.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import PassAtKOptions
from tramontane.trainer.advantages import leave_one_out
from tramontane.trainer.importance import truncated_gradient
from tramontane.trainer.objectives import Metrics, Sequences, Tokens


def advantages(sequences: Sequences, options: PassAtKOptions) -> torch.Tensor:
    """A_i = max r − max of the other r, among k completions: [S]."""
    rewards = sequences.rewards.tolist()

    def best(members: list[int]) -> float:
        return max(rewards[i] for i in members)

    return leave_one_out(sequences, options.k, best, options.centred)


def loss(tokens: Tokens, options: PassAtKOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, ρ)) · A · log π_θ."""
    return truncated_gradient(tokens, options.rho)
