"""Training for majority voting (arXiv 2503.19595): the reward of the most frequent answer among k.

    max E[f(y_1, …, y_k)],   f = r(maj(a_1, …, a_k))
    ∇ = E[ Σ_i A_i ∇ log π_θ(y_i) ],   A_i = f(y) − f(y without i)

Only a sample that decides the vote has an advantage. Among answers with equally many votes f is the
mean, and without any answer it is 0.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from tramontane.config.objectives import MajorityOptions
from tramontane.trainer.advantages import leave_one_out
from tramontane.trainer.importance import truncated_gradient
from tramontane.trainer.objectives import Metrics, Sequences, Tokens


def advantages(sequences: Sequences, options: MajorityOptions) -> torch.Tensor:
    """A_i = r(maj) − r(maj without i), among k completions: [S]."""
    rewards, answers = sequences.rewards.tolist(), sequences.answers.tolist()

    def voted(members: list[int]) -> float:
        votes = defaultdict(list)
        for i in members:
            if answers[i] >= 0:
                votes[answers[i]].append(rewards[i])
        if not votes:
            return 0.0
        most = max(map(len, votes.values()))
        winners = [sum(r) / len(r) for r in votes.values() if len(r) == most]
        return sum(winners) / len(winners)

    return leave_one_out(sequences, options.k, voted, options.centred)


def loss(tokens: Tokens, options: MajorityOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, ρ)) · A · log π_θ."""
    return truncated_gradient(tokens, options.rho)
