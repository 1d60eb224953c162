"""Lanes: contiguous storage of keys and values.

A decode step is bound by reading keys and values, so reads must be contiguous (2–3 times faster
than strided reads on a CPU) and short. Hence *lanes*: entries of similar length are stored side by
side without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import torch

from tramontane.models.states import PackedStates, StateCache, States

Owner = TypeVar("Owner")

_CAPACITY_MULTIPLE = 16


class CacheSize(NamedTuple):
    """Slots of a cache, and the maximum number of positions in it. 0 slots: memory is too small for
    the longest sequence."""

    slots: int
    positions: int


def capacity_ladder(longest: int, shortest: int, factor: float) -> list[int]:
    """Capacities in positions, from at least `shortest` to at least `longest`, each about `factor`
    times the previous one."""
    multiple = _CAPACITY_MULTIPLE
    capacities = [-(-longest // multiple) * multiple]
    while (shorter := int(capacities[0] / factor) // multiple * multiple) >= shortest:
        capacities.insert(0, shorter)
    return capacities


@dataclass(frozen=True)
class Prefix:
    """Keys and values of one sequence's first `length` positions; `planes` as in `Layout`, each
    [planes, heads, length, d]. With the states after the last of them, [1, ...] each, if the model
    has layers that carry state."""

    length: int
    planes: list[torch.Tensor]
    states: States = field(default_factory=dict)

    def split(self, length: int) -> tuple[Prefix, Prefix]:
        """The first `length` positions and the rest, as views."""
        first = [planes[:, :, :length] for planes in self.planes]
        rest = [planes[:, :, length:] for planes in self.planes]
        return Prefix(length, first), Prefix(self.length - length, rest, self.states)

    def joined(self, rest: Prefix) -> Prefix:
        """A copy with the positions of `rest` after its own."""
        if not self.length or not rest.length:
            whole = self if self.length else rest
            return replace(whole, planes=[planes.clone() for planes in whole.planes])
        pairs = zip(self.planes, rest.planes, strict=True)
        planes = [torch.cat(pair, 2) for pair in pairs]
        return Prefix(self.length + rest.length, planes, rest.states)


class WrittenCache(StateCache):
    """A cache that attention writes to: transformers gives it keys and values, and gets them back.

    What attention is called with is cached, which is not what transformers caches everywhere: some
    layers attend to keys and values of an earlier layer. A *layer* is a call of attention in a
    forward, counted from 0.

    Attributes:
        beyond_flash: True once attention that flash attention does not compute has written to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.beyond_flash = False

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take a layer's new keys and values, [B, kv_heads, N, d] each."""
        raise NotImplementedError

    def write_pair(self, layer: int, pair: torch.Tensor) -> None:
        """`write` with both in one tensor, [B, N, 2, kv_heads, d]."""
        key, value = pair.transpose(1, 3).unbind(2)
        self.write(layer, key, value)


class RecordedCache(WrittenCache):
    """Records the keys and values of one packed forward, [1, kv_heads, N, head_dim] per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[tuple[int, int], torch.Tensor] = {}
        self.packed_states = PackedStates([{}])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's keys and values, [1, kv_heads, N, d] each, without a copy."""
        self.recorded[layer, 0], self.recorded[layer, 1] = key, value


