"""Which completions are computed together, and by which rank (arXiv 2506.10910, section 3.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence


def collate(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The paper's greedy collation: microbatches of at most `budget` tokens each.

    Longest first, each sequence goes to the first microbatch with room, or opens a new one. One
    longer than the whole budget gets a microbatch of its own.

    Args:
        lengths: of the sequences, in tokens.
        budget: tokens a microbatch, padding included.

    Returns:
        For each microbatch, the indices of its sequences, longest first.
    """
    microbatches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((m for m, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(room)
            microbatches.append([])
            room.append(budget)
        microbatches[place].append(index)
        room[place] -= length
    return microbatches


def padding_fraction(
    lengths: Sequence[int], microbatches: Sequence[Sequence[int]], budget: int
) -> float:
    """The unfilled share of the microbatches' token budgets, as the paper counts padding.

    In a packed row it costs nothing; see `docs/training.md` for what does.
    """
    used = [sum(lengths[i] for i in m) for m in microbatches]
    capacity = sum(max(budget, u) for u in used)
    return 1 - sum(used) / capacity if capacity else 0.0


def shares(count: int, ranks: int, seed: int) -> list[list[int]]:
    """Deal `count` sequences to `ranks` by a permutation that `seed` fixes beforehand.

    Completions of different lengths so reach every rank alike. `ranks` divides `count`: the
    trainer's construction makes sure of it. Each share is in ascending order.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [sorted(order[rank::ranks]) for rank in range(ranks)]
