"""Sums over the tokens of each sequence, with gradient. `sequence` numbers the tokens' sequences
from 0, in ascending order: [N] int64."""

from __future__ import annotations

import torch


def totals(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of each sequence's values, [S]; 0 for a sequence without tokens."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def sums_to_end(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of each value and those after it in its sequence: [N], in the values' number type."""
    # From the sums to the end of the row, subtract those of later sequences. This is a difference
    # of large numbers, hence float64.
    exact = values.double()
    sums = totals(exact, sequence)
    return (_to_end(exact) - (_to_end(sums) - sums)[sequence]).to(values.dtype)


def sums_from_start(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of each value and those before it in its sequence: [N]."""
    return totals(values, sequence)[sequence] - sums_to_end(values, sequence) + values


def first_tokens(sequence: torch.Tensor) -> torch.Tensor:
    """Index of the first token of each sequence that has tokens, in ascending order."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[1:] = sequence[1:] != sequence[:-1]
    return starts.nonzero()[:, 0]


def _to_end(values: torch.Tensor) -> torch.Tensor:
    """Sum of each value and all after it."""
    return values.flip(0).cumsum(0).flip(0)
