"""The cache of keys and values of all decoding sequences, for decode steps over lanes.

A sequence's keys and values have two parts. The part it was admitted with is its *prefix*: the
members of a group share the prefix of their prompt, and up to 16 members read it together, as one
matrix product (a *block*). The part it generates is *unshared*. Both parts are stored in lanes; a
sequence that outgrows its lane moves to the next, so a long sequence does not slow down the others.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tramontane.generator.lanes import (
    CacheSize,
    Lane,
    Layout,
    Prefix,
    WrittenCache,
    capacity_ladder,
)
from tramontane.generator.states import SlotStates

BLOCK_MEMBERS = 16
# With few slots, the extra calls cost more than the reads they save: below this number of slots,
# each sequence has its own copy of its prefix, and there are fewer lanes.
SHARING_SLOTS = 48
# Shortest lane in positions, and the factor to the next lane: with shared prefixes, and without.
_FINE_LANES, _COARSE_LANES = (32, 1.5), (64, 3.0)


@dataclass(eq=False)
class Block:
    """Sequences that read the same prefix together; `members` are their slots."""

    key: Hashable
    length: int
    members: list[int]


class UnsharedPart:
    """One lane of unshared positions: rows `first` to `last` of the batch.

    Args:
        lane: holds their keys and values.
        first: the lane's first row in the batch.
        lengths: [n] int64 unshared positions of its sequences, before this step's token.
        starts: [n] int64 positions of the prefixes before them.
    """

    def __init__(
        self, lane: Lane[int], first: int, lengths: torch.Tensor, starts: torch.Tensor
    ) -> None:
        self.lane, self.first, self.last = lane, first, first + len(lengths)
        self._lengths, self._starts = lengths, starts
        self._rows: dict[int, torch.Tensor] = {}
        self._bias: dict[tuple[int | None, int | None], torch.Tensor] = {}

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[B, Hq, 1, d] → [entries, 1, Hq, d]."""
        return query[self.first : self.last].transpose(1, 2)

    def rows(self, heads: int) -> torch.Tensor:
        """[n · heads]: the rows to write in a plane seen as [room · heads · capacity, d]."""
        if heads not in self._rows:
            block = torch.arange(len(self._lengths) * heads, device=self._lengths.device)
            written = self._lengths.repeat_interleave(heads)
            self._rows[heads] = block * self.lane.capacity + written
        return self._rows[heads]

    def bias(self, window: int | None, chunk: int | None = None) -> torch.Tensor:
        """Added to scores: 0 at visible positions, very low elsewhere; [entries, 1, 1, capacity].
        With a sliding `window`, a token sees the last `window` positions; with chunks, those of its
        own chunk of `chunk` positions."""
        if (window, chunk) not in self._bias:
            position = torch.arange(self.lane.capacity, device=self._lengths.device)
            distance = self._lengths[:, None] - position
            newest = (self._starts + self._lengths)[:, None]
            hidden = (distance < 0) | _out_of_reach(distance, newest, window, chunk)
            self._bias[window, chunk] = _hide(hidden, self.lane)[:, None, None]
        return self._bias[window, chunk]


