"""Keys and values of the sequences in flight: one slot a sequence, allocated once.

Two duck types of transformers' cache, since a model only ever calls `update`: `PackedCache` records
what a packed prefill computes, `SlotCache` is what decoding writes to and reads from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

# Reads are rounded up to so many positions: matrix kernels like round sizes, and on a bfloat16 CPU
# each new size costs a compilation.
_ROUND = 16

KV = tuple[torch.Tensor, torch.Tensor]


class PackedCache(Cache):
    """Records the keys and values of one packed forward, [1, kv_heads, N, head_dim] a layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.recorded: dict[int, KV] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        self.recorded[layer_idx] = (key, value)
        return key, value

    def split(self, lengths: tuple[int, ...]) -> list[Prefix]:
        """The recorded keys and values by sequence; views, nothing is copied."""
        by_layer = {
            layer: [kv[0].split(lengths, dim=1) for kv in pair]
            for layer, pair in self.recorded.items()
        }
        return [
            Prefix(n, {layer: (k[i], v[i]) for layer, (k, v) in by_layer.items()})
            for i, n in enumerate(lengths)
        ]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of one sequence: `length` positions, [kv_heads, length, head_dim] a layer."""

    length: int
    layers: dict[int, KV]


class Step:
    """One decode step's view of the slots: where it writes, how far it reads, what it may see.

    Args:
        lengths: [B] int64, positions cached in each live slot before this step; the step's own
            token goes to position `lengths[b]`.
        longest: the largest of `lengths`.
        max_len: positions in a slot.
    """

    def __init__(self, lengths: torch.Tensor, longest: int, max_len: int) -> None:
        self.lengths, self.max_len = lengths, max_len
        self.live = len(lengths)
        self.read = min(-(-(longest + 1) // _ROUND) * _ROUND, max_len)
        self._rows: dict[int, torch.Tensor] = {}
        self._bias: dict[int | None, torch.Tensor] = {}

    def rows(self, heads: int) -> torch.Tensor:
        """[B · heads]: the rows of a flat [slots · heads · max_len, d] that this step writes."""
        if heads not in self._rows:
            slot = torch.arange(self.live * heads, device=self.lengths.device)
            self._rows[heads] = slot * self.max_len + self.lengths.repeat_interleave(heads)
        return self._rows[heads]

    def bias(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, read] float32: 0 where a slot's token may look, −inf elsewhere.

        It sees itself and what came before; with a sliding `window`, the last `window` of these.
        """
        if window not in self._bias:
            position = torch.arange(self.read, device=self.lengths.device)
            distance = self.lengths[:, None] - position
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._bias[window] = bias[:, None, None]
        return self._bias[window]


class SlotCache(Cache):
    """Static keys and values, [slots, kv_heads, max_len, head_dim] a layer.

    The engine keeps live slots contiguous at the front, so that a step reads `[:live, :, :read]`,
    a view. `begin` opens a step; the model's forward then calls `update` once a layer.

    Args:
        example: a recorded prefill, from which layers and head sizes are learnt.
        slots: sequences that fit.
        max_len: positions a sequence may take.
    """

    def __init__(self, example: PackedCache, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.max_len = -(-max_len // _ROUND) * _ROUND
        self.store: dict[int, KV] = {}
        for layer, (key, value) in example.recorded.items():
            # Zeros, not empty: an unwritten position is multiplied by an attention weight of 0,
            # and 0 · NaN would not be 0.
            self.store[layer] = (
                key.new_zeros(slots, key.shape[1], self.max_len, key.shape[3]),
                value.new_zeros(slots, value.shape[1], self.max_len, value.shape[3]),
            )
        self.step: Step | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.store.values() for t in pair)

    def begin(self, lengths: torch.Tensor, longest: int) -> Step:
        """Open a decode step over the first `len(lengths)` slots; see `Step`."""
        self.step = Step(lengths, longest, self.max_len)
        return self.step

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        """Write key and value [B, kv_heads, 1, d]; return views [B, kv_heads, read, d] on all."""
        step = self.step
        assert step is not None, "SlotCache.update outside a step"
        rows = step.rows(key.shape[1])
        out = []
        for stored, new in zip(self.store[layer_idx], (key, value), strict=True):
            # On a flat view by index_copy_: scatter_ costs 90 times as much in bfloat16 on a CPU.
            stored.view(-1, stored.shape[3]).index_copy_(0, rows, new.reshape(-1, new.shape[3]))
            out.append(stored[: step.live, :, : step.read])
        return out[0], out[1]

    def fill(self, first: int, last: int, prefix: Prefix) -> None:
        """Copy a prefix into the slots `first` up to `last`, exclusive."""
        for layer, pair in prefix.layers.items():
            for stored, new in zip(self.store[layer], pair, strict=True):
                stored[first:last, :, : prefix.length] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another's."""
        for pair in self.store.values():
            for stored in pair:
                stored[target, :, :length] = stored[source, :, :length]