class Layout:
    """How a model's keys and values are stacked, so that a sequence moves in one copy.

    A *plane* is the keys, or the values, of one layer, and of the later layers that attend to the
    same tensor. Planes with equal heads and head size form one tensor, a *stack*; nearly all models
    have a single stack with 2 · layers planes.

    Args:
        example: a recorded prefill, for the model's planes.

    Attributes:
        shapes: (planes, heads, head size) of each stack.
        plane_index: (layer, 0 for keys or 1 for values) → (stack, index in the stack).
        shared: those (layer, 0 or 1) whose plane an earlier one writes.
        dtype: dtype of keys and values.
        device: device of keys and values.
        beyond_flash: True if attention caps scores, or sees chunks.
        states: states before a sequence's first token, [1, ...] each.
    """

    def __init__(self, example: RecordedCache) -> None:
        stacks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        writers: dict[int, tuple[int, int]] = {}  # by tensor: the first that writes it
        for plane, tensor in example.recorded.items():
            if writers.setdefault(id(tensor), plane) == plane:
                stacks.setdefault((tensor.shape[1], tensor.shape[3]), []).append(plane)
        self.shapes = [(len(planes), *shape) for shape, planes in stacks.items()]
        places = {p: (s, i) for s, ps in enumerate(stacks.values()) for i, p in enumerate(ps)}
        self.plane_index = {p: places[writers[id(t)]] for p, t in example.recorded.items()}
        self.shared = self.plane_index.keys() - places.keys()
        self.beyond_flash = example.beyond_flash
        (states,) = example.packed_states.after
        tensor = next(iter([*example.recorded.values(), *states.values()]))
        self.dtype, self.device = tensor.dtype, tensor.device
        self.states = {key: torch.zeros_like(x) for key, x in states.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(x.nbytes for x in self.states.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all planes; 1 for a model without attention."""
        numbers = sum(planes * heads * d for planes, heads, d in self.shapes)
        return numbers * self.dtype.itemsize or 1


class PackedCache(WrittenCache):
    """Stacks the keys and values of one packed forward of N tokens. Each layer's are copied at
    once, so that those of all layers exist only once.

    Args:
        layout: layout of the model's keys and values.
        tokens: N.
        before: states of each sequence before its first token in the row, if it has any.

    Attributes:
        stacks: [planes, heads, N, d] for each shape of the layout.
    """

    def __init__(self, layout: Layout, tokens: int, before: Sequence[States] = ()) -> None:
        super().__init__()
        self.packed_states = PackedStates(before)
        self._plane_index, self._shared = layout.plane_index, layout.shared
        self.stacks = [
            torch.empty((planes, heads, tokens, d), dtype=layout.dtype, device=layout.device)
            for planes, heads, d in layout.shapes
        ]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a layer's keys and values, [1, kv_heads, N, d] each, into its planes."""
        for which, new in enumerate((key, value)):
            stack, plane = self._plane_index[layer, which]
            if (layer, which) not in self._shared:
                self.stacks[stack][plane] = new[0]

    def split(self, lengths: Sequence[int]) -> list[Prefix]:
        """The keys and values of each sequence, given the sequences' `lengths`; the rest is
        filler."""
        parts = [s.narrow(2, 0, sum(lengths)).split(list(lengths), dim=2) for s in self.stacks]
        after = self.packed_states.after
        return [Prefix(n, [p[i] for p in parts], after[i]) for i, n in enumerate(lengths)]


class Lane(Generic[Owner]):
    """Entries of at most `capacity` positions, side by side without gaps.

    `owners` names the owner of each entry; `stacks` holds one [planes, room, heads, capacity, d]
    per shape of the layout. Room doubles as entries arrive.

    Args:
        layout: layout of the model's keys and values.
        capacity: positions of each entry.
        most: maximum number of entries.
    """

    def __init__(self, layout: Layout, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.owners: list[Owner] = []
        self.stacks: list[torch.Tensor] = []
        self._layout, self._most = layout, most
        self._room = 0  # entries with reserved memory
        self._initialized = 0  # number of initialized entries, from the first
        self._positions = torch.empty(0)

    def append(self, owners: Sequence[Owner], planes: Sequence[torch.Tensor] = ()) -> None:
        """Add entries that start with `planes`, each [planes, owners or 1, heads, length, d]."""
        first = len(self.owners)
        self.owners += owners
        self._reserve(len(self.owners))
        for stack, plane in zip(self.stacks, planes, strict=False):
            stack[:, first : len(self.owners), :, : plane.shape[3]] = plane

    def write(self, place: int, prefix: Prefix) -> None:
        """Replace the first positions of the entry at `place`."""
        for stack, planes in zip(self.stacks, prefix.planes, strict=False):
            stack[:, place, :, : prefix.length] = planes

    def position_numbers(self, heads: int) -> torch.Tensor:
        """[heads · capacity] int32: the numbers of that many heads' positions, from 0."""
        if len(self._positions) < heads * self.capacity:
            self._positions = torch.arange(
                heads * self.capacity, dtype=torch.int32, device=self._layout.device
            )
        return self._positions[: heads * self.capacity]

    def copy_entries(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Copies of whole entries, [planes, len(places), heads, capacity, d] per stack."""
        return [
            _flat(stack).index_select(0, self._index(stack, places)).unflatten(0, (-1, len(places)))
            for stack in self.stacks
        ]

    def remove(self, places: Collection[int]) -> None:
        """Remove entries; the last entries take their places."""
        remaining = len(self.owners) - len(places)
        holes = [p for p in places if p < remaining]
        fillers = [p for p in range(remaining, len(self.owners)) if p not in places]
        if holes:
            for stack, entries in zip(self.stacks, self.copy_entries(fillers), strict=True):
                _flat(stack).index_copy_(0, self._index(stack, holes), entries.flatten(0, 1))
        for hole, filler in zip(holes, fillers, strict=True):
            self.owners[hole] = self.owners[filler]
        del self.owners[remaining:]

    def _index(self, stack: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Entries of all planes as rows of the flat stack."""
        columns = torch.tensor(places, device=stack.device)
        planes = torch.arange(stack.shape[0], device=stack.device)
        return (planes[:, None] * self._room + columns).view(-1)

    def _reserve(self, n: int) -> None:
        if n > self._room:
            self._room = min(self._most, max(n, 2 * self._room))
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
                new[:, : self._initialized] = stack[:, : self._initialized]
        if n > self._initialized:
            # Hidden positions are multiplied by an attention weight of 0: they must not be NaN.
            for stack in self.stacks:
                stack[:, self._initialized : n] = 0
            self._initialized = n


def _flat(stack: torch.Tensor) -> torch.Tensor:
    """[planes · room, heads, capacity, d]: moving a row of this view is one plain copy."""
    return stack.flatten(0, 1)
