"""Keys and values of conversations that wait for their environments.

A conversation whose turn has ended is *parked*: its slot is free for others, but its keys and
values stay in the cache while no other sequence needs the room. When it continues, only the tokens
of its environment's answer are prefilled. Like those of decoding sequences, its keys and values
may have been computed under earlier weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from tramontane.generator.arena import ArenaCache
from tramontane.generator.cache import SlotCache
from tramontane.generator.lanes import Layout, PackedCache, Prefix
from tramontane.models import flash
from tramontane.models.attention import Options, plain_attention
from tramontane.models.packing import Packing, VarlenLayout, upload
from tramontane.tokens import given_ids
from tramontane.types import Completion

NOTHING = Prefix(0, [])


@dataclass(frozen=True)
class Context:
    """Tokens whose keys and values are to be cached."""

    tokens: list[int]  # all of them
    known: int = 0  # number of the first tokens whose keys and values are there already
    # Returns those, which are then no longer kept; they are valid until the cache changes.
    take: Callable[[], Prefix] = lambda: NOTHING
    given_ids: Sequence[int] = ()  # the same tokens, if they have images (`tokens.given_ids`)
    images: Sequence[str] = ()

    @classmethod
    def of(cls, request: Completion) -> Context:
        """What is cached before the next token can be sampled: all tokens but the last."""
        tokens = [*request.prompt_ids, *request.token_ids][:-1]
        if not (images := [*request.images, *request.put_images]):
            return cls(tokens)
        given = given_ids(request.prompt_ids, request.token_ids, request.versions)[:-1]
        return cls(tokens, given_ids=given, images=images)


class ContinuedCache(PackedCache):
    """Stacks one packed forward of sequences that continue cached ones, which attention reads too.

    Args:
        layout: layout of the model's keys and values.
        pasts: the cached positions of each sequence.
        lengths: number of tokens of each sequence in the forward.
    """

    def __init__(self, layout: Layout, pasts: Sequence[Prefix], lengths: Sequence[int]) -> None:
        super().__init__(layout, sum(lengths), [past.states for past in pasts])
        self._device, self._pasts, self._lengths = layout.device, pasts, list(lengths)
        self._layer = 0  # written last
        before = [past.length for past in pasts]
        self._varlen = VarlenLayout(lengths, [None] * len(lengths), layout.device, before)
        # Places of each sequence's tokens, counted from its first cached position.
        self._places = [torch.arange(b + n) for b, n in zip(before, lengths, strict=True)]
        self.packing: Packing | None = None  # of the forward, if some of its tokens are mutual

    def position_ids(self, shifts: Sequence[int]) -> torch.Tensor:
        """[1, N]: the positions of the forward's tokens, whose sequences' images shift them."""
        places = zip(self._places, self._lengths, shifts, strict=True)
        found = torch.cat([place[-n:] + shift for place, n, shift in places])
        return upload(found[None], self._device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(layer, key, value)
        self._layer = layer

    def attend(self, query: torch.Tensor, options: Options) -> torch.Tensor:
        """Causal attention of each sequence to its past and itself: [1, Hq, N, d] →
        [1, N, Hq, dv]."""
        values = self._visible(1)
        dtype = values[0].dtype  # rotary embeddings may return float32 for a model in bfloat16
        keys, query = [key.to(dtype) for key in self._visible(0)], query[0].to(dtype)
        scale, window = options.scale, options.window
        mutual: Mapping[int, Sequence[tuple[int, int]]] = {}
        if self.packing and (window or not self.packing.in_windows):
            mutual = self.packing.mutual
        plain = options.is_plain and not options.chunk and not mutual
        if plain and flash.supports(keys[0], values[0]):
            q, k, v = (x.transpose(0, 1) for x in (query, torch.cat(keys, 1), torch.cat(values, 1)))
            return flash.packed_attention(q, k, v, self._varlen, scale, window)[None]
        rows = zip(query.split(self._lengths, 1), keys, values, self._places, strict=True)
        outs = []
        for number, (q, k, v, places) in enumerate(rows):
            distance, before = places[-q.shape[1] :, None] - places, len(places) - q.shape[1]
            seen = distance >= 0
            for start, end in mutual.get(number, ()):
                seen[start:end, before + start : before + end] = True
            seen &= distance < (window or len(places))
            if chunk := options.chunk:
                seen &= places[-q.shape[1] :, None] // chunk == places // chunk
            mask = seen.to(q.device)
            if not options.is_plain:
                outs.append(plain_attention(q, k, v, mask, options))
                continue
            outs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale, enable_gqa=len(q) != len(k)
                )
            )
        return torch.cat(outs, 1).transpose(0, 1)[None]

    def _visible(self, which: int) -> list[torch.Tensor]:
        """The layer's keys (0) or values (1) of each sequence, [heads, past + n, d]."""
        stack, plane = self._plane_index[self._layer, which]
        new = self.stacks[stack][plane].split(self._lengths, 1)
        return [
            torch.cat([past.planes[stack][plane], own], 1) if past.length else own
            for past, own in zip(self._pasts, new, strict=True)
        ]


