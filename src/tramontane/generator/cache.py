"""Keys and values of the sequences in flight, as attention reads and writes them.

Each sequence's are in two parts. What it was admitted with is its *prefix*: the members of a group
share their prompt's, and up to 16 of them read it together, as one matrix product (a *block*). What
it generates is its own. Both lie in lanes; a sequence that outgrows its lane moves to the next, so
a long sequence is paid for by itself, not by everyone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from tramontane.generator.lanes import Lane, Layout, Prefix

_MEMBERS = 16
# With few slots, calls cost more than the reading that they save: below `_MANY`, each sequence has
# a copy of its prefix, and lanes are fewer.
_MANY = 48
# The shortest lane and how much longer each next one is.
_FINE, _COARSE = (32, 1.5), (64, 3.0)
_ROUND = 16


@dataclass(eq=False)
class Block:
    """Sequences that read one prefix together; `members` are their rows."""

    key: Hashable
    length: int
    members: list[int]


class Part(Protocol):
    """A lane's part in a decode step: the rows of the batch that read its entries."""

    lane: Lane

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[B, Hq, 1, d] → [entries, members, Hq, d]."""
        ...

    def bias(self, window: int | None) -> torch.Tensor:
        """To add to scores: 0 where a token may look, very low elsewhere; [entries, 1, members or
        1, capacity]. With a sliding `window`, it sees the last `window` positions."""
        ...


class Own:
    """One lane of what sequences have generated: rows `first` up to `last` of the batch.

    Args:
        lane: where their keys and values lie.
        first: the lane's first row in the batch.
        lengths: [n] of its sequences, without their prefix and the token of this step.
    """

    def __init__(self, lane: Lane[int], first: int, lengths: torch.Tensor) -> None:
        self.lane, self.first, self.last = lane, first, first + len(lengths)
        self._lengths = lengths
        self._rows: dict[int, torch.Tensor] = {}
        self._bias: dict[int | None, torch.Tensor] = {}

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        return query[self.first : self.last].transpose(1, 2)

    def rows(self, heads: int) -> torch.Tensor:
        """[n · heads]: the rows of a plane seen as [room · heads · capacity, d] to be written."""
        if heads not in self._rows:
            block = torch.arange(len(self._lengths) * heads, device=self._lengths.device)
            written = self._lengths.repeat_interleave(heads)
            self._rows[heads] = block * self.lane.capacity + written
        return self._rows[heads]

    def bias(self, window: int | None) -> torch.Tensor:
        if window not in self._bias:
            position = torch.arange(self.lane.capacity, device=self._lengths.device)
            distance = self._lengths[:, None] - position
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._bias[window] = _hide(hidden, self.lane)[:, None, None]
        return self._bias[window]


class Shared:
    """One lane of prefixes, each read by its block's members.

    Args:
        lane: where the prefixes' keys and values lie.
        batch: [blocks, members]: which row of the batch is whose; absent ones say any.
    """

    def __init__(self, lane: Lane[Block], batch: torch.Tensor) -> None:
        self.lane, self._batch = lane, batch
        lengths = torch.tensor([block.length for block in lane.rows], device=batch.device)
        self._before = torch.arange(lane.capacity, device=batch.device) - lengths[:, None]
        self._bias: dict[int | None, torch.Tensor] = {}
        self._own = torch.empty(0)

    def begin(self, own: torch.Tensor) -> None:
        """`own` [B]: positions that each sequence has behind its prefix in this step."""
        self._own = own
        self._bias = {w: bias for w, bias in self._bias.items() if w is None}

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        return query[:, :, 0].index_select(0, self._batch.view(-1)).unflatten(0, self._batch.shape)

    def bias(self, window: int | None) -> torch.Tensor:
        if window not in self._bias:
            hidden = (self._before >= 0)[:, None]
            if window is not None:
                far = self._own[self._batch][:, :, None] - self._before[:, None] >= window
                hidden = hidden | far
            self._bias[window] = _hide(hidden, self.lane)[:, None]
        return self._bias[window]


def _hide(hidden: torch.Tensor, lane: Lane) -> torch.Tensor:
    # Not −∞: a softmax over nothing else must stay finite; it weighs nothing beside a true one.
    dtype = lane.stacks[0].dtype
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, torch.finfo(dtype).min / 2)


class Step:
    """One decode step as attention sees it: who reads what, and the keys and values of the layer
    that is being computed.

    Args:
        layout: of the model's keys and values.
        own: the lanes of the sequences' own positions, in the order of the batch.
        shared: the lanes of prefixes.
        seats: [B] where each row of the batch finds itself among all members of `shared`.
    """

    def __init__(
        self, layout: Layout, own: list[Own], shared: list[Shared], seats: torch.Tensor
    ) -> None:
        self.own, self.shared, self.seats = own, shared, seats
        self.reads = 0
        self._layout = layout
        self._layer = 0
        self._written = (0, 0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache one token's key and value [B, heads, 1, d] for every row of the batch."""
        self._layer = layer
        self._written = (key.data_ptr(), value.data_ptr())
        for part in self.own:
            for which, new in enumerate((key, value)):
                plane = self._plane(part.lane, which)
                # On a flat view by index_copy_: scatter_ costs 90 times as much in bfloat16.
                plane.view(-1, plane.shape[-1]).index_copy_(
                    0,
                    part.rows(plane.shape[1]),
                    new[part.first : part.last].reshape(-1, plane.shape[-1]),
                )

    def holds(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are the tensors last written: some models cache one thing and attend to
        another made from it, e.g. compressed latents."""
        return (key.data_ptr(), value.data_ptr()) == self._written

    def read(self, lane: Lane) -> tuple[torch.Tensor, torch.Tensor]:
        """A lane's keys and values, [entries, heads, capacity, d] each: views, contiguous."""
        self.reads += 1
        n = len(lane.rows)
        return self._plane(lane, 0)[:n], self._plane(lane, 1)[:n]

    def _plane(self, lane: Lane, which: int) -> torch.Tensor:
        stack, plane = self._layout.where[self._layer, which]
        return lane.stacks[stack][plane]


def capacities(slots: int, max_len: int) -> list[int]:
    """Positions that an entry of each lane has, from the shortest lane."""
    found = [-(-max_len // _ROUND) * _ROUND]
    shortest, growth = _FINE if slots >= _MANY else _COARSE
    while (shorter := int(found[0] / growth) // _ROUND * _ROUND) >= shortest:
        found.insert(0, shorter)
    return found


def positions(slots: int, max_len: int) -> int:
    """The most that all lanes of a `SlotCache` ever hold. Beyond it comes, while a lane grows, its
    old copy.

    A lane keeps the room that it once had, so each may in time have room for every slot; the lanes
    of shared prefixes as well, of which the long ones serve sequences that are continued after an
    interruption.
    """
    return sum(capacities(slots, max_len)) * slots * (2 if slots >= _MANY else 1)


class SlotCache(Cache):
    """The lanes, and the cache that a model's forward is given while decoding.

    Args:
        layout: of the model's keys and values.
        slots: sequences that fit in all.
        max_len: positions that the longest lane has.
    """

    def __init__(self, layout: Layout, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.layout = layout
        self.sharing = slots >= _MANY
        lanes = capacities(slots, max_len)
        self.lanes: list[Lane[int]] = [Lane(layout, c, slots) for c in lanes]
        self.prefixes: list[Lane[Block]] = [Lane(layout, c, slots) for c in lanes]
        self._blocks: dict[int, Block] = {}  # by row
        self._newest: dict[Hashable, Block] = {}  # by key
        self._shared: tuple[list[Shared], torch.Tensor] | None = None
        self._step: Step | None = None

    @property
    def reads(self) -> int:
        """How often attention has read the lanes in the step that is open."""
        return self._step.reads if self._step else 0

    @property
    def nbytes(self) -> int:
        lanes: list[Lane[Any]] = [*self.lanes, *self.prefixes]
        return sum(stack.nbytes for lane in lanes for stack in lane.stacks)

    @property
    def rows(self) -> list[int]:
        """Whose the sequences are, in the order in which a step takes them: lane by lane."""
        return [row for lane in self.lanes for row in lane.rows]

    @property
    def capacities(self) -> list[int]:
        """Own positions that each of `rows` has room for where it is."""
        return [lane.capacity for lane in self.lanes for _ in lane.rows]

    def admit(self, rows: Sequence[int], key: Hashable, prefix: Prefix) -> None:
        """Add sequences that start with `prefix`, and share it with all of the same `key`; without
        `sharing`, each has it as its own."""
        self._shared = None
        if not self.sharing:
            lane = next(lane for lane in self.lanes if lane.capacity > prefix.length)
            lane.append(rows, [planes[:, None] for planes in prefix.planes])
            return
        self.lanes[0].append(rows)
        shelf = next(lane for lane in self.prefixes if lane.capacity >= prefix.length)
        rows = list(rows)
        if block := self._newest.get(key):
            rows = self._join(block, rows)
        while rows:
            block = self._newest[key] = Block(key, prefix.length, [])
            shelf.append([block], [planes[:, None] for planes in prefix.planes])
            rows = self._join(block, rows)

    def _join(self, block: Block, rows: list[int]) -> list[int]:
        """Seat as many as there is room for; returns the others."""
        n = _MEMBERS - len(block.members)
        block.members += rows[:n]
        self._blocks |= dict.fromkeys(rows[:n], block)
        return rows[n:]

    def begin(self, lengths: torch.Tensor) -> Step:
        """Open a decode step; `lengths` [B] int64 are the sequences' own positions cached, in the
        order of `rows`."""
        own, first = [], 0
        for lane in self.lanes:
            if lane.rows:
                own.append(Own(lane, first, lengths[first : first + len(lane.rows)]))
                first += len(lane.rows)
        if self._shared is None:
            self._shared = self._seat(lengths.device)
        shared, seats = self._shared
        for part in shared:
            part.begin(lengths)
        self._step = Step(self.layout, own, shared, seats)
        return self._step

    def _seat(self, device: torch.device) -> tuple[list[Shared], torch.Tensor]:
        """Who sits where: the lanes of prefixes in use, and each row's place among all members."""
        at = {row: b for b, row in enumerate(self.rows)}
        shared, seats, first = [], [0] * len(at), 0
        for lane in self.prefixes:
            if not lane.rows:
                continue
            members = max(len(block.members) for block in lane.rows)
            batch = [0] * (members * len(lane.rows))
            for place, block in enumerate(lane.rows):
                for seat, row in enumerate(block.members, place * members):
                    batch[seat] = at[row]
                    seats[at[row]] = first + seat
            shared.append(Shared(lane, torch.tensor(batch, device=device).view(-1, members)))
            first += len(batch)
        return shared, torch.tensor(seats, device=device)

    def end(self, gone: Collection[int], full: Collection[int]) -> None:
        """After a step: take out what is finished, move up what fills its lane.

        Args:
            gone: indices into `rows` of sequences that leave.
            full: indices of those that fill their lane; some may be among `gone`.
        """
        self._shared = None
        rows, gone, full = self.rows, set(gone), set(full)
        last = len(rows)
        # From the longest, so that nobody moves twice.
        for i, lane in reversed(list(enumerate(self.lanes))):
            first = last - len(lane.rows)
            here = range(first, last)
            if moving := [b - first for b in here if b in full and b not in gone]:
                self.lanes[i + 1].append([lane.rows[p] for p in moving], lane.take(moving))
            lane.drop({b - first for b in here if b in full or b in gone})
            last = first
        for b in gone:
            if block := self._blocks.pop(rows[b], None):
                block.members.remove(rows[b])
                if not block.members and self._newest.get(block.key) is block:
                    del self._newest[block.key]
        for prefixes in self.prefixes:
            prefixes.drop({p for p, block in enumerate(prefixes.rows) if not block.members})

    def rewrite(self, contexts: Iterable[tuple[int, Prefix]]) -> None:
        """Replace all that is cached of each row, prefix and own."""
        places = {row: (lane, p) for lane in self.lanes for p, row in enumerate(lane.rows)}
        blocks = {block: (lane, p) for lane in self.prefixes for p, block in enumerate(lane.rows)}
        for row, context in contexts:
            own = context
            if block := self._blocks.get(row):
                prefix, own = context.cut(block.length)
                lane, place = blocks[block]
                lane.write(place, prefix)
            row_lane, place = places[row]
            row_lane.write(place, own)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values, [B, kv_heads, 1, d]; attention reads the lanes."""
        assert self._step is not None, "SlotCache.update outside a step"
        self._step.write(layer_idx, key_states, value_states)
        return key_states, value_states
