"""The slot engine: continuous batching over a model's own forward.

One decode step feeds each sequence in flight its newest token, whose keys and values are not
cached yet, and samples the next one. So *every* generated token comes out of a decode step, and
the weights of that step are its version; prefill only fills caches, with all of a sequence but its
last token.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator import attention  # noqa: F401 (registers `slots`)
from tramontane.generator.cache import SlotCache
from tramontane.generator.graphs import Looks, Recorder, bucket
from tramontane.generator.lanes import Layout, PackedCache, Prefix
from tramontane.generator.sampling import Drawing, sample, uniforms
from tramontane.generator.slab import SlabCache
from tramontane.generator.state import State
from tramontane.models.loading import context_length
from tramontane.models.packing import pack
from tramontane.types import Completion, Growth, Request

Key = tuple[int, ...]
# Of each row of a batch, [B] bool: it drew an EOS token; it is done; it fills its lane.
Flags = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Stats:
    """Counts since the engine was made.

    `slot_steps` counts all slots in every decode step, `live_slot_steps` those that held a
    sequence: their quotient is the utilisation. `prefill_tokens` are those of admissions,
    `recomputed_tokens` those of weight updates.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    live_slot_steps: int = 0
    slot_steps: int = 0


@dataclass(frozen=True)
class _Flight:
    """A request on its way: `key` names the prefix that it shares with others, `serial` its place
    in the order of submission."""

    request: Request
    key: Key
    serial: int

    @property
    def context(self) -> list[int]:
        """What must be cached before the next token can be sampled: all but the last token."""
        return (self.request.prompt_ids + self.request.token_ids)[:-1]


