"""Decode steps: every live slot is fed its newest token and draws the next one.

`LaneDecoder` computes only the live slots, in shapes that follow the batch. `ArenaDecoder` pads the
live slots with empty ones to fixed shapes, which can be recorded and replayed. The engine chooses
one at construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from tramontane.generator.arena import ArenaCache, arena_size
from tramontane.generator.cache import SlotCache, lane_size
from tramontane.generator.forward import decode
from tramontane.generator.graphs import StepRecorder, padded_rows, run_directly
from tramontane.generator.lanes import CacheSize, Layout
from tramontane.generator.sampling import SamplingPlan, sample, uniforms
from tramontane.generator.state import SlotState
from tramontane.types import SamplingParams


class StepFlags(NamedTuple):
    """Outcome of a decode step for each row of its batch, [B] bool each."""

    stopped: torch.Tensor  # drew an EOS token
    finished: torch.Tensor  # stopped, or has all the tokens it may generate
    full: torch.Tensor  # has filled the room of its keys and values
    may_end: torch.Tensor | None  # drew a token that may complete a stop text; None without any


class Decoder(ABC):
    """The slots' cache and state, and the decode step over both.

    Row b of a step's batch belongs to slot `cache.slots[b]`.

    Args:
        model: prepared by `examine_model`.
        layout: layout of the model's keys and values.
        is_eos: [V] bool, tokens that end a completion.
        may_end: [V] bool, tokens after which the engine looks for a stop text; None without stop
            texts.
    """

    is_recorded = False  # True if steps read the weights at fixed addresses
    cache: SlotCache | ArenaCache
    state: SlotState
    _plan: SamplingPlan
    _slots: torch.Tensor  # [B] int64, of the batch's rows

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        is_eos: torch.Tensor,
        may_end: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.version = torch.zeros(1, dtype=torch.int64, device=layout.device)
        self._model, self._is_eos, self._may_end = model, is_eos, may_end

    @abstractmethod
    def size_within(self, slots: int, max_len: int, limit: int | None) -> CacheSize:
        """The cache size for at most `slots` sequences of up to `max_len` tokens, with at most
        `limit` positions; None: no limit."""

    @abstractmethod
    def allocate(self, size: CacheSize, max_len: int) -> None:
        """Allocate an empty cache of a size from `size_within`, and the state of its slots."""

    @abstractmethod
    def free(self) -> None:
        """Free the cache and the state from `allocate`, before new ones are allocated."""

    @abstractmethod
    def count_admissible(self, lengths: Iterable[int]) -> int:
        """Number of new sequences, from the first, that fit into the cache, given each one's cached
        positions at admission."""

    @abstractmethod
    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        """Update the list of live slots and their sampling; required before a step whenever slots
        were admitted or released."""

    @abstractmethod
    def step(self) -> StepFlags:
        """Draw one token for every live slot, and write it to `state`; [B] rows in the order of the
        batch."""

    @abstractmethod
    def release(self, finished: Sequence[int], full: Sequence[int]) -> list[int]:
        """Empty the slots of the rows `finished`. Of the rows `full`, returns the slots that must
        `grow` before the next step; the others have more room now."""

    @abstractmethod
    def grow(self, slot: int) -> bool:
        """Give a sequence more room; False if the cache is full."""

    @abstractmethod
    def evict(self, slot: int) -> None:
        """Empty the slot of an unfinished sequence."""

    def _advance(self, slots: torch.Tensor, capacities: torch.Tensor) -> StepFlags:
        """Draw a token for each of `slots` [B] int64, which have room for `capacities` [B]
        positions."""
        s = self.state
        counts = s.count[slots]
        lengths = s.offset[slots] + counts
        unshared = lengths - s.start[slots] if self.cache.shares_prefixes else lengths
        tokens, logprobs = sample(
            decode(self._model, self.cache, s.last[slots], lengths, unshared),
            uniforms(s.stream[slots], counts),
            s.temperature[slots],
            s.top_p[slots],
            s.top_k[slots],
            self._plan,
        )
        place = slots * s.max_len + counts
        s.tokens.view(-1).index_copy_(0, place, tokens)
        s.logprobs.view(-1).index_copy_(0, place, logprobs)
        s.versions.view(-1).index_copy_(0, place, self.version.expand_as(place))
        s.last[slots] = tokens
        s.count[slots] = counts + 1
        stopped = self._is_eos[tokens]
        finished = stopped | (counts + 1 >= s.limit[slots])
        may_end = None if self._may_end is None else self._may_end[tokens]
        return StepFlags(stopped, finished, unshared + 1 >= capacities, may_end)


class LaneDecoder(Decoder):
    """Keys and values in lanes; the batch has the live slots, lane by lane. Lanes have room for all
    slots at their longest."""

    cache: SlotCache

    def size_within(self, slots: int, max_len: int, limit: int | None) -> CacheSize:
        return lane_size(slots, max_len, limit)

    def allocate(self, size: CacheSize, max_len: int) -> None:
        self.cache = SlotCache(self.layout, size.slots, max_len)
        self.state = SlotState(size.slots, max_len, self.layout.device)

    def free(self) -> None:
        del self.cache, self.state

    def count_admissible(self, lengths: Iterable[int]) -> int:
        return sum(1 for _ in lengths)

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        device = self.layout.device
        self._slots = torch.tensor(self.cache.slots, dtype=torch.int64, device=device)
        self._capacities = torch.tensor(self.cache.capacities, device=device)
        self._plan = SamplingPlan.of(live.values(), static_shapes=False)

    def step(self) -> StepFlags:
        return self._advance(self._slots, self._capacities)

    def release(self, finished: Sequence[int], full: Sequence[int]) -> list[int]:
        self.cache.end(finished, full)
        return []

    def grow(self, slot: int) -> bool:
        self.cache.end([], [self.cache.slots.index(slot)])
        return True

    def evict(self, slot: int) -> None:
        self.cache.end([self.cache.slots.index(slot)], [])


class ArenaDecoder(Decoder):
    """Keys and values in an arena; the batch has the live slots and some empty ones, and steps are
    recorded.

    Args:
        model: as in `Decoder`.
        layout: as in `Decoder`.
        is_eos, may_end: as in `Decoder`.
        record: records steps for faster repetition.
    """

    cache: ArenaCache

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        is_eos: torch.Tensor,
        record: StepRecorder,
        may_end: torch.Tensor | None = None,
    ) -> None:
        super().__init__(model, layout, is_eos, may_end)
        self._record, self.is_recorded = record, record is not run_directly

    def size_within(self, slots: int, max_len: int, limit: int | None) -> CacheSize:
        return arena_size(slots, max_len, limit)

    def allocate(self, size: CacheSize, max_len: int) -> None:
        device = self.layout.device
        self.cache = ArenaCache(self.layout, size, max_len)
        self.state = SlotState(size.slots, max_len, device)
        # Recorded steps read them at their addresses, so all live as long as the arena.
        self._slots = torch.zeros(size.slots, dtype=torch.int64, device=device)
        self._recorded: dict[tuple[int, int, SamplingPlan], Callable[[], StepFlags]] = {}

    def free(self) -> None:
        del self._recorded, self.cache, self.state

    def count_admissible(self, lengths: Iterable[int]) -> int:
        return self.cache.count_admissible(lengths)

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        rows = padded_rows(len(live), len(self._slots))
        self.cache.assign_rows(rows)
        self._slots[:rows] = torch.tensor(self.cache.slots)
        self._plan = SamplingPlan.of(live.values(), static_shapes=True)
        self._key = rows, self.cache.span, self._plan

    def step(self) -> StepFlags:
        key, rows = self._key, self._key[0]
        if key not in self._recorded:
            state = self.state
            count, last = state.count.clone(), state.last.clone()
            self._recorded[key] = self._record(lambda: self._advance_rows(rows))
            # Recording runs the step, and the replay draws its tokens again: only count and newest
            # token must be restored.
            state.count.copy_(count)
            state.last.copy_(last)
        return self._recorded[key]()

    def _advance_rows(self, rows: int) -> StepFlags:
        """Step the first rows. Empty slots draw tokens that are ignored: their count stays 0, and
        they are neither finished nor full."""
        slots = self._slots[:rows]
        flags = self._advance(slots, self.cache.room[:rows])
        self.state.count.clamp_(max=self.state.limit)
        live = self.state.limit[slots] > 0
        may_end = None if flags.may_end is None else flags.may_end & live
        return StepFlags(flags.stopped, flags.finished & live, flags.full & live, may_end)

    def release(self, finished: Sequence[int], full: Sequence[int]) -> list[int]:
        slots = self.cache.slots
        growing = [slots[row] for row in full if row not in finished]
        self._empty([slots[row] for row in finished])
        return growing

    def grow(self, slot: int) -> bool:
        return self.cache.grow(slot)

    def evict(self, slot: int) -> None:
        self._empty([slot])

    def _empty(self, slots: list[int]) -> None:
        self.cache.release(slots)
        self.state.clear(torch.tensor(slots, dtype=torch.int64, device=self.layout.device))
