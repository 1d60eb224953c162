"""A generator without a model. This file imports no torch, so that its processes start fast."""

from __future__ import annotations

from typing import Any

from tramontane.tokens import Growth
from tramontane.types import Completion, Progress


class NoWeights:
    """A version of the weights, without any."""


class CountingGenerator:
    """Each poll adds a token to every request, under the newest weights; a request ends at its
    `max_tokens`."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause, self.version, self.polls = pause, 0, 0
        self.fetched: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.requests: list[Completion] = []

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Progress:
        self.requests += requests
        self.polls += 1
        completions, grown = [], Growth()
        for r in self.requests:
            r.token_ids.append(7)
            versions, r.versions = [*r.versions, self.version], [*r.versions, self.version]
            if len(r.token_ids) == r.sampling.max_tokens:
                zeros = [0.0] * len(versions)
                completions.append(
                    Completion(r.group, r.index, [1], r.token_ids, zeros, versions, "length")
                )
            else:
                new = {"token_ids": [7], "logprobs": [0.0], "versions": [self.version]}
                grown.add(r.group, r.index, **new)
        ended = {(c.group, c.index) for c in completions}
        self.requests = [r for r in self.requests if (r.group, r.index) not in ended]
        return Progress(
            completions,
            grown,
            busy_seconds=0.5 * self.polls,
            prefilled_tokens=3,
            parked_tokens=2,
        )

    def fetch(self, version: int, weights: Any) -> None:
        assert weights is not None
        self.fetched.append(version)

    def swap(self, version: int) -> float:
        assert version in self.fetched
        self.version = self.fetched[-1]
        return self.pause

    def resize(self, slots: int, max_len: int) -> None:
        self.sizes.append((slots, max_len))

    def stats(self) -> dict[str, float]:
        return {}
