"""Sampled tokens, with what is known of each: arrays that grow, are sent, and are cut.

Plain data without torch, as in `types`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Versions of tokens that were not sampled by this run's weights.
ELSEWHERE = -1  # recorded: from an earlier run, another model, or a human
INSERTED = -2  # inserted into a sampled completion, and not trained on


def ints(values: Iterable[int] = ()) -> array[int]:
    """The values as an array of 32-bit integers; an array is returned unchanged."""
    return values if isinstance(values, array) else array("i", values)


def floats(values: Iterable[float] = ()) -> array[float]:
    """The values as an array of 32-bit floats; an array is returned unchanged."""
    return values if isinstance(values, array) else array("f", values)


@dataclass
class AllowedTokens:
    """The tokens that top-p and top-k allowed where each of a sequence's first n tokens was drawn:
    the sampling mask. At most 4 · (1 + top_k) bytes a token.

    `counts`, [n], is the number of allowed tokens, 0 where all are (nothing was drawn there, or
    nothing excluded), and `ids`, [Σ counts], are those tokens, one place after another.
    """

    counts: array[int] = field(default_factory=ints)
    ids: array[int] = field(default_factory=ints)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, places: slice) -> AllowedTokens:
        """A copy of the sets of consecutive places."""
        start, stop, _ = places.indices(len(self))
        first = sum(self.counts[:start])
        last = first + sum(self.counts[start:stop])
        return AllowedTokens(self.counts[start:stop], self.ids[first:last])

    def extend(self, other: AllowedTokens, place: int | None = None) -> None:
        """Append the sets of further tokens, the first of which is number `place`; None: the next.
        All tokens are allowed at the places between."""
        self.counts.extend(ints([0]) * (0 if place is None else place - len(self)))
        self.counts.extend(other.counts)
        self.ids.extend(other.ids)


def given_ids(
    prompt_ids: Iterable[int], token_ids: Iterable[int], versions: Iterable[int]
) -> list[int]:
    """The tokens of a sequence, −1 in place of those that were sampled: an image token among those
    stands for no image."""
    pairs = zip(token_ids, versions, strict=True)
    return [*prompt_ids, *(token if version == INSERTED else -1 for token, version in pairs)]


class SampledTokens:
    """Token ids, log-probs and versions in compact arrays: 12 bytes a token, whereas lists of
    Python numbers take 76 and slow down the garbage collector. Other sequences are converted.

    `experts`, [n, layers · k] int16, holds the experts that a mixture chose in the steps that drew
    the first n tokens, −1 where none were recorded; None: nowhere. `allowed` has the tokens that
    were allowed there; None: all.
    """

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]

    def __post_init__(self) -> None:
        self.token_ids, self.logprobs = ints(self.token_ids), floats(self.logprobs)
        self.versions = ints(self.versions)

    def part(self, part: slice) -> dict[str, Any]:
        """All that is known of some of the tokens, by field."""
        parts = {name: getattr(self, name)[part] for name in ("token_ids", "logprobs", "versions")}
        for name in ("experts", "allowed"):
            known = getattr(self, name)
            parts[name] = known[part] if known is not None and len(known[part]) else None
        return parts


@dataclass
class EarlierSequence(SampledTokens):
    """An earlier sequence of a forked conversation; its tokens are not a prefix of a later one."""

    prompt_ids: list[int]
    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    experts: NDArray[np.int16] | None = field(default=None, compare=False)
    allowed: AllowedTokens | None = None
    images: Sequence[str] = field(default=(), compare=False)
    put_images: Sequence[str] = field(default=(), compare=False)


@dataclass
class Growth(SampledTokens):
    """New tokens of unfinished requests, one request after another in the same arrays: a message
    holds six arrays for any number of requests, or eight where allowed tokens are recorded."""

    # token_ids, logprobs, versions, allowed: the new tokens, as in `Completion`.
    token_ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    versions: array[int] = field(default_factory=ints)
    # groups, indices: `group` and `index` of each request.
    groups: array[int] = field(default_factory=ints)
    indices: array[int] = field(default_factory=ints)
    counts: array[int] = field(default_factory=ints)  # number of new tokens of each request
    allowed: AllowedTokens | None = None

    def add(
        self,
        group: int,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        allowed: AllowedTokens | None = None,
    ) -> None:
        """Append the new tokens of one request."""
        if allowed is not None:
            if self.allowed is None:
                self.allowed = AllowedTokens()
            self.allowed.extend(allowed, place=len(self.token_ids))
        self.groups.append(group)
        self.indices.append(index)
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def places(self) -> Iterator[tuple[tuple[int, int], slice]]:
        """(group, index) of each request, and the slice of its tokens in the arrays."""
        ends = accumulate(self.counts)
        for group, index, count, end in zip(
            self.groups, self.indices, self.counts, ends, strict=True
        ):
            yield (group, index), slice(end - count, end)
