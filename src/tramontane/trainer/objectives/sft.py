"""Supervised fine-tuning: the mean negative log-likelihood of given responses.

The loss is −Σ w log π_θ(token). With `loss_normalization: minibatch_tokens` it is the mean over
all response tokens of the minibatch, as in pre-training.
"""

from __future__ import annotations

import torch

from tramontane.config.objectives import SFTOptions
from tramontane.trainer.objectives import Metrics, Sequences, Tokens


def advantages(sequences: Sequences, options: SFTOptions) -> torch.Tensor:
    """[S] ones: all responses count equally."""
    return torch.ones_like(sequences.rewards)


def loss(tokens: Tokens, options: SFTOptions) -> tuple[torch.Tensor, Metrics]:
    """−Σ w log π_θ; `accuracy` is the share of tokens that are the model's first choice."""
    assert tokens.top1 is not None  # requested by the options' `needs`
    used = (tokens.weights > 0).to(tokens.top1.dtype)  # in an added term, some have no weight
    metrics = {"accuracy": ((tokens.top1 * used).sum(), used.sum())}
    return -(tokens.weights * tokens.logprobs).sum(), metrics
