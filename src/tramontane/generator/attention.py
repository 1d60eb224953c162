"""Attention over slots: one query token for each live slot, against that slot's cached keys.

Registered with transformers as `slots`. Prefill and any other forward go to `packed_attention`;
a decode step is told by its `decode` keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from tramontane.errors import InputError
from tramontane.generator.cache import Step
from tramontane.models import packed_attention


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    decode: Step | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Decode attention as transformers' interface wants it.

    The query heads that share a key-value head are rows of one matrix product, so keys and values
    are never repeated. Batched matrix products rather than scaled_dot_product_attention, which is
    several times slower for one query in bfloat16 on a CPU (`benchmarks/generation.py`).

    Args:
        query: [B, Hq, 1, d].
        key: [B, Hkv, L, d], a view on the cache; Hkv divides Hq.
        value: [B, Hkv, L, dv], likewise.
        decode: the step, which knows how far each slot's token may look.

    Returns:
        [B, 1, Hq, dv].

    Raises:
        InputError: the model uses attention that this does not compute (soft-capped scores,
            attention sinks), or does not pass keyword arguments to its attention.
    """
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise InputError(
                f"{type(module).__name__} uses {unsupported!r} in its attention, which the "
                f"embedded generator does not compute; generate with vLLM"
            )
    if decode is None:
        if key.shape[2] != query.shape[2]:
            raise InputError(
                f"{type(module).__name__} does not pass keyword arguments on to its attention, so "
                f"the embedded generator cannot run this model; generate with vLLM"
            )
        return packed_attention(
            module, query, key, value, None, scaling, sliding_window=sliding_window, **kwargs
        )
    batch, heads, _, d = query.shape
    kv_heads, length = key.shape[1:3]
    grouped = query.reshape(batch * kv_heads, heads // kv_heads, d)
    grouped = grouped * (d**-0.5 if scaling is None else scaling)
    scores = _products(grouped, key.flatten(0, 1)).view(batch, kv_heads, -1, length)
    weights = torch.softmax(scores + decode.bias(sliding_window), -1).to(value.dtype)
    out = torch.bmm(weights.view(batch * kv_heads, -1, length), value.flatten(0, 1))
    return out.view(batch, 1, heads, -1), None


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Each query with each key: [N, G, d], [N, L, d] → [N, G, L]."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # Keys on the left: twice as fast, as keys then stream through in the order they lie.
        return torch.bmm(key, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, key.transpose(1, 2))


AttentionInterface.register("slots", slot_attention)
