"""Weights in 8-bit floating point as checkpoints store them: a tensor in E4M3, and a scale for the
whole of it (Mistral) or for each block (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tramontane.models.weight_files import Entry

STORED = torch.float8_e4m3fn
LARGEST = torch.finfo(STORED).max
# What a scale is called, after the weight's name or in place of its `weight`.
_SCALES = ("weight_scale_inv", "scale", "qscale_weight")
_ACTIVATIONS = ("activation_scale", "qscale_act")


def scales_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """The name of the scale of each 8-bit weight that has one, by the weight's name."""
    found = {}
    for name, entry in entries.items():
        stem = name.removesuffix("weight")
        scales = [f"{name}_scale_inv", *(f"{stem}{scale}" for scale in _SCALES if stem != name)]
        scale = next((s for s in scales if s in entries), None)
        if entry.dtype == STORED and scale is not None:
            found[name] = scale
    return found


def unscaled(entries: Mapping[str, Entry]) -> list[str]:
    """Names of the 8-bit weights whose scale is missing, or has a name that is not known here."""
    scales = scales_of(entries)
    return [name for name, x in entries.items() if x.dtype == STORED and name not in scales]


def is_activation_scale(name: str) -> bool:
    """True for the scale of a layer's inputs, which its maker measured."""
    return name.endswith(_ACTIVATIONS)


def block_of(config: Any) -> Sequence[int] | None:
    """Rows and columns of a block, by a quantized model's config; None: a scale for each tensor."""
    settings = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    block: Sequence[int] | None = settings.get("weight_block_size")
    return block


def quantize(
    weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8 bits, with scales in the form of those of the weight that it replaces.

    An old scale stays where it is large enough, so that an unchanged weight keeps its bits. E4M3 is
    a floating-point type: a scale that is larger than needed costs no precision.

    Args:
        weight: [..., rows, columns].
        scale: the old weight's, of any shape with a number for each block; those in 8 bits are
            powers of two.
        block: rows and columns of a block, the last of which may be cut off; None: the whole.

    Returns:
        The weight in E4M3, and its scales in shape and type of `scale`.
    """
    *lead, rows, columns = weight.shape
    height, width = block or (rows, columns)
    grid = (*lead, -(-rows // height), -(-columns // width))
    padding = (0, grid[-1] * width - columns, 0, grid[-2] * height - rows)
    blocks = F.pad(weight.float(), padding).view(*grid[:-1], height, grid[-1], width)
    needed = blocks.abs().amax((-3, -1)) / LARGEST
    powers = scale.dtype.itemsize == 1
    old = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    old = old.reshape(grid)
    if powers:
        needed = needed.clamp_min(2.0**-126).log2().ceil().exp2()
    # The largest of an unchanged block may have been rounded up to bfloat16.
    chosen = torch.where(needed <= old * (1 + torch.finfo(torch.bfloat16).eps), old, needed)
    chosen = chosen.to(torch.float32 if powers else scale.dtype).float()
    # A block of zeros may have a scale of 0.
    divisor = torch.where(chosen > 0, chosen, 1.0)[..., None, :, None]
    stored = (blocks / divisor).clamp(-LARGEST, LARGEST)
    stored = stored.view(*lead, grid[-2] * height, -1)[..., :rows, :columns].to(STORED)
    if scale.dtype == torch.uint8:
        chosen = chosen.log2() + 127
    return stored, chosen.to(scale.dtype).reshape(scale.shape)
