import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.trainer.advantages import group_advantages, loss_weights


def advantages(rewards, normalization, scored=None):
    """Advantages of groups that are given as lists of rewards."""
    flat = [r for group in rewards for r in group]
    groups = torch.tensor([n for n, group in enumerate(rewards) for _ in group])
    scored = torch.tensor(scored or [1] * len(flat), dtype=torch.bool)
    return group_advantages(
        torch.tensor(flat, dtype=torch.float64), groups, scored, normalization
    ).tolist()


def weights(lengths, normalization, l_max=100, scored=None):
    flat = [n for group in lengths for n in group]
    groups = torch.tensor([n for n, group in enumerate(lengths) for _ in group])
    scored = torch.tensor(scored or [1] * len(flat), dtype=torch.bool)
    return loss_weights(torch.tensor(flat), groups, scored, normalization, l_max).tolist()


def test_the_paper_figures():
    # The third group, without diversity, is dropped before it gets here.
    groups = [(1.0, 0.1), (1.1, 0.0)]
    plain = advantages(groups, "none")
    assert plain == pytest.approx([0.45, -0.45, 0.55, -0.55])
    assert math.sqrt(sum(a * a for a in plain) / 4) == pytest.approx(0.502494, abs=1e-6)
    expected = [0.89553, -0.89553, 1.09454, -1.09454]
    assert advantages(groups, "minibatch") == pytest.approx(expected, abs=1e-5)


def test_group_normalization_gives_every_group_the_same_scale():
    groups = [(1.0, 0.1), (1.1, 0.0), (1.0, 0.0, 0.5, 0.5)]
    third = math.sqrt(2)
    expected = [1, -1, 1, -1, third, -third, 0, 0]
    assert advantages(groups, "group") == pytest.approx(expected)


@pytest.mark.parametrize("normalization", ["minibatch", "group", "none"])
def test_equal_rewards_give_zeros_even_where_their_mean_is_rounded(normalization):
    # The float mean of three times 0.1 is not 0.1.
    assert advantages([(0.1,) * 3, (1.1,) * 7], normalization) == pytest.approx([0] * 10, abs=1e-9)


def test_one_group_without_diversity_leaves_the_others_finite():
    assert advantages([(1.0, 1.0), (1.0, 0.0)], "group") == pytest.approx([0, 0, 1, -1])


@pytest.mark.parametrize("normalization", ["minibatch", "group", "none"])
def test_the_only_scored_completion_of_a_group_is_its_mean(normalization):
    got = advantages([(1.0, 0.3), (1.0, 0.0)], normalization, [1, 0, 1, 1])
    # The standard deviation of 0, 0.5 and -0.5 is √(1/6).
    half = {"none": 0.5, "group": 1.0, "minibatch": 0.5 * math.sqrt(6)}[normalization]
    assert got == pytest.approx([0, 0, half, -half])


@pytest.mark.parametrize("normalization", ["minibatch", "group", "none"])
def test_an_unscorable_completion_changes_nothing(normalization):
    scored = [True, False, True, True, True]
    got = advantages([(1.0, 0.0, 0.1), (1.1, 0.0)], normalization, scored)
    without = advantages([(1.0, 0.1), (1.1, 0.0)], normalization)
    assert got.pop(1) == 0
    assert got == pytest.approx(without)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.05, 0.1, 1.0, 1.1]), min_size=2, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_minibatch_advantages_have_mean_zero_and_std_one_or_vanish(groups):
    values = torch.tensor(advantages(groups, "minibatch"), dtype=torch.float64)
    assert values.mean().abs() < 1e-9
    if all(len(set(g)) == 1 for g in groups):
        assert (values == 0).all()
    else:
        assert values.std(correction=0) == pytest.approx(1)


LENGTHS = [(10, 30), (5, 15)]


def test_group_tokens_is_the_mean_over_groups_of_token_means():
    assert weights(LENGTHS, "group_tokens") == pytest.approx([1 / 80, 1 / 80, 1 / 40, 1 / 40])


def test_minibatch_tokens_weighs_all_tokens_alike():
    assert weights(LENGTHS, "minibatch_tokens") == pytest.approx([1 / 60] * 4)


def test_sequence_is_the_mean_over_sequences_of_token_means():
    assert weights(LENGTHS, "sequence") == pytest.approx([1 / 40, 1 / 120, 1 / 20, 1 / 60])


def test_constant_divides_by_the_longest_possible_group():
    assert weights(LENGTHS, "constant", l_max=50) == pytest.approx([1 / (2 * 2 * 50)] * 4)


@pytest.mark.parametrize(
    "normalization", ["group_tokens", "minibatch_tokens", "sequence", "constant"]
)
def test_an_unscorable_completion_weighs_nothing_and_counts_in_no_normalizer(normalization):
    got = weights([(10, 7, 30), (5, 15), (9,)], normalization, 50, [1, 0, 1, 1, 1, 0])
    assert got.pop(1) == 0
    assert got.pop() == 0
    assert got == pytest.approx(weights(LENGTHS, normalization, 50))
    assert weights([(3,)], normalization, 50, [0]) == [0]
