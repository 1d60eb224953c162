"""Importance weights of tokens that an older policy sampled."""

from __future__ import annotations

import torch

from tramontane.trainer.kl import estimate, ratio
from tramontane.trainer.objectives import Metrics, Tokens


def truncated_gradient(tokens: Tokens, cap: float) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, cap)) · A · log π_θ (a scalar), and metrics; `cap` is the largest
    weight."""
    tokens = tokens.learnt()
    rho = ratio(tokens.logprobs.detach() - tokens.behavior)
    weights = tokens.weights * rho.clamp(max=cap)
    metrics = ratio_metrics(tokens, {"ratio_capped": rho > cap})
    return -(weights * tokens.advantages * tokens.logprobs).sum(), metrics


@torch.no_grad()
def ratio_metrics(tokens: Tokens, more: dict[str, torch.Tensor]) -> Metrics:
    """Means over sampled tokens of π_θ/μ, the entropy, KL(μ ‖ π_θ) by its k3 estimate, and `more`;
    the tokens of a given answer were not sampled."""
    log_ratio = tokens.logprobs - tokens.behavior
    sampled = torch.ones_like(log_ratio) if tokens.target is None else ~tokens.target
    values = {
        "ratio": ratio(log_ratio),
        "entropy": tokens.entropy,
        "kl_behavior": estimate(-log_ratio, "k3"),
    }
    count = sampled.float().sum()
    return {
        name: ((value.float() * sampled).sum(), count) for name, value in (values | more).items()
    }