class PrefixPart:
    """One lane of prefixes, each read by the members of its block.

    Args:
        lane: holds the prefixes' keys and values.
        batch: [blocks, members] int64, each member's row of the batch; any row for absent members.
    """

    def __init__(self, lane: Lane[Block], batch: torch.Tensor) -> None:
        self.lane, self._batch = lane, batch
        lengths = torch.tensor([block.length for block in lane.owners], device=batch.device)
        self._lengths = lengths[:, None]
        # Position less prefix length: negative inside the prefix.
        self._offset = torch.arange(lane.capacity, device=batch.device) - self._lengths
        self._bias: dict[tuple[int | None, int | None], torch.Tensor] = {}
        self._unshared = torch.empty(0)

    def begin(self, unshared: torch.Tensor) -> None:
        """Set the step's `unshared` positions, [B] int64; biases that depend on them change."""
        self._unshared = unshared
        self._bias = {key: bias for key, bias in self._bias.items() if key == (None, None)}

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[B, Hq, 1, d] → [blocks, members, Hq, d]."""
        return query[:, :, 0].index_select(0, self._batch.view(-1)).unflatten(0, self._batch.shape)

    def bias(self, window: int | None, chunk: int | None = None) -> torch.Tensor:
        """Biases of scores as in `UnsharedPart.bias`, [blocks, 1, members or 1, capacity]."""
        if (window, chunk) not in self._bias:
            hidden = (self._offset >= 0)[:, None]
            if window is not None or chunk is not None:
                unshared = self._unshared[self._batch]
                distance = unshared[:, :, None] - self._offset[:, None]
                newest = (self._lengths + unshared)[:, :, None]
                hidden = hidden | _out_of_reach(distance, newest, window, chunk)
            self._bias[window, chunk] = _hide(hidden, self.lane)[:, None]
        return self._bias[window, chunk]


LanePart = UnsharedPart | PrefixPart


def _out_of_reach(
    distance: torch.Tensor, newest: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor | bool:
    """Which positions are too far before those of the `newest` tokens."""
    if chunk is not None:
        return distance > newest % chunk
    return False if window is None else distance >= window


def _hide(hidden: torch.Tensor, lane: Lane) -> torch.Tensor:
    # Not −∞: a softmax over hidden positions alone must stay finite. It has no weight next to a
    # softmax over visible ones.
    dtype = lane.stacks[0].dtype
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, torch.finfo(dtype).min / 2)


class LaneStep:
    """One decode step as seen by attention: the parts to read, and the layer being computed.

    Args:
        layout: layout of the model's keys and values.
        unshared: the lanes of unshared positions, in the order of the batch.
        prefixes: the lanes of prefixes.
        members: [B] int64, the place of each row of the batch among all members of `prefixes`.
    """

    def __init__(
        self,
        layout: Layout,
        unshared: list[UnsharedPart],
        prefixes: list[PrefixPart],
        members: torch.Tensor,
    ) -> None:
        self.unshared, self.prefixes, self.members = unshared, prefixes, members
        self.reads = 0
        self._layout = layout
        self._layer = 0

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache one token's key and value [B, heads, 1, d] for every row of the batch."""
        self._layer = layer
        for part in self.unshared:
            for which, new in enumerate((key, value)):
                if (layer, which) in self._layout.shared:
                    continue
                plane = self._plane(part.lane, which)
                # On a flat view by index_copy_: scatter_ costs 90 times as much in bfloat16.
                plane.view(-1, plane.shape[-1]).index_copy_(
                    0,
                    part.rows(plane.shape[1]),
                    new[part.first : part.last].reshape(-1, plane.shape[-1]),
                )

    def read(self, lane: Lane) -> tuple[torch.Tensor, torch.Tensor]:
        """A lane's keys and values, [entries, heads, capacity, d] each, as contiguous views."""
        self.reads += 1
        n = len(lane.owners)
        return self._plane(lane, 0)[:n], self._plane(lane, 1)[:n]

    def _plane(self, lane: Lane, which: int) -> torch.Tensor:
        stack, plane = self._layout.plane_index[self._layer, which]
        return lane.stacks[stack][plane]


def lane_capacities(slots: int, max_len: int) -> list[int]:
    """Positions of each lane's entries, from the shortest lane."""
    return capacity_ladder(max_len, *(_FINE_LANES if slots >= SHARING_SLOTS else _COARSE_LANES))


def max_positions(slots: int, max_len: int) -> int:
    """Maximum number of positions in all lanes of a `SlotCache`.

    Lanes never shrink, so each may in time have room for every slot. So may the lanes of shared
    prefixes; the long ones serve sequences continued after an interruption. While a lane grows, its
    old copy is needed too.
    """
    kinds = 2 if slots >= SHARING_SLOTS else 1  # unshared positions, and prefixes
    return sum(lane_capacities(slots, max_len)) * slots * kinds


def lane_size(
    slots: int, max_len: int, limit: int | None = None, state_positions: int = 0
) -> CacheSize:
    """Slots and positions of a `SlotCache` that never holds more than `limit` positions; None: no
    limit. A slot's states take as much memory as `state_positions`, twice while they move."""

    def positions(n: int) -> int:
        return max_positions(n, max_len) + 2 * n * state_positions

    if limit is not None:
        slots = next((n for n in range(slots, 0, -1) if positions(n) <= limit), 0)
    return CacheSize(slots, positions(slots))


