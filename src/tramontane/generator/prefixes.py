"""Prefixes that requests share: a group's prompt is prefilled once, for all of its completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tramontane.generator.lanes import Prefix
from tramontane.generator.parking import Context
from tramontane.types import Completion

Key = tuple[int | str, ...]


@dataclass(frozen=True)
class Flight:
    """An unfinished request; `serial` is its place in the order of submission."""

    request: Completion
    serial: int

    @cached_property
    def key(self) -> Key:
        """Names the prefix that it shares: its group, all tokens so far, and its images."""
        r = self.request
        return (r.group, *r.prompt_ids, *r.token_ids, *r.images, *r.put_images)

    @cached_property
    def sampled_from(self) -> int:
        return self.request.sampled_from

    @property
    def context_length(self) -> int:
        return len(self.request.prompt_ids) + len(self.request.token_ids) - 1


class SharedPrefixes:
    """Keys and values that waiting requests start with. Each prefix is kept until the last request
    that starts with it is admitted.

    Args:
        context: what must be cached for a request before its next token can be sampled.

    Attributes:
        waiting: how many requests wait for a slot, by prefix.
        computed: the prefixes that are there.
    """

    def __init__(self, context: Callable[[Completion], Context]) -> None:
        self._context = context
        self.waiting: Counter[Key] = Counter()
        self.computed: dict[Key, Prefix] = {}
        self._ahead: set[Key] = set()  # computed before any of their requests is admitted

    def missing(self, flights: Iterable[Flight]) -> dict[Key, Context]:
        """What must be cached for requests and is not yet there."""
        found = dict[Key, Context]()
        for flight in flights:
            if flight.key not in self.computed and flight.key not in found:
                found[flight.key] = self._context(flight.request)
        return found

    def ahead(
        self, missing: Mapping[Key, Context], queue: Iterable[Flight], tokens: int
    ) -> dict[Key, Context]:
        """What else fits into a prefill of `missing` and at most `tokens` tokens, from the head of
        the queue: on a GPU, a forward of few tokens takes as long as one of many."""
        room = tokens - sum(len(context.tokens) for context in missing.values())
        seen, flights = {*missing, *self.computed}, list[Flight]()
        for flight in queue:
            if flight.key in seen:
                continue
            room -= flight.context_length
            if room < 0:
                break
            seen.add(flight.key)
            flights.append(flight)
        found = self.missing(flights)
        self._ahead |= found.keys()
        return found

    def get(self, key: Key, prefilled: Iterator[tuple[Key, Prefix]]) -> Prefix:
        """A prefix; the next that is `prefilled` if it is not there yet."""
        if key not in self.computed:
            self.computed |= [next(prefilled)]
        return self.computed[key]

    def admit(self, key: Key, requests: int) -> None:
        """Note that some of the requests that start with a prefix wait no more."""
        self._ahead.discard(key)
        self.waiting[key] -= requests
        if not self.waiting[key]:
            del self.waiting[key], self.computed[key]

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget prefixes whose requests were all dropped, as a cancelled group's are."""
        for key in keys:
            del self.waiting[key]
            self.computed.pop(key, None)
            self._ahead.discard(key)

    def drop_ahead(self) -> None:
        """Forget what was computed ahead of its requests: they start with the new weights."""
        for key in self._ahead:
            del self.computed[key]
        self._ahead.clear()
