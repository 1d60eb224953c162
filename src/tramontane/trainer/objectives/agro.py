"""AGRO, any-generation reward optimization (arXiv 2503.19612).

    R(y) = r(y) − β log π_θ(y)/π_ref(y),   min ½ E_x Var_{y~μ}(R)

At the optimum π* ∝ π_ref e^{r/β}, R is the same for every y, so samples of any policy μ can be
used. With n samples of a prompt:

    off-policy:  ∇ = −(β/(n − 1)) Σ_i (R_i − R̄) ∇ log π_θ(y_i)
    on-policy:   ∇ = −(1/(n − 1)) Σ_i (R_i − R̄) min(π_θ/μ, ρ) ∇ log π_θ(y_i)

The first uses no importance ratio. The second is the regularized policy gradient.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import AGROOptions
from tramontane.trainer.advantages import group_advantages
from tramontane.trainer.objectives import Metrics, Sequences, Tokens, truncated_gradient


def advantages(sequences: Sequences, options: AGROOptions) -> torch.Tensor:
    """n/(n − 1) · (R − R̄), times β for the off-policy form: [S]."""
    assert sequences.policy is not None  # requested by the options' `needs`
    assert sequences.reference is not None
    groups, scored = sequences.groups, sequences.scored
    regularized = sequences.rewards - options.beta * (sequences.policy - sequences.reference)
    centered = group_advantages(regularized, groups, scored, "none")
    n = torch.bincount(groups[scored], minlength=int(groups.max()) + 1)[groups]
    scale = options.beta if options.form == "off_policy" else 1.0
    return scale * centered * n / (n - 1).clamp(min=1)


def loss(tokens: Tokens, options: AGROOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w A log π_θ, on-policy with the weight sg(min(π_θ/μ, ρ))."""
    return truncated_gradient(tokens, options.rho if options.form == "on_policy" else None)
