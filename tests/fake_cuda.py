"""CUDA tensors on machines without a GPU: they have shapes, dtypes and a device, but no values.

Code under `fake_cuda` fails where it mixes devices. `Launches` shows what the same code would do on
a GPU: the kernels that it launches, and the operations for which the host waits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
# In inference mode, `bool(x)` and `x.item()` arrive as operations of their own.
_READS = {_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default}
_READS |= {_aten.equal.default}
# Operations that allocate, or name an existing tensor anew, without a kernel.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
_FREE |= {"detach", "detach_", "_unsafe_view", "_reshape_alias", "record_stream"}
_CUDA, _META = 1, 14  # c10::DeviceType


@contextmanager
def fake_cuda() -> Iterator[list[int]]:
    """Context manager: all tensors made inside are without values, and may be on `cuda`, a GPU of
    compute capability 9.0. Tensors from outside must be on the CPU.

    Returns:
        The bytes of each buffer that was pinned by `models.host`.
    """
    pinned: list[int] = []
    Launches.pinned.clear()

    def pin(buffer: torch.Tensor, owner: object) -> torch.Tensor:
        pinned.append(buffer.nbytes)
        return torch.empty_like(buffer, pin_memory=True)

    with (
        patch("tramontane.models.host.pin", pin),
        patch("tramontane.models.staging.pin", pin),
        patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        patch("torch.cuda.current_stream", Mock()),
        # A constant on the CPU would otherwise be moved to the GPU with its value.
        patch("torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT", -1),
        _device_guard(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield pinned


@contextmanager
def _device_guard() -> Iterator[None]:
    """Context manager: some of torch's functions, e.g. indexing, set the current device, which for
    CUDA fails without a GPU. Lend CUDA the code that sets the device `meta`: it does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, symbol)
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


class Launches(TorchDispatchMode):
    """Context manager inside `fake_cuda`, which notes what operations would do on a GPU.

    Args:
        value: stands for every value that the host reads.

    Attributes:
        kernels: number of kernels by operation; an operation counts as one kernel.
        waits: operations for which the host waits until the GPU has done all work before them:
            values read, shapes that depend on values, copies between pageable memory and the GPU.
        pinned: memory that was pinned under any `Launches` of this `fake_cuda`.
    """

    pinned: ClassVar[list[torch.UntypedStorage]] = []

    def __init__(self, value: float = 0) -> None:
        super().__init__()
        self.value = value
        self.kernels: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # the tensor's device
            return func(*args, **kwargs)
        if func not in _READS:  # in inference mode, composite operations arrive whole
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        reads = any(_is_cuda(x) for x in inputs)
        if func in _READS and any(isinstance(x, FakeTensor) for x in inputs):
            if reads:
                self.waits.append(name)
            truth = args[0].dtype == torch.bool or func in (
                _aten.is_nonzero.default,
                _aten.equal.default,
            )
            kind = bool if truth else float if args[0].is_floating_point() else int
            return kind(self.value)
        by_mask = func not in _INDEXING or any(x.dtype == torch.bool for x in _tensors(args[1]))
        if reads and by_mask and torch.Tag.dynamic_output_shape in func.tags:
            self.waits.append(name)
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if kwargs.get("pin_memory"):
            self.pinned.append(out.untyped_storage())
        if func in _COPIES and len({_is_cuda(x) for x in [*inputs[:2], *outputs]}) > 1:
            waits = not kwargs.get("non_blocking", len(args) > 2 and args[2])
            # A new tensor on the CPU is pinned if its copy does not block.
            if waits or not all(_is_cuda(x) or self._is_pinned(x) for x in inputs[:2]):
                self.waits.append(f"{name} between CPU and GPU")
        elif func is _aten.lift_fresh.default and _is_cuda(out):
            self.waits.append("a tensor of Python's values")
        elif func in _INDEXING and reads and not all(_is_cuda(x) for x in _tensors(args[1])):
            self.waits.append(f"{name} by an index on the CPU")
        launched = any(_is_cuda(x) for x in [*inputs, *outputs])
        if launched and not func.is_view and name not in _FREE:
            self.kernels[name] += 1
        return out

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == kept._cdata for kept in self.pinned)


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Without asking a fake tensor itself, which would be an operation in every mode."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cuda"
    return tensor.is_cuda


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Allocator(TorchDispatchMode):
    """Context manager inside `fake_cuda`: a GPU's memory, of which tensors take blocks of 512 bytes
    as in torch's allocator. It is a `CudaMemory` whose allowance is all that is free.

    Args:
        capacity: bytes of the GPU.

    Raises:
        torch.OutOfMemoryError: an operation's result does not fit; raised by that operation.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.used, self.highest = capacity, 0, 0
        self._storages: dict[int, Any] = {}

    def free(self) -> int:
        return self.capacity - self.used

    def held(self) -> int:
        return self.used

    allowance = free

    def peak(self, work: Callable[[], object]) -> int:
        before = self.highest = self.used
        work()
        return self.highest - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # composite operations arrive whole in inference mode
            with self:
                if (out := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return out
        out = func(*args, **(kwargs or {}))
        for x in _tensors(out):
            storage = x.untyped_storage()
            if _is_cuda(x) and storage._cdata not in self._storages:
                size = -(-storage.nbytes() // 512) * 512
                free = partial(self._release, storage._cdata, size)
                self._storages[storage._cdata] = weakref.finalize(storage, free)
                self.used += size
                self.highest = max(self.highest, self.used)
                if self.used > self.capacity:
                    raise torch.OutOfMemoryError(f"{func}: {size:,} bytes")
        return out

    def _release(self, key: int, size: int) -> None:
        del self._storages[key]
        self.used -= size
