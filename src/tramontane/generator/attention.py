"""Attention over slots: one query token a sequence, against that sequence's cached keys.

Registered with transformers as `slots`. Prefill and any other forward go to `packed_attention`;
a decode step is told by its `decode` keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from tramontane.attention import packed_attention, refuse_unsupported
from tramontane.errors import InputError
from tramontane.generator.cache import Step


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

    The query heads that share a key-value head are the rows of one matrix product, so keys and
    values are never repeated. Batched matrix products rather than scaled_dot_product_attention,
    which is several times slower for one query in bfloat16 on a CPU. Softmax in float32.

    Args:
        module: the attention layer.
        query: [B, Hq, 1, d].
        key: [B, Hkv, 1, d], already written to the cache that `decode` reads; Hkv divides Hq.
        value: [B, Hkv, 1, dv], likewise.
        attention_mask: unused: the step knows who may look where.
        scaling: of the scores, by default 1/√d.
        decode: the step; None for any forward but a decode step.
        sliding_window: how many positions a token sees, itself included; None for all.
        **kwargs: what else transformers passes; `packing` for packed forwards.

    Returns:
        [B, 1, Hq, dv].

    Raises:
        InputError: attention that is not computed here: soft-capped scores, attention sinks, or
            keys that are cached in another form (multi-head latent attention).
    """
    refuse_unsupported(module, kwargs)
    if decode is None:
        return packed_attention(
            module, query, key, value, None, scaling, sliding_window=sliding_window, **kwargs
        )
    if not decode.holds(key, value):
        raise InputError(
            f"{type(module).__name__} does not attend to the keys and values that it caches; the "
            f"embedded generator cannot run it; generate with vLLM"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    out = []
    for segment in decode.segments:
        keys, values = decode.read(segment)
        batch, kv_heads, length, d = keys.shape
        grouped = query[segment.first : segment.last].reshape(batch * kv_heads, -1, d) * scale
        scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2))
        scores = scores.view(batch, kv_heads, -1, length) + segment.bias(sliding_window)
        weights = torch.softmax(scores, -1).to(values.dtype)
        mixed = torch.bmm(weights.view(batch * kv_heads, -1, length), values.flatten(0, 1))
        out.append(mixed.view(batch, 1, query.shape[1], -1))
    return torch.cat(out), None


AttentionInterface.register("slots", slot_attention)
