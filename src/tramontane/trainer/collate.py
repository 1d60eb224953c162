"""Distributes completions over ranks and microbatches (arXiv 2506.10910, section 3.3).

Example: sequences of 3, 7, 2, 5, 4 and 3 tokens under a budget of 10 tokens per microbatch. Taken
longest first, 7 opens the first microbatch; 5 does not fit next to it and opens the second; 4 goes
to the second (5 + 4 = 9); 3 to the first (7 + 3 = 10); the other 3 and the 2 open the third.

    [7, 3]  [5, 4]  [3, 2]        used 10 + 9 + 5 of 30 tokens: padding fraction 0.2
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tramontane.types import TrainSequence


def collate(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Greedy collation, the paper's: microbatches of at most `budget` tokens each.

    Longest first, each sequence goes to the first microbatch with room, or opens a new one. A
    sequence longer than the whole budget gets a microbatch of its own.

    Args:
        lengths: tokens of each sequence.
        budget: tokens per microbatch.

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
    """Collate completions that share their prompt's tokens, as `pack_row` lays them out.

    Completions of one prompt stay together as far as the budget allows: they are collated into
    bundles that fit the budget together with the prompt, and then the bundles are collated.

    Args:
        sequences: completions with their prompts, in any order.
        budget: tokens per microbatch, where each bundle counts its prompt once.

    Returns:
        For each microbatch, the indices of its completions, bundle after bundle, longest first;
        and its tokens.
    """
    siblings: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        siblings.setdefault(tuple(sequence.prompt_ids), []).append(index)
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
    """Unfilled share of the microbatches' token budgets, the paper's measure of padding.

    `tokens` are the tokens used in each microbatch. In a packed row unfilled places cost nothing;
    `docs/training.md` lists the padding that does.
    """
    capacity = sum(max(budget, used) for used in tokens)
    return 1 - sum(tokens) / capacity if capacity else 0.0


def shares(count: int, ranks: int, seed: int) -> list[list[int]]:
    """Deal `count` sequences to `ranks` by a random permutation that `seed` fixes.

    So every rank gets completions of all lengths, and as many as the others if `ranks` divides
    `count`, else at most one less. Each share is in ascending order.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [sorted(order[rank::ranks]) for rank in range(ranks)]
