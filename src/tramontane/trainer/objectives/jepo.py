"""JEPO (arXiv 2503.19618): learns chains of thought c from the likelihood of a given answer a*,
without a verifier.

    one-sample:  log π(a*|x) ≥ L = E_c[log π(a*|x, c)]
        ∇ = (log π(a*|c) − v) ∇ log π(c) + β_sup ∇ log π(a*|c)
    n-sample:    L⁽ⁿ⁾ = E[log (1/n) Σ_i π(a*|c_i)]
        ∇ = Σ_i (log mean_j π(a*|c_j) − ṽ_i) ∇ log π(c_i)
            + β_sup Σ_j softmax_j(log π(a*|c_j)) ∇ log π(a*|c_j)

v and ṽ_i exclude completion i. A completion without the marker that begins the answer has no a*: it
is excluded from the bound and gets the format reward. In groups without given answers (solved ones,
in a mixture), completions are trained on by their rewards. Each of the three kinds of advantages is
divided by its own standard deviation and clipped separately.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tramontane.config.objectives import JEPOOptions
from tramontane.trainer.advantages import SAME, group_advantages
from tramontane.trainer.objectives import Metrics, Sequences, Tokens, count, truncated_gradient
from tramontane.trainer.ratios import totals

FORMAT_REWARD = -10.0  # of a completion that lacks the marker


def advantages(sequences: Sequences, options: JEPOOptions) -> torch.Tensor:
    """The advantage of the sampled tokens, and the weight of the given answer's: [S, 2]."""
    assert sequences.targets is not None  # requested by the options' `needs`
    groups, scored = sequences.groups, sequences.scored
    bounded = scored & (sequences.targets > 0)
    in_bound = scored & (totals(bounded.long(), groups) > 0)[groups]
    thoughts, answers = _bound(sequences, bounded, options)
    lacking = torch.where(in_bound & ~bounded, FORMAT_REWARD, 0.0).double()
    form = group_advantages(lacking, groups, in_bound, "none")
    rewarded = group_advantages(sequences.rewards, groups, scored & ~in_bound, "none")
    parts = ((thoughts, bounded), (form, in_bound), (rewarded, scored & ~in_bound))
    sampled = torch.stack([_scaled(values, used, groups, options) for values, used in parts])
    return torch.stack([sampled.sum(0), options.supervised_coef * answers], dim=1)


def loss(tokens: Tokens, options: JEPOOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w · sg(min(π_θ/μ, ρ)) · A · log π_θ; a given answer's tokens have no importance weight."""
    assert tokens.target is not None
    behavior = torch.where(tokens.target, tokens.logprobs.detach(), tokens.behavior)
    loss, metrics = truncated_gradient(replace(tokens, behavior=behavior), options.rho)
    given = tokens.target.to(tokens.logprobs.dtype)
    return loss, metrics | {
        "answer_logprob": ((tokens.logprobs.detach() * given).sum(), given.sum()),
        "given_tokens": (given.sum(), count(given)),
    }


def _bound(
    sequences: Sequences, bounded: torch.Tensor, options: JEPOOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantage of the thoughts and the weight of the answer of each completion, [S] each; 0
    without a given answer. The loss is a mean over completions, so sums over a group's n have the
    factor n."""
    assert sequences.target_logprobs is not None
    found, thoughts = sequences.target_logprobs, torch.zeros_like(sequences.target_logprobs)
    answers = torch.zeros_like(thoughts)
    for group in sequences.groups[bounded].unique():
        members = (bounded & (sequences.groups == group)).nonzero()[:, 0]
        values, n = found[members], len(members)
        others = values.repeat(n, 1)[~torch.eye(n, dtype=torch.bool)].reshape(n, n - 1)
        if options.bound == "one_sample":
            total, baseline, weight = values, others.mean(1), torch.ones_like(values)
        else:
            total = (values.logsumexp(0) - values.new_tensor(n).log()).expand(n)
            baseline = others.logsumexp(1) - values.new_tensor(n - 1).log()
            weight = n * values.softmax(0)
        advantage = total if options.baseline == "none" else total - baseline
        if n == 1 and options.baseline == "leave_one_out":
            advantage = torch.zeros_like(values)
        factor = n if options.bound == "n_sample" and options.first_sum == "sum" else 1
        thoughts[members], answers[members] = factor * advantage, weight
    return thoughts, answers


def _scaled(
    values: torch.Tensor, used: torch.Tensor, groups: torch.Tensor, options: JEPOOptions
) -> torch.Tensor:
    """clip(A/std(A), −clip, clip) of the completions that are `used`; 0 for others: [S]."""
    values = torch.where(used, values, 0.0)
    if options.advantage_normalization != "none":
        pools = groups if options.advantage_normalization == "group" else torch.zeros_like(groups)
        count = totals(used.double(), pools).clamp(min=1)
        mean = (totals(values, pools) / count)[pools]
        squares = torch.where(used, (values - mean).square(), 0.0)
        std = (totals(squares, pools) / count).sqrt()[pools]
        values = torch.where(std > SAME, values / std.clamp(min=SAME), 0.0)
    return (
        values
        if options.advantage_clip is None
        else values.clamp(-options.advantage_clip, options.advantage_clip)
    )
