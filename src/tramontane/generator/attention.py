"""Attention of decode steps: one query token per sequence, against that sequence's cached keys.

Registered with transformers as `slots`. In a forward under `forward_over`, attention first writes
its keys and values to the cache. Prefill and all other forwards use `packed_attention`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tramontane.generator.arena import ArenaStep
from tramontane.generator.cache import LanePart, LaneStep
from tramontane.generator.lanes import Lane, WrittenCache
from tramontane.generator.parking import ContinuedCache
from tramontane.models.attention import (
    Options,
    by_position,
    check_arguments,
    chunk_size,
    packed_attention,
)
from tramontane.models.latent import UpProjection, up_weight
from tramontane.models.packing import Packing

# Below this, a weight loses float32 precision.
_UNDERFLOW = 1e-35


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Decode attention with the signature of transformers' attention interface.

    In lanes, each sequence attends to its prefix, together with all that share it, and to its
    unshared positions; the two are merged by their shares of the softmax's denominator. Query heads
    that share a key-value head are the rows of one matrix product, so keys and values are never
    repeated. Batched matrix products are used because scaled_dot_product_attention is several times
    slower for one query in bfloat16 on a CPU. Softmax in float32.

    Args:
        module: the attention layer.
        query: [B, Hq, 1, d]; rows after the step's are filler, whose output is 0.
        key: [B, Hkv, 1, d]; Hkv divides Hq. Of latent attention, the latents (`keep_latents`).
        value: [B, Hkv, 1, dv]; the latents again.
        attention_mask: None: the step determines the visible positions.
        scaling: factor of the scores, by default 1/√d.
        sliding_window: number of positions that a token sees, itself included; None for all.
        softcap: as in `packed_attention`.
        s_aux: as in `packed_attention`.
        dropout: unused: a policy is sampled without.
        **kwargs: `packing` for packed forwards, and further arguments of transformers, without
            effect on the result.

    Returns:
        [B, 1, Hq, dv].

    Raises:
        InputError: see `models.attention.check_arguments`.
    """
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    # Blocks that count positions are not compiled, and others are one graph for all layers: what
    # depends on a layer's number is not asked there.
    compiling = torch.compiler.is_dynamo_compiling()
    chunk = None if compiling else chunk_size(module)
    options = Options(scale, sliding_window, softcap, s_aux, chunk=chunk)
    inputs = [query if compiling else by_position(module, query), key, value]
    if (weight := up_weight(module)) is not None:
        inputs.append(weight)
    if compiling:
        return _compiled_attention(inputs, options), None
    packing = kwargs.pop("packing", _forward.packing)
    check_arguments(module, attention_mask, kwargs)
    if _forward.cache is not None:
        _forward.cache.write(_forward.next_layer(), key, value)
        _forward.cache.beyond_flash |= softcap is not None or options.chunk is not None
    return _attend_written(inputs, options, packing), None


def _attend_written(
    inputs: Sequence[torch.Tensor], options: Options, packing: Packing | None
) -> torch.Tensor:
    """`slot_attention` once keys and values are written: `inputs` are queries, keys and values, and
    of latent attention the weight of its up-projection."""
    query, key, value, *weights = inputs
    if not weights:
        if _forward.decode is not None:
            return _attend_to_cache(query, _forward.decode, options)
        return _packed(query, key, value, options, packing)
    up = UpProjection.of(weights[0], query, key)
    if _forward.decode is not None:
        return up.values(_attend_to_cache(up.absorb(query), _forward.decode, options))
    return _packed(query, *up.expand(key), options, packing)


