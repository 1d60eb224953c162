"""Which completions are computed together, and by which rank (arXiv 2506.10910, section 3.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tramontane.types import TrainSequence


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


def collate_shared(
    sequences: Sequence[TrainSequence], budget: int
) -> tuple[list[list[int]], list[int]]:
    """`collate` where completions of one prompt share its tokens, as `pack_rows` lays them out.

    A prompt's completions stay together as far as the budget allows: they are collated into
    bundles, which with the prompt fit it, and then the bundles are.

    Args:
        sequences: in any order.
        budget: tokens a microbatch, each prompt counted once in it.

    Returns:
        For each microbatch, the indices of its completions, a bundle's in a row, longest first;
        and its tokens.
    """
    siblings: dict[tuple[int, ...], list[int]] = {}
    for index, s in enumerate(sequences):
        siblings.setdefault(tuple(s.prompt_ids), []).append(index)
    bundles, sizes = [], []
    for prompt, members in siblings.items():
        lengths = [len(sequences[i].token_ids) for i in members]
        for bundle in collate(lengths, budget - len(prompt)):
            bundles.append([members[i] for i in bundle])
            sizes.append(len(prompt) + sum(lengths[i] for i in bundle))
    layout = collate(sizes, budget)
    microbatches = [[i for bundle in m for i in bundles[bundle]] for m in layout]
    return microbatches, [sum(sizes[bundle] for bundle in m) for m in layout]


def padding_fraction(tokens: Sequence[int], budget: int) -> float:
    """The unfilled share of the token budgets of microbatches with so many `tokens`, as the paper
    counts padding.

    In a packed row it costs nothing; see `docs/training.md` for what does.
    """
    capacity = sum(max(budget, used) for used in tokens)
    return 1 - sum(tokens) / capacity if capacity else 0.0


def shares(count: int, ranks: int, seed: int) -> list[list[int]]:
    """Deal `count` sequences to `ranks` by a permutation that `seed` fixes beforehand.

    Completions of different lengths so reach every rank alike. `ranks` divides `count`: the
    trainer's construction makes sure of it. Each share is in ascending order.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [sorted(order[rank::ranks]) for rank in range(ranks)]
