"""Soft policy optimization (SPO, arXiv 2503.05453): path consistency by construction.

    max E[r] − β KL(π_θ ‖ π_ref)
    A_t = β log π_θ(a_t)/π_ref(a_t),   Q_t = Q_0 + Σ_{u≤t} A_u,   Q_0 = β log mean_k e^{r_k/β}

A policy's log-ratios are the advantages of a soft Q function, so that Q_t is consistent along every
path, and only its end is trained: Q_T = r. Trajectories of any policy can be used, without an
importance ratio or a value network.

    squared:        (Q_T − r)²
    cross_entropy:  −r log p − (1 − r) log(1 − p),   p = e^{Q_T}, with Q_T clipped just below 0

The cross-entropy reads Q as the log of a success probability: its reward is log r, also in Q_0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float

from tramontane.config.objectives import SPOOptions
from tramontane.trainer.objectives import Metrics, Sequences, Tokens, count
from tramontane.trainer.ratios import last_tokens, sums_from_start, totals

# Upper bound of the log probability of success (at 0, the paper's bound, the loss of a failure is
# infinite), and the smallest reward whose logarithm is taken. Both are ours.
SUCCESS_MAX, REWARD_MIN = -0.01, 1e-3


def advantages(sequences: Sequences, options: SPOOptions) -> torch.Tensor:
    """Q_0 of each completion's group: [S]. The samples k are those of the group, weighted by
    π_ref/μ if `initial_value` is `importance`."""
    groups, scored = sequences.groups, sequences.scored
    exponents = sequences.rewards / options.beta
    if options.loss == "cross_entropy":
        scale = options.beta if options.success == "beta" else 1.0
        exponents = scale / options.beta * sequences.rewards.clamp(min=REWARD_MIN).log()
    weights = torch.zeros_like(exponents)
    if options.initial_value == "importance":
        assert sequences.reference is not None  # requested by the options' `needs`
        assert sequences.behavior is not None
        weights = sequences.reference - sequences.behavior
    weights = torch.where(scored, weights, -torch.inf)
    return options.beta * (_logsumexp(exponents + weights, groups) - _logsumexp(weights, groups))


def loss(tokens: Tokens, options: SPOOptions) -> tuple[torch.Tensor, Metrics]:
    """The loss of Q_T of each completion."""
    # Q_T is Q_t at a sequence's last token; the others' losses have no weight.
    last = last_tokens(tokens.sequence).to(tokens.weights.dtype)
    q = prefix_values(tokens, options)
    if options.loss == "squared":
        losses = (q - tokens.rewards).square()
    else:
        losses = _cross_entropy(q, tokens.rewards, options)
    metrics = {
        "q_initial": tokens.advantages,
        "q_final": q,
        "q_error": (q - tokens.rewards).abs(),
    }
    number = last.sum()
    return (tokens.weights * last * losses).sum(), {
        "entropy": (tokens.entropy.detach().sum(), count(tokens.entropy)),
        **{name: ((x.detach() * last).sum(), number) for name, x in metrics.items()},
    }


def prefix_values(tokens: Tokens, options: SPOOptions) -> Float[torch.Tensor, " N"]:
    """Q_t after each token, with gradient: [N]."""
    assert tokens.reference is not None  # requested by the options' `needs`
    paid = options.beta * (tokens.logprobs - tokens.reference)
    return tokens.advantages + sums_from_start(paid, tokens.sequence)


def _cross_entropy(
    q_final: torch.Tensor, rewards: torch.Tensor, options: SPOOptions
) -> torch.Tensor:
    """[S]. Above `SUCCESS_MAX`, a success has no gradient; a failure still has one."""
    log_success = q_final / (options.beta if options.success == "beta" else 1.0)
    clipped = log_success.clamp(max=SUCCESS_MAX)
    # The value of the clipped Q, with the gradient of Q itself.
    failing = clipped.detach() + log_success - log_success.detach()
    return -rewards * clipped - (1 - rewards) * torch.log(-torch.expm1(failing))


def _logsumexp(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """log Σ exp over each completion's group: [S]; −inf for a group of −inf."""
    top = torch.full_like(values, -torch.inf)
    top = top.scatter_reduce(0, groups, values, "amax").clamp(min=-1e30)
    return (totals((values - top[groups]).exp(), groups).log() + top)[groups]