def _attend_to_cache(
    query: torch.Tensor,
    decode: LaneStep | ArenaStep | ContinuedCache,
    options: Options,
) -> torch.Tensor:
    """Attention of queries [B, Hq, N, d] to what is cached."""
    if isinstance(decode, ContinuedCache):
        return decode.attend(query, options)
    if isinstance(decode, ArenaStep):
        return decode.attend(query, options)[:, None]
    query = query * options.scale
    out, log_sum = _attend(query, decode, decode.unshared, options)
    if decode.prefixes:
        prefix_out, prefix_log_sum = _attend(query, decode, decode.prefixes, options)
        assert log_sum is not None
        assert prefix_log_sum is not None
        prefix_log_sum = prefix_log_sum[decode.members]
        share = torch.sigmoid(prefix_log_sum - log_sum)[:, :, None]
        out = torch.lerp(out, prefix_out[decode.members], share.to(out.dtype))
        if options.sinks is not None:
            log_sum = torch.logaddexp(log_sum, prefix_log_sum)
    if options.sinks is not None:
        assert log_sum is not None
        out = out * torch.sigmoid(log_sum - options.sinks.float())[:, :, None].to(out.dtype)
    if filler := len(query) - len(out):
        out = F.pad(out, (0, 0, 0, 0, 0, filler))
    return out[:, None]


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    packing: Packing | None,
) -> torch.Tensor:
    """`slot_attention` of a packed row to itself."""
    if packing is not None and options.chunk is not None:
        packing = packing.in_chunks(options.chunk)
    out, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, options.scale,
        packing=packing, sliding_window=options.window, softcap=options.softcap,
        s_aux=options.sinks,
    )  # fmt: skip
    return out


class _Forward(threading.local):
    """What the attention of this thread's forward is given, besides tensors: see `forward_over`."""

    cache: WrittenCache | None = None
    decode: LaneStep | ArenaStep | ContinuedCache | None = None
    packing: Packing | None = None
    layers: int = 0  # calls of attention so far

    def next_layer(self) -> int:
        """The number of this call of attention."""
        self.layers += 1
        return self.layers - 1


_forward = _Forward()


@contextmanager
def forward_over(
    cache: WrittenCache,
    decode: LaneStep | ArenaStep | ContinuedCache | None = None,
    packing: Packing | None = None,
) -> Iterator[None]:
    """Context manager: what the attention of one forward writes and reads.

    Args:
        cache: takes each layer's keys and values.
        decode: the step, or the cache of a prefill that continues cached sequences; attention reads
            its keys and values instead of its own. None in a prefill.
        packing: the row of a packed forward of compiled blocks.
    """
    _forward.cache, _forward.decode, _forward.packing = cache, decode, packing
    _forward.layers = 0
    try:
        yield
    finally:
        _forward.cache = _forward.decode = _forward.packing = None


def _compiled_attention(inputs: Sequence[torch.Tensor], options: Options) -> torch.Tensor:
    """`slot_attention` in a compiled block: one operation, which also writes keys and values;
    `inputs` as in `_attend_written`."""
    assert options.chunk is None, "such blocks are not compiled"
    parts = [x.transpose(1, 2) for x in inputs[:3]]
    if len(inputs) > 3:
        parts.append(inputs[3])
    elif len({(x.shape[3], x.dtype) for x in parts}) == 1:
        # A compiler fuses this and the rotation of queries and keys into one kernel.
        parts = [torch.cat(parts, 2)]
    out: torch.Tensor = _write_and_attend(parts, inputs[1].shape[1], *options[:4])
    return out


