"""Log-probs over the tokens that the sampler allowed: with S_t the tokens that top-p and top-k left
when token t was drawn, log π(y_t) − log Σ_{j ∈ S_t} π(j), in place of log π(y_t).

What sampled was μ renormalized over S_t, so that the ratio to it is that of two policies over the
same tokens, and its expectation is 1: exact, where the ratio of whole distributions is biased.
DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) calls S_t the sampling mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tramontane.batches import TrainSequence
from tramontane.trainer.rows import PackedRow, Predictions

ANY = -1  # in place of a token: fewer are allowed, or, in the first column, all
SMALLEST = 8  # `columns`


def columns(most: int) -> int:
    """Columns for sets of at most this many tokens: a power of two, so that few shapes need
    kernels; 0 if there are none."""
    return most and max(SMALLEST, 1 << (most - 1).bit_length())


def allowed_of(sequences: Sequence[TrainSequence]) -> NDArray[np.int64] | None:
    """The allowed tokens of each generated token, followed by `ANY`: [N, k], where k is of
    `columns`; None if all are allowed everywhere.

    Only tokens that this run sampled have sets: others may have replaced sampled ones.
    """
    counts, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence in sequences:
        of_tokens = np.zeros(len(sequence.token_ids), np.int64)
        if (own := sequence.allowed) is not None:
            sampled = np.asarray(sequence.versions)[: len(own)] >= 0
            of_tokens[: len(own)] = np.asarray(own.counts) * sampled
            ids.append(np.asarray(own.ids)[np.repeat(sampled, own.counts)])
        counts.append(of_tokens)
    sizes = np.concatenate(counts)
    if not (width := columns(int(sizes.max(initial=0)))):
        return None
    found = np.full((len(sizes), width), ANY)
    found[np.arange(width) < sizes[:, None]] = np.concatenate(ids)
    return found


def with_candidates(row: PackedRow) -> PackedRow:
    """The row with its allowed tokens as candidates; unchanged if it has none."""
    return row if row.allowed is None else replace(row, candidates=row.allowed.clamp(min=0))


def renormalized(predictions: Predictions, allowed: torch.Tensor | None) -> Predictions:
    """The predictions over the allowed tokens [N, k], whose log-probs are in `policy_top`; or
    unchanged if all are allowed. The entropy has a gradient only if it had one."""
    if allowed is None:
        return predictions
    assert predictions.policy_top is not None  # the candidates are the allowed tokens
    everything = allowed[:, :1] == ANY
    # Finite wherever it is not used, for the gradient.
    among = (allowed != ANY) | everything
    top = predictions.policy_top.masked_fill(~among, -torch.inf)
    total = top.logsumexp(-1).masked_fill(everything[:, 0], 0.0)
    own = (top - total[:, None]).masked_fill(~among, -1e4)
    with torch.set_grad_enabled(predictions.entropy.requires_grad):
        entropy = -(own.exp() * own).sum(-1)
    return replace(
        predictions,
        logprobs=predictions.logprobs - total,
        entropy=torch.where(everything[:, 0], predictions.entropy, entropy),
        policy_top=None,
    )
