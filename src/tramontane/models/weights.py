"""Weights in transfer from the trainer to the generators, bucket by bucket."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from tramontane.models.host import Allocate, HostMemory, flat, pageable

BUCKET_BYTES = 64 << 20


class Part(NamedTuple):
    """A weight, or the rows of it that one trainer rank holds."""

    names: tuple[str, ...]  # the weight's name; several names if it is tied
    shape: torch.Size  # shape of the whole weight
    start: int  # index of the first row
    values: torch.Tensor  # the rows, [rows, *shape[1:]]; the whole weight if it has no dimensions

    @classmethod
    def whole(cls, names: Iterable[str], values: torch.Tensor) -> Part:
        """A whole weight, of any shape."""
        return cls(tuple(names), values.shape, 0, values)


Bucket = list[Part]


class Held(NamedTuple):
    """A version that a reader has in memory."""

    version: str  # `Weights.version`
    tensors: Mapping[str, torch.Tensor]  # whole, contiguous, by every name; not all of them


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor: several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


class Weights(ABC):
    """One version of a whole model: every trainer rank adds the rows that it holds, every generator
    iterates over all of them. The placement decides how a bucket travels.

    Attributes:
        borrowed: the values are the trainer's parameters, so the trainer must not step before all
            generators have fetched them.
        version: names these weights, in every process.
    """

    borrowed = False

    def __init__(self) -> None:
        self.version = uuid.uuid4().hex
        self._shapes: dict[str, torch.Size] = {}

    def follow(self, last: Weights | None) -> Weights | None:
        """Note what a trainer rank's part has in common with that of the version before, once it
        has been added; returns what the next version follows, which the rank keeps."""
        return None

    def add(self, bucket: Bucket, memory: HostMemory | None = None) -> None:
        """Keep a bucket, at least until the trainer's next step; copies of it on the host may use
        `memory`."""
        self._note_shapes(bucket)
        self._keep(bucket, memory)

    def add_all(
        self, source: Callable[[], Iterator[Bucket]], memory: HostMemory | None = None
    ) -> None:
        """Add all buckets of an iteration; only one of them needs to exist at a time.

        Args:
            source: makes the iteration.
            memory: room for copies of values on a GPU, which are valid until the second version
                after this one begins.
        """
        if memory is not None:
            memory.begin()
        for bucket in source():
            self.add(bucket, memory)

    def merge(self, others: Iterable[Weights]) -> None:
        """Add what other ranks have added to weights of the same kind."""
        for other in others:
            self._shapes |= other._shapes
            self._merge(other)

    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every weight added."""
        return self._shapes

    def _note_shapes(self, bucket: Bucket) -> None:
        self._shapes |= {name: part.shape for part in bucket for name in part.names}

    @abstractmethod
    def buckets(self, held: Held | None = None) -> Iterator[Bucket]:
        """All buckets added, read-only; each bucket is valid until the next one is requested.

        Args:
            held: an earlier version; values that have not changed since need not travel.
        """

    @abstractmethod
    def _keep(self, bucket: Bucket, memory: HostMemory | None) -> None: ...

    @abstractmethod
    def _merge(self, other: Weights) -> None: ...


class LocalWeights(Weights):
    """The trainer's parameters, for generators in its process: the only copies are those that
    generators fetch. Valid until the trainer's next step."""

    borrowed = True

    def __init__(self) -> None:
        super().__init__()
        self._parts: Bucket = []
        self._sources: list[Callable[[], Iterator[Bucket]]] = []

    def add_all(
        self, source: Callable[[], Iterator[Bucket]], memory: HostMemory | None = None
    ) -> None:
        """Keep the source, which each generator iterates over: parameters are not copied, and
        weights that the trainer has to compute exist one bucket at a time."""
        for bucket in source():
            self._note_shapes(bucket)
        self._sources.append(source)

    def buckets(self, held: Held | None = None) -> Iterator[Bucket]:
        yield self._parts
        for source in self._sources:
            yield from source()

    def _keep(self, bucket: Bucket, memory: HostMemory | None) -> None:
        self._parts += bucket

    def _merge(self, other: Weights) -> None:
        for bucket in other.buckets():
            self._parts += bucket


class CopiedWeights(LocalWeights):
    """Copies on the CPU in a given dtype, which stay valid and can be sent to another process;
    those of a GPU's values are in the memory that they are added with."""

    borrowed = False

    add_all = Weights.add_all  # copied immediately

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def _keep(self, bucket: Bucket, memory: HostMemory | None) -> None:
        self._parts += on_host(bucket, self._dtype, memory.take if memory else pageable)


@torch.no_grad()
def on_host(bucket: Bucket, dtype: torch.dtype, allocate: Allocate) -> Bucket:
    """Copies of a bucket's values on the CPU, in one buffer. A GPU casts them, and each is copied
    once: a copy between devices that also casts would cast on the CPU, in pageable memory."""
    copies = flat((part.values for part in bucket), allocate, dtype)
    for part, copy in zip(bucket, copies, strict=True):
        move(part.values, copy)
    for device in {part.values.device for part in bucket if part.values.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [part._replace(values=copy) for part, copy in zip(bucket, copies, strict=True)]


def move(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy values to another device or in place, cast where they are; returns the values as they
    were copied. A copy from or to a GPU may finish after this function returns, in the order of the
    stream."""
    if values.device != target.device:
        values = values.to(target.dtype)
    target.copy_(values, non_blocking=True)
    return values