# `mutates_args` names no cache: a compiler copies mutated arguments that it does not understand.
@torch.library.custom_op(
    "tramontane::write_and_attend",
    mutates_args=(),
    schema="(Tensor[] parts, int kv_heads, float scale, int? window, float? softcap, "
    "Tensor? sinks) -> Tensor",
)
def _write_and_attend(
    parts: Sequence[torch.Tensor],
    kv_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Cache keys and values, and attend, in the thread's `forward_over`.

    Args:
        parts: queries [B, N, Hq, d], keys and values [B, N, Hkv, d]; or one tensor with the heads
            of all three; or latents as keys and values, and the weight of their up-projection.
        kv_heads: Hkv.
        scale: factor of the scores.
        window: see `slot_attention`.
        softcap: see `slot_attention`.
        sinks: see `slot_attention`.

    Returns:
        [B, N, Hq, dv], contiguous.
    """
    cache, number = _forward.cache, _forward.next_layer()
    assert cache is not None, "compiled attention outside forward_over"
    cache.beyond_flash |= softcap is not None
    if len(parts) == 1:
        rest = 2 * kv_heads
        query, pair = parts[0].split([parts[0].shape[2] - rest, rest], 2)
        query, pair = query.transpose(1, 2), pair.unflatten(2, (2, kv_heads))
        cache.write_pair(number, pair)
        key, value = pair.transpose(1, 3).unbind(2)
    else:
        query, key, value = (x.transpose(1, 2) for x in parts[:3])
        cache.write(number, key, value)
    options = Options(scale, window, softcap, sinks)
    inputs = [query, key, value, *parts[3:]]
    return _attend_written(inputs, options, _forward.packing).contiguous()


@_write_and_attend.register_fake
def _(
    parts: Sequence[torch.Tensor],
    kv_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    query, value = parts[0], parts[2 if len(parts) > 1 else 0]
    heads, width = query.shape[2], value.shape[3]
    if len(parts) == 1:
        heads -= 2 * kv_heads
    elif len(parts) > 3:
        width = UpProjection.of(parts[3], query.transpose(1, 2), value.transpose(1, 2)).width
    return value.new_empty(*query.shape[:2], heads, width)


def _attend(
    query: torch.Tensor, step: LaneStep, parts: Sequence[LanePart], options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention to each part's lane separately.

    Returns:
        The output [N, Hq, dv] for all members of all entries of `parts`, one after the other, and
        the logarithm of the softmax's denominator [N, Hq] float32; None if nothing needs it.
    """
    outputs, log_sums = [], []
    for part in parts:
        keys, values = step.read(part.lane)
        entries, kv_heads, length, d = keys.shape
        queries = part.queries(query)
        members = queries.shape[1]
        # The rows of one product: all queries that read the same keys.
        queries = (
            queries.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(entries * kv_heads, -1, d)
        )
        scores = torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2))
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        scores.view(entries, kv_heads, members, -1, length).add_(
            part.bias(options.window, options.chunk).unsqueeze(3)
        )
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        mixed = _mix(weights.to(values.dtype), values.flatten(0, 1), part.lane)
        mixed = mixed.view(entries, kv_heads, members, -1, values.shape[3])
        outputs.append(mixed.transpose(1, 2).reshape(entries * members, query.shape[1], -1))
        if step.prefixes or options.sinks is not None:
            log_sum = _log_sum_exp(scores, weights)
            log_sum = log_sum.view(entries, kv_heads, members, -1).transpose(1, 2)
            log_sums.append(log_sum.reshape(entries * members, -1))
    return torch.cat(outputs), torch.cat(log_sums) if log_sums else None


def _log_sum_exp(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """log Σ exp s, from any entry of a softmax w = exp s / Σ exp s."""
    first = weights[..., 0]
    # On a CPU two maxima cost more than a softmax; on a GPU, reading a value would block.
    if first.device.type == "cpu" and bool((first > _UNDERFLOW).all()):  # nearly always
        return scores[..., 0].float() - first.log()
    return scores.amax(-1).float() - weights.amax(-1).log()


def _mix(weights: torch.Tensor, values: torch.Tensor, lane: Lane) -> torch.Tensor:
    """Weighted sums of a lane's values: [N, rows, L] and [N, L, dv] → [N, rows, dv]."""
    n, rows, length = weights.shape
    if rows > 1 or weights.device.type != "cpu":
        return torch.bmm(weights, values)
    # embedding_bag takes half the time of a one-row product, and a third in bfloat16.
    index = lane.position_numbers(n)
    return F.embedding_bag(
        index,
        values.reshape(n * length, -1),
        index[::length],
        mode="sum",
        per_sample_weights=weights.view(-1),
    )[:, None]


AttentionInterface.register("slots", slot_attention)
