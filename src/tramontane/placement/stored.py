"""Weights on their way through Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray
import torch

from tramontane.models.differences import Difference
from tramontane.models.host import HostMemory
from tramontane.models.weights import Bucket, Held, Part, Weights, on_host


class StoredWeights(Weights):
    """Weights in Ray's object store, one object per bucket.

    On the trainer's machine the store is shared memory, which generators map and copy from; other
    machines fetch each bucket once. A machine's store holds one copy, in the generators' dtype.
    A trainer rank holds at most one bucket in addition to its share of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype  # the generators'
        self._stored: list[_StoredBucket] = []

    def buckets(self, held: Held | None = None) -> Iterator[Bucket]:
        for stored in self._stored:
            bucket = self._read(stored, held)
            yield bucket
            bucket.clear()

    def _read(self, stored: _StoredBucket, held: Held | None) -> Bucket:
        bucket = ray.get(stored.whole)
        return [
            part.filled(self._tensor(values, part.values_shape))
            for part, values in zip(stored.parts, bucket, strict=True)
        ]

    def _keep(self, bucket: Bucket, memory: HostMemory | None) -> None:
        parts = [_StoredPart(*part[:3], part.values.shape) for part in bucket]
        self._stored.append(_StoredBucket(parts, self._put(bucket, memory), _machine()))

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


def _machine() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


class _StoredPart(NamedTuple):
    """A `Part` whose values are in the store."""

    names: tuple[str, ...]
    shape: torch.Size
    start: int
    values_shape: torch.Size

    def rows(self, held: Held) -> torch.Tensor:
        tensor = held.tensors[self.names[0]]
        return tensor.narrow(0, self.start, self.values_shape[0]) if self.shape else tensor

    def filled(self, values: torch.Tensor) -> Part:
        return Part(self.names, self.shape, self.start, values)


class _Change(NamedTuple):
    """What a bucket changes of one version, to become the next one."""

    base: str  # the version before
    stored: ray.ObjectRef  # a `Difference` for each part


class _StoredBucket(NamedTuple):
    parts: list[_StoredPart]
    whole: ray.ObjectRef
    machine: str
    changes: tuple[_Change, ...] = ()  # from one version to the next, up to this one

    def since(self, version: str) -> tuple[_Change, ...] | None:
        """The changes from a version to this one, or None if one of them is not known."""
        bases = [change.base for change in self.changes]
        return self.changes[bases.index(version) :] if version in bases else None


_VERSIONS = 8  # changes that are kept, from one version to the next: how far a reader may lag
_WORTH = 0.5  # bytes of a bucket's changes, of its own, above which they are not stored


class DifferenceWeights(StoredWeights):
    """Weights in Ray's object store, with what they change of the last versions.

    A generator on another machine that has one of these fetches the changes alone, which it applies
    to its own copy: the same bits as the whole weights, which every other generator reads. A
    trainer rank's machine keeps one version until the next one is stored.
    """

    def follow(self, last: Weights | None) -> Weights:
        if last is not None:
            assert isinstance(last, DifferenceWeights)
            pairs = zip(self._stored, last._stored, strict=True)
            self._stored = [self._changed(new, old, last.version) for new, old in pairs]
        return self

    def _changed(self, new: _StoredBucket, old: _StoredBucket, base: str) -> _StoredBucket:
        differences = [
            Difference.between(before.values, after.values)
            for before, after in zip(self._read(old, None), self._read(new, None), strict=True)
        ]
        size = sum(part.values_shape.numel() for part in new.parts) * self._dtype.itemsize
        if sum(difference.nbytes for difference in differences) > size * _WORTH:
            return new
        change = _Change(base, ray.put(differences))
        return new._replace(changes=(*old.changes[1 - _VERSIONS :], change))

    def _read(self, stored: _StoredBucket, held: Held | None) -> Bucket:
        changes = stored.since(held.version) if held and stored.machine != _machine() else None
        if held is None or changes is None:
            return super()._read(stored, held)
        bucket = [part.filled(part.rows(held).to(self._dtype, copy=True)) for part in stored.parts]
        for change in changes:
            for part, difference in zip(bucket, ray.get(change.stored), strict=True):
                difference.apply(part.values)
        return bucket


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
