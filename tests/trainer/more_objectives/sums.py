"""An objective whose advantages come from log-probs summed over sequences, as AGRO's do
(arXiv 2503.19612): R = r − β log π/π_ref, less its group's mean."""

import torch

from tramontane.config import ObjectiveOptions
from tramontane.trainer.advantages import group_advantages

BETA = 0.1


class Options(ObjectiveOptions):
    @property
    def needs(self):
        return frozenset({"sequence_logprobs", "reference"})


def advantages(sequences, options):
    regularized = sequences.rewards - BETA * (sequences.policy - sequences.reference)
    return group_advantages(regularized, sequences.groups, sequences.scored, "none")


def loss(tokens, options):
    used = (tokens.weights > 0).float()
    # Each sequence's sum, by the sequences' numbers, given back to its tokens.
    # A rank without work has no tokens.
    logprobs = tokens.logprobs.detach()
    sums = torch.zeros_like(logprobs).index_add(0, tokens.sequence, logprobs)
    metrics = {
        "advantage_squared": ((tokens.advantages.square() * used).sum(), used.sum()),
        "sequence_logprob": ((sums[tokens.sequence] * used).sum(), used.sum()),
    }
    return -(tokens.weights * tokens.advantages * tokens.logprobs).sum(), metrics
