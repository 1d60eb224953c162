"""Weights on their way from the trainer to the generators, bucket by bucket."""

from __future__ import annotations

from typing import Protocol

import torch

BUCKET_BYTES = 64 << 20

Bucket = dict[str, torch.Tensor]  # tied weights are one tensor under several names


class Weights(Protocol):
    """One version of a whole model: the trainer adds buckets, the generators take the tensors.

    What happens to a bucket in between is the placement's affair.
    """

    def add(self, bucket: Bucket) -> None:
        """Keep a bucket's values; its tensors may change afterwards."""

    def tensors(self) -> Bucket:
        """Everything that was added, to be read only."""


class LocalWeights:
    """Copies on the CPU: for workers in one process, where a tensor travels by being named."""

    def __init__(self) -> None:
        self._tensors: Bucket = {}

    def add(self, bucket: Bucket) -> None:
        copies = {id(t): t.to("cpu", copy=True) for t in bucket.values()}
        self._tensors |= {name: copies[id(t)] for name, t in bucket.items()}

    def tensors(self) -> Bucket:
        return self._tensors
