"""The term of an objective's `kl_coef`: KL(π_θ ‖ π_ref) as a loss (arXiv 2506.09477). As a reward,
it is the objective's charge. `docs/kl.md` has the gradient of each estimator in each place."""

from __future__ import annotations

import torch

from tramontane.config.objectives import KLOptions
from tramontane.trainer.objectives import Metrics, Tokens, count
from tramontane.trainer.ratios import estimate, totals


def loss(tokens: Tokens, options: KLOptions) -> tuple[torch.Tensor, Metrics]:
    """Σ w k; `kl_reference` is the mean k3 estimate, whichever is trained."""
    assert tokens.reference is not None  # requested by the options' `needs`
    log_ratio = tokens.logprobs - tokens.reference
    found = estimate(log_ratio.detach(), "k3")
    metrics = {"kl_reference": (found.sum(), count(found))}
    if options.kl_as == "reward":
        return torch.zeros_like(found.sum()), metrics
    if options.kl_level == "sequence":  # shared equally by its tokens
        lengths = totals(torch.ones_like(log_ratio), tokens.sequence)
        whole = estimate(totals(log_ratio, tokens.sequence), options.kl_estimator)
        penalty = (whole / lengths.clamp(min=1))[tokens.sequence]
    else:
        penalty = estimate(log_ratio, options.kl_estimator)
    return (tokens.weights * penalty).sum(), metrics
