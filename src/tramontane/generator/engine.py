"""The slot engine: continuous batching over a model's own forward.

One decode step feeds each sequence in flight its newest token, whose keys and values are not cached
yet, and samples the next one. So *every* generated token comes from a decode step, whose weights
are its version; prefill only fills caches, with all of a sequence but its last token.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator.decoders import ArenaDecoder, Decoder, LaneDecoder, StepFlags
from tramontane.generator.forward import examine_model, prefill
from tramontane.generator.graphs import StepRecorder, run_directly
from tramontane.generator.lanes import Prefix
from tramontane.generator.requests import check_request
from tramontane.generator.stops import StopTexts
from tramontane.models.loading import context_length
from tramontane.types import Completion, Growth, Request

Key = tuple[int, ...]
_DTYPES = {"i": torch.int32, "f": torch.float32}


@dataclass
class Stats:
    """Counts since the engine was made.

    Attributes:
        generated_tokens: sampled in decode steps.
        prefill_tokens: prefilled for admissions.
        recomputed_tokens: prefilled again after weight updates.
        decode_steps: steps of the whole batch.
        live_slot_steps: slots that held a sequence, summed over the decode steps.
        slot_steps: all slots, summed over the decode steps; live_slot_steps / slot_steps is the
            utilisation.
        preemptions: sequences sent back to the queue because memory was short.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    live_slot_steps: int = 0
    slot_steps: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class _Flight:
    """An unfinished request: `key` names the prefix that it shares, `serial` is its place in the
    order of submission."""

    request: Request
    key: Key
    serial: int

    @property
    def context(self) -> list[int]:
        """Tokens to be cached before the next one can be sampled: all but the last."""
        return [*self.request.prompt_ids, *self.request.token_ids][:-1]

    @property
    def context_length(self) -> int:
        return len(self.request.prompt_ids) + len(self.request.token_ids) - 1


