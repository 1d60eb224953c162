import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.batches import TrainSequence
from tramontane.trainer.collate import (
    _Share,
    balance,
    collate,
    collate_shared,
    padding_fraction,
)


def lengths_of(microbatches, lengths):
    return [[lengths[i] for i in m] for m in microbatches]


def test_the_paper_example():
    lengths = [3, 7, 2, 5, 4, 3]
    assert lengths_of(collate(lengths, 10), lengths) == [[7, 3], [5, 4], [3, 2]]


def test_a_sequence_above_the_budget_is_alone():
    lengths = [2, 25, 9]
    assert lengths_of(collate(lengths, 10), lengths) == [[25], [9], [2]]


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 50))
def test_nothing_is_lost_and_the_budget_is_kept(lengths, budget):
    microbatches = collate(lengths, budget)
    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in m) for m in microbatches]
    assert all(u <= budget or len(m) == 1 for u, m in zip(used, microbatches, strict=True))
    # Greedy: a microbatch is opened only where its first sequence fits into none before it.
    firsts = [m[0] for m in microbatches]
    for number, first in enumerate(firsts):
        assert all(u + lengths[first] > budget for u in used[:number])
    assert 0 <= padding_fraction(used, budget) < 1


def test_padding_fraction_is_the_unfilled_share_of_the_budgets():
    lengths = [7, 3, 5, 4, 3, 2]
    used = [sum(m) for m in lengths_of(collate(lengths, 10), lengths)]
    assert padding_fraction(used, 10) == pytest.approx(6 / 30)
    # A sequence of 25 takes 25, not 10.
    assert padding_fraction([25, 5], 10) == pytest.approx(5 / 35)


def completions_of(families):
    """Completions of the given lengths, family after family: [(prompt's length, lengths)]."""
    return [
        TrainSequence(array("i", [n] * prompt), array("i", [0] * length), array("f"), array("i"))
        for n, (prompt, lengths) in enumerate(families)
        for length in lengths
    ]


def test_a_prompt_counts_once_in_a_microbatch():
    completions = completions_of([(4, [3, 3]), (5, [4])])
    # 4 + 3 + 3 and 5 + 4: with a prompt each, the first two would not fit together.
    assert collate_shared(completions, 10) == ([[0, 1], [2]], [10, 9])
    # All three: the bundles of both prompts.
    assert collate_shared(completions, 19) == ([[0, 1, 2]], [19])


@given(
    st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=9))),
    st.integers(1, 60),
)
def test_shared_prompts_lose_nothing_and_the_budget_is_kept(families, budget):
    completions = completions_of(families)
    microbatches, tokens = collate_shared(completions, budget)
    assert sorted(i for m in microbatches for i in m) == list(range(len(completions)))
    for micro, used in zip(microbatches, tokens, strict=True):
        generated = sum(len(completions[i].token_ids) for i in micro)
        prompts = {i: len(completions[i].prompt_ids) for i in micro}
        once = sum({completions[i].prompt_ids[0]: n for i, n in prompts.items()}.values())
        assert generated + once <= used <= generated + sum(prompts.values())
        assert used <= budget or len(micro) == 1


def tokens_of(completions, share):
    """Tokens of a rank's completions, with each prompt once."""
    prompts = {tuple(completions[i].prompt_ids) for i in share}
    return sum(map(len, prompts)) + sum(len(completions[i].token_ids) for i in share)


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 200), min_size=1, max_size=9)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 8),
)
def test_every_completion_has_one_rank_and_ranks_have_equal_tokens(families, ranks):
    completions = completions_of(families)
    dealt = balance(completions, ranks)
    assert len(dealt) == ranks
    assert sorted(i for share in dealt for i in share) == list(range(len(completions)))
    tokens = [tokens_of(completions, share) for share in dealt]
    for share, used in zip(dealt, tokens, strict=True):
        if len(share) > 1:
            shortest = min(len(completions[i].token_ids) for i in share)
            longest_prompt = max(len(completions[i].prompt_ids) for i in share)
            assert used - min(tokens) <= shortest + longest_prompt
    least_busy = dealt[tokens.index(min(tokens))]
    for share in dealt:
        for i in share if share is not least_busy else ():
            without = tokens_of(completions, [j for j in share if j != i])
            more = tokens_of(completions, [*least_busy, i])
            assert max(without, more) >= tokens_of(completions, share)  # no move helps


def test_sixteen_completions_of_very_different_lengths_are_dealt_evenly():
    rng = random.Random(0)
    families = [(40, [rng.randint(20, 4000) for _ in range(16)]) for _ in range(16)]
    completions = completions_of(families)
    for ranks in (2, 4, 8):
        tokens = [tokens_of(completions, share) for share in balance(completions, ranks)]
        assert max(tokens) <= 1.01 * sum(tokens) / ranks


def test_the_largest_prompts_with_their_completions_are_dealt_first():
    """Then two ranks share these evenly, and no prompt is computed twice."""
    completions = completions_of([(100, [100]), (100, [100]), (100, [100, 100, 100])])
    dealt = balance(completions, 2)
    assert sorted(dealt) == [[0, 1], [2, 3, 4]]
    assert [tokens_of(completions, share) for share in dealt] == [400, 400]


def test_one_rank_takes_the_completions_in_order():
    assert balance(completions_of([(3, [5, 1]), (2, [9])]), 1) == [[0, 1, 2]]


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_a_share_counts_each_prompt_once_however_it_is_changed(data, prompts):
    share = _Share()
    for index in range(data.draw(st.integers(1, 12))):
        if share.members and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(share.members)))
            family, length = share.members[gone]
            before = share.tokens
            gain = share.gain(family, length, prompts[family])
            share.remove(gone, prompts[family])
            assert before - share.tokens == gain
        family = data.draw(st.integers(0, len(prompts) - 1))
        share.add(index, family, data.draw(st.integers(1, 9)), prompts[family])
        families = {family for family, _ in share.members.values()}
        lengths = sum(length for _, length in share.members.values())
        assert share.tokens == lengths + sum(prompts[family] for family in families)