class SlotEngine:
    """Runs requests through `slots` slots, refilling each as it falls free.

    Args:
        model: any causal LM whose attention goes through transformers' attention interface; its
            attention implementation is set to `slots`, which serves other forwards as `packed`.
        slots: sequences decoded at once.
        max_len: longest prompt plus completion, in tokens.
        eos_ids: tokens that end a completion.
        prefill_tokens: tokens in one prefill forward (a longer sequence has one to itself).
        version: of the weights as they are.
        record: makes steps of fixed shapes quicker to repeat; keys and values then lie in a slab
            instead of in lanes. Left out where the model's forward looks at tensors' values.

    Raises:
        InputError: the model cannot be run this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_len: int,
        eos_ids: Collection[int] = (),
        prefill_tokens: int = 4096,
        version: int = 0,
        record: Recorder | None = None,
    ) -> None:
        self.model = model.eval()
        self.slots, self.max_len, self.prefill_tokens = slots, max_len, prefill_tokens
        self.stats = Stats()
        self._device = next(model.parameters()).device
        self._version = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.version = version
        self._recorder = record
        vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index, arg-type]
        self._is_eos = torch.zeros(vocab, dtype=torch.bool, device=self._device)
        if strange := [t for t in eos_ids if not 0 <= t < vocab]:
            raise InputError(f"EOS tokens {strange} are outside the model's vocabulary of {vocab}")
        self._is_eos[list(eos_ids)] = True
        self._layout = self._try_model()
        self._serial = 0
        self._allocate()

    def resize(self, slots: int, max_len: int) -> None:
        """Take other sizes; the memory of the old ones is freed.

        Raises:
            RuntimeError: something is in flight or waiting.
        """
        if self.unfinished:
            raise RuntimeError(f"resize with {self.unfinished} sequences unfinished")
        self.slots, self.max_len = slots, max_len
        self.clear()

    @property
    def version(self) -> int:
        """Of the weights, noted with every token that is sampled."""
        return self._version_number

    @version.setter
    def version(self, version: int) -> None:
        self._version_number = version
        self._version.fill_(version)

    # --- requests

    @property
    def in_flight(self) -> int:
        """Sequences that hold a slot."""
        return len(self._flights)

    @property
    def unfinished(self) -> int:
        """Sequences in flight and waiting for a slot."""
        return len(self._flights) + len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots' keys and values."""
        return self._cache.nbytes

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each step admits as many as there are free slots, in order.

        Raises:
            InputError: a request that can never run: nothing to start from, unknown tokens, longer
                than a slot, already complete, or impossible sampling parameters. Nothing of the
                call is queued then.
        """
        for request in requests:
            self._check(request)
        for request in requests:
            key = (request.group, *request.prompt_ids, *request.token_ids)
            self._waiting.append(_Flight(request, key, self._serial))
            self._sharers[key] += 1
            self._serial += 1

    def pending(self) -> list[Request]:
        """Everything unfinished, in order of submission, with what it has generated so far.

        Submitted again, here or elsewhere, these continue to the same tokens.
        """
        flights = [(f.serial, self._so_far(slot)) for slot, f in self._flights.items()]
        flights += [(f.serial, replace(f.request)) for f in self._waiting]
        return [request for _, request in sorted(flights, key=lambda pair: pair[0])]

    def grown(self) -> list[Growth]:
        """What each sequence in flight gained since this was last asked."""
        slots = list(self._flights)
        if not slots:
            return []
        s, at = self._state, torch.tensor(slots, device=self._device)
        counts = s.count[at].tolist()
        told = [self._told[slot] for slot in slots]
        self._told |= zip(slots, counts, strict=True)
        news = max(now - then for now, then in zip(counts, told, strict=True))
        # The newest `news` tokens of each, whether all of them are new or not: one read for all.
        places = s.count[at, None] - torch.arange(news, 0, -1, device=self._device)
        columns = [c[at].gather(1, places.clamp(min=0)) for c in (s.tokens, s.logprobs, s.versions)]
        rows = zip(slots, counts, told, *(c.tolist() for c in columns), strict=True)
        return [
            Growth(f.request.group, f.request.index, *(values[then - now :] for values in gained))
            for slot, now, then, *gained in rows
            if now > then and (f := self._flights[slot])
        ]

    def clear(self) -> None:
        """Forget everything in flight and waiting."""
        del self._recorded, self._cache, self._state  # before memory is taken for new ones
        self._allocate()

    def _allocate(self) -> None:
        kind = SlotCache if self._recorder is None else SlabCache
        self._cache: SlotCache | SlabCache = kind(self._layout, self.slots, self.max_len)
        self._state = State(self.slots, self.max_len, self._device)
        self._flights: dict[int, _Flight] = {}
        self._told: dict[int, int] = {}  # tokens of each flight that `grown` has told of
        self._free = list(range(self.slots))  # a heap: the lowest is taken first
        self._waiting: deque[_Flight] = deque()
        # Prefixes stay until the last sequence that starts with them is admitted.
        self._sharers: Counter[Key] = Counter()
        self._prefixes: dict[Key, Prefix] = {}
        # The batch of a decode step; recorded ones hold on to the first two of a slab.
        self._seat()
        self._moved = False  # since the batch was last looked at
        self._recorded: dict[tuple[int, Drawing], Callable[[], Flags]] = {}

    def _check(self, request: Request) -> None:
        s = request.sampling
        name = f"request {request.index} of group {request.group}"
        vocab = len(self._is_eos)
        context = context_length(self.model.config) or self.max_len
        limit = min(context, self.max_len)
        if not request.prompt_ids:
            raise InputError(f"{name}: an empty prompt; give at least a BOS token")
        if not all(0 <= t < vocab for t in request.prompt_ids):
            raise InputError(f"{name}: prompt tokens outside the model's vocabulary of {vocab}")
        if len(request.prompt_ids) + s.max_tokens > limit:
            what = "the model's context" if context < self.max_len else "the generator's slots"
            raise InputError(
                f"{name}: {len(request.prompt_ids)} prompt tokens and max_tokens {s.max_tokens} "
                f"do not fit {what} of {limit} tokens; shorten either"
            )
        if len(request.token_ids) >= s.max_tokens:
            raise InputError(f"{name}: max_tokens {s.max_tokens} leaves nothing to generate")
        if not len(request.token_ids) == len(request.logprobs) == len(request.versions):
            raise InputError(f"{name}: needs a log-prob and a version for each of its tokens")
        if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
            raise InputError(f"{name}: needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, not {s}")

    # --- decoding

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for every live slot, and return what that finished."""
        self._admit()
        if not self._flights:
            return []
        if self._moved:
            if self._recorder is None:
                self._seat()
            params = [f.request.sampling for f in self._flights.values()]
            self._drawing = Drawing.of(params, fixed=self._recorder is not None)
            self._moved = False
        if self._recorder is None:
            flags = self._advance(self._order, self._capacity)
        else:
            flags = self._replay(self._recorder)
        live = len(self._flights)
        self.stats.generated_tokens += live
        self.stats.live_slot_steps += live
        self.stats.slot_steps += self.slots
        self.stats.decode_steps += 1
        return self._leave(*flags)

    def _seat(self) -> None:
        """Note whose row is whose, and how far each may grow where it is."""
        self._order = torch.tensor(self._cache.rows, dtype=torch.int64, device=self._device)
        self._capacity = torch.tensor(self._cache.capacities, device=self._device)

    def _replay(self, record: Recorder) -> Flags:
        """`_advance` of all slots up to the last in use, by a recorded step."""
        rows = bucket(max(self._flights) + 1, self.slots)
        key = rows, self._drawing
        if key not in self._recorded:
            state = self._state
            count, last = state.count.clone(), state.last.clone()
            self._recorded[key] = record(lambda: self._advance_first(rows))
            # Recording runs steps, whose tokens are drawn again: only these say how far all are.
            state.count.copy_(count)
            state.last.copy_(last)
        return self._recorded[key]()

    def _advance_first(self, rows: int) -> Flags:
        """`_advance` of the first slots. What empty ones draw comes to nothing: their count stays
        0, and they are never done."""
        stopped, done, full = self._advance(self._order[:rows], self._capacity[:rows])
        limit = self._state.limit[:rows]
        self._state.count[:rows].clamp_(max=limit)
        return stopped, done & (limit > 0), full

    def _advance(self, order: torch.Tensor, capacity: torch.Tensor) -> Flags:
        """Draw a token for each of the slots `order` [B], of which `capacity` [B] says how many
        positions each has room for behind its prefix."""
        s = self._state
        counts = s.count[order]
        lengths = s.offset[order] + counts
        own = lengths - s.start[order] if self._cache.sharing else lengths
        logits = self._decode(self._cache, s.last[order], lengths, own)
        tokens, logprobs = sample(
            logits,
            uniforms(s.stream[order], counts),
            s.temperature[order],
            s.top_p[order],
            s.top_k[order],
            self._drawing,
        )
        place = order * self.max_len + counts
        s.tokens.view(-1).index_copy_(0, place, tokens)
        s.logprobs.view(-1).index_copy_(0, place, logprobs)
        s.versions.view(-1).index_copy_(0, place, self._version.expand_as(place))
        s.last[order] = tokens
        s.count[order] = counts + 1
        stopped = self._is_eos[tokens]
        return stopped, stopped | (counts + 1 >= s.limit[order]), own + 1 >= capacity

    def _decode(
        self,
        cache: SlotCache | SlabCache,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        own: torch.Tensor,
    ) -> torch.Tensor:
        """Feed one token to each sequence: [B], [B] positions cached, [B] of these without the
        prefix → logits [B, V] float32."""
        out = self.model(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            past_key_values=cache,
            use_cache=True,
            decode=cache.begin(own),
        )
        return out.logits[:, -1].float()

    def _leave(
        self, stopped: torch.Tensor, done: torch.Tensor, full: torch.Tensor
    ) -> list[Completion]:
        """Free the slots of finished sequences, and give longer lanes to those that need them."""
        if not bool((done | full).any()):
            return []
        gone, slots, ended = done.nonzero()[:, 0].tolist(), self._cache.rows, stopped.tolist()
        completions = [self._complete(slots[b], ended[b]) for b in gone]
        self._cache.end(gone, full.nonzero()[:, 0].tolist())
        for b in gone:
            del self._flights[slots[b]]
            heapq.heappush(self._free, slots[b])
        if self._recorder is not None:
            freed = torch.tensor([slots[b] for b in gone], dtype=torch.int64, device=self._device)
            self._state.empty(freed)
        self._moved = True
        return completions

    def _complete(self, slot: int, stopped: bool) -> Completion:
        r = self._so_far(slot)
        return Completion(
            r.group,
            r.index,
            r.prompt_ids,
            r.token_ids,
            r.logprobs,
            r.versions,
            "stop" if stopped else "length",
        )

    def _so_far(self, slot: int) -> Request:
        s, n = self._state, int(self._state.count[slot])
        return replace(
            self._flights[slot].request,
            token_ids=s.tokens[slot, :n].tolist(),
            logprobs=s.logprobs[slot, :n].tolist(),
            versions=s.versions[slot, :n].tolist(),
        )

    # --- admission

    def _admit(self) -> None:
        n = min(len(self._free), len(self._waiting))
        if not n:
            return
        flights = [self._waiting.popleft() for _ in range(n)]
        slots = [heapq.heappop(self._free) for _ in range(n)]
        missing = {f.key: f.context for f in flights if f.key not in self._prefixes}
        self._prefixes |= zip(missing, self._prefill(list(missing.values())), strict=True)
        self.stats.prefill_tokens += sum(map(len, missing.values()))
        self._state.place(slots, [f.request for f in flights])
        self._flights |= zip(slots, flights, strict=True)
        self._told |= {
            slot: len(f.request.token_ids) for slot, f in zip(slots, flights, strict=True)
        }
        self._moved = True
        for key, members in groupby(zip(slots, flights, strict=True), lambda pair: pair[1].key):
            rows = [slot for slot, _ in members]
            prefix = self._prefixes[key]
            self._cache.admit(rows, key, prefix)
            self._sharers[key] -= len(rows)
            if not self._sharers[key]:
                del self._sharers[key], self._prefixes[key]

    def _prefill(self, contexts: list[list[int]]) -> Iterator[Prefix]:
        """Keys and values of token sequences, in few packed forwards."""
        start = 0
        while start < len(contexts):
            end, tokens = start + 1, len(contexts[start])
            while end < len(contexts) and tokens + len(contexts[end]) <= self.prefill_tokens:
                tokens += len(contexts[end])
                end += 1
            chunk = contexts[start:end]
            # A prompt of one token has nothing to cache, and a forward takes no empty sequence.
            filled = [c for c in chunk if c]
            prefixes = iter(
                self._layout.split(self._record(filled), [len(c) for c in filled]) if filled else ()
            )
            yield from (next(prefixes) if c else Prefix(0, []) for c in chunk)
            start = end

    def _record(self, sequences: list[list[int]]) -> PackedCache:
        cache = PackedCache()
        inputs = pack(sequences, self._device).model_inputs | {"use_cache": True}
        self.model(**inputs, past_key_values=cache, logits_to_keep=1)
        return cache

    # --- weights

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild all cached keys and values, live and kept, under the weights as they are now."""
        requests = {slot: self._so_far(slot) for slot in self._flights}
        contexts = {slot: (r.prompt_ids + r.token_ids)[:-1] for slot, r in requests.items()}
        self._cache.rewrite(zip(contexts, self._prefill(list(contexts.values())), strict=True))
        self.stats.recomputed_tokens += sum(map(len, contexts.values()))
        kept = {f.key: f.context for f in self._waiting if f.key in self._prefixes}
        self._prefixes |= zip(kept, self._prefill(list(kept.values())), strict=True)
        self.stats.recomputed_tokens += sum(map(len, kept.values()))

    @torch.inference_mode()
    def _try_model(self) -> Layout:
        """One prefill and one decode step: an unfit model fails here, not in mid-run."""
        name = type(self.model).__name__
        if not self.model._supports_attention_backend:
            raise InputError(
                f"{name} does not go through transformers' attention interface, so the embedded "
                f"generator cannot run it; generate with vLLM"
            )
        layers = set(getattr(self.model.config, "layer_types", None) or ())
        if strange := sorted(layers - {"full_attention", "sliding_attention"}):
            raise InputError(
                f"{name} has layers of kind {', '.join(strange)}, of which the embedded generator "
                f"caches nothing; generate with vLLM"
            )
        self.model.set_attn_implementation("slots")
        layout = Layout(self._record([[0]]))
        cache = SlotCache(layout, 1, self.max_len)
        cache.admit([0], 0, Prefix(0, []))
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        with Looks() as looks:
            self._decode(cache, zero, zero, zero)
        if looks.seen:
            self._recorder = None
        if not cache.reads:
            raise InputError(
                f"{name} does not pass keyword arguments on to its attention, so the embedded "
                f"generator cannot run it; generate with vLLM"
            )
        return layout
