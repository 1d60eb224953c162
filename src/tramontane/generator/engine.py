"""The slot engine: continuous batching over a model's own forward.

Every sequence in flight owns a slot. One decode step feeds each live slot its last token, whose
keys and values are not cached yet, and samples the next one. So *every* generated token comes out
of a decode step, and the weights of that step are its version; prefill only fills caches, with all
of a sequence but its last token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator.attention import slot_attention  # noqa: F401 (registers `slots`)
from tramontane.generator.cache import Lane, Layout, PackedCache, Prefix, SlotCache
from tramontane.generator.sampling import sample, streams, uniforms
from tramontane.models import pack
from tramontane.types import Completion, Request

Key = tuple[int, ...]


@dataclass
class Stats:
    """Counts since the engine was made.

    `slot_steps` counts all slots in every decode step, `live_slot_steps` those that held a
    sequence: their quotient is the utilisation.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    live_slot_steps: int = 0
    slot_steps: int = 0


@dataclass
class _Flight:
    """A request on its way: `key` names the prefix that it shares with others, `serial` its place
    in the order of submission."""

    request: Request
    key: Key
    serial: int

    @property
    def context(self) -> list[int]:
        """All that must be cached before its next token: everything but the last token."""
        return (self.request.prompt_ids + self.request.token_ids)[:-1]


@dataclass
class _State:
    """What each slot holds, [slots] or [slots, max_len]."""

    last: torch.Tensor  # the newest token, not cached yet
    length: torch.Tensor  # positions cached
    count: torch.Tensor  # tokens generated
    limit: torch.Tensor  # tokens to generate at most
    stream: torch.Tensor  # where its random numbers start
    top_k: torch.Tensor
    top_p: torch.Tensor
    temperature: torch.Tensor
    tokens: torch.Tensor
    versions: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def empty(cls, slots: int, max_len: int, device: torch.device) -> _State:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            **{n: zeros(slots) for n in ("last", "length", "count", "limit", "stream", "top_k")},
            **{n: zeros(slots, dtype=torch.float32) for n in ("top_p", "temperature")},
            **{n: zeros(slots, max_len) for n in ("tokens", "versions")},
            logprobs=zeros(slots, max_len, dtype=torch.float32),
        )

    def move(self, source: int, target: int) -> None:
        for tensor in vars(self).values():
            tensor[target] = tensor[source]


