"""DRO, direct reward optimization (arXiv 2405.19107), for single trajectories.

    min ½ E_{x,y~μ}[(r − V(x) − τ ℓ)²],   ℓ = log π_θ(y)/π_ref(y)

Its only optimum is π* ∝ π_ref e^{r/τ} with V*(x) = τ log E_ref e^{r/τ}, for samples of any μ.

    DRO-V:  ∇_θ = −mean (r − V − τ ℓ) ∇ log π_θ (scaled by 1/τ),   ∇_φ = −mean (r − V − τ ℓ) ∇ V_φ
    DRO-P:  ½ Var_μ(r − τ ℓ) over the minibatch, without V (also scaled by 1/τ)

With a value per token, the same holds from every prefix: r = V_t + τ Σ_{u≥t} ℓ_u, and the loss is
the mean of the squares over the prefixes of a completion. The paper does not print this loss.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import DROOptions
from tramontane.trainer.objectives import Metrics, Sequences, Tokens, count
from tramontane.trainer.ratios import first_tokens, sums_to_end, totals


def advantages(sequences: Sequences, options: DROOptions) -> torch.Tensor:
    """For DRO-P, R less its mean over the minibatch, R = r − τ ℓ: [S]. DRO-V takes rewards and
    values token by token."""
    if options.form == "value":
        return sequences.rewards
    assert sequences.policy is not None  # requested by the options' `needs`
    assert sequences.reference is not None
    scored = sequences.scored
    regularized = sequences.rewards - options.tau * (sequences.policy - sequences.reference)
    return torch.where(scored, regularized - regularized[scored].mean(), 0.0)


def loss(tokens: Tokens, options: DROOptions) -> tuple[torch.Tensor, Metrics]:
    """DRO-P: −Σ w A log π_θ. DRO-V: ½ Σ w δ²/τ with δ = r − V − τ ℓ as a function of the policy,
    plus ½ Σ w δ² as a function of V."""
    assert tokens.reference is not None
    log_ratio = tokens.logprobs - tokens.reference
    if options.form == "policy":
        loss = -(tokens.weights * tokens.advantages * tokens.logprobs).sum()
        return loss, _metrics(tokens, {"log_ratio": log_ratio})
    assert tokens.values is not None
    values, used = tokens.values, torch.ones_like(tokens.weights)
    rest = options.tau * sums_to_end(log_ratio, tokens.sequence)  # τ ℓ from each prefix on
    if options.values == "prompt":
        used = first_tokens(tokens.sequence).to(used.dtype)
    weights = tokens.weights * used / totals(used, tokens.sequence)[tokens.sequence]
    of_policy = (tokens.rewards - values.detach() - rest).square() / options.tau
    of_value = (tokens.rewards - values - rest.detach()).square()
    loss = (weights * (of_policy + of_value)).sum() / 2
    of_values = {"value": values, "value_error": of_value.sqrt()}
    return loss, _metrics(tokens, {"log_ratio": log_ratio}) | {
        name: ((x.detach() * used).sum(), used.sum()) for name, x in of_values.items()
    }


@torch.no_grad()
def _metrics(tokens: Tokens, more: dict[str, torch.Tensor]) -> Metrics:
    values = {"entropy": tokens.entropy} | more
    return {name: (x.sum(), count(x)) for name, x in values.items()}
