"""Keys and values at fixed addresses, for decode steps of fixed shapes, as CUDA graphs need them.

All sequences share one tensor, the *arena*. Each has an *extent* of it: contiguous positions, a few
more than it uses, so memory is proportional to the live tokens. A sequence that fills its extent
gets another, a quarter longer, at the arena's end; when the end is reached, the extents in use are
compacted. Extents are contiguous, not paged, because the flash attention kernel in torch takes no
block tables, but does take each sequence's start and length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tramontane.generator.lanes import CacheSize, Layout, Prefix, WrittenCache, capacity_ladder
from tramontane.models import flash
from tramontane.models.attention import Options, plain_attention
from tramontane.models.packing import upload

# Shortest extent in positions, and the factor to the next longer one. A sequence of L tokens is
# copied about 1 / (1 - 1/1.25) = 5 times, negligible next to L reads of its positions.
_SHORTEST, _FACTOR = 256, 1.25
_CHUNK = 2048  # positions moved at once
# Share of the arena kept free of new sequences, at most the longest extent. In a simulation
# (lognormal lengths of mean 6,000 and at most 36,864; 262,144 positions) 85 % of the arena then
# hold tokens, and half a token is prefilled again per generated token; without it, 89 % and 2.7
# tokens.
_KEPT_FREE = 1 / 16


@dataclass
class Extent:
    """The positions `start` to `start + capacity` of the arena."""

    start: int
    capacity: int


def extent_capacities(max_len: int) -> list[int]:
    """Lengths of extents in positions, from the shortest."""
    return capacity_ladder(max_len, _SHORTEST, _FACTOR)


def arena_size(slots: int, max_len: int, limit: int | None = None) -> CacheSize:
    """Slots and positions of an arena of at most `limit` positions; None: no limit.

    Without a limit, all slots fit at their longest. The arena has one more position per slot, where
    rows without a sequence write.
    """
    capacities = extent_capacities(max_len)
    longest = capacities[-1]
    # A moving sequence briefly has two extents.
    most = slots * (longest + 1) + (longest if slots > 1 else 0)
    if limit is None or limit >= most:
        return CacheSize(slots, most)
    slots = min(slots, limit // (capacities[0] + 1), max(0, limit - longest))
    return CacheSize(slots, limit)


class ArenaCache(WrittenCache):
    """The cache passed to a model's forward while decoding with fixed shapes.

    One tensor [planes, positions, heads, d] for each shape of the layout. A step's rows are the
    slots with a sequence, in the order of their extents, then empty slots.

    Args:
        layout: layout of the model's keys and values.
        size: of `arena_size`.
        max_len: positions of the longest sequence.
    """

    shares_prefixes = False  # each sequence has a copy of its prefix

    def __init__(self, layout: Layout, size: CacheSize, max_len: int) -> None:
        super().__init__()
        self.layout, self.max_len = layout, max_len
        self.capacities = extent_capacities(max_len)
        self._positions = size.positions - size.slots
        self.arenas = [
            torch.zeros(
                (planes, size.positions, heads, d), dtype=layout.dtype, device=layout.device
            )
            for planes, heads, d in layout.shapes
        ]
        # By slot, or by the key of a parked sequence, in the order of their starts.
        self._extents: dict[Hashable, Extent] = {}
        self._end = 0  # of the last extent
        self._slots = size.slots
        self.slots: list[int] = []  # slot of each row
        # Recorded steps read these at their addresses: the start of each row and the end of the
        # last, numbers from 0 on, and the positions of each row.
        self.starts = torch.zeros(size.slots + 1, dtype=torch.int32, device=layout.device)
        counted = size.slots * flash.spans(max_len) + 1
        self.counted = torch.arange(counted, dtype=torch.int32, device=layout.device)
        self.room = torch.ones(size.slots, dtype=torch.int64, device=layout.device)
        self._step: ArenaStep | None = None

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def free(self) -> int:
        """Positions that belong to no extent."""
        return self._positions - sum(extent.capacity for extent in self._extents.values())

    @property
    def _live(self) -> dict[int, Extent]:
        """The extents of slots, in the order of their starts."""
        return {owner: e for owner, e in self._extents.items() if isinstance(owner, int)}

    @property
    def has_fixed_span(self) -> bool:
        """True if `span` does not depend on the sequences."""
        # Flash attention reads only the used positions, so one recorded step serves all lengths.
        return not self.layout.beyond_flash and all(
            flash.supports(arena, arena) for arena in self.arenas
        )

    @property
    def span(self) -> int:
        """Number of positions, from a row's start, that a step's attention covers."""
        if self.has_fixed_span:
            return self.max_len
        longest = max((extent.capacity for extent in self._live.values()), default=1)
        return int(min(self.capacities[-1], 1 << (longest - 1).bit_length()))

    def capacity_for(self, length: int) -> int:
        """Length of the extent of a sequence with `length` cached positions; has room for one
        more."""
        return next(capacity for capacity in self.capacities if capacity > length)

    def count_admissible(self, lengths: Iterable[int]) -> int:
        """Number of new sequences, from the first, that fit, given each one's cached positions. If
        others are live, some of the arena is kept free for their growth."""
        kept = min(self.capacities[-1], int(self._positions * _KEPT_FREE))
        free, count = self.free, 0
        for length in lengths:
            free -= self.capacity_for(length)
            if free < (kept if count or self._live else 0):
                break
            count += 1
        return count

    def admit(self, slots: Sequence[int], key: Hashable, prefix: Prefix) -> None:
        """Write a prefix into new extents of the slots; enough positions must be `free`. `key` is
        unused."""
        capacity = self.capacity_for(prefix.length)
        for slot in slots:
            self._extents[slot] = self._take(capacity)
            self._write(slot, prefix)

    def clear(self) -> None:
        """Free all extents."""
        self._extents.clear()
        self._end = 0

    def release(self, slots: Iterable[int]) -> None:
        """Free the extents of finished sequences."""
        for slot in slots:
            self._extents.pop(slot, None)  # a parked sequence's extent is no longer the slot's

    def park(self, key: Hashable, slot: int, length: int) -> None:
        """Keep the extent of a sequence beyond its end."""
        owners = (key if owner == slot else owner for owner in self._extents)
        self._extents = dict(zip(owners, self._extents.values(), strict=True))

    def parked(self, key: Hashable, length: int) -> Prefix:
        """The first `length` positions that are kept under a key, as views."""
        start = self._extents[key].start
        return Prefix(length, [a[:, start : start + length].transpose(1, 2) for a in self.arenas])

    def drop(self, key: Hashable) -> None:
        """Free what is kept under a key."""
        del self._extents[key]

    def grow(self, slot: int) -> bool:
        """Give a longer extent to a sequence; False if not enough positions are free."""
        old = self._extents[slot]
        capacity = self.capacity_for(old.capacity)
        is_last = old.start + old.capacity == self._end
        added = capacity - old.capacity if is_last else capacity
        if added > self.free:
            return False
        new = self._take(added)
        if is_last:
            old.capacity = capacity  # in place
            return True
        for arena in self.arenas:
            source = arena[:, old.start : old.start + old.capacity]
            arena[:, new.start : new.start + old.capacity] = source
        del self._extents[slot]
        self._extents[slot] = new
        return True

    def _take(self, positions: int) -> Extent:
        """An extent at the end."""
        if self._end + positions > self._positions:
            self._compact()
        extent = Extent(self._end, positions)
        self._end += positions
        return extent

    def _compact(self) -> None:
        """Move all extents to the start of the arena, in order."""
        sources, self._end = [torch.empty(0, dtype=torch.int64)], 0
        for extent in self._extents.values():
            sources.append(torch.arange(extent.start, extent.start + extent.capacity))
            extent.start, self._end = self._end, self._end + extent.capacity
        # Positions only move down, so a chunk overwrites nothing that is still to be read.
        places = upload(torch.cat(sources), self.layout.device)
        for first, source in enumerate(places.split(_CHUNK)):
            for arena in self.arenas:
                moved = arena.index_select(1, source)
                arena[:, first * _CHUNK : first * _CHUNK + len(source)] = moved

    def rewrite(self, contexts: Iterable[tuple[int, Prefix]]) -> None:
        """Replace everything cached of each (slot, context)."""
        for slot, context in contexts:
            self._write(slot, context)

    def _write(self, slot: int, prefix: Prefix) -> None:
        start = self._extents[slot].start
        for arena, planes in zip(self.arenas, prefix.planes, strict=False):
            arena[:, start : start + prefix.length] = planes.transpose(1, 2)

    def assign_rows(self, rows: int) -> None:
        """Assign slots to the rows of the next steps: set `slots`, `starts` and `room`."""
        live = self._live
        empty = [slot for slot in range(self._slots) if slot not in live][: rows - len(live)]
        self.slots = [*live, *empty]
        scratch = range(self._positions, self._positions + len(empty) + 1)
        starts = [*(extent.start for extent in live.values()), *scratch]
        room = [*(extent.capacity for extent in live.values()), *[1] * len(empty)]
        device = self.layout.device
        self.starts[: rows + 1] = upload(torch.tensor(starts, dtype=torch.int32), device)
        self.room[:rows] = upload(torch.tensor(room), device)

    def begin(self, lengths: torch.Tensor) -> ArenaStep:
        """Open a decode step; `lengths` [B] int64 are the cached positions of each row."""
        self._step = ArenaStep(self, lengths)
        return self._step

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache the newest step's keys and values of a layer, [B, kv_heads, 1, d] each."""
        assert self._step is not None, "ArenaCache.write outside a step"
        self._step.write(layer, key, value)

    def write_pair(self, layer: int, pair: torch.Tensor) -> None:
        """`write` with both in one tensor, [B, 1, 2, kv_heads, d]."""
        assert self._step is not None, "ArenaCache.write_pair outside a step"
        self._step.write_pair(layer, pair)