class SlotCache(WrittenCache):
    """The lanes, and the cache passed to a model's forward while decoding.

    Args:
        layout: layout of the model's keys and values.
        slots: maximum number of sequences.
        max_len: positions of the longest lane.
    """

    def __init__(self, layout: Layout, slots: int, max_len: int) -> None:
        super().__init__()
        self.layout = layout
        self.shares_prefixes = slots >= SHARING_SLOTS
        capacities = lane_capacities(slots, max_len)
        self.lanes: list[Lane[int]] = [Lane(layout, c, slots) for c in capacities]
        self.prefixes: list[Lane[Block]] = [Lane(layout, c, slots) for c in capacities]
        self._blocks: dict[int, Block] = {}  # by slot
        self._open_blocks: dict[Hashable, Block] = {}  # by key: the newest, which others may join
        self._parked: dict[Hashable, Prefix] = {}
        self._slot_states = SlotStates(layout.states)
        # Reused by the steps until a sequence arrives, moves or leaves.
        self._prefix_parts: tuple[list[PrefixPart], torch.Tensor, torch.Tensor] | None = None
        self._step: LaneStep | None = None

    @property
    def reads(self) -> int:
        """How often attention has read a lane in the open step."""
        return self._step.reads if self._step else 0

    @property
    def nbytes(self) -> int:
        lanes: list[Lane[Any]] = [*self.lanes, *self.prefixes]
        live = sum(stack.nbytes for lane in lanes for stack in lane.stacks)
        kept = [[*parked.planes, *parked.states.values()] for parked in self._parked.values()]
        return live + self._slot_states.nbytes + sum(x.nbytes for parts in kept for x in parts)

    @property
    def slots(self) -> list[int]:
        """Slot of each row of a step's batch: lane by lane."""
        return [slot for lane in self.lanes for slot in lane.owners]

    @property
    def capacities(self) -> list[int]:
        """Number of unshared positions that fit into the lane of each row of a step's batch."""
        return [lane.capacity for lane in self.lanes for _ in lane.owners]

    def admit(self, slots: Sequence[int], key: Hashable, prefix: Prefix) -> None:
        """Add sequences that start with `prefix`, which those with the same `key` share; without
        sharing, each gets its own copy."""
        self._prefix_parts = None
        self._slot_states.add(slots, prefix.states)
        if not self.shares_prefixes:
            lane = next(lane for lane in self.lanes if lane.capacity > prefix.length)
            lane.append(slots, [planes[:, None] for planes in prefix.planes])
            return
        self.lanes[0].append(slots)
        shelf = next(lane for lane in self.prefixes if lane.capacity >= prefix.length)
        remaining = list(slots)
        if block := self._open_blocks.get(key):
            remaining = self._join(block, remaining)
        while remaining:
            block = self._open_blocks[key] = Block(key, prefix.length, [])
            shelf.append([block], [planes[:, None] for planes in prefix.planes])
            remaining = self._join(block, remaining)

    def _join(self, block: Block, slots: list[int]) -> list[int]:
        """Add slots to a block up to its maximum; returns the rest."""
        n = BLOCK_MEMBERS - len(block.members)
        block.members += slots[:n]
        self._blocks |= dict.fromkeys(slots[:n], block)
        return slots[n:]

    def begin(self, unshared: torch.Tensor) -> LaneStep:
        """Open a decode step; `unshared` [B] int64 counts each row's cached positions outside a
        shared prefix."""
        if self._prefix_parts is None:
            self._prefix_parts = self._find_members(unshared.device)
        prefixes, members, starts = self._prefix_parts
        parts, first = [], 0
        for lane in self.lanes:
            if lane.owners:
                rows = slice(first, first + len(lane.owners))
                parts.append(UnsharedPart(lane, first, unshared[rows], starts[rows]))
                first = rows.stop
        for part in prefixes:
            part.begin(unshared)
        self._step = LaneStep(self.layout, parts, prefixes, members)
        self._slot_states.arrange(self.slots)
        self.states = self._slot_states.rows
        return self._step

    def _find_members(
        self, device: torch.device
    ) -> tuple[list[PrefixPart], torch.Tensor, torch.Tensor]:
        """The lanes of prefixes in use, each row's place among all their members, and the length of
        its prefix there."""
        row_of = {slot: row for row, slot in enumerate(self.slots)}
        parts, places, first = [], [0] * len(row_of), 0
        lengths = [b.length if (b := self._blocks.get(slot)) else 0 for slot in row_of]
        for lane in self.prefixes:
            if not lane.owners:
                continue
            most = max(len(block.members) for block in lane.owners)
            batch = [0] * (most * len(lane.owners))
            for entry, block in enumerate(lane.owners):
                for place, slot in enumerate(block.members, entry * most):
                    batch[place] = row_of[slot]
                    places[row_of[slot]] = first + place
            parts.append(PrefixPart(lane, torch.tensor(batch, device=device).view(-1, most)))
            first += len(batch)
        return parts, torch.tensor(places, device=device), torch.tensor(lengths, device=device)

    def end(self, finished: Collection[int], full: Collection[int]) -> None:
        """After a step: remove finished sequences, and move those that fill their lane.

        Args:
            finished: rows of the batch whose sequences leave.
            full: rows whose sequences fill their lane; some may be in `finished` too.
        """
        self._prefix_parts = None
        slots, finished, full = self.slots, set(finished), set(full)
        last = len(slots)
        # From the longest lane, so that no sequence moves twice.
        for i, lane in reversed(list(enumerate(self.lanes))):
            first = last - len(lane.owners)
            rows = range(first, last)
            if moving := [row - first for row in rows if row in full and row not in finished]:
                owners = [lane.owners[place] for place in moving]
                self.lanes[i + 1].append(owners, lane.copy_entries(moving))
            lane.remove({row - first for row in rows if row in full or row in finished})
            last = first
        for row in finished:
            if block := self._blocks.pop(slots[row], None):
                block.members.remove(slots[row])
                if not block.members and self._open_blocks.get(block.key) is block:
                    del self._open_blocks[block.key]
        for prefixes in self.prefixes:
            prefixes.remove({p for p, block in enumerate(prefixes.owners) if not block.members})

    def park(self, key: Hashable, slot: int, length: int) -> None:
        """Keep a copy of a sequence's `length` positions beyond its end."""
        block, shared = self._blocks.get(slot), Prefix(0, [])
        if block:
            shared = _entry(self.prefixes, block, block.length)
        whole = shared.joined(_entry(self.lanes, slot, length - shared.length))
        self._parked[key] = replace(whole, states=self._slot_states.copy(slot))

    def parked(self, key: Hashable, length: int) -> Prefix:
        """The `length` positions that are kept under a key."""
        return self._parked[key]

    def drop(self, key: Hashable) -> None:
        """Free what is kept under a key."""
        del self._parked[key]

    def rewrite(self, contexts: Iterable[tuple[int, Prefix]]) -> None:
        """Replace everything cached of each (slot, context), prefix and unshared part."""
        places = {slot: (lane, p) for lane in self.lanes for p, slot in enumerate(lane.owners)}
        blocks = {block: (lane, p) for lane in self.prefixes for p, block in enumerate(lane.owners)}
        for slot, context in contexts:
            self._slot_states.add([slot], context.states)
            unshared = context
            if block := self._blocks.get(slot):
                prefix, unshared = context.split(block.length)
                prefix_lane, place = blocks[block]
                prefix_lane.write(place, prefix)
            lane, place = places[slot]
            lane.write(place, unshared)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert self._step is not None, "SlotCache.write outside a step"
        self._step.write(layer, key, value)


def _entry(lanes: Sequence[Lane[Any]], owner: object, length: int) -> Prefix:
    """The first `length` positions of an owner's entry, as views."""
    lane = next(lane for lane in lanes if owner in lane.owners)
    place = lane.owners.index(owner)
    return Prefix(length, [stack[:, place, :, :length] for stack in lane.stacks])
