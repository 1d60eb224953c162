"""AGRO by exact enumeration, through the trainer's step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tabular import bandit, completion, descent, every_group, trainer
from tramontane.config.objectives import AGROOptions
from tramontane.trainer.objectives import Sequences, agro

REFERENCE, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 0.0)
OPTIMUM = (0.731059, 0.161365, 0.107577)  # π_ref e^r, normalized


def step(policy, counts, size=2, *, reference=REFERENCE, rewards=REWARDS, **options):
    """Descent of the action's logits, over all groups of `size` completions of μ ∝ counts."""
    behavior = bandit([n / sum(counts) for n in counts])
    groups = [
        [completion(behavior, [a], rewards[a]) for a in group]
        for group in every_group(counts, size)
    ]
    section = {"beta": 1.0} | options
    t = trainer(bandit(policy), {"name": "agro", "agro": section}, bandit(reference))
    return descent(t, groups)[-1]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((5, 3, 2), [0.25, -0.15, -0.1]), ((1, 1, 1), [2 / 9, -1 / 9, -1 / 9])],
)
def test_at_the_reference(counts, expected):
    for size in (2, 3) if sum(counts) < 10 else (2,):
        assert step(REFERENCE, counts, size).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("counts", [(5, 3, 2), (1, 1, 1), (1, 1, 4)])
def test_the_optimum_is_stationary_for_samples_of_any_policy(counts):
    total = sum(p * math.exp(r) for p, r in zip(REFERENCE, REWARDS, strict=True))
    exact = [p * math.exp(r) / total for p, r in zip(REFERENCE, REWARDS, strict=True)]
    assert exact == pytest.approx(OPTIMUM, abs=1e-6)
    # R is V* = β log E_ref e^{r/β} for every outcome.
    for p, q, r in zip(exact, REFERENCE, REWARDS, strict=True):
        assert r - math.log(p / q) == pytest.approx(0.620115, abs=1e-6)
    assert step(exact, counts).tolist() == pytest.approx([0, 0, 0], abs=1e-9)


rows = st.lists(st.floats(-1.5, 1.5), min_size=3, max_size=3)


@settings(max_examples=10, deadline=None)
@given(rows, rows, rows, st.lists(st.integers(1, 3), min_size=3, max_size=3), st.floats(0.1, 3))
def test_off_policy_is_the_gradient_of_half_the_variance(policy, reference, rewards, counts, beta):
    logits = torch.tensor(policy, dtype=torch.float64).requires_grad_()
    reference = torch.tensor(reference, dtype=torch.float64).softmax(0)
    mu = torch.tensor(counts).double() / sum(counts)
    log_ratio = logits.log_softmax(0) - reference.log()
    regularized = torch.tensor(rewards, dtype=torch.float64) - beta * log_ratio
    variance = (mu * (regularized - (mu * regularized).sum()).square()).sum()
    (expected,) = torch.autograd.grad(variance / 2, logits)
    start = logits.detach().softmax(0).tolist()
    got = step(start, counts, reference=reference.tolist(), rewards=rewards, beta=beta)
    torch.testing.assert_close(got, -expected, atol=1e-9, rtol=1e-7)


@settings(max_examples=10, deadline=None)
@given(rows, rows, st.lists(st.integers(1, 3), min_size=3, max_size=3), st.floats(0.1, 3))
def test_on_policy_is_the_regularized_policy_gradient(reference, rewards, counts, beta):
    policy = torch.tensor(counts).double() / sum(counts)
    logits = policy.log().requires_grad_()
    reference = torch.tensor(reference, dtype=torch.float64).softmax(0)
    p = logits.softmax(0)
    objective = (
        p * (torch.tensor(rewards, dtype=torch.float64) - beta * (p / reference).log())
    ).sum()
    (expected,) = torch.autograd.grad(objective, logits)
    got = step(
        policy.tolist(),
        counts,
        reference=reference.tolist(),
        rewards=rewards,
        beta=beta,
        form="on_policy",
    )
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def test_a_constant_added_to_all_rewards_changes_nothing():
    shifted = step((0.6, 0.3, 0.1), (1, 1, 1), rewards=(3.0, 2.0, 2.0))
    torch.testing.assert_close(shifted, step((0.6, 0.3, 0.1), (1, 1, 1)))


@pytest.mark.parametrize(("form", "weights"), [("off_policy", (1, 1)), ("on_policy", (1.6, 0.4))])
def test_only_the_on_policy_form_weighs_samples_of_another_policy(form, weights):
    """A group of one sample of each of two outcomes, drawn evenly; π = (0.8, 0.2)."""
    behavior, policy = bandit((0.5, 0.5)), bandit((0.8, 0.2))
    group = [completion(behavior, [0], 1.0), completion(behavior, [1], 0.0)]
    options = {"beta": 1.0, "form": form}
    got = descent(trainer(policy, {"name": "agro", "agro": options}, behavior), [group])[-1]
    # R = r − log π/π_ref, and with n = 2 the advantage n/(n − 1) (R − R̄) is ±(R_0 − R_1).
    advantage = (1 - math.log(1.6)) - (0 - math.log(0.4))
    first = (weights[0] * advantage * 0.2 + weights[1] * -advantage * -0.8) / 2
    assert got.tolist() == pytest.approx([first, -first])


def test_a_group_without_scored_completions_has_no_advantages():
    sequences = Sequences(
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        groups=torch.tensor([0, 0, 1, 1]),
        scored=torch.tensor([True, True, False, False]),
        lengths=torch.ones(4, dtype=torch.int64),
        answers=torch.full((4,), -1),
        policy=torch.zeros(4),
        reference=torch.zeros(4),
    )
    assert agro.advantages(sequences, AGROOptions(beta=0.5)).tolist() == [0.5, -0.5, 0, 0]
