"""On-policy distillation: the divergence from a teacher π_T, on the policy's own completions.

With d_t the divergence of the two next-token distributions after y_<t, and s_t = ∇ log π_θ(y_t):

    D = E_y[Σ_t d_t],   ∇D = E_y[ Σ_t (∇d_t + s_t Σ_{u>t} d_u) ]

For d = KL(π_θ ‖ π_T), D is the divergence of whole completions (arXiv 2506.09477). The usual form
keeps ∇d_t alone (discount 0). The sampled token alone estimates d_t by ℓ_t = log π_θ/π_T:

    ∇D = E_y[ Σ_t s_t (ℓ_t + Σ_{u>t} ℓ_u − b_t) ],   b_t a baseline

π_θ is the policy that is trained, whatever policy μ sampled y; s_t is weighted by min(π_θ/μ, ρ).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float

from tramontane.config.objectives import DistillOptions
from tramontane.trainer.objectives import (
    Metrics,
    Sequences,
    Tokens,
    ratio_metrics,
    truncated_gradient,
)
from tramontane.trainer.ratios import estimate, sums_to_end

LEAST_REST = 1e-6  # probability of all other tokens; in float32, a smaller difference is noise
CHUNK_ELEMENTS = 1 << 20  # log-probs of a distribution that are worked on at once
LEAST_LOGPROB = -1e4  # of a token that cannot be sampled: 0 · −∞ would be NaN


def advantages(sequences: Sequences, options: DistillOptions) -> torch.Tensor:
    """[S] zeros: rewards do not count."""
    return torch.zeros_like(sequences.rewards)


def loss(tokens: Tokens, options: DistillOptions) -> tuple[torch.Tensor, Metrics]:
    """Σ w d, or its gradient by sampled tokens. The metric `teacher_divergence` is the mean of d,
    or of its k3 estimate from the sampled token alone."""
    if tokens.teacher is not None:  # the options' charge is in the advantages
        loss, metrics = truncated_gradient(tokens, options.rho)
        divergences = estimate((tokens.logprobs - tokens.teacher).detach(), "k3")
    else:
        assert tokens.policy_top is not None
        assert tokens.teacher_top is not None
        divergences = divergence(tokens.policy_top, tokens.teacher_top, options)
        loss = (tokens.weights * divergences).sum()
        divergences = divergences.detach()
        metrics = ratio_metrics(tokens, {})
        if options.discount:
            after = sums_to_end(divergences, tokens.sequence) - divergences
            added, metrics = truncated_gradient(replace(tokens, advantages=-after), options.rho)
            loss = loss + added
    used = (tokens.weights > 0).to(divergences.dtype)  # in an added term, some have no weight
    return loss, metrics | {"teacher_divergence": ((divergences * used).sum(), used.sum())}


def divergence(
    policy: Float[torch.Tensor, "N k"], teacher: Float[torch.Tensor, "N k"], options: DistillOptions
) -> Float[torch.Tensor, " N"]:
    """The divergence of two distributions at each place: [N], in nats. For the gradient, one tensor
    of the policy's shape is kept.

    Args:
        policy: [N, k] log π_θ, with gradient.
        teacher: [N, k] log π_T of the same tokens.
        options: which divergence; with a `top_k` other than 0, all other tokens count as one.
    """
    found: torch.Tensor = _ByRows.apply(policy, teacher, options)
    return found


class _ByRows(torch.autograd.Function):
    """`_divergence` of some rows at a time, each with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, policy: torch.Tensor, teacher: torch.Tensor, options: DistillOptions
    ) -> torch.Tensor:
        gradient, found = torch.empty_like(policy), policy.new_empty(len(policy))
        rows = max(1, CHUNK_ELEMENTS // policy.shape[1])
        for start in range(0, len(policy), rows):
            some = slice(start, start + rows)
            with torch.enable_grad():
                part = policy[some].detach().requires_grad_()
                each = _divergence(part, teacher[some], options)
                (gradient[some],) = torch.autograd.grad(each.sum(), part)
            found[some] = each.detach()
        ctx.save_for_backward(gradient)
        return found

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(slope[:, None]), None, None


def _divergence(
    policy: torch.Tensor, teacher: torch.Tensor, options: DistillOptions
) -> torch.Tensor:
    q, p = (x.clamp(min=LEAST_LOGPROB) for x in (policy, teacher))
    if options.top_k:
        q, p = _with_rest(q), _with_rest(p)
    if options.divergence == "reverse":
        return _kl(q, p)
    if options.divergence == "forward":
        return _kl(p, q)
    beta = options.js_beta
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) of rows of log-probs: [N]."""
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[N, k + 1]: log-probs of k tokens, and of all others together."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([logprobs, rest.log()], dim=-1)
