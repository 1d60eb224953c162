"""Where keys and values lie.

A decode step is bound by reading keys and values, so what matters is that reads are contiguous
(2–3 times faster than strided ones on a CPU) and short. Hence *lanes*: entries of similar length
lie side by side without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from transformers.cache_utils import Cache

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Prefix:
    """Keys and values of one sequence's first `length` positions; `planes` as in `Layout`, each
    [planes, heads, length, d]."""

    length: int
    planes: list[torch.Tensor]

    def cut(self, at: int) -> tuple[Prefix, Prefix]:
        """The first `at` positions, and the others; views."""
        first, rest = [p[:, :, :at] for p in self.planes], [p[:, :, at:] for p in self.planes]
        return Prefix(at, first), Prefix(self.length - at, rest)


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


class Lane(Generic[Owner]):
    """Entries of at most `capacity` positions, side by side without gaps.

    `rows` says whose they are; `stacks` holds one [planes, room, heads, capacity, d] per shape of
    the layout. Room doubles as entries come, up to `most`.
    """

    def __init__(self, layout: Layout, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.rows: list[Owner] = []
        self.stacks: list[torch.Tensor] = []
        self._layout, self._most = layout, most
        self._room = self._clean = 0
        self._positions = torch.empty(0)

    def append(self, rows: Sequence[Owner], planes: Sequence[torch.Tensor] = ()) -> None:
        """Add entries that start with `planes`, each [planes, len(rows) or 1, heads, length, d]."""
        first = len(self.rows)
        self.rows += rows
        self._reserve(len(self.rows))
        for stack, plane in zip(self.stacks, planes, strict=False):
            stack[:, first : len(self.rows), :, : plane.shape[3]] = plane

    def write(self, place: int, prefix: Prefix) -> None:
        """Replace what the entry at `place` starts with."""
        for stack, planes in zip(self.stacks, prefix.planes, strict=False):
            stack[:, place, :, : prefix.length] = planes

    def index(self, heads: int) -> torch.Tensor:
        """[heads · capacity] int32: the numbers of that many heads' positions, from 0."""
        if len(self._positions) < heads * self.capacity:
            self._positions = torch.arange(
                heads * self.capacity, dtype=torch.int32, device=self._layout.device
            )
        return self._positions[: heads * self.capacity]

    def take(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Copies of whole entries, [planes, len(places), heads, capacity, d] a stack."""
        return [
            _flat(stack).index_select(0, self._index(stack, places)).unflatten(0, (-1, len(places)))
            for stack in self.stacks
        ]

    def drop(self, places: Collection[int]) -> None:
        """Take entries out; the last ones fill their places."""
        left = len(self.rows) - len(places)
        holes = [p for p in places if p < left]
        fillers = [p for p in range(left, len(self.rows)) if p not in places]
        if holes:
            for stack, entries in zip(self.stacks, self.take(fillers), strict=True):
                _flat(stack).index_copy_(0, self._index(stack, holes), entries.flatten(0, 1))
        for hole, filler in zip(holes, fillers, strict=True):
            self.rows[hole] = self.rows[filler]
        del self.rows[left:]

    def _index(self, stack: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Entries of all planes as rows of the flat stack."""
        at = torch.tensor(places, device=stack.device)
        planes = torch.arange(stack.shape[0], device=stack.device)
        return (planes[:, None] * self._room + at).view(-1)

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
                new[:, : self._clean] = stack[:, : self._clean]
        if n > self._clean:
            # What was never written is multiplied by an attention weight of 0: it must not be NaN.
            for stack in self.stacks:
                stack[:, self._clean : n] = 0
            self._clean = n


def _flat(stack: torch.Tensor) -> torch.Tensor:
    """[planes · room, heads, capacity, d]: moving rows of this is one plain copy a row."""
    return stack.flatten(0, 1)
