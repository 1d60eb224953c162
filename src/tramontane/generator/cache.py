"""Keys and values of the sequences in flight.

Two duck types of transformers' cache, of which a model only ever calls `update`: `PackedCache`
records what a packed prefill computes, `SlotCache` is what decoding writes to and reads from.

A decode step is bound by reading keys and values, so what matters is that reads are contiguous
(2–3 times faster than strided ones on a CPU) and short. Hence *lanes*: sequences of similar length
lie side by side without gaps, and one that outgrows its lane moves to the next, half as long again.
A long sequence is then paid for by itself, not by everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

_SHORTEST_LANE = 64
_GROWTH = 1.5
_ROUND = 16


@dataclass(frozen=True)
class Prefix:
    """Keys and values of one sequence's first `length` positions; `planes` as in `Layout`, each
    [planes, heads, length, d]."""

    length: int
    planes: list[torch.Tensor]


class PackedCache(Cache):
    """Records the keys and values of one packed forward, [1, kv_heads, N, head_dim] a layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.recorded: dict[tuple[int, int], torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.recorded[layer_idx, 0], self.recorded[layer_idx, 1] = key_states, value_states
        return key_states, value_states


class Layout:
    """How a model's keys and values are stacked, so that a sequence moves in one copy.

    A *plane* is the keys, or the values, of one layer. Planes with equal heads and head size form
    one tensor; nearly all models have a single one, of 2 · layers planes.

    Args:
        example: a recorded prefill, from which the planes are learnt.
    """

    def __init__(self, example: PackedCache) -> None:
        stacks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for plane, tensor in example.recorded.items():
            stacks.setdefault((tensor.shape[1], tensor.shape[3]), []).append(plane)
        self.shapes = [(len(planes), *shape) for shape, planes in stacks.items()]
        self._planes = list(stacks.values())
        self.where = {p: (s, i) for s, ps in enumerate(self._planes) for i, p in enumerate(ps)}
        tensor = next(iter(example.recorded.values()))
        self.dtype, self.device = tensor.dtype, tensor.device

    def split(self, packed: PackedCache, lengths: Sequence[int]) -> list[Prefix]:
        """What was recorded, by sequence."""
        stacks = [torch.cat([packed.recorded[p] for p in planes]) for planes in self._planes]
        parts = [stack.split(list(lengths), dim=2) for stack in stacks]
        return [Prefix(n, [p[i] for p in parts]) for i, n in enumerate(lengths)]


class Lane:
    """Sequences of at most `capacity` positions, side by side without gaps.

    `rows` says whose they are; `stacks` holds one [planes, room, heads, capacity, d] per shape of
    the layout. Room doubles as sequences come, up to `slots`.
    """

    def __init__(self, layout: Layout, capacity: int, slots: int) -> None:
        self.capacity = capacity
        self.rows: list[int] = []
        self.stacks: list[torch.Tensor] = []
        self._layout, self._slots = layout, slots
        self._room = self._clean = 0

    def append(self, rows: Sequence[int], prefix: Prefix) -> None:
        """Add sequences that start with the same `prefix`."""
        first = len(self.rows)
        self.rows += rows
        self._reserve(len(self.rows))
        self.write(first, len(self.rows), prefix)

    def write(self, first: int, last: int, prefix: Prefix) -> None:
        """Copy a prefix into the places `first` up to `last`, exclusive."""
        for stack, planes in zip(self.stacks, prefix.planes, strict=False):
            stack[:, first:last, :, : prefix.length] = planes[:, None]

    def read(self, place: int, length: int) -> Prefix:
        """The first `length` positions of the sequence at `place`; a view."""
        return Prefix(length, [stack[:, place, :, :length] for stack in self.stacks])

    def drop(self, place: int, last_length: int) -> None:
        """Take a sequence out; the last one, of `last_length` positions, fills its place."""
        last = len(self.rows) - 1
        if place != last:
            self.write(place, place + 1, self.read(last, last_length))
            self.rows[place] = self.rows[last]
        self.rows.pop()

    def _reserve(self, n: int) -> None:
        if n > self._room:
            self._room = min(self._slots, max(n, 2 * self._room))
            old, layout = self.stacks, self._layout
            self.stacks = [
                torch.empty(
                    (planes, self._room, heads, self.capacity, d),
                    dtype=layout.dtype,
                    device=layout.device,
                )
                for planes, heads, d in layout.shapes
            ]
            for new, stack in zip(self.stacks, old, strict=False):
                new[:, : self._clean] = stack[:, : self._clean]
        if n > self._clean:
            # What was never written is multiplied by an attention weight of 0: it must not be NaN.
            for stack in self.stacks:
                stack[:, self._clean : n] = 0
            self._clean = n


class Segment:
    """One lane's part of a decode step: rows `first` up to `last` of the batch.

    Args:
        lane: where their keys and values lie.
        first: the lane's first row in the batch.
        lengths: [B] of its sequences, without the token of this step.
    """

    def __init__(self, lane: Lane, first: int, lengths: torch.Tensor) -> None:
        self.lane, self.first, self.last = lane, first, first + len(lengths)
        self._lengths = lengths
        self._rows: dict[int, torch.Tensor] = {}
        self._bias: dict[int | None, torch.Tensor] = {}

    def rows(self, heads: int) -> torch.Tensor:
        """[B · heads]: the rows of a plane seen as [room · heads · capacity, d] to be written."""
        if heads not in self._rows:
            block = torch.arange(len(self._lengths) * heads, device=self._lengths.device)
            written = self._lengths.repeat_interleave(heads)
            self._rows[heads] = block * self.lane.capacity + written
        return self._rows[heads]

    def bias(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, capacity] float32: 0 where a token may look, −inf elsewhere.

        It sees itself and what came before; with a sliding `window`, the last `window` of these.
        """
        if window not in self._bias:
            position = torch.arange(self.lane.capacity, device=self._lengths.device)
            distance = self._lengths[:, None] - position
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            bias = torch.zeros(hidden.shape, device=hidden.device)
            self._bias[window] = bias.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._bias[window]


class Step:
    """One decode step as attention sees it: the segments, and the keys and values of the layer
    that is being computed."""

    def __init__(self, layout: Layout, segments: list[Segment]) -> None:
        self.segments = segments
        self.reads = 0
        self._layout = layout
        self._layer = 0
        self._written = (0, 0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache one token's key and value [B, heads, 1, d] for every row of the batch."""
        self._layer = layer
        self._written = (key.data_ptr(), value.data_ptr())
        for segment in self.segments:
            for which, new in enumerate((key, value)):
                plane = self._plane(segment, which)
                # On a flat view by index_copy_: scatter_ costs 90 times as much in bfloat16.
                plane.view(-1, plane.shape[-1]).index_copy_(
                    0,
                    segment.rows(plane.shape[1]),
                    new[segment.first : segment.last].reshape(-1, plane.shape[-1]),
                )

    def holds(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are the tensors last written: some models cache one thing and attend to
        another made from it, e.g. compressed latents."""
        return (key.data_ptr(), value.data_ptr()) == self._written

    def read(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """A segment's keys and values, [B, heads, capacity, d] each: views, contiguous."""
        self.reads += 1
        n = segment.last - segment.first
        return self._plane(segment, 0)[:n], self._plane(segment, 1)[:n]

    def _plane(self, segment: Segment, which: int) -> torch.Tensor:
        stack, plane = self._layout.where[self._layer, which]
        return segment.lane.stacks[stack][plane]


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
        capacities = [-(-max_len // _ROUND) * _ROUND]
        while (shorter := int(capacities[0] / _GROWTH) // _ROUND * _ROUND) >= _SHORTEST_LANE:
            capacities.insert(0, shorter)
        self.lanes = [Lane(layout, c, slots) for c in capacities]
        self._step: Step | None = None

    @property
    def reads(self) -> int:
        """How often attention has read the lanes in the step that is open."""
        return self._step.reads if self._step else 0

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for lane in self.lanes for stack in lane.stacks)

    @property
    def rows(self) -> list[int]:
        """Whose the sequences are, in the order in which a step takes them: lane by lane."""
        return [row for lane in self.lanes for row in lane.rows]

    @property
    def capacities(self) -> list[int]:
        """Positions that each of `rows` has room for where it is."""
        return [lane.capacity for lane in self.lanes for _ in lane.rows]

    def lane_for(self, length: int) -> Lane:
        """The shortest lane with room for `length` positions and one more."""
        return next(lane for lane in self.lanes if lane.capacity > length)

    def begin(self, lengths: torch.Tensor) -> Step:
        """Open a decode step; `lengths` [B] int64 are the positions cached, in the order of
        `rows`."""
        segments, first = [], 0
        for lane in self.lanes:
            if lane.rows:
                segments.append(Segment(lane, first, lengths[first : first + len(lane.rows)]))
                first += len(lane.rows)
        self._step = Step(self.layout, segments)
        return self._step

    def end(self, lengths: list[int], gone: Sequence[int], full: Sequence[int]) -> None:
        """After a step: take out what is finished, move up what has outgrown its lane.

        Args:
            lengths: [B] positions cached now, in the order of `rows`.
            gone: indices into `rows` of sequences that leave.
            full: indices of those that stay but fill their lane.
        """
        lengths, leaving = list(lengths), sorted({*gone, *full})
        first = len(lengths)
        # Backwards, so that whatever fills a place has been looked at before.
        for lane in reversed(self.lanes):
            last, first = first, first - len(lane.rows)
            while leaving and leaving[-1] >= first:
                b = leaving.pop()
                if b not in gone:
                    prefix = lane.read(b - first, lengths[b])
                    self.lane_for(lengths[b]).append([lane.rows[b - first]], prefix)
                last -= 1
                lane.drop(b - first, lengths[last])
                lengths[b] = lengths[last]

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
