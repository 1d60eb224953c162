"""Weights in transit from the trainer to the generators, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

BUCKET_BYTES = 64 << 20

Bucket = dict[str, torch.Tensor]  # tied weights are one tensor under several names


class Weights(Protocol):
    """One version of a whole model: the trainer adds buckets, every generator iterates over them.

    The placement decides how a bucket travels. Tied weights come in one bucket.

    Attributes:
        borrowed: the tensors are the trainer's parameters, so the trainer must not step before all
            generators have copied them.
    """

    borrowed: bool

    def add(self, bucket: Bucket) -> None:
        """Keep a bucket, at least until the trainer's next step."""

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every weight added."""

    def buckets(self) -> Iterator[Bucket]:
        """All buckets added, read-only; each bucket is valid until the next one is requested."""


class LocalWeights:
    """The trainer's parameters, for generators in its process: the only copy made is the one into
    the generator's model. Valid until the trainer's next step."""

    borrowed = True

    def __init__(self) -> None:
        self._tensors: Bucket = {}

    def add(self, bucket: Bucket) -> None:
        self._tensors |= bucket

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def buckets(self) -> Iterator[Bucket]:
        yield self._tensors


class CopiedWeights(LocalWeights):
    """Copies on the CPU in a given dtype, which stay valid and can be sent to another process."""

    borrowed = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def add(self, bucket: Bucket) -> None:
        copies = {id(t): t.to("cpu", self._dtype, copy=True) for t in bucket.values()}
        super().add({name: copies[id(t)] for name, t in bucket.items()})

    def tensors(self) -> Bucket:
        return self._tensors
