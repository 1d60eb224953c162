"""pass@k and majority by exact enumeration, through the trainer's step."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tabular import bandit, completion, descent, every_group, trainer
from tramontane.config import parse_settings
from tramontane.config.config import Config
from tramontane.config.objectives import MajorityOptions, PassAtKOptions
from tramontane.errors import InputError
from tramontane.trainer.objectives import Sequences, majority, pass_at_k


def gradient(name, counts, rewards, k, **options):
    """k times the descent per completion: the gradient of E[f(y_1, …, y_k)] by the logits."""
    table = bandit([n / sum(counts) for n in counts])
    groups = [
        [completion(table, [a], rewards[a], answer=a) for a in group]
        for group in every_group(counts, k)
    ]
    t = trainer(table, {"name": name, name: {"k": k} | options})
    return k * descent(t, groups)[-1]


@pytest.mark.parametrize(("centered", "expected"), [(False, 0.125), (True, 0.1875)])
def test_pass_at_4_of_a_coin(centered, expected):
    """p = ½: k p (1 − p)^k, and centered (k − 1) p (1 − p)^(k−1)."""
    got = gradient("pass_at_k", [1, 1], [1.0, 0.0], 4, centered=centered)
    assert got.tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("centered", [False, True])
def test_pass_at_k_of_other_probabilities(centered):
    p, k = 0.25, 3
    expected = (k - 1) * p * (1 - p) ** (k - 1) if centered else k * p * (1 - p) ** k
    got = gradient("pass_at_k", [1, 3], [1.0, 0.0], k, centered=centered)
    assert got.tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("counts", [[1, 1], [1, 2]])
def test_majority_of_3_with_one_wrong_answer(counts):
    """6 p² (1 − p)²: 0.375 at p = ½."""
    p = counts[0] / sum(counts)
    expected = 6 * p**2 * (1 - p) ** 2
    got = gradient("majority", counts, [1.0, 0.0], 3)
    assert got.tolist() == pytest.approx([expected, -expected])


def voted(rewards, group):
    """Reward of the most frequent answer, the mean over answers with equally many votes."""
    most = max(group.count(a) for a in group)
    winners = {a for a in group if group.count(a) == most}
    return sum(rewards[a] for a in winners) / len(winners)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(1, 2), min_size=3, max_size=3),
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    st.sampled_from(["pass_at_k", "majority"]),
)
def test_the_gradient_is_that_of_the_expectation(counts, rewards, name):
    policy = (torch.tensor(counts).double() / sum(counts)).log().requires_grad_()
    p = policy.softmax(0)
    expectation = 0.0
    for group in product(range(3), repeat=3):
        f = max(rewards[a] for a in group) if name == "pass_at_k" else voted(rewards, group)
        expectation = expectation + p[list(group)].prod() * f
    (expected,) = torch.autograd.grad(expectation, policy)
    got = gradient(name, counts, rewards, 3)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def sequences(rewards, groups, answers=None, scored=None):
    n = len(rewards)
    return Sequences(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        scored=torch.tensor(scored or [True] * n),
        lengths=torch.ones(n, dtype=torch.int64),
        answers=torch.tensor(answers or [-1] * n),
    )


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_only_the_best_of_k_counts_by_its_lead(rewards):
    got = pass_at_k.advantages(sequences(rewards, [0] * 4), PassAtKOptions(k=4)).tolist()
    second, first = sorted(rewards)[-2:]
    assert sorted(got) == [0, 0, 0, first - second]
    assert got[rewards.index(first)] == first - second
    centered = pass_at_k.advantages(sequences(rewards, [0] * 4), PassAtKOptions(k=4, centered=True))
    assert centered.sum().item() == pytest.approx(0)


def test_a_larger_group_is_split_and_unscored_completions_are_passed_over():
    rewards = [1.0, 0.5, 9.0, 0.25, 0.0, 1.0, 0.75]
    scored = [True, True, False, True, True, True, True]
    split = sequences(rewards, [0, 0, 0, 0, 0, 1, 1], scored=scored)
    got = pass_at_k.advantages(split, PassAtKOptions(k=2)).tolist()
    assert got == [0.5, 0, 0, 0.25, 0, 0.25, 0]
    # Three are too few for k = 4 of the second group, and for the rest of the first.
    assert pass_at_k.advantages(split, PassAtKOptions(k=3)).tolist() == [0.5, 0, 0, 0, 0, 0, 0]


def test_a_completion_without_an_answer_does_not_vote():
    got = majority.advantages(
        sequences([1.0, 0.0, 0.0, 0.0], [0] * 4, [0, 1, -1, -1]), MajorityOptions(k=4)
    )
    # Right and wrong are even: ½. Without the right one 0, without the wrong one 1.
    assert got.tolist() == [0.5, -0.5, 0, 0]
    silent = sequences([1.0, 0.0], [0, 0], [-1, -1])
    assert majority.advantages(silent, MajorityOptions(k=2)).tolist() == [0, 0]
    # Without its only answer a vote is worth 0.
    alone = sequences([0.75, 0.5], [0, 0], [0, -1])
    assert majority.advantages(alone, MajorityOptions(k=2)).tolist() == [0.75, 0]
    assert majority.advantages(alone, MajorityOptions(k=2, centered=True)).tolist() == [
        0.375,
        -0.375,
    ]


def test_a_group_size_that_k_does_not_divide_is_refused():
    raw = {"trainer": {"objective": {"name": "pass_at_k", "pass_at_k": {"k": 3}}}}
    with pytest.raises(InputError, match="judges 3 completions together, .* group_size 16"):
        parse_settings(Config, raw, [], "run.yaml")
