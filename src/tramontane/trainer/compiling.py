"""`trainer.compile`: torch.compile for a model's blocks. It fuses the operations between matrix
products: norms, rotary embeddings, activations."""

from __future__ import annotations

import os
import shutil

import torch
from transformers import AttentionInterface, PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.attention import PACKED, packed_attention


def check(device: str) -> None:
    """Check that a C++ compiler is installed, if compiling needs one.

    Raises:
        InputError: a CPU without a C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if torch.device(device).type == "cpu" and shutil.which(compiler) is None:
        raise InputError(
            f"compile is true, but there is no C++ compiler ({compiler!r}, as CXX says or "
            f"by default): install g++, or set it to false"
        )


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block when it first runs, for rows of any length.

    Attention is not compiled: its block shapes differ from row to row, and each shape would need a
    graph of its own.
    """
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            module.compile(dynamic=True)
