"""Ratios of two policies: bounded, as estimates of the KL divergence (arXiv 2506.09477), and summed
over the tokens of each sequence.

ℓ = log π_θ/π_ref. The gradient of KL(π_θ ‖ π_ref) is E[ℓ s], s = ∇ log π_θ, and over the tokens of
a sequence E[Σ_t s_t Σ_{u≥t} ℓ_u]. `docs/kl.md` has the gradient of each estimator in each place.

`sequence` numbers the tokens' sequences from 0, in ascending order: [N] int64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64, Num

from tramontane.config.objectives import Charge

MOST = 20.0  # |log-ratio|, beyond which a ratio no longer grows


def ratio(log_ratio: Float[torch.Tensor, " *shape"]) -> Float[torch.Tensor, " *shape"]:
    """π/μ from log π/μ, in the same shape; constant outside e⁻²⁰ to e²⁰.

    A float32 overflows at e⁸⁹, and the gradient of an overflow is NaN even where it is clipped
    away. Infinite and NaN log-ratios are errors and are passed through.
    """
    return _bounded(log_ratio).exp()


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.where(log_ratio.isfinite(), log_ratio.clamp(-MOST, MOST), log_ratio)


def estimate(log_ratio: Float[torch.Tensor, " N"], estimator: str) -> Float[torch.Tensor, " N"]:
    """KL(π ‖ π_ref) of each token, estimated from samples of π: [N] of ℓ = log π/π_ref [N]; k3
    within the bounds of `ratio`."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio + torch.expm1(_bounded(-log_ratio))


def returns(
    log_ratio: Float[torch.Tensor, " N"], sequence: Int64[torch.Tensor, " N"], charge: Charge
) -> Float[torch.Tensor, " N"]:
    """The estimates that each token is charged for by `charge`: [N] of ℓ [N]."""
    if charge.scope == "sequence":
        return estimate(totals(log_ratio, sequence), charge.estimator)[sequence]
    own = estimate(log_ratio, charge.estimator)
    return sums_to_end(own, sequence) if charge.scope == "rest" else own


def totals(
    values: Num[torch.Tensor, " N"], sequence: Int64[torch.Tensor, " N"]
) -> Num[torch.Tensor, " N"]:
    """Sum of each sequence's values, 0 for a number without values: [N], since there are at most as
    many sequences as values, and counting them would mean waiting for a GPU."""
    return torch.zeros_like(values).index_add(0, sequence, values)


def effective_sample_size(log_weights: Float[torch.Tensor, " B"]) -> float:
    """(Σ w)² / (B Σ w²) of importance weights w, from their logarithms [B]: 1 if all are equal, 1/B
    if one outweighs all others."""
    total, squares = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * total - squares).exp()) / len(log_weights)


def sums_to_end(
    values: Float[torch.Tensor, " N"], sequence: Int64[torch.Tensor, " N"]
) -> Float[torch.Tensor, " N"]:
    """Sum of each value and those after it in its sequence: [N], in the values' number type."""
    # From the sums to the end of the row, subtract those of later sequences. This is a difference
    # of large numbers, hence float64.
    exact = values.double()
    sums = totals(exact, sequence)
    return (_to_end(exact) - (_to_end(sums) - sums)[sequence]).to(values.dtype)


def sums_from_start(
    values: Float[torch.Tensor, " N"], sequence: Int64[torch.Tensor, " N"]
) -> Float[torch.Tensor, " N"]:
    """Sum of each value and those before it in its sequence: [N]."""
    return totals(values, sequence)[sequence] - sums_to_end(values, sequence) + values


def first_tokens(sequence: Int64[torch.Tensor, " N"]) -> Bool[torch.Tensor, " N"]:
    """True for the first token of each sequence: [N] bool."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[1:] = sequence[1:] != sequence[:-1]
    return starts


def last_tokens(sequence: Int64[torch.Tensor, " N"]) -> Bool[torch.Tensor, " N"]:
    """True for the last token of each sequence: [N] bool."""
    return first_tokens(sequence.flip(0)).flip(0)


def _to_end(values: torch.Tensor) -> torch.Tensor:
    """Sum of each value and all after it."""
    return values.flip(0).cumsum(0).flip(0)
