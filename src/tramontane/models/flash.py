"""Flash attention on a GPU: the one file that calls torch's kernel.

It is called as `aten::_flash_attention_forward` and `_backward`: what is passed here is the same in
all releases from torch 2.11 to 2.15, whereas `torch.nn.attention.varlen`, a prototype on top of
them, has changed with each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32

from tramontane.errors import InputError
from tramontane.models.packing import VarlenLayout

# Most keys that one row of a decode step reads in one block of threads. A block reads about 40 GB/s
# of an H100's 3,350 (computed), so 4,096 keys of 128 numbers take 50 µs, about as long as all keys
# of 64 sequences of 2,000 tokens with two key-value heads. docs/gpu.md has measured steps.
SPAN = 4096

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


def use_fa3(device: torch.device, dtype: torch.dtype) -> None:
    """Have torch compute flash attention by FlashAttention 3 (arXiv 2407.08608), in the whole
    process from now on. It replaces the operators that this file calls, so the calls stay the same.

    Args:
        device: of the keys and values.
        dtype: theirs.

    Raises:
        InputError: it computes nothing for this device or dtype, or is not installed.
    """
    reason = ""
    if device.type != "cuda" or dtype != torch.bfloat16:
        reason = f"computes bfloat16 on a GPU, not {dtype} on {device.type}"
    elif (capability := torch.cuda.get_device_capability(device))[0] != 9:
        reason = "is for GPUs of capability 9, not {}.{}".format(*capability)
    else:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except ImportError as error:
            reason = f"is not installed: {error}"
    if reason:
        raise InputError(f"attention_kernel: FlashAttention 3 {reason}; leave the key out")


def supports(key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if the kernel takes such keys and values: [..., d] each."""
    if value.device.type != "cuda" or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = value.shape[-1]
    if key.shape[-1] != size or size % 8 or size > 256:
        return False
    return torch.cuda.get_device_capability(value.device)[0] >= 8


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within each sequence of a packed row, with gradients.

    The causal mask is aligned to the sequences' ends, so a sequence's queries see all tokens of the
    sequence it continues.

    Args:
        q: [N, Hq, d].
        k: [K, Hkv, d], in the order of the layout's keys; Hkv divides Hq.
        v: [K, Hkv, d].
        layout: the sequences.
        scale: factor of the scores.
        window: number of positions that a token sees, itself included; None for all.

    Returns:
        [N, Hq, d].
    """
    out: torch.Tensor = _PackedAttention.apply(q, k, v, layout, scale, window)
    return out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: VarlenLayout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        ctx.sequences = (
            layout.query_ends,
            layout.key_ends,
            layout.longest_query,
            layout.longest_key,
        )
        ctx.causal, ctx.options = window is None, _options(scale, window)
        if _computed.before is None:
            out, *others, _ = _forward(
                q, k, v, *ctx.sequences, 0.0, ctx.causal, False, **ctx.options
            )
        else:
            kept, *others = next(_computed.before)
            out = kept.detach()  # what is returned becomes a part of this forward's graph
        if _computed.kept is not None:
            _computed.kept.append((out.detach(), *others))
        ctx.save_for_backward(q, k, v, out, *others)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, random, unused = ctx.saved_tensors
        grads = _backward(
            grad.contiguous(),
            *saved,
            *ctx.sequences,
            0.0,
            ctx.causal,
            random,
            unused,
            **ctx.options,
        )
        return *grads, None, None, None


class _Computed(threading.local):
    """In this thread: a list to which attention adds what it computes, and an iterator over what it
    has computed before."""

    kept: list[tuple[torch.Tensor, ...]] | None = None
    before: Iterator[tuple[torch.Tensor, ...]] | None = None


_computed = _Computed()


def computed_once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a `torch.utils.checkpoint.checkpoint` that keeps the results of packed
    attention: the second forward takes those of the first. In long sequences attention is most of a
    small model's work, and its output is about as large as a block's input."""
    results: list[tuple[torch.Tensor, ...]] = []
    return _Using(results, again=False), _Using(results, again=True)


class _Using(AbstractContextManager[None]):
    """Attention adds its results to a list, or takes them from it `again`. Torch enters it once for
    each backward pass."""

    def __init__(self, results: list[tuple[torch.Tensor, ...]], again: bool) -> None:
        self._results, self._again = results, again

    def __enter__(self) -> None:
        if self._again:
            _computed.before = iter(self._results)
        else:
            _computed.kept = self._results

    def __exit__(self, *error: object) -> None:
        _computed.kept = _computed.before = None


