"""Weights on their way through Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray
import torch

from tramontane.models.host import HostMemory
from tramontane.models.weights import Bucket, Part, Weights, on_host


class StoredWeights(Weights):
    """Weights in Ray's object store, one object per bucket.

    On the trainer's machine the store is shared memory, which generators map and copy from; other
    machines fetch each bucket once. A machine's store holds one copy, in the generators' dtype.
    A trainer rank holds at most one bucket in addition to its share of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype  # the generators'
        self._stored: list[tuple[list[_StoredPart], ray.ObjectRef]] = []

    def buckets(self) -> Iterator[Bucket]:
        for parts, stored in self._stored:
            bucket = [
                Part(names, shape, start, self._tensor(found, found_shape))
                for (names, shape, start, found_shape), found in zip(
                    parts, ray.get(stored), strict=True
                )
            ]
            yield bucket
            bucket.clear()

    def _keep(self, bucket: Bucket, memory: HostMemory | None) -> None:
        parts = [_StoredPart(*part[:3], part.values.shape) for part in bucket]
        self._stored.append((parts, self._put(bucket, memory)))

    def _merge(self, other: Weights) -> None:
        assert isinstance(other, StoredWeights)
        self._stored += other._stored

    def _put(self, bucket: Bucket, memory: HostMemory | None) -> ray.ObjectRef:
        """Store tensors as bytes, since numpy has no bfloat16; Ray copies them without pickling."""
        held = bucket if memory is None else on_host(bucket, self._dtype, memory.pass_through)
        tensors = [part.values.to(self._dtype) for part in held]
        return ray.put([tensor.flatten().view(torch.uint8).numpy() for tensor in tensors])

    def _tensor(self, found: Any, shape: torch.Size) -> torch.Tensor:
        with warnings.catch_warnings():  # mapped memory is read only, and only read
            warnings.filterwarnings("ignore", message="The given .* is not writable")
            return torch.from_numpy(found).view(self._dtype).view(shape)


class _StoredPart(NamedTuple):
    """A `Part` whose values are in the store."""

    names: tuple[str, ...]
    shape: torch.Size
    start: int
    values_shape: torch.Size


class DirectWeights(StoredWeights):
    """Weights that generators read from the trainer's memory by Ray Direct Transport over NIXL,
    from GPU to GPU if both are on one.

    Reading involves no other process, so a generator may come or go at any time; with NCCL or gloo
    all generators and the trainer would have to form a new group. Each trainer rank holds a copy of
    its share of the newest version, in the generators' dtype.
    """

    def _put(self, bucket: Bucket, memory: HostMemory | None) -> ray.ObjectRef:
        copies = [part.values.to(self._dtype, copy=True) for part in bucket]
        return ray.put(copies, _tensor_transport="nixl")

    def _tensor(self, found: Any, shape: torch.Size) -> torch.Tensor:
        tensor: torch.Tensor = found
        return tensor
