"""Distributes completions evenly over ranks, and over microbatches (arXiv 2506.10910, section 3.3).

Example: sequences of 3, 7, 2, 5, 4 and 3 tokens under a budget of 10 tokens per microbatch. Taken
longest first, 7 opens the first microbatch; 5 does not fit next to it and opens the second; 4 goes
to the second (5 + 4 = 9); 3 to the first (7 + 3 = 10); the other 3 and the 2 open the third.

    [7, 3]  [5, 4]  [3, 2]        used 10 + 9 + 5 of 30 tokens: padding fraction 0.2
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tramontane.batches import TrainSequence


def lay_out(
    sequences: Sequence[TrainSequence], ranks: int, budget: int, together: bool
) -> tuple[list[list[list[int]]], list[int]]:
    """Deal sequences to ranks and collate each rank's share.

    Args:
        sequences: those of a minibatch.
        ranks: number of ranks.
        budget: tokens per microbatch.
        together: keep the sequences of a conversation in one microbatch, in order.

    Returns:
        For each rank and microbatch, the indices of its sequences; and the tokens of each
        microbatch of all ranks.
    """
    parts: list[list[int]] = []
    for index, sequence in enumerate(sequences):
        if together and sequence.continues:
            parts[-1].append(index)
        else:
            parts.append([index])
    units = [_as_one([sequences[i] for i in part]) for part in parts]
    layouts, used = [], []
    for share in balance(units, ranks):
        layout, tokens = collate_shared([units[i] for i in share], budget)
        layouts.append([[i for unit in m for i in parts[share[unit]]] for m in layout])
        used += tokens
    return layouts, used


def _as_one(sequences: Sequence[TrainSequence]) -> TrainSequence:
    """A conversation's sequences as one that shares no prompt; its other per-token arrays are not
    used."""
    if len(sequences) == 1:
        return sequences[0]
    tokens = array("i", chain.from_iterable(s.prompt_ids + s.token_ids for s in sequences))
    return replace(sequences[0], prompt_ids=array("i"), token_ids=tokens)


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
    siblings = _by_prompt(sequences)
    bundles, sizes = [], []
    for (prompt, _), members in siblings.items():
        lengths = [len(sequences[i].token_ids) for i in members]
        for bundle in collate(lengths, budget - len(prompt)):
            bundles.append([members[i] for i in bundle])
            sizes.append(len(prompt) + sum(lengths[i] for i in bundle))
    layout = collate(sizes, budget)
    microbatches = [[i for bundle in m for i in bundles[bundle]] for m in layout]
    return microbatches, [sum(sizes[bundle] for bundle in m) for m in layout]


def _by_prompt(
    sequences: Sequence[TrainSequence],
) -> dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]]:
    """Indices of the sequences by their prompts' tokens and images."""
    siblings: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for index, sequence in enumerate(sequences):
        key = tuple(sequence.prompt_ids), sequence.images
        siblings.setdefault(key, []).append(index)
    return siblings


def padding_fraction(tokens: Sequence[int], budget: int) -> float:
    """Unfilled share of the microbatches' token budgets, the paper's measure of padding.

    `tokens` are the tokens used in each microbatch. In a packed row unfilled places cost nothing;
    `docs/training.md` lists the padding that does.
    """
    capacity = sum(max(budget, used) for used in tokens)
    return 1 - sum(tokens) / capacity if capacity else 0.0


def balance(sequences: Sequence[TrainSequence], ranks: int) -> list[list[int]]:
    """Deal completions to ranks so that all ranks compute nearly the same number of tokens.

    A rank computes a prompt once for all its completions, so the completions of one prompt start
    out together: longest first, each prompt with its completions goes to the rank with the fewest
    tokens. Then single completions move from busy ranks to the least busy rank, for as long as a
    move lowers the busier of the two.

    Afterwards no rank with several completions exceeds the least busy rank by more than its
    shortest completion and that completion's prompt.

    Returns:
        For each rank, the indices of its completions in ascending order.
    """
    if ranks == 1:
        return [list(range(len(sequences)))]
    siblings = _by_prompt(sequences)
    shares = [_Share() for _ in range(ranks)]
    families = [
        [(len(sequences[i].token_ids), i) for i in members] for members in siblings.values()
    ]
    prompts = [len(prompt) for prompt, _ in siblings]
    sizes = [prompts[f] + sum(n for n, _ in members) for f, members in enumerate(families)]
    for family in sorted(range(len(families)), key=lambda f: -sizes[f]):
        share = min(shares, key=lambda s: s.tokens)
        for length, index in families[family]:
            share.add(index, family, length, prompts[family])
    while _move_one(shares, prompts):
        pass
    return [sorted(share.members) for share in shares]


class _Share:
    """One rank's completions while they are dealt: `tokens` counts each prompt once, and `members`
    has the number of a completion's prompt and its length, by the completion's index."""

    def __init__(self) -> None:
        self.tokens = 0
        self.members: dict[int, tuple[int, int]] = {}
        self._siblings: Counter[int] = Counter()  # completions by the number of their prompt

    def cost(self, family: int, length: int, prompt: int) -> int:
        """Tokens that a completion adds."""
        return length if self._siblings[family] else length + prompt

    def gain(self, family: int, length: int, prompt: int) -> int:
        """Tokens that a completion leaves free if it goes."""
        return length if self._siblings[family] > 1 else length + prompt

    def add(self, index: int, family: int, length: int, prompt: int) -> None:
        self.tokens += self.cost(family, length, prompt)
        self.members[index] = family, length
        self._siblings[family] += 1

    def remove(self, index: int, prompt: int) -> None:
        family, length = self.members.pop(index)
        self.tokens -= self.gain(family, length, prompt)
        self._siblings[family] -= 1


def _move_one(shares: list[_Share], prompts: list[int]) -> bool:
    """Move the best completion to the least busy rank; False if no move lowers a busier rank."""
    target = min(shares, key=lambda s: s.tokens)
    for source in sorted(shares, key=lambda s: -s.tokens):
        best, index = source.tokens, -1
        for i, (family, length) in source.members.items():
            after = max(
                source.tokens - source.gain(family, length, prompts[family]),
                target.tokens + target.cost(family, length, prompts[family]),
            )
            if source is not target and after < best:
                best, index = after, i
        if index >= 0:
            family, length = source.members[index]
            source.remove(index, prompts[family])
            target.add(index, family, length, prompts[family])
            return True
    return False