def _options(scale: float, window: int | None) -> dict[str, Any]:
    """The kernel's options for causal attention within `window`."""
    left = -1 if window is None else window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


def spans(longest: int) -> int:
    """Number of rows of the kernel that compute a row of at most `longest` keys."""
    return -(-longest // SPAN)


class CachedKeys:
    """The keys in a cache that each row of a decode step attends to.

    The kernel reads a row's keys in one block of threads for each key-value head. It splits rows
    only while they are few (below 53 rows of four heads on an H100), and by their number, not by
    their lengths, so that one sequence of 32,768 tokens would take several times as long as all
    others together. Here, a row is computed as several rows of at most SPAN keys, and their outputs
    are merged by their shares of the softmax's denominator. Shapes depend on `longest` alone, so a
    CUDA graph can record the step.

    Args:
        counted: int32, 0, 1, 2 and so on; at least B · spans(longest) + 1 numbers.
        starts: [B + 1] int32, the first key of each row in the cache; the last is not read.
        used: [B] int32, the number of keys of each row, at least 1.
        longest: upper bound of `used`.
    """

    def __init__(
        self, counted: torch.Tensor, starts: torch.Tensor, used: torch.Tensor, longest: int
    ) -> None:
        rows, self._spans = len(used), spans(longest)
        self._whole = _Rows(counted[: rows + 1], starts, used, longest)
        if self._spans > 1:
            before = torch.arange(0, longest, SPAN, dtype=torch.int32, device=used.device)[:, None]
            parts = (used - before).clamp(0, SPAN)
            self._empty = parts == 0  # [spans, B]
            part_starts = F.pad((starts[:-1] + before).flatten(), (0, 1))
            ends = counted[: rows * self._spans + 1]
            self._parts = _Rows(ends, part_starts, parts.flatten(), SPAN)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None = None,
        sums: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Softmax attention of each row to its keys.

        Args:
            query: [B, Hq, d].
            keys: [positions, Hkv, d]; Hkv divides Hq.
            values: [positions, Hkv, d].
            scale: factor of the scores.
            window: number of the row's last keys that it sees; None for all.
            sums: also return the denominators.

        Returns:
            The output [B, Hq, d], and the logarithm of the softmax's denominator [Hq, B] float32;
            None without `sums`.
        """
        if self._spans == 1 or window is not None:  # the kernel does not read beyond the window
            out, log_sum = self._whole.attend(query, keys, values, scale, window)
            return out, log_sum if sums else None
        repeated = query.repeat(self._spans, 1, 1)
        out, log_sum = self._parts.attend(repeated, keys, values, scale, None)
        rows = self._empty.shape
        log_sum = log_sum.unflatten(1, rows).masked_fill(self._empty, float("-inf"))
        return merge(out.unflatten(0, rows), log_sum), log_sum.logsumexp(1) if sums else None


class _Rows(NamedTuple):
    """Arguments of the kernel for B rows of one query each, as in `CachedKeys`."""

    ends: torch.Tensor  # [B + 1] int32: 0 to B
    starts: torch.Tensor
    used: torch.Tensor
    longest: int

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, Hq, d], and the logarithm of the softmax's denominator [Hq, B] float32.
        A row without keys has the output 0."""
        options = _options(scale, window)
        if window is None:
            # The single query stands at the end of the keys and needs no causal mask; with one, the
            # kernel would not read the keys once for all query heads that share them.
            options["window_size_right"] = -1
        sequences = self.ends, self.starts, 1, self.longest
        out, log_sum, *_ = _forward(
            query, keys, values, *sequences, 0.0, False, False, seqused_k=self.used, **options
        )
        return out, log_sum


def merge(
    out: Float[torch.Tensor, "spans B H d"], log_sum: Float32[torch.Tensor, "H spans B"]
) -> Float[torch.Tensor, "B H d"]:
    """Attention to all keys, from attention to each of several spans of them.

    A span's weight is its share of the softmax's denominator.

    Args:
        out: [spans, B, H, d], attention to each span; finite for empty ones.
        log_sum: [H, spans, B] float32, the logarithm of each span's denominator; −∞ for spans
            without keys. No row may have only these.

    Returns:
        [B, H, d].
    """
    spans = len(out)
    weights = torch.softmax(log_sum, 1).permute(2, 0, 1)
    weights = weights.to(out.dtype, memory_format=torch.contiguous_format)
    # One product for each row and head: [1, spans] · [spans, d].
    parts = out.flatten(1, 2).transpose(0, 1)
    return torch.bmm(weights.reshape(-1, 1, spans), parts).view(out.shape[1:])
