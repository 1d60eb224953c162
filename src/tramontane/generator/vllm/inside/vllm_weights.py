"""Weights for vLLM from shared memory: a backend of vLLM's weight-transfer interface.

vLLM imports this file in each of its worker processes, as a worker extension, which registers the
backend `shared_memory` there. See https://docs.vllm.ai/en/latest/training/weight_transfer/.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "shared_memory"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Shared memory needs no handshake."""


@dataclass
class SharedFile(WeightTransferUpdateInfo):
    """Weights in the layout of a Hugging Face checkpoint, in one file.

    Attributes:
        path: the file, e.g. `/proc/PID/fd/N` of a memory file of another process.
        table: (name, dtype, shape, offset in bytes) of each tensor.
    """

    path: str = ""
    table: list[tuple[str, str, tuple[int, ...], int]] = field(default_factory=list)


class SharedMemoryWeights(WeightTransferEngine[NoInit, SharedFile]):
    """Copies weights from a file in shared memory to vLLM's model, layer by layer; vLLM fuses,
    shards and packs them as it does for a checkpoint."""

    init_info_cls = NoInit
    update_info_cls = SharedFile

    def init_transfer_engine(self, init_info: NoInit) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedFile) -> None:
        self.model.load_weights(_tensors(_map(update_info.path), update_info.table))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


class ReadableWeights:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    def effective_weights(self) -> dict[str, torch.Tensor]:
        """The weights that the model computes with, by their names in the checkpoint: a matrix is
        the layer's output for the unit vectors, since a layer may hold different weights from those
        it uses, e.g. a packed copy. Without bias terms; for models on one device."""
        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        found: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, LinearBase | ParallelLMHead):
                dtype = self.model_config.dtype  # type: ignore[attr-defined]
                found |= _matrices(
                    name, module, getattr(model, "packed_modules_mapping", {}), dtype
                )
            else:
                own = module.named_parameters(name, recurse=False)
                found |= {key: tensor.detach().float().cpu() for key, tensor in own}
        return found


def _matrices(
    name: str, layer: Any, packed: dict[str, list[str]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weight of a linear layer, split into the matrices of the checkpoint; `dtype` is that of
    its inputs, which its own tensors need not have (FP8)."""
    inputs = getattr(layer, "input_size", None) or layer.embedding_dim
    units = torch.eye(inputs, dtype=dtype, device=next(layer.parameters()).device)
    # [out, in]
    weight = layer.quant_method.apply(layer, units, None).detach().float().cpu().T.contiguous()
    parent, _, last = name.rpartition(".")
    parts = packed.get(last)
    if parts is None:
        return {f"{name}.weight": weight}
    prefix = f"{parent}." if parent else ""
    split = weight.split(list(layer.output_sizes))
    return {f"{prefix}{part}.weight": w for part, w in zip(parts, split, strict=True)}


def _map(path: str) -> mmap.mmap:
    """The bytes of a file; its tensors keep the mapping alive."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _tensors(
    memory: mmap.mmap, table: list[tuple[str, str, tuple[int, ...], int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, offset in table:
        dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        yield name, tensor.view(shape)


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeights)
