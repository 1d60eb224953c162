"""Soft policy optimization (SPO, arXiv 2503.05453): path consistency by construction.

    max E[r] − β KL(π_θ ‖ π_ref)
    A_t = β log π_θ(a_t)/π_ref(a_t),   Q_t = Q_0 + Σ_{u≤t} A_u,   Q_0 = β log mean_k e^{r_k/β}

A policy's log-ratios are the advantages of a soft Q function, so that Q_t is consistent along every
path, and only its end is trained: Q_T = r. Trajectories of any policy can be used, without an
importance ratio or a value network.

    squared:        (Q_T − r)²
    cross_entropy:  −r log p − (1 − r) log(1 − p),   p = e^{Q_T}, with Q_T clipped at q_max ≤ 0

The cross-entropy reads Q as the log of a success probability: its reward is log r, also in Q_0.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import SPOOptions
from tramontane.trainer.objectives import Metrics, Sequences, Tokens
from tramontane.trainer.segments import first_tokens, sums_from_start, totals


def advantages(sequences: Sequences, options: SPOOptions) -> torch.Tensor:
    """Q_0 of each completion's group: [S]. The samples k are those of the group, weighted by
    π_ref/μ if `initial_value` is `importance`."""
    groups, scored = sequences.groups, sequences.scored
    exponents = sequences.rewards / options.beta
    if options.loss == "cross_entropy":
        scale = options.beta if options.success == "beta" else 1.0
        exponents = scale / options.beta * sequences.rewards.clamp(min=options.r_min).log()
    weights = torch.zeros_like(exponents)
    if options.initial_value == "importance":
        assert sequences.reference is not None  # requested by the options' `needs`
        assert sequences.behavior is not None
        weights = sequences.reference - sequences.behavior
    weights = torch.where(scored, weights, -torch.inf)
    return options.beta * (_logsumexp(exponents + weights, groups) - _logsumexp(weights, groups))


def loss(tokens: Tokens, options: SPOOptions) -> tuple[torch.Tensor, Metrics]:
    """The loss of Q_T of each completion."""
    tokens = tokens.learnt()
    start = first_tokens(tokens.sequence)
    q_final = prefix_values(tokens, options)[_last_tokens(tokens.sequence)]
    rewards, weights = tokens.rewards[start], tokens.weights[start]
    if options.loss == "squared":
        losses = (q_final - rewards).square()
    else:
        losses = _cross_entropy(q_final, rewards, options)
    metrics = {
        "entropy": tokens.entropy,
        "q_initial": tokens.advantages[start],
        "q_final": q_final,
        "q_error": (q_final - rewards).abs(),
    }
    return (weights * losses).sum(), {
        name: (x.detach().sum(), x.new_tensor(float(len(x)))) for name, x in metrics.items()
    }


def prefix_values(tokens: Tokens, options: SPOOptions) -> torch.Tensor:
    """Q_t after each token, with gradient: [N]."""
    assert tokens.reference is not None  # requested by the options' `needs`
    paid = options.beta * (tokens.logprobs - tokens.reference)
    return tokens.advantages + sums_from_start(paid, tokens.sequence)


def _cross_entropy(
    q_final: torch.Tensor, rewards: torch.Tensor, options: SPOOptions
) -> torch.Tensor:
    """[S]. Above `q_max` a success teaches nothing more, and a failure still does."""
    log_success = q_final / (options.beta if options.success == "beta" else 1.0)
    clipped = log_success.clamp(max=options.q_max)
    # The value of the clipped Q, with the gradient of Q itself.
    failing = clipped.detach() + log_success - log_success.detach()
    return -rewards * clipped - (1 - rewards) * torch.log(-torch.expm1(failing))


def _last_tokens(sequence: torch.Tensor) -> torch.Tensor:
    """Index of the last token of each sequence that has tokens."""
    start = first_tokens(sequence)
    lengths = totals(torch.ones_like(sequence), sequence)[sequence[start]]
    return start + lengths - 1


def _logsumexp(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """log Σ exp over each completion's group: [S]; −inf for a group of −inf."""
    top = values.new_full((int(groups.max()) + 1,), -torch.inf)
    top = top.scatter_reduce(0, groups, values, "amax").clamp(min=-1e30)
    return (totals((values - top[groups]).exp(), groups).log() + top)[groups]
