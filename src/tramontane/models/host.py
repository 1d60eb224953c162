"""Tensors in flat buffers of the host's memory, pinned where a GPU copies from or to them.

torch's own pinned memory comes in powers of two: a tensor of 136 MB takes 256. A buffer that is
registered with CUDA takes its size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

ALIGNMENT = 64  # bytes; alignment of each tensor in a buffer
PASSING_BYTES = 64 << 20  # least size of the buffer of `pass_through`

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

Allocate = Callable[[int], torch.Tensor]  # a number of bytes → a buffer of that size, uint8


def flat(
    tensors: Iterable[torch.Tensor], allocate: Allocate, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Uninitialized contiguous tensors of the same shapes, in one buffer.

    Args:
        tensors: on any device, with any strides.
        allocate: makes the buffer, [bytes] uint8; what it raises is passed on.
        dtype: dtype of all; None: each keeps its own.
    """
    like = [(tensor.shape, dtype or tensor.dtype) for tensor in tensors]
    places, end = [], 0
    for shape, kind in like:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + shape.numel() * kind.itemsize
        places.append((start, end))
    buffer = allocate(end) if end else pageable(0)  # CUDA refuses to pin nothing
    return [
        buffer[start:end].view(kind).view(shape)
        for (start, end), (shape, kind) in zip(places, like, strict=True)
    ]


def pageable(size: int) -> torch.Tensor:
    """A buffer that only the CPU uses."""
    return torch.empty(size, dtype=torch.uint8)


def pin(buffer: torch.Tensor, owner: object) -> torch.Tensor:
    """Pin a buffer and keep it for as long as its `owner` exists.

    Raises:
        RuntimeError: CUDA cannot pin so much memory.
    """
    register = torch.cuda.cudart().cudaHostRegister
    if code := int(register(buffer.data_ptr(), buffer.nbytes, _PORTABLE)):
        raise RuntimeError(f"CUDA cannot pin {buffer.nbytes:,} bytes of host memory (error {code})")
    weakref.finalize(owner, _unpin, buffer)
    return buffer


def _unpin(buffer: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Context manager: tensors on a GPU that are saved for the backward pass are in pinned memory
    until then. Nothing waits for the two copies, which run in the order of the GPU's stream.

    Its buffers are kept for the next context, since pinning one takes longer than filling it.

    Args:
        size: bytes of a buffer; a larger tensor has a buffer of its own size.
    """

    def __init__(self, size: int) -> None:
        super().__init__(self._to_host, _to_device)
        self._size = size
        self._free: list[torch.Tensor] = []

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor | _Offloaded:
        return (
            _Offloaded(tensor, self._take(tensor.nbytes), self._free) if tensor.is_cuda else tensor
        )

    def _take(self, size: int) -> torch.Tensor:
        for place, buffer in enumerate(self._free):
            if buffer.nbytes >= size:
                return self._free.pop(place)
        return pin(pageable(max(size, self._size)), self)


class _Offloaded:
    """A tensor's copy in a buffer; the buffer is free again once the copy is deleted."""

    def __init__(
        self, tensor: torch.Tensor, buffer: torch.Tensor, free: list[torch.Tensor]
    ) -> None:
        self._buffer, self._free, self._device = buffer, free, tensor.device
        self._values = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._values.copy_(tensor, non_blocking=True)

    def __del__(self) -> None:
        self._free.append(self._buffer)

    def on_device(self) -> torch.Tensor:
        return self._values.to(self._device, non_blocking=True)


def _to_device(saved: torch.Tensor | _Offloaded) -> torch.Tensor:
    return saved.on_device() if isinstance(saved, _Offloaded) else saved


class HostMemory:
    """Memory for the versions of the weights that a GPU publishes.

    Two versions take turns, so the last one can be read until the next is complete. Their buffers
    are pinned and shared with other processes; both take longer than a copy, so they are kept.

    Args:
        allocate: makes a buffer; None: shared and pinned.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self._versions: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._turn = self._used = 0
        self._passing = pageable(0)

    def begin(self) -> None:
        """Begin a version; its buffers have the sizes of those of the version before."""
        self._turn, self._used = 1 - self._turn, 0

    def take(self, size: int) -> torch.Tensor:
        """The next buffer of the version."""
        buffers = self._versions[self._turn]
        if self._used == len(buffers):
            make = self._allocate or self._shared
            buffers.append(make(size))
        self._used += 1
        return buffers[self._used - 1]

    def pass_through(self, size: int) -> torch.Tensor:
        """A buffer for values that are copied on immediately: each call returns the same memory."""
        if self._passing.nbytes < size:
            self._passing = (self._allocate or self._shared)(max(size, PASSING_BYTES))
        return self._passing[:size]

    def _shared(self, size: int) -> torch.Tensor:
        return pin(pageable(size).share_memory_(), self)
