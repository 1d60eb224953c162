"""Keys and values at fixed addresses, for decode steps of fixed shapes, as CUDA graphs need them.

Each slot has `max_len` positions, occupied or not. Flash attention reads only the used positions of
each slot, so the others cost memory and no time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.cache_utils import Cache

from tramontane.generator.lanes import Layout, Prefix
from tramontane.models.attention import supports_varlen


class SlabCache(Cache):
    """The cache that a model's forward is given while decoding with fixed shapes.

    One tensor [planes, slots, max_len, heads, d] for each shape of the layout. A step takes slots 0
    to B.

    Args:
        layout: layout of the model's keys and values.
        slots: maximum number of sequences.
        max_len: positions of each slot.
    """

    shares_prefixes = False  # each sequence has a copy of its prefix

    def __init__(self, layout: Layout, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.layout, self.max_len = layout, max_len
        self.slabs = [
            torch.zeros(
                (planes, slots, max_len, heads, d), dtype=layout.dtype, device=layout.device
            )
            for planes, heads, d in layout.shapes
        ]
        self.slots = range(slots)
        ends = torch.arange(slots + 1, dtype=torch.int32, device=layout.device)
        self.query_ends, self.key_ends = ends, ends * max_len
        self._step: SlabStep | None = None

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def admit(self, slots: Sequence[int], key: Hashable, prefix: Prefix) -> None:
        """Write a prefix into the slots of the sequences that start with it; `key` is unused."""
        for slot in slots:
            self._write(slot, prefix)

    def rewrite(self, contexts: Iterable[tuple[int, Prefix]]) -> None:
        """Replace everything cached of each (slot, context)."""
        for slot, context in contexts:
            self._write(slot, context)

    def _write(self, slot: int, prefix: Prefix) -> None:
        for slab, planes in zip(self.slabs, prefix.planes, strict=False):
            slab[:, slot, : prefix.length] = planes.transpose(1, 2)

    def begin(self, lengths: torch.Tensor) -> SlabStep:
        """Open a decode step; `lengths` [B] int64 are the cached positions of slots 0 to B."""
        self._step = SlabStep(self, lengths)
        return self._step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values, [B, kv_heads, 1, d]."""
        assert self._step is not None, "SlabCache.update outside a step"
        self._step.write(layer_idx, key_states, value_states)
        return key_states, value_states


class SlabStep:
    """One decode step of a slab's first slots, as attention sees it.

    Args:
        cache: the slab.
        lengths: [B] positions cached before this step.
    """

    def __init__(self, cache: SlabCache, lengths: torch.Tensor) -> None:
        # No reference to the cache: the cache holds its newest step, and a cycle would keep the
        # slab's memory until the next garbage collection.
        self._slabs, self._plane_index = cache.slabs, cache.layout.plane_index
        self._max_len = cache.max_len
        self._batch = len(lengths)
        self._query_ends = cache.query_ends[: self._batch + 1]
        self._key_ends = cache.key_ends[: self._batch + 1]
        self._used = (lengths + 1).int()
        self._places = torch.arange(len(lengths), device=lengths.device) * cache.max_len + lengths
        self._layer = 0
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache one token's key and value [B, heads, 1, d] for every row of the batch."""
        self._layer, self._written = layer, (key, value)
        for which, new in enumerate((key, value)):
            self._plane(which).flatten(0, 1).index_copy_(0, self._places, new[:, :, 0])

    def was_written(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """True if these are the tensors last written."""
        return self._written is not None and key is self._written[0] and value is self._written[1]

    def attend(self, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Softmax attention of each row to its slot: [B, Hq, 1, d] → [B, Hq, dv]."""
        keys, values = self._plane(0), self._plane(1)
        if window is not None and window >= self._max_len:
            window = None
        if supports_varlen(values):
            # The kernel reads the first `seqused_k` keys of each slot. The single query stands at
            # their end and needs no causal mask; with one, the kernel would not read the keys once
            # for all query heads that share them.
            out = varlen_attn(
                query[:, :, 0],
                keys.flatten(0, 1),
                values.flatten(0, 1),
                self._query_ends,
                self._key_ends,
                1,
                self._max_len,
                scale=scale,
                window_size=(-1, -1) if window is None else (window - 1, 0),
                enable_gqa=query.shape[1] != keys.shape[2],
                seqused_k=self._used,
            )
            assert isinstance(out, torch.Tensor)
            return out
        position = torch.arange(self._max_len, device=query.device)
        visible = position < self._used[:, None]
        if window is not None:
            visible = visible & (position >= self._used[:, None] - window)
        # Query heads that share keys are rows of one product, so keys are not repeated.
        out = F.scaled_dot_product_attention(
            query[:, :, 0].unflatten(1, (keys.shape[2], -1)),
            keys[: self._batch].transpose(1, 2),
            values[: self._batch].transpose(1, 2),
            attn_mask=visible[:, None, None],
            scale=scale,
        )
        return out.flatten(1, 2)

    def _plane(self, which: int) -> torch.Tensor:
        """The layer's keys (0) or values (1): [slots, max_len, heads, d]."""
        stack, plane = self._plane_index[self._layer, which]
        return self._slabs[stack][plane]
