"""Attention over packed rows, registered with transformers as `packed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from tramontane.errors import InputError
from tramontane.packing import Block, Packing, Ragged

PACKED = "packed"


def refuse_unsupported(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Attention that is not computed here must not be computed wrongly.

    Raises:
        InputError: soft-capped scores, or attention sinks.
    """
    for unsupported in ("softcap", "s_aux"):
        if options.get(unsupported) is not None:
            raise InputError(
                f"{type(module).__name__} uses {unsupported!r} in its attention, which is not "
                f"computed here; choose another model"
            )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a packed row, as transformers' interface wants it.

    Takes query [1, Hq, N, d], key and value [1, Hkv, N, d]; returns [1, N, Hq, d]. Without
    `packing`, the batch is an ordinary rectangle without padding.

    Raises:
        InputError: as `refuse_unsupported`.
    """
    refuse_unsupported(module, kwargs)
    batch, _, length, d = query.shape
    if packing is None:
        packing = Packing([length] * batch, [None] * batch, query.device)
    scale = d**-0.5 if scaling is None else scaling
    # [N, heads, d]; under autocast, rotary embeddings have made float32 of queries and keys.
    rows = [x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value)]
    if _takes_ragged(value, dropout):
        q, k, v = rows
        out = _ragged_attention(q, k, v, packing.ragged, scale, sliding_window)
        return out.view(batch, length, *out.shape[1:]), None
    # One split a tensor, whose backward is one concatenation; slices would cost a zero-filled
    # gradient of the whole row each.
    queries, keys, values = (x.split(packing.sizes) for x in rows)
    outs = []
    for block, q, k, v in zip(packing.blocks, queries, keys, values, strict=True):
        before_k = before_v = None
        if block.context is not None:
            before_k, before_v = keys[block.context], values[block.context]
        window = sliding_window if (sliding_window or block.keys) < block.keys else None
        if block.short and dropout == 0.0:
            out = _ShortAttention.apply(q, k, v, before_k, before_v, block, scale, window)
        else:
            out = _fused_attention(q, k, v, before_k, before_v, block, scale, window, dropout)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(batch, length, *out.shape[1:]), None


def _takes_ragged(value: torch.Tensor, dropout: float) -> bool:
    """Whether flash attention of sequences of any lengths is there for these."""
    half = value.dtype in (torch.bfloat16, torch.float16)
    return value.device.type == "cuda" and half and dropout == 0.0


def _ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ragged: Ragged,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """On a GPU: one kernel for the whole row, which pads nothing. Its causal mask is aligned at the
    sequences' ends, so that a sequence's queries see all that it continues."""
    if ragged.keys is not None:
        k, v = k.index_select(0, ragged.keys), v.index_select(0, ragged.keys)
    out = varlen_attn(
        q,
        k,
        v,
        ragged.query_ends,
        ragged.key_ends,
        ragged.longest_query,
        ragged.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out


class _ShortAttention(torch.autograd.Function):
    """Plain matrix products: on a CPU, sequences of up to SHORT tokens pass through these several
    times as fast as through the fused kernel, in training above all.

    The query heads that share a key-value head are rows of one matrix product. With S = Q Kᵀ,
    P = softmax(S) and O = P V: ∂V = Pᵀ ∂O, ∂P = ∂O Vᵀ, ∂S = P (∂P − Σ P ∂P), ∂Q = ∂S K, ∂K = ∂Sᵀ Q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        before_k: torch.Tensor | None,
        before_v: torch.Tensor | None,
        block: Block,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        ctx.block, ctx.scale, ctx.heads, ctx.kv_heads = block, scale, heads, kv_heads
        places = block.query_places(heads)
        padded = (places.pad(q) * scale).view(block.batch * kv_heads, -1, q.shape[2])
        keys = block.key_places(kv_heads).pad(_joined(before_k, k)).flatten(0, 1)
        values = block.key_places(kv_heads).pad(_joined(before_v, v)).flatten(0, 1)
        bias = block.bias(window, q.dtype).repeat(heads // kv_heads, 1)
        scores = torch.baddbmm(bias, padded, keys.transpose(1, 2))
        # On bfloat16 the kernel itself sums in float32.
        p = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(padded, keys, values, p)
        return places.unpad(torch.bmm(p, values))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, keys, values, p = ctx.saved_tensors
        block: Block = ctx.block
        places = block.query_places(ctx.heads)
        # What padded queries saw must not reach keys and values.
        grad = places.clear(places.pad(grad)).view_as(q)
        grad_p = torch.bmm(grad, values.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        grad_q = places.unpad(torch.bmm(grad_scores, keys).mul_(ctx.scale))
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        own_k, before_k = _parted(grad_k, block, ctx.kv_heads)
        own_v, before_v = _parted(grad_v, block, ctx.kv_heads)
        return grad_q, own_k, own_v, before_k, before_v, None, None, None


def _joined(before: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    return own if before is None else torch.cat([before, own])


def _parted(x: torch.Tensor, block: Block, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of a rectangle of keys, to the block's own tokens and to its context's."""
    x = x.view(block.batch, heads, block.keys, -1)
    own = block.key_places(heads).unpad(x)
    if block.context is None:
        return own, None
    return own, x[:, :, : block.before].sum(0).transpose(0, 1)


def _fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    before_k: torch.Tensor | None,
    before_v: torch.Tensor | None,
    block: Block,
    scale: float,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    heads, kv_heads = q.shape[1], k.shape[1]
    places, key_places = block.query_places(heads), block.key_places(kv_heads)
    plain = window is None and block.context is None
    out = F.scaled_dot_product_attention(
        places.pad(q),
        key_places.pad(_joined(before_k, k)),
        key_places.pad(_joined(before_v, v)),
        attn_mask=None if plain else block.mask(window),
        is_causal=plain,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=heads != kv_heads,
    )
    return places.unpad(out)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
