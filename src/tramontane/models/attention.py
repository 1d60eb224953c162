"""Attention over packed rows, registered with transformers as `packed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from tramontane.errors import InputError
from tramontane.models.packing import Block, Packing, Ragged

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
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
    if dropout == 0.0 and supports_varlen(value):
        out = _ragged_attention(q, k, v, packing.ragged, scale, sliding_window)
    elif dropout == 0.0 and not packing.long:
        out = _ShortAttention.apply(q, k, v, packing, scale, sliding_window)
    else:
        out = _mixed_attention(q, k, v, packing, scale, sliding_window, dropout)
    return out.view(batch, length, *out.shape[1:]), None


def _mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """Long blocks by the fused kernel, each for itself; with dropout, all of them."""
    # One split a tensor, whose backward is one concatenation; slices would cost a zero-filled
    # gradient of the whole row each.
    queries, keys, values = (x.split(packing.sizes) for x in (q, k, v))
    outs: dict[int, torch.Tensor] = {}
    if dropout == 0.0 and packing.short:
        short = _ShortAttention.apply(q, k, v, packing, scale, window)
        outs = dict(enumerate(short.split(packing.sizes)))
    for i, block in packing.long if dropout == 0.0 else enumerate(packing.blocks):
        seen_k, seen_v = _seen(keys, i, block), _seen(values, i, block)
        own_window = _narrow(window, block)
        outs[i] = _fused_attention(queries[i], seen_k, seen_v, block, scale, own_window, dropout)
    return torch.cat([outs[i] for i in range(len(packing.blocks))])


def _narrow(window: int | None, block: Block) -> int | None:
    """A sliding window, where it hides anything."""
    return window if (window or block.keys) < block.keys else None


def supports_varlen(value: torch.Tensor) -> bool:
    """Whether flash attention of sequences of any lengths is there for these."""
    if value.device.type != "cuda" or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = value.shape[-1]
    return size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(value.device)[0] >= 8


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
    times as fast as through the fused kernel, in training above all. One function for all blocks of
    a row, whose views autograd then need not keep a book of; rows of long blocks are left zero.

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
        (out,) = _rows(v, packing, (*q.shape[:2], v.shape[2]))
        queries, keys, values, outs = (x.split(packing.sizes) for x in (q, k, v, out))
        saved = []
        for i, block in packing.short:
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            padded = (places.pad(queries[i]) * scale).view(block.batch * kv_heads, -1, q.shape[2])
            seen_k = key_places.pad(_seen(keys, i, block)).flatten(0, 1)
            seen_v = key_places.pad(_seen(values, i, block)).flatten(0, 1)
            bias = block.bias(_narrow(window, block), q.dtype).repeat(heads // kv_heads, 1)
            scores = torch.baddbmm(bias, padded, seen_k.transpose(1, 2))
            # On bfloat16 the kernel itself sums in float32.
            p = torch.softmax(scores, dim=-1)
            saved += [padded, seen_k, seen_v, p]
            places.unpad(torch.bmm(p, seen_v), outs[i])
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packing: Packing = ctx.packing
        heads, kv_heads = ctx.shapes[0][1], ctx.shapes[1][1]
        grads = _rows(grad, packing, *ctx.shapes)
        grads_q, grads_k, grads_v = (x.split(packing.sizes) for x in grads)
        grads_out, saved = grad.split(packing.sizes), iter(ctx.saved_tensors)
        # In the row's order: a block adds to what it continues, which was written before.
        for i, block in packing.short:
            q, keys, values, p = (next(saved) for _ in range(4))
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            # What padded queries saw must not reach keys and values.
            own = places.clear(places.pad(grads_out[i])).view(*q.shape[:2], -1)
            grad_p = torch.bmm(own, values.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            places.unpad(torch.bmm(grad_scores, keys).mul_(ctx.scale), grads_q[i])
            for rows, seen in (
                (grads_k, torch.bmm(grad_scores.transpose(1, 2), q)),
                (grads_v, torch.bmm(p.transpose(1, 2), own)),
            ):
                key_places.unpad(seen, rows[i])
                if block.context is not None:
                    seen = seen.view(block.batch, kv_heads, block.keys, -1)
                    rows[block.context].add_(seen[:, :, : block.before].sum(0).transpose(0, 1))
        return *grads, None, None, None


def _rows(like: torch.Tensor, packing: Packing, *shapes: Sequence[int]) -> list[torch.Tensor]:
    """To be filled block by block; zero where long blocks stay out."""
    make = like.new_zeros if packing.long else like.new_empty
    return [make(shape) for shape in shapes]


def _seen(rows: Sequence[torch.Tensor], i: int, block: Block) -> torch.Tensor:
    """The keys or values that block `i` looks at: those that it continues, then its own."""
    return rows[i] if block.context is None else torch.cat([rows[block.context], rows[i]])


def _fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Block,
    scale: float,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """Of one block: its queries, and all that they may look at."""
    heads, kv_heads = q.shape[1], k.shape[1]
    places, key_places = block.query_places(heads), block.key_places(kv_heads)
    plain = window is None and block.context is None
    out = F.scaled_dot_product_attention(
        places.pad(q),
        key_places.pad(k),
        key_places.pad(v),
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
