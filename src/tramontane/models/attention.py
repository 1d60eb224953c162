"""Attention over packed rows, registered with transformers as `packed`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tramontane.errors import InputError
from tramontane.models import flash
from tramontane.models.longrope import dynamic_context
from tramontane.models.packing import Block, Packing

PACKED = "packed"

_QUERY_CHUNK = 512  # queries whose scores are in memory at once in `_chunked_attention`

# Arguments of transformers' attention interface beside queries, keys, values and mask: those that
# are computed here, and those that change nothing in the result.
_COMPUTED = {"scaling", "dropout", "packing", "sliding_window", "softcap", "s_aux"}
_WITHOUT_EFFECT = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "deterministic",
}


class Options(NamedTuple):
    """How an attention layer turns scores into weights."""

    scale: float  # factor of the scores
    window: int | None = None  # positions that a token sees, itself included; None for all
    softcap: float | None = None  # scores s become softcap · tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [Hq] score of a key without a value, in each softmax
    dropout: float = 0.0  # probability
    chunk: int | None = None  # see `chunk_size`; in place of a window

    @property
    def is_plain(self) -> bool:
        """True for a softmax over scores alone, which is all that fused kernels compute."""
        return self.softcap is None and self.sinks is None


def packed_attention(
    module: torch.nn.Module,
    query: Float[torch.Tensor, "batch Hq N d"],
    key: Float[torch.Tensor, "batch Hkv keys d"],
    value: Float[torch.Tensor, "batch Hkv keys dv"],
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Float[torch.Tensor, "batch N Hq dv"], None]:
    """Causal attention within each sequence of a packed row, but for the spans that its packing
    lets see each other, with the signature of transformers' attention interface.

    Args:
        module: the attention layer.
        query: [1, Hq, N, d].
        key: [1, Hkv, N, d]; Hkv divides Hq.
        value: [1, Hkv, N, dv].
        attention_mask: None: the packing determines the visible positions.
        scaling: factor of the scores, by default 1/√d.
        dropout: dropout probability of attention weights.
        packing: the row's sequences, and the ranks that share it, each of which gives N of its
            tokens; None: those that `note_rows` noted, since some models' layers
            do not pass it on; without any, the batch is a rectangle without padding.
        sliding_window: number of positions that a token sees, itself included; None for all.
        softcap: cap of the scores (Gemma 2, arXiv 2408.00118, section 2).
        s_aux: [Hq], attention sinks (arXiv 2309.17453; gpt-oss learns one for each head).
        **kwargs: further arguments of transformers, without effect on the result.

    Returns:
        [1, N, Hq, dv].

    Raises:
        InputError: see `check_arguments`; or there are more keys than tokens.
    """
    check_arguments(module, attention_mask, kwargs)
    batch, _, length, d = query.shape
    if key.shape[2] != length:
        raise InputError(
            f"{type(module).__name__} attends to other keys than those of its tokens (compressed "
            f"ones, or an encoder's), which is not computed here; choose another model"
        )
    if reader := getattr(module, "row_reader", None):
        packing = packing or reader.packing
        query = by_position(module, query)
    if packing is None:
        packing = Packing([length] * batch, [None] * batch, query.device)
    exchange = packing.exchange
    if chunk := chunk_size(module):
        packing = packing.in_chunks(chunk)
    # [N, heads, d]; rotary embeddings may return float32 for a model in bfloat16.
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
    if exchange:
        q, k, v, s_aux = exchange.of_attention(q, k, v, s_aux)
    scale = d**-0.5 if scaling is None else scaling
    options = Options(scale, sliding_window, softcap, s_aux, dropout)
    fused = dropout == 0.0 and options.is_plain and not packing.mutual
    if fused and flash.supports(k, v):
        layout = packing.varlen
        if layout.keys is not None:
            k, v = k.index_select(0, layout.keys), v.index_select(0, layout.keys)
        out = flash.packed_attention(q, k, v, layout, scale, sliding_window)
    elif dropout == 0.0 and not packing.long:
        out = _ShortAttention.apply(q, k, v, s_aux, packing, options)
    else:
        out = _mixed_attention(q, k, v, packing, options)
    if exchange:
        out = exchange.to_tokens(out)
    return out.view(batch, length, *out.shape[1:]), None


def chunk_size(module: torch.nn.Module) -> int | None:
    """Positions of a chunk in a layer with chunked attention (Llama 4), which sees only its own."""
    config: Any = getattr(module, "config", None)
    kinds: Any = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds:  # a layer that is shared by others has no index
        return None
    if kinds[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def counts_positions(model: PreTrainedModel) -> bool:
    """True if layers of a model have chunked attention, or queries that `by_position` corrects."""
    kinds = getattr(model.config, "layer_types", None) or ()
    tuned = any(hasattr(module, "attn_temperature_tuning") for module in model.modules())
    return tuned or "chunked_attention" in kinds


def by_position(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries [B, Hq, N, d] of a layer that makes them larger with their distance from the start
    (arXiv 2501.19399; Llama 4's layers without rotary embeddings). transformers counts from the
    start of the row; here it is the start of the sequence, by the positions that were noted."""
    tuned = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if not tuned or module.row_reader.positions is None:
        return query
    places = torch.arange(query.shape[2], device=query.device)
    right, wrong = (
        torch.log1p(torch.floor((x.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for x in (module.row_reader.positions, places)
    )
    return (query * (right / wrong)[:, None, :, None]).to(query.dtype)


def check_arguments(
    module: torch.nn.Module, attention_mask: object, others: Mapping[str, object]
) -> None:
    """Check that attention is given nothing that would change its result and is not computed here.

    Args:
        module: the attention layer.
        attention_mask: what the layer gives as its mask.
        others: its arguments that are neither queries, keys, values nor in `packed_attention`'s
            signature.

    Raises:
        InputError: there is such an argument; the message names it.
    """
    given = {"attention_mask": attention_mask, **others}
    unknown = [
        name
        for name, x in given.items()
        if x is not None and name not in _WITHOUT_EFFECT and not (name == "is_causal" and x is True)
    ]
    if unknown:
        raise InputError(
            f"{type(module).__name__} gives its attention {', '.join(sorted(unknown))}, which is "
            f"not computed here; choose another model"
        )


def unknown_arguments(model: PreTrainedModel) -> list[str]:
    """Names of arguments that the code of a model's layers gives to attention, and that would be
    refused there."""
    given = {name for names in _interface_calls(model) for name in names}
    return sorted(given - _COMPUTED - _WITHOUT_EFFECT - {"attention_mask", "is_causal"})


def uses_interface(model: PreTrainedModel) -> bool:
    """True if layers of a model compute attention through transformers' attention interface."""
    return bool(_interface_calls(model))


def _interface_calls(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """The keywords of each call of the attention interface in the code of a model's layers."""
    classes = {type(module) for module in model.modules()}
    codes = [getattr(inspect.unwrap(cls.forward), "__code__", None) for cls in classes]
    constants = [x for code in codes if code for x in code.co_consts]
    return [x for x in constants if isinstance(x, tuple) and {"scaling", "dropout"} <= {*x}]


class RowReader:
    """A forward pre-hook of a model: notes the packing of its row, and the positions of its tokens
    [1, N], for layers that do not get them. They stay there for the backward pass, which may run
    blocks again.

    Args:
        longest: the longest sequence that is not refused; None: any.
    """

    packing: Packing | None = None
    positions: torch.Tensor | None = None

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.packing, self.positions = kwargs.get("packing"), kwargs.get("position_ids")
        if self._longest and self.packing and self.packing.longest > self._longest:
            raise InputError(
                f"a sequence of {self.packing.longest:,} tokens exceeds the model's context of "
                f"{self._longest:,}, beyond which its rotary frequencies (rope_type dynamic) would "
                f"depend on the sequences beside it; shorten it, or take a model with more context"
            )


def note_rows(model: PreTrainedModel) -> None:
    """Let all modules of a model know the packing of its row, as `row_reader`."""
    if not hasattr(model, "row_reader"):
        reader = RowReader(dynamic_context(model.config.get_text_config()))
        model.register_forward_pre_hook(reader, with_kwargs=True)
        for module in model.modules():
            module.row_reader = reader  # type: ignore[assignment]


def _mixed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, options: Options
) -> torch.Tensor:
    """Long blocks by the fused kernel, one call per block; with dropout, all blocks."""
    # One split per tensor: its backward is one concatenation, whereas each slice would cost a
    # zero-filled gradient of the whole row.
    queries, keys, values = (x.split(packing.sizes) for x in (q, k, v))
    outs: dict[int, torch.Tensor] = {}
    if options.dropout == 0.0 and packing.short:
        short = _ShortAttention.apply(q, k, v, options.sinks, packing, options)
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
    """The sliding window if it changes what a query of the block sees, else None."""
    return window if block.in_windows or (window or block.keys) < block.keys else None


class _ShortAttention(torch.autograd.Function):
    """Attention by plain matrix products: for sequences of up to SHORT tokens on a CPU, several
    times as fast as the fused kernel, especially in training. One function handles all blocks of a
    row, so that autograd need not track the blocks' views; rows of long blocks are zero.

    The query heads that share a key-value head are rows of one matrix product. With S = Q Kᵀ,
    P = softmax(S) and O = P V: ∂V = Pᵀ ∂O, ∂P = ∂O Vᵀ, ∂S = P (∂P − Σ P ∂P), ∂Q = ∂S K, ∂K = ∂Sᵀ Q.
    A sink is one more column of S, whose value is 0; its ∂S is −P Σ P ∂P. With a soft cap c and
    T = tanh(S / c), ∂S is multiplied by 1 − T².
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        packing: Packing,
        options: Options,
    ) -> torch.Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        ctx.packing, ctx.options, ctx.shapes = packing, options, (q.shape, k.shape, v.shape)
        (out,) = _make_rows(v, packing, (*q.shape[:2], v.shape[2]))
        queries, keys, values, outs = (x.split(packing.sizes) for x in (q, k, v, out))
        saved = []
        for i, block in packing.short:
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            padded = places.pad(queries[i]).mul_(options.scale)
            padded = padded.view(block.batch * kv_heads, -1, q.shape[2])
            seen_k = key_places.pad(_visible_rows(keys, i, block)).flatten(0, 1)
            seen_v = key_places.pad(_visible_rows(values, i, block)).flatten(0, 1)
            bias = block.bias(_effective_window(options.window, block), q.dtype).repeat(
                heads // kv_heads, 1
            )
            capped = None
            if options.softcap is None:
                scores = torch.baddbmm(bias, padded, seen_k.transpose(1, 2))
            else:
                capped = torch.bmm(padded, seen_k.transpose(1, 2)).div_(options.softcap).tanh_()
                scores = torch.add(bias, capped, alpha=options.softcap)
            if sinks is not None:
                scores = torch.cat([scores, _sink_column(sinks, scores, block.batch)], -1)
            # In bfloat16 the kernel itself sums in float32.
            p = torch.softmax(scores, dim=-1)
            saved += [padded, seen_k, seen_v, p, capped]
            places.unpad(torch.bmm(p[..., : block.keys], seen_v), outs[i])
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packing: Packing = ctx.packing
        heads, kv_heads = ctx.shapes[0][1], ctx.shapes[1][1]
        options: Options = ctx.options
        sinks = options.sinks
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        grads = _make_rows(grad, packing, *ctx.shapes)
        grads_q, grads_k, grads_v = (x.split(packing.sizes) for x in grads)
        grads_out, saved = grad.split(packing.sizes), iter(ctx.saved_tensors)
        # In the row's order: a block adds to the gradient of the block it continues, which is
        # already written.
        for i, block in packing.short:
            q, keys, values, p, capped = (next(saved) for _ in range(5))
            places, key_places = block.query_places(heads), block.key_places(kv_heads)
            # Gradients of padded queries must not reach keys and values.
            grad_out = places.clear(places.pad(grads_out[i])).view(*q.shape[:2], -1)
            grad_p = torch.bmm(grad_out, values.transpose(1, 2))
            if grad_sinks is not None:
                grad_p = F.pad(grad_p, (0, 1))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            if grad_sinks is not None:
                at_sinks = grad_scores[..., -1].view(block.batch, heads, -1)
                grad_sinks += at_sinks.sum((0, 2))
                grad_scores, p = grad_scores[..., :-1], p[..., :-1]
            if capped is not None:
                grad_scores = grad_scores * (1 - capped.square())
            places.unpad(torch.bmm(grad_scores, keys).mul_(options.scale), grads_q[i])
            for rows, seen in (
                (grads_k, torch.bmm(grad_scores.transpose(1, 2), q)),
                (grads_v, torch.bmm(p.transpose(1, 2), grad_out)),
            ):
                key_places.unpad(seen, rows[i])
                if block.context is not None:
                    seen = seen.view(block.batch, kv_heads, block.keys, -1)
                    rows[block.context].add_(seen[:, :, : block.before].sum(0).transpose(0, 1))
        return *grads, grad_sinks, None, None


def _sink_column(sinks: torch.Tensor, scores: torch.Tensor, batch: int) -> torch.Tensor:
    """The sinks [Hq] as one more key of scores [batch · Hkv, Hq / Hkv · L, keys]."""
    column = sinks.to(scores.dtype).view(1, -1, 1).expand(batch, -1, -1)
    length = scores.shape[0] * scores.shape[1] // column[..., 0].numel()
    return column.expand(-1, -1, length).reshape(*scores.shape[:2], 1)


def _make_rows(like: torch.Tensor, packing: Packing, *shapes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors to fill block by block; zeros if long blocks leave rows unfilled."""
    make = like.new_zeros if packing.long else like.new_empty
    return [make(shape) for shape in shapes]


def _visible_rows(rows: Sequence[torch.Tensor], i: int, block: Block) -> torch.Tensor:
    """Keys or values that block `i` attends to: those of the sequence it continues, then its
    own."""
    return rows[i] if block.context is None else torch.cat([rows[block.context], rows[i]])


def _fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, options: Options
) -> torch.Tensor:
    """Attention of one block's queries to its visible keys and values."""
    heads, kv_heads = q.shape[1], k.shape[1]
    places, key_places = block.query_places(heads), block.key_places(kv_heads)
    if not options.is_plain:
        padded = places.pad(q), key_places.pad(k), key_places.pad(v)
        return places.unpad(_chunked_attention(*padded, block.mask(options.window), options))
    plain = options.window is None and block.context is None and not block.mutual
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


def _chunked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: Options
) -> torch.Tensor:
    """`plain_attention` of some queries at a time. The backward pass computes their scores again,
    so that those of all queries are never in memory."""
    outs = [
        checkpoint(plain_attention, queries, k, v, visible, options, use_reentrant=False)
        for queries, visible in zip(
            q.split(_QUERY_CHUNK, -2), mask.split(_QUERY_CHUNK, -2), strict=True
        )
    ]
    return torch.cat(outs, -2)


def plain_attention(
    q: Float[torch.Tensor, "*rows Hq L d"],
    k: Float[torch.Tensor, "*rows Hkv K d"],
    v: Float[torch.Tensor, "*rows Hkv K dv"],
    mask: torch.Tensor,
    options: Options,
) -> Float[torch.Tensor, "*rows Hq L dv"]:
    """Attention with all options, by its definition; softmax in float32.

    Args:
        q: [..., Hq, L, d].
        k: [..., Hkv, K, d]; Hkv divides Hq.
        v: [..., Hkv, K, dv].
        mask: True where a query sees a key; broadcast to [..., Hkv, Hq / Hkv, L, K].
        options: the window is unused, since `mask` has it.

    Returns:
        [..., Hq, L, dv].
    """
    queries = q.unflatten(-3, (k.shape[-3], -1))
    scores = (queries * options.scale) @ k.unsqueeze(-3).transpose(-1, -2)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.view(*scores.shape[-4:-2], 1, 1).to(scores.dtype)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : k.shape[-2]].to(v.dtype)
    weights = F.dropout(weights, options.dropout)
    return (weights @ v.unsqueeze(-3)).flatten(-4, -3)


def no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
