"""The slot engine: continuous batching over a model's own forward.

Each decoding sequence holds a slot. A decode step feeds every such sequence its newest token, which
is not cached yet, and samples the next one. So *every* generated token comes from a decode step,
whose weights are its version; prefill only fills caches, with all of a sequence but its last token.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator.allowed import SamplingMasks
from tramontane.generator.decoders import ArenaDecoder, Decoder, LaneDecoder, StepFlags, columns_of
from tramontane.generator.endings import StopTexts
from tramontane.generator.forward import examine_model, prefill
from tramontane.generator.fusion import is_merged
from tramontane.generator.graphs import StepRecorder, run_directly
from tramontane.generator.interface import check_request, not_finite
from tramontane.generator.lanes import CacheSize, Prefix
from tramontane.generator.memory import CudaMemory, cache_room
from tramontane.generator.parking import Context, Parking
from tramontane.generator.prefixes import Flight, SharedPrefixes
from tramontane.models.loading import context_length, vocabulary
from tramontane.models.packing import upload
from tramontane.models.vision import Vision
from tramontane.tokens import Growth
from tramontane.types import Completion

_REMEDIES = (
    "shorten prompts or completions, raise generator.kv_cache_mib or "
    "generator.gpu_memory_utilization, or, on a GPU, lower generator.slots or "
    "generator.prefill_tokens, or set generator.staging to host"
)


@dataclass
class Stats:
    """Counts since the engine was made."""

    generated_tokens: int = 0  # sampled in decode steps
    prefill_tokens: int = 0  # prefilled for admissions
    parked_tokens: int = 0  # not prefilled for admissions: their keys and values were parked
    recomputed_tokens: int = 0  # prefilled again after weight updates
    decode_steps: int = 0  # of the whole batch
    live_slot_steps: int = 0  # slots that held a sequence, summed over the decode steps
    slot_steps: int = 0  # all slots, likewise; live_slot_steps / slot_steps is the utilization
    preemptions: int = 0  # sequences sent back to the queue because memory was short


class SlotEngine:
    """Runs requests in `slots` slots, and refills each slot as soon as it is free.

    With limited memory, as many sequences decode as fit. If they outgrow it, the latest
    return to the queue with their tokens, and are prefilled again once there is room.

    Args:
        model: a causal LM whose attention goes through transformers' attention interface; its
            attention implementation is set to `slots`, which acts as `packed` in other forwards.
        slots: maximum number of sequences decoded at once.
        max_len: longest prompt plus completion, in tokens.
        eos_ids: tokens that end a completion.
        kv_bytes: memory limit of keys and values, in bytes; None for no limit.
        prefill_tokens: maximum tokens in one prefill forward (a longer sequence gets its own).
        record: records steps of fixed shapes for faster repetition; keys and values are then in an
            arena instead of lanes. A model whose forward reads values of tensors is not recorded.
        memory: the device's allocator, with `record`: keys and values then take no more than what
            prefills, steps and recordings leave, which is measured before they are allocated. None:
            `kv_bytes` is the only limit.
        stop_texts: texts that end a completion; None costs nothing.

    Attributes:
        vision: makes the features of prompts' images; None: requests have no images.

    Raises:
        InputError: the engine cannot run the model, or the longest sequence does not fit into
            `kv_bytes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_len: int,
        eos_ids: Collection[int] = (),
        *,
        kv_bytes: int | None = None,
        prefill_tokens: int = 4096,
        record: StepRecorder | None = None,
        memory: CudaMemory | None = None,
        stop_texts: StopTexts | None = None,
    ) -> None:
        self.model = model.eval()
        self.prefill_tokens = prefill_tokens
        self.vision: Vision | None = None
        self.stats = Stats()
        vocab = vocabulary(model)
        self._is_eos = torch.zeros(vocab, dtype=torch.bool, device=model.device)
        if unknown := [t for t in eos_ids if not 0 <= t < vocab]:
            raise InputError(
                f"EOS or stop tokens {unknown} are outside the model's vocabulary of {vocab}"
            )
        self._is_eos[list(eos_ids)] = True
        self._stop_texts = stop_texts
        may_end = stop_texts.may_end.to(model.device) if stop_texts else None
        layout, recordable = examine_model(model, max_len)
        self._decoder: Decoder
        if record is None or layout.states:  # recorded steps and the arena know no states
            self._decoder = LaneDecoder(model, layout, self._is_eos, may_end)
        else:
            record = record if recordable else run_directly
            self._decoder = ArenaDecoder(model, layout, self._is_eos, record, may_end)
        self._memory = memory if isinstance(self._decoder, ArenaDecoder) else None
        self._kv_bytes, self._token_bytes = kv_bytes, layout.token_bytes
        self._serial = 0
        self._allocate(slots, max_len)
        self.version = 0

    def resize(self, slots: int, max_len: int) -> None:
        """Change the number of slots and their length, and free the memory of the old slots.

        Raises:
            RuntimeError: a sequence is in flight.
            InputError: a sequence of `max_len` tokens does not fit into `kv_bytes`.
        """
        if self.unfinished:
            raise RuntimeError(f"resize with {self.unfinished} sequences unfinished")
        self._decoder.free()
        self._allocate(slots, max_len)

    def _allocate(self, slots: int, max_len: int) -> None:
        kv_bytes = self._kv_bytes
        if self._memory is not None:
            try:
                measured = self._measure_room(self._memory, slots, max_len)
            except torch.OutOfMemoryError as error:
                raise InputError(
                    f"prefills of {max(self.prefill_tokens, max_len):,} tokens and decode steps of "
                    f"{slots:,} rows do not fit into the GPU's memory: {_REMEDIES}"
                ) from error
            kv_bytes = measured if kv_bytes is None else min(kv_bytes, measured)
        limit = None if kv_bytes is None else kv_bytes // self._token_bytes
        size = self._decoder.size_within(slots, max_len, limit)
        if not size.slots:
            assert kv_bytes is not None  # without a limit every slot has room
            needed = self._decoder.size_within(1, max_len, None).positions * self._token_bytes
            raise InputError(
                f"keys and values of one sequence of {max_len:,} tokens take "
                f"{needed / 2**20:,.1f} MiB, and there are {kv_bytes / 2**20:,.1f} MiB: {_REMEDIES}"
            )
        self.slots, self.max_len = size.slots, max_len
        self._decoder.allocate(size, max_len)
        if isinstance(self._decoder, ArenaDecoder):
            # Now, and not when it is first needed: recording waits for all work on the device, a
            # trainer's too.
            self._decoder.record(self._decoder.shapes())
        self._forget()

    def _forget(self) -> None:
        self._flights: dict[int, Flight] = {}  # by slot
        self._steps = 0
        self._born: dict[int, int] = {}  # by slot: the step before its first token, maybe negative
        self._reported: dict[int, int] = {}  # by slot: tokens that `take_growth` has returned
        # For preempted sequences with unreported tokens: by serial, how many were reported.
        self._unreported: dict[int, int] = {}
        self._free_slots = list(range(self.slots))  # a heap: the lowest is taken first
        self._waiting: deque[Flight] = deque()
        self._batch_changed = False  # since the decoder's last `refresh_batch`
        self._masks = SamplingMasks()
        self._parking = Parking(self._decoder.cache, self.slots, self._kv_bytes)
        self._prefixes = SharedPrefixes(self._parking.context)

    @torch.inference_mode()
    def _measure_room(self, memory: CudaMemory, slots: int, max_len: int) -> int:
        """Bytes for keys and values: see `memory.cache_room`."""
        decoder = self._decoder
        assert isinstance(decoder, ArenaDecoder)
        n = min(max_len, self.prefill_tokens)
        batch, longest = [Context([0] * n)] * (self.prefill_tokens // n), [Context([0] * max_len)]

        def run_prefills() -> None:
            _kept = list(self._prefills(batch))  # of prompts whose group is not complete yet
            list(self._prefills(batch))
            list(self._prefills(longest))

        # No sequence has room: the empty rows have positions of their own.
        decoder.allocate(CacheSize(slots, 2 * slots), max_len)
        recordings = [partial(decoder.record, [shape]) for shape in decoder.shapes()]
        room = cache_room(memory, [run_prefills, decoder.run_largest], recordings)
        decoder.free()
        return room

    @property
    def version(self) -> int:
        """Version of the weights, from 0; recorded with every sampled token."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._decoder.version.fill_(version)
        self._prefixes.drop_ahead()

    @property
    def needs_fixed_addresses(self) -> bool:
        """True if new weights must be written in place, for recorded steps and merged products."""
        return self._decoder.is_recorded or is_merged(self.model)

    # --- requests

    @property
    def decoding(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self._flights)

    @property
    def unfinished(self) -> int:
        """Number of sequences in flight: decoding, or waiting for a slot."""
        return len(self._flights) + len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots' keys and values."""
        return self._decoder.cache.nbytes

    def submit(self, requests: Sequence[Completion]) -> None:
        """Queue requests; each step admits as many as fit, in order.

        Raises:
            InputError: a request that can never run: empty prompt, unknown tokens, longer than a
                slot, already complete, or impossible sampling parameters. No request of the call
                is queued then.
        """
        vocab, context = len(self._is_eos), context_length(self.model.config) or self.max_len
        limits = (self.max_len, "the generator's slots"), (context, "the model's context")
        for request in requests:
            check_request(request, vocab, *min(limits))
            if (request.images or request.put_images) and self.vision is None:
                raise InputError("a prompt has images, and the generator was made without a tower")
        for request in requests:
            self._parking.touch(request)
            self._waiting.append(self._queued(request, self._serial))
            self._serial += 1

    def _queued(self, request: Completion, serial: int) -> Flight:
        """A request to be queued, counted among those that share its prefix."""
        flight = Flight(request, serial)
        self._prefixes.waiting[flight.key] += 1
        return flight

    def pending(self) -> list[Completion]:
        """All unfinished requests, in order of submission, with the tokens generated so far.

        Submitted again, to this engine or another, they continue with the same random numbers.
        """
        flights = [(f.serial, self._snapshot(slot)) for slot, f in self._flights.items()]
        flights += [(f.serial, replace(f.request)) for f in self._waiting]
        return [request for _, request in sorted(flights, key=lambda pair: pair[0])]

    def take_growth(self) -> Growth:
        """New tokens of each unfinished sequence since its submission or the last call."""
        slots, growth = list(self._flights), Growth()
        for flight in self._waiting if self._unreported else ():
            request, n = flight.request, self._unreported.pop(flight.serial, None)
            if n is not None:
                allowed = None if request.allowed is None else request.allowed[n:]
                tokens = request.token_ids[n:], request.logprobs[n:], request.versions[n:]
                growth.add(request.group, request.index, *tokens, allowed)
        counts = [self._count(slot) for slot in slots]
        gained = [n - self._reported[slot] for slot, n in zip(slots, counts, strict=True)]
        self._reported |= zip(slots, counts, strict=True)
        if not (most := max(gained, default=0)):
            return growth
        # The newest `most` tokens of each sequence, reported or not, in a single read.
        ids, versions, logprobs = columns_of(self._newest(slots, counts, most))
        for row, (slot, new) in enumerate(zip(slots, gained, strict=True)):
            if new:
                request, last = self._flights[slot].request, slice(most - new, None)
                newest = [column[row, last].tolist() for column in (ids, logprobs, versions)]
                allowed = self._masks.read(slot, self._count(slot) - new)
                growth.add(request.group, request.index, newest[0], newest[1], newest[2], allowed)
        return growth

    def _count(self, slot: int) -> int:
        """Number of tokens of the sequence in a slot: each step draws one."""
        return self._steps - self._born[slot]

    def _newest(self, slots: list[int], counts: list[int], most: int) -> torch.Tensor:
        """[N, most, 3]: the newest tokens of slots with `counts` tokens, as in `SlotState.record`;
        undefined before the first one."""
        record = self._decoder.state.record
        pairs = upload(torch.tensor([slots, counts]), record.device)
        places = pairs[1][:, None] - torch.arange(most, 0, -1, device=record.device)
        return record[pairs[0][:, None], places.clamp(min=0)]

    @torch.inference_mode()
    def cancel(self, group: int) -> None:
        """Drop the sequences of a group."""
        self._parking.forget(group)
        for slot in [s for s, flight in self._flights.items() if flight.request.group == group]:
            self._decoder.evict(slot)
            self._free(slot)
        dropped = [flight for flight in self._waiting if flight.request.group == group]
        self._waiting = deque(f for f in self._waiting if f.request.group != group)
        for flight in dropped:
            self._unreported.pop(flight.serial, None)
        self._prefixes.drop(
            {flight.key for flight in dropped}
        )  # of this group alone, by their keys

    def clear(self) -> None:
        """Drop all sequences in flight."""
        self._decoder.clear()
        self._forget()

    # --- decoding

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit waiting requests, decode one token for every live slot, and return what ended.

        Raises:
            InputError: the logits are not finite.
        """
        self._admit()
        self._parking.trim(len(self._flights))
        if not self._flights:
            return []
        if self._batch_changed:
            self._decoder.refresh_batch({s: f.request.sampling for s, f in self._flights.items()})
            self._batch_changed = False
        flags = self._decoder.step()
        if bool(flags.broken.any()):
            raise not_finite(self._version)
        self._steps += 1
        self._masks.note([*self._flights], self._decoder.newest_allowed)
        live = len(self._flights)
        self.stats.generated_tokens += live
        self.stats.live_slot_steps += live
        self.stats.slot_steps += self.slots
        self.stats.decode_steps += 1
        return self._retire_finished(flags)

    def _retire_finished(self, flags: StepFlags) -> list[Completion]:
        """Free the slots of finished sequences, and give more room to those that need it."""
        if not bool((flags.finished | flags.full | flags.may_end).any()):
            return []
        by_text = self._find_stop_texts(flags)
        rows = (flags.finished | by_text).nonzero()[:, 0].tolist()
        stopped = (flags.stopped | by_text).tolist()
        slots = [self._decoder.cache.slots[row] for row in rows]
        completions = []
        for slot, row in zip(slots, rows, strict=True):
            completions.append(self._snapshot(slot).completed("stop" if stopped[row] else "length"))
            if self._flights[slot].request.keep_kv:
                asked = self._flights[slot].request
                shown = [*asked.images, *asked.put_images]
                self._parking.keep(slot, completions[-1], shown)
        growing = self._decoder.release(rows, flags.full.nonzero()[:, 0].tolist())
        for slot in slots:
            self._free(slot)
        self._make_room(growing)
        return completions

    def _free(self, slot: int) -> Flight:
        heapq.heappush(self._free_slots, slot)
        self._batch_changed = True
        self._masks.free(slot)
        return self._flights.pop(slot)

    def _make_room(self, growing: list[int]) -> None:
        """Give the sequences of these slots more room. If memory is short, the latest sequences
        return to the queue, so the earliest always advances."""
        self._batch_changed = True
        for slot in sorted(growing, key=lambda slot: self._flights[slot].serial):
            while slot in self._flights and not self._decoder.grow(slot):
                if not self._parking.drop_first():
                    self._preempt(max(self._flights, key=lambda other: self._flights[other].serial))

    def _preempt(self, slot: int) -> None:
        """Return a sequence with its tokens to the head of the queue."""
        request = self._snapshot(slot)
        self._decoder.evict(slot)
        flight = self._free(slot)
        self._unreported[flight.serial] = self._reported[slot]
        self._waiting.appendleft(self._queued(request, flight.serial))
        self.stats.preemptions += 1

    def _find_stop_texts(self, flags: StepFlags) -> torch.Tensor:
        """[B] bool: rows whose newest token completes a stop text."""
        found, texts = torch.zeros_like(flags.stopped), self._stop_texts
        rows = flags.may_end.nonzero()[:, 0].tolist()
        if texts is None or not rows:
            return found
        slots = [self._decoder.cache.slots[row] for row in rows]
        counts = [self._count(slot) for slot in slots]
        tails = columns_of(self._newest(slots, counts, texts.tail))[0].tolist()
        for row, slot, tail, count in zip(rows, slots, tails, counts, strict=True):
            sampled = count - self._flights[slot].sampled_from
            found[row] = texts.found(tail[max(0, texts.tail - sampled) :])
        return found

    def _snapshot(self, slot: int) -> Completion:
        """The request in a slot, with the tokens generated so far."""
        ids, versions, logprobs = self._decoder.state.read(slot, self._count(slot))
        return replace(
            self._flights[slot].request,
            token_ids=array("i", ids.tobytes()),
            logprobs=array("f", logprobs.tobytes()),
            versions=array("i", versions.tobytes()),
            experts=self._decoder.state.read_experts(slot, self._count(slot)),
            allowed=self._masks.read(slot),
        )

    # --- admission

    def _admit(self) -> None:
        lengths = [flight.context_length for flight in islice(self._waiting, len(self._free_slots))]
        while (n := self._decoder.count_admissible(lengths)) < len(lengths):
            if not self._parking.drop_first():
                break
        if not n:
            return
        flights = [self._waiting.popleft() for _ in range(n)]
        slots = [heapq.heappop(self._free_slots) for _ in range(n)]
        missing = self._prefixes.missing(flights)
        if missing and isinstance(self._decoder, ArenaDecoder):
            missing |= self._prefixes.ahead(missing, self._waiting, self.prefill_tokens)
        parked = sum(context.known for context in missing.values())
        self.stats.parked_tokens += parked
        self.stats.prefill_tokens += sum(len(c.tokens) for c in missing.values()) - parked
        requests = [flight.request for flight in flights]
        self._decoder.state.write(slots, requests, self._shifts(requests))
        self._flights |= zip(slots, flights, strict=True)
        for slot, flight in zip(slots, flights, strict=True):
            self._masks.admit(slot, flight.request)
            known = len(flight.request.token_ids)
            self._reported[slot] = self._unreported.pop(flight.serial, known)
            self._born[slot] = self._steps - known
        self._batch_changed = True
        # One forward's prefixes at a time, copied into the cache before the next forward.
        prefilled = zip(missing, self._prefills([*missing.values()]), strict=True)
        for key, members in groupby(zip(slots, flights, strict=True), lambda pair: pair[1].key):
            admitted = [slot for slot, _ in members]
            self._decoder.cache.admit(admitted, key, self._prefixes.get(key, prefilled))
            self._prefixes.admit(key, len(admitted))
        self._prefixes.computed |= prefilled

    def _shifts(self, requests: Sequence[Completion]) -> list[int] | None:
        """By how much images shift the positions of each request's tokens; None: not at all."""
        if self.vision is None or not any(r.images or r.put_images for r in requests):
            return None
        contexts = [Context.of(request) for request in requests]
        return [self.vision.shift(c.given_ids, c.images) for c in contexts]

    def _prefills(self, contexts: Sequence[Context]) -> Iterator[Prefix]:
        """Keys and values of contexts, as many in one forward as `prefill_tokens` allow."""
        layout = self._decoder.layout
        return prefill(self.model, layout, contexts, self.prefill_tokens, self.vision)

    # --- weights

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild the keys and values of live slots and kept prefixes under the current weights."""
        self._parking.forget()  # prefilled again when they resume
        contexts = {slot: Context.of(self._snapshot(slot)) for slot in self._flights}
        prefilled = self._prefills([*contexts.values()])
        self._decoder.cache.rewrite(zip(contexts, prefilled, strict=True))
        computed = self._prefixes.computed
        kept = {f.key: Context.of(f.request) for f in self._waiting if f.key in computed}
        computed |= zip(kept, self._prefills([*kept.values()]), strict=True)
        recomputed = (*contexts.values(), *kept.values())
        self.stats.recomputed_tokens += sum(len(context.tokens) for context in recomputed)
