"""Decode steps: every live slot is fed its newest token and draws the next one.

`LaneDecoder` computes only the live slots, in shapes that follow the batch. `ArenaDecoder` pads the
live slots with empty ones to fixed shapes, which can be recorded and replayed. The engine chooses
one at construction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tramontane.config.generator import MOST_ALLOWED
from tramontane.generator.arena import ArenaCache, arena_size
from tramontane.generator.cache import SlotCache, lane_size
from tramontane.generator.forward import decode
from tramontane.generator.fusion import compiled_like
from tramontane.generator.graphs import StepRecorder, padded_rows, recorded_rows, run_directly
from tramontane.generator.lanes import CacheSize, Layout
from tramontane.generator.sampling import DrawPlan, draw, sample, streams, uniforms
from tramontane.models import routing
from tramontane.models.packing import upload
from tramontane.models.routing import NO_CHOICE
from tramontane.types import Completion, SamplingParams

logger = logging.getLogger("tramontane")

TOKEN_STATE = 12  # bytes of a generated token in a slot: id, version, log-prob


class SlotState:
    """The state of the slots, which stays on the device while decoding.

    Few tensors, so that a step gathers a slot's numbers and writes its token with one kernel each,
    and a slot is written or read with one copy.

    Attributes:
        progress: [slots, 2] int64: newest token, not cached yet; number of tokens generated.
        numbers: [slots, 8] int64, written at admission: positions cached before the first token was
            generated, and that token's own; positions cached at admission; maximum number of
            tokens, 0 for an empty slot; start of the random stream; top-k; and top-p and
            temperature, as float64.
        record: [slots, max_len, 3] int32 of each generated token: id, version, and log-prob, as
            float32.
        experts: [slots, max_len, numbers] int16, the experts of the step that drew each token;
            `numbers` is layers · k, and 0 if they are not recorded.
        allowed: [slots, MOST_ALLOWED] int32, the tokens that were allowed in the newest step, as in
            `Draws`, in the first columns.
    """

    def __init__(self, slots: int, max_len: int, device: torch.device, numbers: int = 0) -> None:
        self.max_len = max_len
        self.experts = torch.zeros(slots, max_len, numbers, dtype=torch.int16, device=device)
        self.progress = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, 8, dtype=torch.int64, device=device)
        self.numbers.view(torch.float64)[:, 6:] = 1.0
        self.record = torch.zeros(slots, max_len, 3, dtype=torch.int32, device=device)
        self.allowed = torch.zeros(slots, MOST_ALLOWED, dtype=torch.int32, device=device)

    def allow(self, slots: torch.Tensor, allowed: torch.Tensor) -> None:
        """Write the allowed tokens of the newest step, [N, top-k] int32, of N slots."""
        self.allowed.narrow(1, 0, allowed.shape[1]).index_copy_(0, slots, allowed)

    @staticmethod
    def nbytes(slots: int, max_len: int) -> int:
        """Bytes of the tensors."""
        return slots * (8 * (2 + 8) + 4 * MOST_ALLOWED + max_len * TOKEN_STATE)

    def clear(self, slots: torch.Tensor) -> None:
        """Mark slots [N] int64 as empty for steps of fixed shapes: nothing cached, no token to
        draw."""
        self.progress.index_fill_(0, slots, 0)
        self.numbers[:, :4].index_fill_(0, slots, 0)

    def write(
        self, slots: list[int], requests: list[Completion], shifts: Sequence[int] | None = None
    ) -> None:
        """Write N requests, with the tokens they have so far, into N slots.

        Args:
            slots: where.
            requests: what.
            shifts: by how much the positions of their tokens differ from a count; None: not.
        """
        rows = torch.empty(len(slots), 11, dtype=torch.int64)
        tokens = [len(r.token_ids) for r in requests]
        prompts = [len(r.prompt_ids) for r in requests]
        columns = [
            slots,
            [(r.token_ids or r.prompt_ids)[-1] for r in requests],
            tokens,
            [prompt - 1 for prompt in prompts],
            [p - 1 + shift for p, shift in zip(prompts, shifts or [0] * len(prompts), strict=True)],
            [prompt + n - 1 for prompt, n in zip(prompts, tokens, strict=True)],
            [r.sampling.max_tokens for r in requests],
        ]
        rows[:, :7] = torch.tensor(columns).T
        rows[:, 7] = streams([r.seed for r in requests])
        rows[:, 8] = torch.tensor([r.sampling.top_k for r in requests])
        real = [[r.sampling.top_p, r.sampling.temperature] for r in requests]
        rows.view(torch.float64)[:, 9:] = torch.tensor(real, dtype=torch.float64)
        rows = upload(rows, self.record.device)
        self.progress.index_copy_(0, rows[:, 0], rows[:, 1:3])
        self.numbers.index_copy_(0, rows[:, 0], rows[:, 3:])
        for slot, r in zip(slots, requests, strict=True):
            if n := len(r.token_ids):
                known = np.empty((n, 3), dtype=np.int32)
                known[:, 0], known[:, 1] = r.token_ids, r.versions
                known[:, 2] = np.array(r.logprobs, dtype=np.float32).view(np.int32)
                self.record[slot, :n] = upload(torch.from_numpy(known), self.record.device)
                self._write_experts(slot, r)

    def _write_experts(self, slot: int, request: Completion) -> None:
        """Write the experts of a request's tokens, as far as they are known."""
        numbers = self.experts.shape[2]
        self.experts[slot, : len(request.token_ids)] = NO_CHOICE
        if numbers and (known := request.experts) is not None:
            self.experts[slot, : len(known)] = upload(torch.from_numpy(known), self.experts.device)

    def read_experts(self, slot: int, count: int) -> NDArray[np.int16] | None:
        """The experts of the first `count` tokens of a slot, [count, numbers]."""
        if not self.experts.shape[2]:
            return None
        return self.experts[slot, :count].to("cpu", copy=True).numpy()

    def read(self, slot: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first `count` tokens of a slot: ids and versions int32, log-probs float32."""
        return columns_of(self.record[slot, :count])


def columns_of(record: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A part [..., 3] of `SlotState.record`, copied to the host: ids, versions and log-probs."""
    # Through pinned memory a GPU copies several times as fast; torch keeps and reuses it.
    pinned = record.is_cuda
    on_host = torch.empty(record.shape, dtype=record.dtype, pin_memory=pinned).copy_(record)
    columns = np.ascontiguousarray(np.moveaxis(on_host.numpy(), -1, 0))
    return columns[0], columns[1], columns[2].view(np.float32)


class _Shape(NamedTuple):
    """What distinguishes recorded steps."""

    rows: int
    span: int
    plan: DrawPlan


class StepFlags(NamedTuple):
    """Outcome of a decode step for each row of its batch, [B] bool each, on the host."""

    stopped: torch.Tensor  # drew an EOS token
    finished: torch.Tensor  # stopped, or has all the tokens it may generate
    full: torch.Tensor  # has filled the room of its keys and values
    may_end: torch.Tensor  # drew a token that may complete a stop text
    broken: torch.Tensor  # drew from logits that are not finite


class _Decoder:
    """The slots' cache and state, and the decode step over both.

    Row b of a step's batch belongs to slot `cache.slots[b]`.

    Args:
        model: prepared by `examine_model`.
        layout: layout of the model's keys and values.
        is_eos: [V] bool, tokens that end a completion.
        may_end: [V] bool, tokens after which the engine looks for a stop text; None without stop
            texts.
    """

    cache: SlotCache | ArenaCache
    state: SlotState
    _plan: DrawPlan

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        is_eos: torch.Tensor,
        may_end: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.version = torch.zeros(1, dtype=torch.int32, device=layout.device)
        self._model, self._is_eos, self._may_end = model, is_eos, may_end
        self._records_experts = bool(routing.blocks(model))
        self._draw = compiled_like(model, draw)
        self._read_rows = compiled_like(model, _read_rows)
        self._outcome = compiled_like(model, _outcome)

    @property
    def newest_allowed(self) -> torch.Tensor:
        """[slots, top-k] int32: the tokens allowed in the newest step, as in `SlotState.allowed`;
        of as many columns as are recorded."""
        return self.state.allowed[:, : self._plan.recorded]

    def _new_state(self, slots: int, max_len: int) -> SlotState:
        numbers = 0
        if self._records_experts:
            numbers = routing.choices(self._model)[0].numel()  # of `examine_model`'s last forward
        return SlotState(slots, max_len, self.layout.device, numbers)

    def _advance(self, slots: torch.Tensor, capacities: torch.Tensor) -> torch.Tensor:
        """Draw a token for each of `slots` [B] int64, which have room for `capacities` [B]
        positions; returns the fields of `StepFlags`, [5, B]."""
        s = self.state
        rows = self._read_rows(s.progress, s.numbers, slots)
        unshared = rows.lengths - rows.start if self.cache.shares_prefixes else rows.lengths
        drawn = sample(
            decode(self._model, self.cache, rows.last, rows.positions, unshared),
            rows.uniform,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            self._plan,
            self._draw,
        )
        full = unshared + 1 >= capacities
        ends = self._is_eos, self._may_end
        progress, record, flags = self._outcome(rows, drawn[:2], self.version, full, ends)
        places = slots * s.max_len + rows.counts
        s.record.view(-1, 3).index_copy_(0, places, record)
        if self._records_experts:
            chosen = routing.choices(self._model)[: len(slots)].flatten(1)  # without filler
            s.experts.view(-1, chosen.shape[1]).index_copy_(0, places, chosen)
        if self._plan.recorded:
            s.allow(slots, drawn.allowed)
        s.progress.index_copy_(0, slots, progress)
        return flags


class _Rows(NamedTuple):
    """What a step reads from its rows' slots, [B] each: see `SlotState`."""

    last: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor  # positions cached
    positions: torch.Tensor  # of the newest tokens
    start: torch.Tensor
    limit: torch.Tensor
    uniform: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    temperature: torch.Tensor


def _read_rows(progress: torch.Tensor, numbers: torch.Tensor, slots: torch.Tensor) -> _Rows:
    last, counts = progress[slots].unbind(1)
    numbers = numbers[slots]
    lengths, positions = (numbers[:, :2] + counts[:, None]).unbind(1)
    start, limit, stream, top_k = numbers[:, 2:6].unbind(1)
    top_p, temperature = numbers.view(torch.float64)[:, 6:].float().unbind(1)
    uniform = uniforms(stream, counts)
    return _Rows(last, counts, lengths, positions, start, limit, uniform, top_k, top_p, temperature)


def _outcome(
    rows: _Rows,
    drawn: tuple[torch.Tensor, torch.Tensor],
    version: torch.Tensor,
    full: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a step writes to `progress` [B, 2] and `record` [B, 3], and the fields of `StepFlags`
    [5, B]. Rows without a sequence, whose limit is 0, keep their count of 0 and have no flags.

    Args:
        rows: the rows before the step.
        drawn: [B] tokens and log-probs.
        version: [1] of the weights.
        full: [B] bool, rows without room for another position.
        ends: EOS tokens and tokens that may end a stop text, as in `_Decoder`.
    """
    tokens, logprobs = drawn
    is_eos, may_end = ends
    counts = rows.counts + 1
    stopped = is_eos[tokens]
    text = torch.zeros_like(stopped) if may_end is None else may_end[tokens]
    finished = stopped | (counts >= rows.limit)
    flags = torch.stack([stopped, finished, full, text, logprobs.isnan()])
    made = [tokens.int(), version.expand_as(tokens), logprobs.view(torch.int32)]
    progress = torch.stack([tokens, torch.minimum(counts, rows.limit)], 1)
    return progress, torch.stack(made, 1), flags & (rows.limit > 0)


class LaneDecoder(_Decoder):
    """Keys and values in lanes; the batch has the live slots, lane by lane. Lanes have room for all
    slots at their longest."""

    cache: SlotCache
    is_recorded = False  # steps do not read the weights at fixed addresses

    def size_within(self, slots: int, max_len: int, limit: int | None) -> CacheSize:
        """The cache size for at most `slots` sequences of up to `max_len` tokens, with at most
        `limit` positions; None: no limit."""
        state_positions = -(-self.layout.state_bytes // self.layout.token_bytes)
        return lane_size(slots, max_len, limit, state_positions)

    def allocate(self, size: CacheSize, max_len: int) -> None:
        """Allocate an empty cache of a size from `size_within`, and the state of its slots."""
        self.cache = SlotCache(self.layout, size.slots, max_len)
        self.state = self._new_state(size.slots, max_len)

    def free(self) -> None:
        """Free the cache and the state from `allocate`, before new ones are allocated."""
        del self.cache, self.state

    def clear(self) -> None:
        """Empty all slots."""
        size = CacheSize(len(self.state.progress), 0)
        max_len = self.state.max_len
        self.free()
        self.allocate(size, max_len)

    def count_admissible(self, lengths: Iterable[int]) -> int:
        """Number of new sequences, from the first, that fit into the cache, given each one's cached
        positions at admission."""
        return sum(1 for _ in lengths)

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        """Update the list of live slots and their sampling; required before a step whenever slots
        were admitted or released."""
        device = self.layout.device
        self._slots = torch.tensor(self.cache.slots, dtype=torch.int64, device=device)
        self._capacities = torch.tensor(self.cache.capacities, device=device)
        self._plan = DrawPlan.of(live.values(), static_shapes=False)

    def step(self) -> StepFlags:
        """Draw one token for every live slot, and write it to `state`; [B] rows in the order of the
        batch."""
        return StepFlags(*self._advance(self._slots, self._capacities).cpu())

    def release(self, finished: Sequence[int], full: Sequence[int]) -> list[int]:
        """Empty the slots of the rows `finished`. Of the rows `full`, returns the slots that must
        `grow` before the next step; the others have more room now."""
        self.cache.end(finished, full)
        return []

    def grow(self, slot: int) -> bool:
        """Give a sequence more room; False if the cache is full."""
        self.cache.end([], [self.cache.slots.index(slot)])
        return True

    def evict(self, slot: int) -> None:
        """Empty the slot of an unfinished sequence."""
        self.cache.end([self.cache.slots.index(slot)], [])


class ArenaDecoder(_Decoder):
    """Keys and values in an arena; the batch has the live slots and some empty ones, and steps are
    recorded: `record` makes their repetition faster. Methods as in `LaneDecoder`."""

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
        self._record = record

    @property
    def is_recorded(self) -> bool:
        return self._record is not run_directly

    def size_within(self, slots: int, max_len: int, limit: int | None) -> CacheSize:
        return arena_size(slots, max_len, limit)

    def allocate(self, size: CacheSize, max_len: int) -> None:
        device = self.layout.device
        self.cache = ArenaCache(self.layout, size, max_len)
        self.state = self._new_state(size.slots, max_len)
        # Recorded steps read these at their addresses, so all live as long as the arena.
        self._slots = torch.zeros(size.slots, dtype=torch.int64, device=device)
        self._recorded: dict[_Shape, Callable[[], torch.Tensor]] = {}

    def free(self) -> None:
        del self._recorded, self.cache, self.state

    def clear(self) -> None:
        self.cache.clear()
        self.state.clear(torch.arange(len(self._slots), device=self.layout.device))

    def shapes(self) -> list[_Shape]:
        """The steps to record before the first one is needed, the largest first; none if their
        shapes depend on the sequences' lengths."""
        if not self.is_recorded or not self.cache.has_fixed_span:
            return []
        plans = [DrawPlan.of([p], True) for p in (SamplingParams(1, top_p=0.5), SamplingParams(1))]
        sizes = reversed(recorded_rows(len(self._slots)))
        return [_Shape(rows, self.cache.span, plan) for rows in sizes for plan in plans]

    @torch.inference_mode()
    def record(self, shapes: Iterable[_Shape]) -> None:
        """Record steps; all slots must be empty."""
        for shape in shapes:
            self._set_shape(shape)
            self._find_recorded()

    def run_largest(self) -> None:
        """Run the step that takes most memory, without recording it; all slots must be empty."""
        plan = DrawPlan.of([SamplingParams(1, top_p=0.5)], True)
        self._set_shape(_Shape(len(self._slots), self.cache.span, plan))
        self._advance_rows(len(self._slots))

    def count_admissible(self, lengths: Iterable[int]) -> int:
        return self.cache.count_admissible(lengths)

    def refresh_batch(self, live: Mapping[int, SamplingParams]) -> None:
        rows = padded_rows(len(live), len(self._slots))
        plan = DrawPlan.of(live.values(), static_shapes=True)
        self._set_shape(_Shape(rows, self.cache.span, plan))

    def _set_shape(self, shape: _Shape) -> None:
        self._shape, self._plan = shape, shape.plan
        self.cache.assign_rows(shape.rows)
        self._slots[: shape.rows] = upload(torch.tensor(self.cache.slots), self.layout.device)

    def step(self) -> StepFlags:
        return StepFlags(*self._find_recorded()().cpu())

    def _find_recorded(self) -> Callable[[], torch.Tensor]:
        """The step of the current shape, which is recorded if it is new."""
        if (found := self._recorded.get(self._shape)) is not None:
            return found
        rows, progress = self._shape.rows, self.state.progress.clone()

        def step() -> torch.Tensor:
            return self._advance_rows(rows)

        try:
            made = self._record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning(
                "decode steps of %s cannot be recorded as CUDA graphs and run directly, which is "
                "slower for small batches: %s. generator.cuda_graphs=false avoids the attempt",
                type(self._model).__name__,
                str(error.__context__ or error).splitlines()[0],  # what ended the recording
            )
            self._record, made = run_directly, step
        # Recording runs the step, and the replay draws its tokens again: only count and newest
        # token must be restored.
        self.state.progress.copy_(progress)
        self._recorded[self._shape] = made
        return made

    def _advance_rows(self, rows: int) -> torch.Tensor:
        """Step the first rows; empty slots draw tokens that are ignored."""
        return self._advance(self._slots[:rows], self.cache.room[:rows])

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
        self.state.clear(upload(torch.tensor(slots, dtype=torch.int64), self.layout.device))


Decoder = LaneDecoder | ArenaDecoder
