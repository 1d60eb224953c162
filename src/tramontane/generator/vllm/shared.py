"""A model's weights in memory shared with vLLM's process."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tramontane.errors import InputError

ALIGNMENT = 64  # bytes; alignment of each tensor's start

Row = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, offset in bytes


class SharedTensors:
    """A copy of a model's weights in shared memory (a memory file of Linux).

    Attributes:
        tensors: by name in the model's state dict; tied weights are one tensor.
        path: the memory as a file, for processes on this machine while this object exists.
        table: the same memory as the tensors of a Hugging Face checkpoint.

    Raises:
        InputError: a model whose parameters are not laid out like the tensors of its checkpoints.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        state = model.state_dict(keep_vars=True)
        places: dict[int, tuple[int, torch.Tensor]] = {}  # by the identity of each tensor
        size = 0
        for tensor in state.values():
            if id(tensor) not in places:
                places[id(tensor)] = size, tensor
                size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        file = os.memfd_create("tramontane weights")
        weakref.finalize(self, os.close, file)
        os.posix_fallocate(file, 0, size)  # a full machine refuses here, not amid a copy
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._memory = mmap.mmap(file, size)
        mapped = {
            key: _tensor(self._memory, offset, tensor) for key, (offset, tensor) in places.items()
        }
        for key, (_, tensor) in places.items():
            mapped[key].copy_(tensor.data)
        self.tensors = {name: mapped[id(tensor)] for name, tensor in state.items()}
        self.table = self._layout(model)

    def _layout(self, model: PreTrainedModel) -> list[Row]:
        """The table of the tensors under a checkpoint's names: newer models in transformers fuse
        some, e.g. those of experts."""
        start = min(tensor.data_ptr() for tensor in self.tensors.values())
        rows: list[Row] = []
        for name, tensor in revert_weight_conversion(model, dict(self.tensors)).items():
            offset = tensor.data_ptr() - start
            if not 0 <= offset < len(self._memory) or not tensor.is_contiguous():
                raise InputError(
                    f"generator.kind vllm: {model.config.model_type} models cannot be sent to "
                    f"vLLM, since {name} of a checkpoint is not part of a parameter; take slots"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((name, dtype, tuple(tensor.shape), offset))
        return rows


def _tensor(memory: Any, offset: int, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.view(like.shape)