class SlotEngine:
    """Runs requests in `slots` slots, and refills each slot as soon as it is free.

    With limited memory, as many sequences are in flight as fit. If they outgrow it, the latest
    return to the queue with their tokens, and are prefilled again once there is room.

    Args:
        model: a causal LM whose attention goes through transformers' attention interface; its
            attention implementation is set to `slots`, which serves other forwards as `packed`.
        slots: maximum number of sequences decoded at once.
        max_len: longest prompt plus completion, in tokens.
        eos_ids: tokens that end a completion.
        kv_bytes: memory limit of keys and values, in bytes; None for no limit.
        prefill_tokens: maximum tokens in one prefill forward (a longer sequence gets its own).
        record: records steps of fixed shapes for faster repetition; keys and values are then in an
            arena instead of lanes. A model whose forward reads values of tensors is not recorded.
        stop_texts: texts that end a completion; None costs nothing.

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
        stop_texts: StopTexts | None = None,
    ) -> None:
        self.model = model.eval()
        self.prefill_tokens = prefill_tokens
        self.stats = Stats()
        vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index, arg-type]
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
        if record is None:
            self._decoder = LaneDecoder(model, layout, self._is_eos, may_end)
        else:
            record = record if recordable else run_directly
            self._decoder = ArenaDecoder(model, layout, self._is_eos, record, may_end)
        self._kv_bytes, self._token_bytes = kv_bytes, layout.token_bytes
        self.version = 0
        self._serial = 0
        self._set_size(slots, max_len)
        self._allocate()

    def resize(self, slots: int, max_len: int) -> None:
        """Change the number of slots and their length, and free the memory of the old slots.

        Raises:
            RuntimeError: a sequence is in flight or waiting.
            InputError: a sequence of `max_len` tokens does not fit into `kv_bytes`.
        """
        if self.unfinished:
            raise RuntimeError(f"resize with {self.unfinished} sequences unfinished")
        self._set_size(slots, max_len)
        self.clear()

    def _set_size(self, slots: int, max_len: int) -> None:
        limit = None if self._kv_bytes is None else self._kv_bytes // self._token_bytes
        size = self._decoder.size_within(slots, max_len, limit)
        if not size.slots:
            assert self._kv_bytes is not None  # without a limit every slot has room
            needed = self._decoder.size_within(1, max_len, None).positions * self._token_bytes
            raise InputError(
                f"keys and values of one sequence of {max_len:,} tokens take "
                f"{needed / 2**20:,.1f} MiB, and there are {self._kv_bytes / 2**20:,.1f} "
                f"MiB; shorten prompts or completions, or raise generator.kv_cache_mib or "
                f"generator.gpu_memory_utilization"
            )
        self._size, self.slots, self.max_len = size, size.slots, max_len

    @contextmanager
    def vacated(self) -> Iterator[None]:
        """Context manager: if nothing is unfinished, free the slots' memory for another engine."""
        if self.unfinished:
            yield
            return
        self._decoder.free()
        try:
            yield
        finally:
            self._allocate()

    @property
    def version(self) -> int:
        """Version of the weights, from 0; recorded with every sampled token."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._decoder.version.fill_(version)

    @property
    def needs_fixed_addresses(self) -> bool:
        """True if decode steps read the weights at the addresses from the time of recording."""
        return self._decoder.is_recorded

    # --- requests

    @property
    def in_flight(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self._flights)

    @property
    def unfinished(self) -> int:
        """Number of sequences in flight or waiting for a slot."""
        return len(self._flights) + len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots' keys and values."""
        return self._decoder.cache.nbytes

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each step admits as many as fit, in order.

        Raises:
            InputError: a request that can never run: empty prompt, unknown tokens, longer than a
                slot, already complete, or impossible sampling parameters. No request of the call
                is queued then.
        """
        for request in requests:
            self._check(request)
        for request in requests:
            key = (request.group, *request.prompt_ids, *request.token_ids)
            self._waiting.append(_Flight(request, key, self._serial))
            self._sharers[key] += 1
            self._serial += 1

    def pending(self) -> list[Request]:
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
                growth.add(
                    request.group,
                    request.index,
                    token_ids=request.token_ids[n:],
                    logprobs=request.logprobs[n:],
                    versions=request.versions[n:],
                )
        if not slots:
            return growth
        s = self._decoder.state
        index = torch.tensor(slots, device=s.count.device)
        counts = s.count[index].tolist()
        reported = [self._reported[slot] for slot in slots]
        self._reported |= zip(slots, counts, strict=True)
        most = max(now - before for now, before in zip(counts, reported, strict=True))
        # The newest `most` tokens of each sequence, reported or not, in a single read.
        places = s.count[index, None] - torch.arange(most, 0, -1, device=index.device)
        columns = [
            column[index].gather(1, places.clamp(min=0)).tolist()
            for column in (s.tokens, s.logprobs, s.versions)
        ]
        rows = zip(slots, counts, reported, *columns, strict=True)
        for slot, now, before, *gained in rows:
            if now > before:
                request = self._flights[slot].request
                token_ids, logprobs, versions = (values[before - now :] for values in gained)
                growth.add(
                    request.group,
                    request.index,
                    token_ids=token_ids,
                    logprobs=logprobs,
                    versions=versions,
                )
        return growth

    def clear(self) -> None:
        """Drop all sequences in flight and waiting."""
        self._decoder.free()
        self._allocate()

    def _allocate(self) -> None:
        self._decoder.allocate(self._size, self.max_len)
        self._flights: dict[int, _Flight] = {}  # by slot
        self._reported: dict[int, int] = {}  # by slot: tokens that `take_growth` has returned
        # For preempted sequences with unreported tokens: by serial, how many were reported.
        self._unreported: dict[int, int] = {}
        self._free_slots = list(range(self.slots))  # a heap: the lowest is taken first
        self._waiting: deque[_Flight] = deque()
        # A prefix is kept until the last sequence that starts with it is admitted.
        self._sharers: Counter[Key] = Counter()
        self._prefixes: dict[Key, Prefix] = {}
        self._batch_changed = False  # since the decoder's last `refresh_batch`

    def _check(self, request: Request) -> None:
        context = context_length(self.model.config) or self.max_len
        if context < self.max_len:
            check_request(request, len(self._is_eos), context, "the model's context")
        else:
            check_request(request, len(self._is_eos), self.max_len, "the generator's slots")

    # --- decoding

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit waiting requests to free slots, decode one token for every live slot, and return
        the finished completions."""
        self._admit()
        if not self._flights:
            return []
        if self._batch_changed:
            self._decoder.refresh_batch({s: f.request.sampling for s, f in self._flights.items()})
            self._batch_changed = False
        flags = self._decoder.step()
        live = len(self._flights)
        self.stats.generated_tokens += live
        self.stats.live_slot_steps += live
        self.stats.slot_steps += self.slots
        self.stats.decode_steps += 1
        return self._retire_finished(flags)

    def _retire_finished(self, flags: StepFlags) -> list[Completion]:
        """Free the slots of finished sequences, and give more room to those that need it."""
        due = flags.finished | flags.full
        if flags.may_end is not None:
            due |= flags.may_end
        if not bool(due.any()):
            return []
        by_text = self._find_stop_texts(flags)
        rows = (flags.finished | by_text).nonzero()[:, 0].tolist()
        stopped = (flags.stopped | by_text).tolist()
        slot_of = self._decoder.cache.slots
        slots = [slot_of[row] for row in rows]
        completions = [
            self._complete(slot, stopped[row]) for slot, row in zip(slots, rows, strict=True)
        ]
        growing = self._decoder.release(rows, flags.full.nonzero()[:, 0].tolist())
        for slot in slots:
            self._free(slot)
        self._make_room(growing)
        return completions

    def _free(self, slot: int) -> _Flight:
        """Take a sequence out of its slot."""
        heapq.heappush(self._free_slots, slot)
        self._batch_changed = True
        return self._flights.pop(slot)

    def _make_room(self, growing: list[int]) -> None:
        """Give the sequences of these slots more room. If memory is short, the latest sequences
        return to the queue, so the earliest always advances."""
        self._batch_changed = True
        for slot in sorted(growing, key=lambda slot: self._flights[slot].serial):
            while slot in self._flights and not self._decoder.grow(slot):
                self._preempt(max(self._flights, key=lambda other: self._flights[other].serial))

    def _preempt(self, slot: int) -> None:
        """Return a sequence with its tokens to the head of the queue."""
        request = self._snapshot(slot)
        self._decoder.evict(slot)
        flight = self._free(slot)
        self._unreported[flight.serial] = self._reported[slot]
        key = (request.group, *request.prompt_ids, *request.token_ids)
        self._waiting.appendleft(_Flight(request, key, flight.serial))
        self._sharers[key] += 1
        self.stats.preemptions += 1

    def _find_stop_texts(self, flags: StepFlags) -> torch.Tensor:
        """[B] bool: rows whose newest token completes a stop text."""
        found = torch.zeros_like(flags.stopped)
        rows = [] if flags.may_end is None else flags.may_end.nonzero()[:, 0].tolist()
        if not rows:
            return found
        assert self._stop_texts is not None
        s, length = self._decoder.state, self._stop_texts.tail
        slots = torch.tensor(
            [self._decoder.cache.slots[row] for row in rows], device=s.count.device
        )
        counts = s.count[slots]
        places = counts[:, None] - torch.arange(length, 0, -1, device=slots.device)
        tails = s.tokens[slots[:, None], places.clamp(min=0)].tolist()
        for row, tail, count in zip(rows, tails, counts.tolist(), strict=True):
            found[row] = self._stop_texts.found(tail[max(0, length - count) :])
        return found

    def _complete(self, slot: int, stopped: bool) -> Completion:
        r = self._snapshot(slot)
        return Completion(
            r.group,
            r.index,
            r.prompt_ids,
            r.token_ids,
            r.logprobs,
            r.versions,
            "stop" if stopped else "length",
        )

    def _snapshot(self, slot: int) -> Request:
        """The request in a slot, with the tokens generated so far."""
        s = self._decoder.state
        n = int(s.count[slot])
        return replace(
            self._flights[slot].request,
            token_ids=_array("i", s.tokens[slot, :n]),
            logprobs=_array("f", s.logprobs[slot, :n]),
            versions=_array("i", s.versions[slot, :n]),
        )

    # --- admission

    def _admit(self) -> None:
        first = islice(self._waiting, len(self._free_slots))
        n = self._decoder.count_admissible(flight.context_length for flight in first)
        if not n:
            return
        flights = [self._waiting.popleft() for _ in range(n)]
        slots = [heapq.heappop(self._free_slots) for _ in range(n)]
        missing = {f.key: f.context for f in flights if f.key not in self._prefixes}
        self.stats.prefill_tokens += sum(map(len, missing.values()))
        self._decoder.state.write(slots, [f.request for f in flights])
        self._flights |= zip(slots, flights, strict=True)
        for slot, flight in zip(slots, flights, strict=True):
            known = len(flight.request.token_ids)
            self._reported[slot] = self._unreported.pop(flight.serial, known)
        self._batch_changed = True
        # One forward's prefixes at a time, copied into the cache before the next forward.
        prefilled = zip(missing, self._prefill(list(missing.values())), strict=True)
        for key, members in groupby(zip(slots, flights, strict=True), lambda pair: pair[1].key):
            if key not in self._prefixes:
                self._prefixes |= [next(prefilled)]
            admitted = [slot for slot, _ in members]
            self._decoder.cache.admit(admitted, key, self._prefixes[key])
            self._sharers[key] -= len(admitted)
            if not self._sharers[key]:
                del self._sharers[key], self._prefixes[key]

    def _prefill(self, contexts: list[list[int]]) -> Iterator[Prefix]:
        """Keys and values of token sequences, several of them in one packed forward."""
        start = 0
        while start < len(contexts):
            end, tokens = start + 1, len(contexts[start])
            while end < len(contexts) and tokens + len(contexts[end]) <= self.prefill_tokens:
                tokens += len(contexts[end])
                end += 1
            chunk = contexts[start:end]
            # A prompt of one token has nothing to cache, and a forward takes no empty sequence.
            filled = [c for c in chunk if c]
            prefixes: Iterator[Prefix] = iter(())
            if filled:
                packed = prefill(self.model, filled)
                prefixes = iter(self._decoder.layout.split(packed, [len(c) for c in filled]))
            yield from (next(prefixes) if c else Prefix(0, []) for c in chunk)
            start = end

    # --- weights

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild all cached keys and values, of live slots and of kept prefixes, under the current
        weights."""
        requests = {slot: self._snapshot(slot) for slot in self._flights}
        contexts = {s: [*r.prompt_ids, *r.token_ids][:-1] for s, r in requests.items()}
        prefilled = self._prefill(list(contexts.values()))
        self._decoder.cache.rewrite(zip(contexts, prefilled, strict=True))
        kept = {f.key: f.context for f in self._waiting if f.key in self._prefixes}
        self._prefixes |= zip(kept, self._prefill(list(kept.values())), strict=True)
        recomputed = [*contexts.values(), *kept.values()]
        self.stats.recomputed_tokens += sum(map(len, recomputed))


def _array(code: str, values: torch.Tensor) -> array[Any]:
    """A one-dimensional tensor as an array of the C type `code`, of 4 bytes."""
    numbers: array[Any] = array(code)
    numbers.frombytes(values.to(_DTYPES[code]).cpu().numpy().tobytes())
    return numbers
