"""Attention over slots: one query token a sequence, against that sequence's cached keys.

Registered with transformers as `slots`. Prefill and any other forward go to `packed_attention`;
a decode step is told by its `decode` keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tramontane.errors import InputError
from tramontane.generator.cache import Part, Step
from tramontane.generator.lanes import Lane
from tramontane.generator.slab import SlabStep
from tramontane.models.attention import packed_attention, refuse_unsupported

# Below this, a weight is no longer exact to float32's digits.
_UNDERFLOW = 1e-35


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    decode: Step | SlabStep | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Decode attention as transformers' interface wants it.

    In lanes, each sequence attends to its prefix, with all that share it, and to its own
    positions; the two are merged by the share that each has of the softmax' denominator. The query
    heads that share a key-value head are the rows of one matrix product, so keys and values are
    never repeated. Batched matrix products rather than scaled_dot_product_attention, which is
    several times slower for one query in bfloat16 on a CPU. Softmax in float32.

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
    if isinstance(decode, SlabStep):
        return decode.attend(query, scale, sliding_window)[:, None], None
    query = query * scale
    own, own_mass = _attend(query, decode, decode.own, sliding_window)
    if decode.shared:
        shared, mass = _attend(query, decode, decode.shared, sliding_window)
        assert mass is not None
        assert own_mass is not None
        share = torch.sigmoid(mass[decode.seats] - own_mass)[:, :, None]
        own = torch.lerp(own, shared[decode.seats], share.to(own.dtype))
    return own[:, None], None


def _attend(
    query: torch.Tensor, step: Step, parts: Sequence[Part], window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention to each part's lane alone.

    Returns:
        Its output [N, Hq, dv] for all members of all entries of `parts`, one after the other, and
        the logarithm of its softmax' denominator [N, Hq] float32; None where nothing is merged.
    """
    outputs, masses = [], []
    for part in parts:
        keys, values = step.read(part.lane)
        entries, kv_heads, length, d = keys.shape
        asked = part.queries(query)
        members = asked.shape[1]
        # The rows of one product: all queries that read the same keys.
        asked = (
            asked.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(entries * kv_heads, -1, d)
        )
        scores = torch.bmm(asked, keys.flatten(0, 1).transpose(1, 2))
        scores.view(entries, kv_heads, members, -1, length).add_(part.bias(window).unsqueeze(3))
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        mixed = _mix(weights.to(values.dtype), values.flatten(0, 1), part.lane)
        mixed = mixed.view(entries, kv_heads, members, -1, values.shape[3])
        outputs.append(mixed.transpose(1, 2).reshape(entries * members, query.shape[1], -1))
        if step.shared:
            mass = _mass(scores, weights)
            mass = mass.view(entries, kv_heads, members, -1).transpose(1, 2)
            masses.append(mass.reshape(entries * members, -1))
    return torch.cat(outputs), torch.cat(masses) if masses else None


def _mass(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """log Σ exp s, by any one number of a softmax w = exp s / Σ exp s."""
    first = weights[..., 0]
    # On a CPU two searches for the largest cost more than a softmax; on a GPU, looking would wait.
    if first.device.type == "cpu" and bool((first > _UNDERFLOW).all()):  # nearly always
        return scores[..., 0].float() - first.log()
    return scores.amax(-1).float() - weights.amax(-1).log()


def _mix(weights: torch.Tensor, values: torch.Tensor, lane: Lane) -> torch.Tensor:
    """Weighted sums of a lane's values: [N, rows, L] and [N, L, dv] → [N, rows, dv]."""
    n, rows, length = weights.shape
    if rows > 1 or weights.device.type != "cpu":
        return torch.bmm(weights, values)
    # As bags of embeddings: half the time of a product of one row, a third in bfloat16.
    index = lane.index(n)
    return F.embedding_bag(
        index,
        values.reshape(n * length, -1),
        index[::length],
        mode="sum",
        per_sample_weights=weights.view(-1),
    )[:, None]


AttentionInterface.register("slots", slot_attention)
