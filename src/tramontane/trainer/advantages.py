"""Advantages and loss weights of completions (Magistral, arXiv 2506.10910, section 2.1).

All values are per sequence, over a whole minibatch. Every rank computes the same numbers, so no
normalizer depends on how work is distributed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64, Num

from tramontane.config.objectives import (
    AdvantageNormalization,
    AdvantageOptions,
    LossNormalization,
)
from tramontane.trainer.objectives import Sequences

# Rewards that differ only by float64 rounding count as equal; real ones differ by far more.
SAME = 1e-8


def normalized(sequences: Sequences, options: AdvantageOptions) -> Float[torch.Tensor, " S"]:
    """Ã = r − group mean, normalized by `options.advantage_normalization`: [S]."""
    return group_advantages(
        sequences.rewards, sequences.groups, sequences.scored, options.advantage_normalization
    )


def group_advantages(
    rewards: Float[torch.Tensor, " S"],
    groups: Int64[torch.Tensor, " S"],
    scored: Bool[torch.Tensor, " S"],
    normalization: AdvantageNormalization,
) -> Float[torch.Tensor, " S"]:
    """Ã = r − mean of its group, then normalized to mean 0 and standard deviation 1.

    `minibatch` takes the mean and standard deviation of Ã over the minibatch, `group` over each
    group. The standard deviation is the population's (ddof 0); where it is zero, so are the
    advantages.

    Args:
        rewards: [S] float64.
        groups: [S] int64, the group of each sequence, from 0.
        scored: [S] bool; unscored sequences get 0 and enter no mean.
        normalization: the sequences over which Ã is normalized.

    Returns:
        [S] float64.
    """
    pools = groups if normalization == "group" else torch.zeros_like(groups)
    centered = torch.where(scored, rewards - _mean(rewards, groups, scored), 0.0)
    if normalization == "none":
        return centered
    centered = torch.where(scored, centered - _mean(centered, pools, scored), 0.0)
    std = _mean(centered.square(), pools, scored).sqrt()
    return torch.where(std > SAME, centered / std.clamp(min=SAME), 0.0)


def leave_one_out(
    sequences: Sequences, k: int, value: Callable[[list[int]], float], centered: bool
) -> Float[torch.Tensor, " S"]:
    """A_i = f(y) − f(y without i) among k completions of a group (arXiv 2503.19595).

    A group is split in order into groups of k. Unscored completions are skipped, and a remainder of
    fewer than k has advantage 0.

    Args:
        sequences: those of the minibatch.
        k: completions judged together, at least 2.
        value: f, a function of completions' indices.
        centered: subtract the mean of the k advantages.

    Returns:
        [S] float64.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(sequences.groups.tolist()):
        if sequences.scored[index]:
            members.setdefault(group, []).append(index)
    result = torch.zeros(len(sequences.groups), dtype=torch.float64)
    for indices in members.values():
        for start in range(0, len(indices) - k + 1, k):
            chosen = indices[start : start + k]
            together = value(chosen)
            found = [together - value([j for j in chosen if j != i]) for i in chosen]
            mean = sum(found) / k if centered else 0.0
            result[chosen] = torch.tensor(found, dtype=torch.float64) - mean
    return result


def loss_weights(
    lengths: Num[torch.Tensor, " S"],
    groups: Int64[torch.Tensor, " S"],
    scored: Bool[torch.Tensor, " S"],
    normalization: LossNormalization,
    l_max: int,
) -> Float[torch.Tensor, " S"]:
    """Loss weight of each token of a sequence: the loss is Σ weight · token loss.

    - `group_tokens` (the paper): a group's summed token losses divided by its tokens Σ|o_i|, then
      the mean over groups.
    - `minibatch_tokens`: the mean over all tokens of the minibatch.
    - `sequence`: the mean over each sequence's tokens, then the mean over sequences.
    - `sequence_sum`: the sum over each sequence's tokens, then the mean over sequences.
    - `constant`: a group's summed token losses divided by G · l_max, then the mean over groups.

    Args:
        lengths: [S], generated tokens of each sequence; under a mask, those kept, in float64.
        groups: [S] int64, the group of each sequence, from 0.
        scored: [S] bool; unscored sequences weigh 0 and count in no normalizer.
        normalization: as above.
        l_max: the longest completion allowed, in tokens.

    Returns:
        [S] float64.
    """
    tokens = torch.where(scored, lengths, 0).double()
    count = scored.double()
    if normalization == "minibatch_tokens":
        divisor = tokens.sum().expand_as(tokens)
    elif normalization == "sequence":
        divisor = tokens * count.sum()
    elif normalization == "sequence_sum":
        divisor = count.sum().expand_as(tokens)
    else:
        per_group = tokens if normalization == "group_tokens" else count * l_max
        divisor = _sum(per_group, groups)[groups] * len(groups[scored].unique())
    return torch.where(scored, 1.0 / divisor, 0.0)


def _sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(int(groups.max()) + 1).index_add(0, groups, values)


def _mean(values: torch.Tensor, groups: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Mean over the scored sequences of each sequence's group: [S]."""
    total = _sum(torch.where(scored, values, 0.0), groups)
    return (total / _sum(scored.double(), groups).clamp(min=1))[groups]
