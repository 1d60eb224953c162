"""Decode steps: every live slot is fed its newest token and draws the next one.

`LaneDecoder` computes the live slots only, in shapes that follow the batch. `RecordedDecoder`
computes all slots up to the last live one, in fixed shapes that can be recorded and replayed. The
engine chooses one of the two at construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from tramontane.generator.cache import SlotCache
from tramontane.generator.forward import decode
from tramontane.generator.graphs import StepRecorder, padded_rows
from tramontane.generator.lanes import Layout
from tramontane.generator.sampling import SamplingPlan, sample, uniforms
from tramontane.generator.slab import SlabCache
from tramontane.generator.state import SlotState
from tramontane.types import SamplingParams


class StepFlags(NamedTuple):
    """Outcome of a decode step for each row of its batch, [B] bool each."""

    stopped: torch.Tensor  # drew an EOS token
    finished: torch.Tensor  # stopped, or has all the tokens it may generate
    full: torch.Tensor  # has filled its lane
    may_end: torch.Tensor | None  # drew a token that may complete a stop text; None without any


class Decoder(ABC):
    """Cache and state of the slots, and the decode step over both.

    Row b of a step's batch belongs to slot `cache.slots[b]`.

    Args:
        model: prepared by `examine_model`.
        layout: layout of the model's keys and values.
        is_eos: [V] bool, tokens that end a completion.
        may_end: [V] bool, tokens after which the engine looks for a stop text; None without stop
            texts.
    """

    cache: SlotCache | SlabCache
    state: SlotState
    _plan: SamplingPlan
    # The batch: [B] int64 slots, and [B] int64 unshared positions that each has room for.
    _slots: torch.Tensor
    _capacities: torch.Tensor

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
    def allocate(self, slots: int, max_len: int) -> None:
        """Make an empty cache and state for `slots` sequences of up to `max_len` tokens."""

    @abstractmethod
    def free(self) -> None:
        """Free the cache and the state of `allocate`, before new ones are allocated."""

    @abstractmethod
    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        """Take note of the live slots and their sampling; due before a step whenever slots were
        admitted or released."""

    @abstractmethod
    def step(self) -> StepFlags:
        """Draw one token for every live slot, and write it to `state`."""

    @abstractmethod
    def release(self, finished: Sequence[int], full: Sequence[int]) -> None:
        """Empty the slots of the rows `finished`; give more room to the rows `full`."""

    def _advance(self, slots: torch.Tensor, capacities: torch.Tensor) -> StepFlags:
        """Draw a token for each of `slots` [B], which have room for `capacities` [B] positions."""
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
    """Keys and values in lanes; a batch of the live slots, lane by lane."""

    cache: SlotCache

    def allocate(self, slots: int, max_len: int) -> None:
        self.cache = SlotCache(self.layout, slots, max_len)
        self.state = SlotState(slots, max_len, self.layout.device)

    def free(self) -> None:
        del self.cache, self.state

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        device = self.layout.device
        self._slots = torch.tensor(self.cache.slots, dtype=torch.int64, device=device)
        self._capacities = torch.tensor(self.cache.capacities, device=device)
        self._plan = SamplingPlan.of(live.values(), static_shapes=False)

    def step(self) -> StepFlags:
        return self._advance(self._slots, self._capacities)

    def release(self, finished: Sequence[int], full: Sequence[int]) -> None:
        self.cache.end(finished, full)


class RecordedDecoder(Decoder):
    """Keys and values in a slab; a batch of the first slots, live or empty, by recorded steps.

    Args:
        model: as in `Decoder`; its forward reads no values of tensors.
        layout: as in `Decoder`.
        is_eos, may_end: as in `Decoder`.
        record: makes steps quicker to repeat.
    """

    cache: SlabCache

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        is_eos: torch.Tensor,
        record: StepRecorder,
        may_end: torch.Tensor | None = None,
    ) -> None:
        super().__init__(model, layout, is_eos, may_end)
        self._record = record

    def allocate(self, slots: int, max_len: int) -> None:
        device = self.layout.device
        self.cache = SlabCache(self.layout, slots, max_len)
        self.state = SlotState(slots, max_len, device)
        # Recorded steps read both where they lie: they stay for as long as the slab.
        self._slots = torch.arange(slots, device=device)
        self._capacities = torch.full((slots,), max_len, device=device)
        self._recorded: dict[tuple[int, SamplingPlan], Callable[[], StepFlags]] = {}

    def free(self) -> None:
        del self._recorded, self.cache, self.state

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        self._rows = padded_rows(max(live, default=0) + 1, len(self._slots))
        self._plan = SamplingPlan.of(live.values(), static_shapes=True)

    def step(self) -> StepFlags:
        rows, key = self._rows, (self._rows, self._plan)
        if key not in self._recorded:
            state = self.state
            count, last = state.count.clone(), state.last.clone()
            self._recorded[key] = self._record(lambda: self._advance_first(rows))
            # Recording runs the step, and its tokens are drawn again in the replay: only count and
            # newest token have to be put back.
            state.count.copy_(count)
            state.last.copy_(last)
        return self._recorded[key]()

    def _advance_first(self, rows: int) -> StepFlags:
        """Step the first slots. Empty slots draw tokens that nothing reads: their count stays 0,
        and they are never finished."""
        flags = self._advance(self._slots[:rows], self._capacities[:rows])
        limit = self.state.limit[:rows]
        self.state.count[:rows].clamp_(max=limit)
        live = limit > 0
        may_end = None if flags.may_end is None else flags.may_end & live
        return flags._replace(finished=flags.finished & live, may_end=may_end)

    def release(self, finished: Sequence[int], full: Sequence[int]) -> None:
        """Empty the slots; a slot of a slab has room for the longest sequence and is never full."""
        self.state.clear(torch.tensor(finished, dtype=torch.int64, device=self.layout.device))