class ArenaStep:
    """One decode step of an arena's rows, as seen by attention.

    Args:
        cache: the arena.
        lengths: [B] positions cached before this step.
    """

    def __init__(self, cache: ArenaCache, lengths: torch.Tensor) -> None:
        # Holds no reference to the cache: the cache holds its newest step, and a cycle would keep
        # the arena's memory until the next garbage collection.
        self._arenas, self._layout = cache.arenas, cache.layout
        self._span = cache.span
        self._batch = len(lengths)
        self._starts, self._counted = cache.starts[: self._batch + 1], cache.counted
        # Recording repeats a step: no repetition may go beyond a row's extent.
        lengths = torch.minimum(lengths, cache.room[: self._batch] - 1)
        self._used = (lengths + 1).int()
        self._places = self._starts[:-1] + lengths
        self._layer = 0
        self._keys: flash.CachedKeys | None = None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache one token's key and value [B, heads, 1, d] for every row of the batch."""
        self._layer = layer
        for which, new in enumerate((key, value)):
            if (layer, which) not in self._layout.shared:
                self._plane(which).index_copy_(0, self._places, new[:, :, 0])

    def write_pair(self, layer: int, pair: torch.Tensor) -> None:
        """`write` with both in one tensor, [B, 1, 2, heads, d], with one kernel."""
        self._layer = layer
        if not self._layout.shared.isdisjoint([(layer, 0), (layer, 1)]):
            key, value = pair.transpose(1, 3).unbind(2)
            return self.write(layer, key, value)
        stack, plane = self._layout.plane_index[layer, 0]  # planes of one shape are neighbors
        planes = self._arenas[stack][plane : plane + 2]
        planes.index_copy_(1, self._places, pair[:, 0].transpose(0, 1))

    def attend(self, query: torch.Tensor, options: Options) -> torch.Tensor:
        """Softmax attention of each row to its extent: [B, Hq, 1, d] → [B, Hq, dv]."""
        keys, values = self._plane(0), self._plane(1)
        window = options.window
        if window is not None and window >= self._span:
            window = None
        if self._layout.beyond_flash or not flash.supports(keys, values):
            return self._attend_to_copies(query, options._replace(window=window))
        if self._keys is None:  # for all layers
            self._keys = flash.CachedKeys(self._counted, self._starts, self._used, self._span)
        sums = options.sinks is not None
        out, log_sum = self._keys.attend(query[:, :, 0], keys, values, options.scale, window, sums)
        if options.sinks is not None:
            assert log_sum is not None
            out = out * torch.sigmoid(log_sum.T - options.sinks.float())[:, :, None].to(out.dtype)
        return out

    def _attend_to_copies(self, query: torch.Tensor, options: Options) -> torch.Tensor:
        """`attend` without flash attention: each row's first `span` positions are copied."""
        position = torch.arange(self._span, device=query.device)
        visible = position < self._used[:, None]
        if options.window is not None:
            visible = visible & (position >= self._used[:, None] - options.window)
        if options.chunk is not None:
            newest = self._used[:, None] - 1
            visible = visible & (position >= newest - newest % options.chunk)
        # Positions beyond a row's extent are hidden, but must exist.
        places = (self._starts[:-1, None] + position).clamp_max(self._plane(0).shape[0] - 1)
        keys = values = self._plane(0)[places].transpose(1, 2)  # [B, heads, span, d]
        planes = self._layout.plane_index
        if planes[self._layer, 1] != planes[self._layer, 0]:
            values = self._plane(1)[places].transpose(1, 2)
        if not options.is_plain:
            mask = visible[:, None, None, None]
            return plain_attention(query, keys, values, mask, options)[:, :, 0]
        # Query heads that share keys are rows of one product, so keys are not repeated.
        out = F.scaled_dot_product_attention(
            query[:, :, 0].unflatten(1, (keys.shape[1], -1)),
            keys,
            values,
            attn_mask=visible[:, None, None],
            scale=options.scale,
        )
        return out.flatten(1, 2)

    def _plane(self, which: int) -> torch.Tensor:
        """The layer's keys (0) or values (1): [positions, heads, d]."""
        stack, plane = self._layout.plane_index[self._layer, which]
        return self._arenas[stack][plane]