class Parking:
    """The parked sequences of an engine, those parked longest ago first.

    Args:
        cache: holds their keys and values.
        slots: maximum number of sequences, parked and live.
        limit: maximum bytes of the cache; None for no limit.
    """

    def __init__(self, cache: SlotCache | ArenaCache, slots: int, limit: int | None) -> None:
        self._cache, self._slots, self._limit = cache, slots, limit
        self._tokens: dict[tuple[int, int], array[int]] = {}  # cached, by group and index
        self._images: dict[tuple[int, int], Sequence[str]] = {}  # of these tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, slot: int, ended: Completion, images: Sequence[str] = ()) -> None:
        """Park the sequence of a slot, which is about to be released; its last token is not
        cached. `images` are those of its tokens."""
        key = ended.group, ended.index
        self._drop(key)
        tokens = (array("i", ended.prompt_ids) + ended.token_ids)[:-1]
        self._cache.park(key, slot, len(tokens))
        self._tokens[key], self._images[key] = tokens, images

    def touch(self, request: Completion) -> None:
        """Mark the parked sequence of a waiting request as most recently used."""
        key = request.group, request.index
        if (tokens := self._tokens.pop(key, None)) is not None:
            self._tokens[key] = tokens

    def context(self, request: Completion) -> Context:
        """What is to be cached for a request; includes what is parked if the request continues
        it."""
        context, key = Context.of(request), (request.group, request.index)
        if (parked := self._tokens.get(key)) is None:
            return context
        shown = self._images[key]
        if (
            not request.token_ids
            or context.tokens[: len(parked)] != parked.tolist()
            or [*context.images[: len(shown)]] != [*shown]
        ):
            self._drop(key)  # of a conversation that began again, or was forked
            return context
        return replace(context, known=len(parked), take=partial(self._take, key))

    def _take(self, key: tuple[int, int]) -> Prefix:
        found = self._cache.parked(key, len(self._tokens[key]))
        self._drop(key)
        return found

    def trim(self, live: int) -> None:
        """Drop sequences until the rest fit beside `live` ones."""
        while self._tokens and (
            live + len(self._tokens) > self._slots
            or (self._limit is not None and self._cache.nbytes > self._limit)
        ):
            self.drop_first()

    def drop_first(self) -> bool:
        """Drop the sequence parked longest ago; False if there is none."""
        for key in self._tokens:
            self._drop(key)
            return True
        return False

    def forget(self, group: int | None = None) -> None:
        """Drop the sequences of a group, or all."""
        for key in [key for key in self._tokens if group in (None, key[0])]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        if self._tokens.pop(key, None) is not None:
            del self._images[key]
            self._cache.drop(key)
