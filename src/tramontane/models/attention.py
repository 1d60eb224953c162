"""Attention over packed rows, registered with transformers as `packed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from tramontane.errors import InputError
from tramontane.models import flash
from tramontane.models.packing import Block, Packing

PACKED = "packed"


class _Options(NamedTuple):
    """Scaling of the scores, sliding window in positions or None, and dropout probability."""

    scale: float
    window: int | None
    dropout: float


def refuse_unsupported(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Reject options of an attention layer that are not supported here.

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
    """Causal attention within each sequence of a packed row, with the signature of transformers'
    attention interface.

    Args:
        module: the attention layer.
        query: [1, Hq, N, d].
        key: [1, Hkv, N, d]; Hkv divides Hq.
        value: [1, Hkv, N, dv].
        attention_mask: unused: the packing determines the visible positions.
        scaling: factor of the scores, by default 1/√d.
        dropout: dropout probability of attention weights.
        packing: the row's sequences; None: the batch is a rectangle without padding.
        sliding_window: number of positions that a token sees, itself included; None for all.
        **kwargs: further arguments of transformers.

    Returns:
        [1, N, Hq, dv].

    Raises:
        InputError: see `refuse_unsupported`.
    """
    refuse_unsupported(module, kwargs)
    batch, _, length, d = query.shape
    if packing is None:
        packing = Packing([length] * batch, [None] * batch, query.device)
    scale = d**-0.5 if scaling is None else scaling
    # [N, heads, d]; rotary embeddings may return float32 for a model in bfloat16.
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
    if dropout == 0.0 and flash.supports(k, v):
        layout = packing.varlen
        if layout.keys is not None:
            k, v = k.index_select(0, layout.keys), v.index_select(0, layout.keys)
        out = flash.packed_attention(q, k, v, layout, scale, sliding_window)
    elif dropout == 0.0 and not packing.long:
        out = _ShortAttention.apply(q, k, v, packing, scale, sliding_window)
    else:
        out = _mixed_attention(q, k, v, packing, _Options(scale, sliding_window, dropout))
    return out.view(batch, length, *out.shape[1:]), None


def _mixed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, options: _Options
) -> torch.Tensor:
    """Long blocks by the fused kernel, one call per block; with dropout, all blocks."""
    # One split per tensor: its backward is one concatenation, whereas each slice would cost a
    # zero-filled gradient of the whole row.
    queries, keys, values = (x.split(packing.sizes) for x in (q, k, v))
    outs: dict[int, torch.Tensor] = {}
    if options.dropout == 0.0 and packing.short:
        short = _ShortAttention.apply(q, k, v, packing, options.scale, options.window)
        outs = dict(enumerate(short.split(packing.sizes)))
    for i, block in packing.long if options.dropout == 0.0 else enumerate(packing.blocks):
        outs[i] = _fused_attention(
            queries[i],
            _visible_rows(keys, i, block),
            _visible_rows(values, i, block),
            block,
            options._replace(window=_effective_window(options.window, block)),
        )
    return torch.cat([outs[i] for i in range(len(packing.blocks))])


def _effective_window(window: int | None, block: Block) -> int | None:
    """The sliding window if it hides any key of the block, else None."""
    return window if (window or block.keys) < block.keys else None


class _ShortAttention(torch.autograd.Function):
    """Attention by plain matrix products: for sequences of up to SHORT tokens on a CPU, several
    times as fast as the fused kernel, especially in training. One function handles all blocks of a
    row, so that autograd need not track the blocks' views; rows of long blocks are zero.

    The query heads that share a key-value head are rows of one matrix product. With S = Q Kᵀ,
    P = softmax(S) and O = P V: ∂V = Pᵀ ∂O, ∂P = ∂O Vᵀ, ∂S = P (∂P − Σ P ∂P), ∂Q = ∂S K, ∂K = ∂Sᵀ Q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packing: Packing,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        ctx.packing, ctx.scale, ctx.shapes = packing, scale, (q.shape, k.shape, v.shape)
        (out,) = _make_rows(v, packing, (*q.shape[:2], v.shape[2]))
        queries, keys, values, outs = (x.split(packing.sizes) for x in (q, k, v, out))
        saved = []
        for i, block in packing.short:
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            padded = (places.pad(queries[i]) * scale).view(block.batch * kv_heads, -1, q.shape[2])
            seen_k = key_places.pad(_visible_rows(keys, i, block)).flatten(0, 1)
            seen_v = key_places.pad(_visible_rows(values, i, block)).flatten(0, 1)
            bias = block.bias(_effective_window(window, block), q.dtype).repeat(
                heads // kv_heads, 1
            )
            scores = torch.baddbmm(bias, padded, seen_k.transpose(1, 2))
            # In bfloat16 the kernel itself sums in float32.
            p = torch.softmax(scores, dim=-1)
            saved += [padded, seen_k, seen_v, p]
            places.unpad(torch.bmm(p, seen_v), outs[i])
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packing: Packing = ctx.packing
        heads, kv_heads = ctx.shapes[0][1], ctx.shapes[1][1]
        grads = _make_rows(grad, packing, *ctx.shapes)
        grads_q, grads_k, grads_v = (x.split(packing.sizes) for x in grads)
        grads_out, saved = grad.split(packing.sizes), iter(ctx.saved_tensors)
        # In the row's order: a block adds to the gradient of the block it continues, which is
        # already written.
        for i, block in packing.short:
            q, keys, values, p = (next(saved) for _ in range(4))
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            # Gradients of padded queries must not reach keys and values.
            grad_out = places.clear(places.pad(grads_out[i])).view(*q.shape[:2], -1)
            grad_p = torch.bmm(grad_out, values.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            places.unpad(torch.bmm(grad_scores, keys).mul_(ctx.scale), grads_q[i])
            for rows, seen in (
                (grads_k, torch.bmm(grad_scores.transpose(1, 2), q)),
                (grads_v, torch.bmm(p.transpose(1, 2), grad_out)),
            ):
                key_places.unpad(seen, rows[i])
                if block.context is not None:
                    seen = seen.view(block.batch, kv_heads, block.keys, -1)
                    rows[block.context].add_(seen[:, :, : block.before].sum(0).transpose(0, 1))
        return *grads, None, None, None


def _make_rows(like: torch.Tensor, packing: Packing, *shapes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors to fill block by block; zeros if long blocks leave rows unfilled."""
    make = like.new_zeros if packing.long else like.new_empty
    return [make(shape) for shape in shapes]


def _visible_rows(rows: Sequence[torch.Tensor], i: int, block: Block) -> torch.Tensor:
    """Keys or values that block `i` attends to: those of the sequence it continues, then its
    own."""
    return rows[i] if block.context is None else torch.cat([rows[block.context], rows[i]])


def _fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, options: _Options
) -> torch.Tensor:
    """Attention of one block's queries to its visible keys and values."""
    heads, kv_heads = q.shape[1], k.shape[1]
    places, key_places = block.query_places(heads), block.key_places(kv_heads)
    plain = options.window is None and block.context is None
    out = F.scaled_dot_product_attention(
        places.pad(q),
        key_places.pad(k),
        key_places.pad(v),
        attn_mask=None if plain else block.mask(options.window),
        is_causal=plain,
        scale=options.scale,
        dropout_p=options.dropout,
        enable_gqa=heads != kv_heads,
    )
    return places.unpad(out)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