@dataclass
class _Kept:
    """Prefixes computed and not yet copied to the last sequence that starts with them."""

    waiting: Counter[Key] = field(default_factory=Counter)
    prefixes: dict[Key, Prefix] = field(default_factory=dict)

    def release(self, key: Key, n: int) -> None:
        self.waiting[key] -= n
        if not self.waiting[key]:
            del self.waiting[key]
            self.prefixes.pop(key, None)


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

    Raises:
        InputError: the model cannot be run this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_len: int,
        eos_ids: Iterable[int] = (),
        prefill_tokens: int = 4096,
        version: int = 0,
    ) -> None:
        if not model._supports_attention_backend:
            raise InputError(
                f"{type(model).__name__} does not go through transformers' attention interface, "
                f"so the embedded generator cannot run it; generate with vLLM"
            )
        model.set_attn_implementation("slots")
        self.model = model.eval()
        self.slots, self.max_len, self.prefill_tokens = slots, max_len, prefill_tokens
        self.version = version
        self.stats = Stats()
        self._device = next(model.parameters()).device
        vocab = model.get_input_embeddings().weight.shape[0]
        self._is_eos = torch.zeros(vocab, dtype=torch.bool, device=self._device)
        self._is_eos[list(eos_ids)] = True
        self._state = _State.empty(slots, max_len, self._device)
        self._row = torch.arange(slots, device=self._device) * max_len
        self._live: list[_Flight] = []
        self._waiting: deque[_Flight] = deque()
        self._kept = _Kept()
        self._serial = 0
        with torch.inference_mode():
            self._cache = SlotCache(self._forward_packed([[0]]), slots, max_len)
            self._decode(self._state.last[:1])  # an unfit model fails here, not mid-run

    # --- requests

    @property
    def in_flight(self) -> int:
        """Sequences that hold a slot."""
        return len(self._live)

    @property
    def unfinished(self) -> int:
        """Sequences in flight and waiting for a slot."""
        return len(self._live) + len(self._waiting)

    @property
    def cache_bytes(self) -> int:
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
            self._kept.waiting[key] += 1
            self._serial += 1

    def pending(self) -> list[Request]:
        """Everything unfinished, in order of submission, with what it has generated so far.

        Submitted again, here or elsewhere, these continue to the same tokens.
        """
        flights = [(f.serial, self._so_far(i)) for i, f in enumerate(self._live)]
        flights += [(f.serial, replace(f.request)) for f in self._waiting]
        return [request for _, request in sorted(flights, key=lambda pair: pair[0])]

    def clear(self) -> None:
        """Forget everything in flight and waiting."""
        self._live, self._waiting, self._kept = [], deque(), _Kept()

    def _check(self, request: Request) -> None:
        s = request.sampling
        name = f"request {request.index} of group {request.group}"
        known = len(self._is_eos)
        context = getattr(self.model.config, "max_position_embeddings", None) or self.max_len
        length = len(request.prompt_ids) + s.max_tokens
        if not request.prompt_ids:
            raise InputError(f"{name}: an empty prompt; give at least a BOS token")
        if not all(0 <= t < known for t in request.prompt_ids):
            raise InputError(f"{name}: prompt tokens outside the model's vocabulary of {known}")
        if length > min(context, self.max_len):
            limit = "the model's context" if context < self.max_len else "the generator's slots"
            raise InputError(
                f"{name}: {len(request.prompt_ids)} prompt tokens and max_tokens {s.max_tokens} "
                f"do not fit {limit} of {min(context, self.max_len)} tokens"
            )
        if len(request.token_ids) >= s.max_tokens:
            raise InputError(f"{name}: max_tokens {s.max_tokens} leaves nothing to generate")
        if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
            raise InputError(
                f"{name}: needs temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0, not {s}"
            )

    # --- decoding

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for every live slot, and return what that finished."""
        self._admit()
        n = len(self._live)
        if n == 0:
            return []
        s = self._state
        logits = self._decode(s.last[:n])
        uniform = uniforms(s.stream[:n], s.count[:n])
        tokens, logprobs = sample(logits, uniform, s.temperature[:n], s.top_p[:n], s.top_k[:n])
        place = self._row[:n] + s.count[:n]
        s.tokens.view(-1).index_copy_(0, place, tokens)
        s.logprobs.view(-1).index_copy_(0, place, logprobs)
        s.versions.view(-1).index_fill_(0, place, self.version)
        s.last[:n] = tokens
        s.count[:n] += 1
        s.length[:n] += 1
        self.stats.generated_tokens += n
        self.stats.live_slot_steps += n
        self.stats.slot_steps += self.slots
        self.stats.decode_steps += 1
        ended = self._is_eos[tokens]
        done = (ended | (s.count[:n] >= s.limit[:n])).nonzero()[:, 0].tolist()
        return self._finish(done, ended) if done else []

    def _decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token to each of the first B slots: [B] → logits [B, V] float32."""
        lengths = self._state.length[: len(tokens)]
        step = self._cache.begin(lengths, int(lengths.max()))
        out = self.model(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
            decode=step,
        )
        return out.logits[:, -1].float()

    def _finish(self, done: list[int], ended: torch.Tensor) -> list[Completion]:
        completions = []
        for i in done:
            r = self._so_far(i)
            reason = "stop" if ended[i] else "length"
            completions.append(
                Completion(
                    r.group,
                    r.index,
                    r.prompt_ids,
                    r.token_ids,
                    r.logprobs,
                    r.versions,
                    "stop" if reason == "stop" else "length",
                )
            )
        # Compaction: the last live slots move into the holes, so that live ones stay in front.
        for hole in reversed(done):
            last = len(self._live) - 1
            if hole != last:
                self._cache.move(last, hole, int(self._state.length[last]))
                self._state.move(last, hole)
                self._live[hole] = self._live[last]
            self._live.pop()
        return completions

    def _so_far(self, slot: int) -> Request:
        s, n = self._state, int(self._state.count[slot])
        return replace(
            self._live[slot].request,
            token_ids=s.tokens[slot, :n].tolist(),
            logprobs=s.logprobs[slot, :n].tolist(),
            versions=s.versions[slot, :n].tolist(),
        )

    # --- admission

    def _admit(self) -> None:
        free = min(self.slots - len(self._live), len(self._waiting))
        if not free:
            return
        flights = [self._waiting.popleft() for _ in range(free)]
        missing = {f.key: f.context for f in flights if f.key not in self._kept.prefixes}
        for key, prefix in zip(missing, self._prefill(list(missing.values())), strict=True):
            self._kept.prefixes[key] = prefix
        self.stats.prefill_tokens += sum(len(context) for context in missing.values())
        first = len(self._live)
        self._place(flights, first)
        self._live += flights
        for key, members in groupby(flights, lambda f: f.key):
            last = first + len(list(members))
            self._cache.fill(first, last, self._kept.prefixes[key])
            self._kept.release(key, last - first)
            first = last

    def _place(self, flights: list[_Flight], first: int) -> None:
        """Write the requests' own numbers into the slots from `first` on."""
        s, requests = self._state, [f.request for f in flights]
        columns: list[tuple[torch.Tensor, list]] = [
            (s.last, [(r.token_ids or r.prompt_ids)[-1] for r in requests]),
            (s.length, [len(r.prompt_ids) + len(r.token_ids) - 1 for r in requests]),
            (s.count, [len(r.token_ids) for r in requests]),
            (s.limit, [r.sampling.max_tokens for r in requests]),
            (s.top_k, [r.sampling.top_k for r in requests]),
            (s.top_p, [r.sampling.top_p for r in requests]),
            (s.temperature, [r.sampling.temperature for r in requests]),
        ]
        last = first + len(requests)
        for column, values in columns:
            column[first:last] = torch.tensor(values, dtype=column.dtype)
        s.stream[first:last] = streams([r.seed for r in requests])
        for slot, r in enumerate(requests, start=first):
            if n := len(r.token_ids):
                s.tokens[slot, :n] = torch.tensor(r.token_ids)
                s.logprobs[slot, :n] = torch.tensor(r.logprobs)
                s.versions[slot, :n] = torch.tensor(r.versions)

    def _prefill(self, contexts: list[list[int]]) -> Iterator[Prefix]:
        """Keys and values of each token sequence, packed into few forwards."""
        start = 0
        while start < len(contexts):
            end, tokens = start + 1, len(contexts[start])
            while end < len(contexts) and tokens + len(contexts[end]) <= self.prefill_tokens:
                tokens += len(contexts[end])
                end += 1
            chunk = contexts[start:end]
            # A prompt of one token has nothing to cache, and a forward takes no empty sequence.
            lengths = [len(c) for c in chunk if c]
            recorded = self._forward_packed([c for c in chunk if c]) if lengths else PackedCache()
            prefixes = iter(recorded.split(tuple(lengths)))
            yield from (next(prefixes) if c else Prefix(0, {}) for c in chunk)
            start = end

    def _forward_packed(self, sequences: list[list[int]]) -> PackedCache:
        cache = PackedCache()
        inputs = pack(sequences, self._device).model_inputs | {"use_cache": True}
        self.model(**inputs, past_key_values=cache, logits_to_keep=1)
        return cache

    # --- weights

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild all cached keys and values, live and kept, under the weights as they are now."""
        contexts = []
        for i, flight in enumerate(self._live):
            contexts.append((flight.request.prompt_ids + self._so_far(i).token_ids)[:-1])
        for i, prefix in enumerate(self._prefill(contexts)):
            self._cache.fill(i, i + 1, prefix)
        first = {f.key: f.context for f in reversed(self._waiting)}
        kept = {key: first[key] for key in self._kept.prefixes}
        for key, prefix in zip(kept, self._prefill(list(kept.values())), strict=True):
            self._kept.prefixes[key] = prefix
        self.stats.recomputed_tokens += sum(map(len, contexts)) + sum(map(len, kept.values()))
