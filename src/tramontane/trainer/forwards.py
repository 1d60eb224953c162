"""Training-mode forwards: without dropout; with activation checkpointing, which keeps only each
block's input, optionally in host memory; and compiled, which fuses the operations between matrix
products: norms, rotary embeddings, activations."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from tramontane.config.trainer import NumericsConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.attention import PACKED, packed_attention
from tramontane.models.compiling import compile_module, missing_for_compiling
from tramontane.models.families import short_sequences
from tramontane.models.flash import computed_once
from tramontane.models.host import Offload
from tramontane.models.packing import pack

SAME = 1e-3  # largest difference of logits computed twice; a GPU may sum in a different order


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout and layer drop to 0, in the modules and in the configs that they read: the
    generator samples without dropout, and log-probs must agree."""
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        _set_to_zero(module, {"p"} if is_dropout else set())
        if config := getattr(module, "config", None):
            _set_to_zero(config, set())


def train_blocks(model: PreTrainedModel) -> None:
    """Set training mode where activations are checkpointed, which needs it, and evaluation mode
    elsewhere: what is random in training, such as PhiMoE's routers, must not make the trained
    policy another than the generator's."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _set_to_zero(owner: object, more: set[str]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and ("drop" in name or name in more):
            setattr(owner, name, 0.0)


@torch.no_grad()
def check_repeatable(model: PreTrainedModel, device: torch.device) -> None:
    """Check that a model in training mode computes the same logits twice; every rank must call it.

    Raises:
        InputError: the logits differ.
    """
    row = pack(short_sequences(model), device)
    first, second = (model(**row).logits.float() for _ in range(2))
    if (largest := float((first - second).abs().max())) > SAME:
        raise InputError(
            f"{type(model).__name__} computes different logits for the same tokens each time (they "
            f"differ by up to {largest:.2g}): something in it is random while it is trained, such "
            f"as a dropout under an unusual name. Set it to 0 in the checkpoint's config.json"
        )


def checkpoint_blocks(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Keep only each block's input, in host memory with `activation_offload`; the backward pass
    recomputes the rest of the block. The output of flash attention is kept too, unless
    `activation_offload` or `gradient_checkpointing: full` is set. The model may be sharded."""
    options: dict[str, Any] = {"use_reentrant": False}
    if config.keeps_attention:
        options["context_fn"] = computed_once
    # A release of transformers 5 renames the method.
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)(options)
    if config.activation_offload:
        numbers = config.microbatch_tokens * model.config.hidden_size
        offload = Offload(numbers * getattr(torch, config.dtype).itemsize)
        for module in model.modules():
            attributes = vars(module)
            if checkpoint := attributes.get("_gradient_checkpointing_func"):
                attributes["_gradient_checkpointing_func"] = partial(
                    _offloaded, checkpoint, offload
                )


def _offloaded(
    checkpoint: Callable[..., Any], offload: Offload, block: Callable[..., Any], *inputs: Any
) -> Any:
    """Run a checkpointed block whose inputs are kept on the CPU until the backward pass. The
    block's second forward, in the backward pass, does not go through this function, so its
    activations stay on the device."""
    with offload:
        return checkpoint(block, *inputs)


def use_expandable_segments(device: torch.device) -> None:
    """Let torch's allocator on a GPU grow its segments, unless the environment configures it: rows
    of ever-changing lengths would leave gaps in segments of fixed sizes."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if device.type == "cuda" and not any(name in os.environ for name in names):
        # Unlike a variable, this also counts after CUDA has started, and child processes, such as
        # vLLM's, do not inherit it.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


class Compilation(NamedTuple):
    """Whether a model is compiled, and why `auto` decides so."""

    enabled: bool
    reason: str


def compilation(config: NumericsConfig) -> Compilation:
    """Resolve `compile` on this machine. `auto` compiles on a CUDA device, where a step takes
    longer between the matrix products than in them, if all that compiling needs is installed.

    Raises:
        InputError: `compile` is true, and something that it needs is missing.
    """
    missing = missing_for_compiling(config.device)
    if config.compile is True and missing:
        raise InputError(f"compile is true, but there is {missing}, or set it to false")
    on_gpu = config.device.startswith("cuda")
    auto, reason = on_gpu and not missing, missing if on_gpu else "not a CUDA device"
    enabled = auto if config.compile == "auto" else config.compile
    return Compilation(enabled, "on, a CUDA device" if auto else f"off, {reason}")


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block when it first runs, for rows of any length.

    Attention is not compiled: its block shapes differ from row to row, and each shape would need a
    graph of its own.
    """
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            compile_module(module)
