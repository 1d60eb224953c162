"""DRO by exact enumeration, through the trainer's step."""

import math
from array import array
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.rollouts import batch, equal
from tests.trainer.rollouts import trainer as small_trainer
from tests.trainer.tabular import bandit, completion, descent, logits, trainer, values
from tramontane.config import TrainerConfig, parse
from tramontane.config.objectives import DROOptions
from tramontane.errors import InputError
from tramontane.tokens import ELSEWHERE
from tramontane.trainer.objectives import Sequences, dro

REFERENCE, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 0.0)
OPTIMUM, VALUE = (0.731059, 0.161365, 0.107577), 0.620115  # of AGRO's bandit, τ = 1


def step(policy, counts, value=0.0, *, rewards=REWARDS, reference=REFERENCE, **options):
    """Descent of the action's logits and of V(x), over single trajectories of μ ∝ counts."""
    groups = [
        [completion(bandit(reference), [a], rewards[a])]
        for a, n in enumerate(counts)
        for _ in range(n)
    ]
    t = trainer(bandit(policy), {"name": "dro", "dro": options}, bandit(reference))
    if t._values:
        t._values.model.head.weight.data[0, len(policy)] = value
    got = descent(t, groups)[-1]
    return got, (values(t)[-1].item() - value if t._values else None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, [1 / 6, -1 / 10, -1 / 15]), (1 / 3, [2 / 9, -1 / 9, -1 / 9])],
)
@pytest.mark.parametrize("prefixes", ["token", "prompt"])
def test_at_the_reference_the_value_is_no_mere_baseline(value, expected, prefixes):
    got, of_value = step(REFERENCE, (1, 1, 1), value, values=prefixes)
    assert got.tolist() == pytest.approx(expected)
    assert of_value == pytest.approx(1 / 3 - value)


@pytest.mark.parametrize("form", ["value", "policy"])
def test_the_log_ratio_to_the_reference_is_reported(form):
    groups = [[completion(bandit(REFERENCE), [a], REWARDS[a])] for a in range(3)]
    t = trainer(bandit(OPTIMUM), {"name": "dro", "dro": {"form": form}}, bandit(REFERENCE))
    descent(t, groups)
    ratios = [math.log(p / q) for p, q in zip(OPTIMUM, REFERENCE, strict=True)]
    assert t.metrics["log_ratio"] == pytest.approx(sum(ratios) / 3, abs=1e-5)


def test_without_a_value_unscorable_completions_count_nowhere():
    """R = r − τ log(π/π_ref), less its mean over the minibatch."""
    sequences = Sequences(
        rewards=torch.tensor([1.0, 0.0, 9.0], dtype=torch.float64),
        groups=torch.arange(3),
        scored=torch.tensor([True, True, False]),
        lengths=torch.ones(3, dtype=torch.int64),
        answers=torch.full((3,), -1),
        policy=torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64),
        reference=torch.tensor([-2.0, -2.0, -9.0], dtype=torch.float64),
    )
    options = DROOptions(form="policy", tau=0.5)
    assert dro.advantages(sequences, options).tolist() == [0.25, -0.25, 0]


def test_without_a_value_the_variance_over_the_minibatch_is_agros():
    got, _ = step(REFERENCE, (1, 1, 1), form="policy")
    assert got.tolist() == pytest.approx([2 / 9, -1 / 9, -1 / 9])


@pytest.mark.parametrize("counts", [(5, 3, 2), (1, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("form", ["value", "policy"])
def test_the_optimum_is_stationary_for_samples_of_any_policy(counts, form):
    weights = [p * math.exp(r) for p, r in zip(REFERENCE, REWARDS, strict=True)]
    exact, value = [w / sum(weights) for w in weights], math.log(sum(weights))
    assert exact == pytest.approx(OPTIMUM, abs=1e-6)
    assert value == pytest.approx(VALUE, abs=1e-6)
    got, of_value = step(exact, counts, value, form=form)
    assert got.tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    assert form == "policy" or of_value == pytest.approx(0, abs=1e-9)


# Two bits, a uniform reference, e^r of 00, 01, 10 and 11, τ = 1: V* of the prompt, 0 and 1.
OUTCOMES = list(product(range(2), repeat=2))
TREE = [math.log(r) for r in (4, 2, 1, 1)]
TREE_OPTIMUM = torch.stack([logits([2 / 3, 1 / 3]), logits([1 / 2, 1 / 2]), logits([3 / 4, 1 / 4])])
TREE_VALUES = [math.log(3), 0.0, math.log(2)]  # after 0, after 1, at the prompt


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 2, 3, 1)])
@pytest.mark.parametrize("prefixes", ["token", "prompt"])
def test_the_optimum_of_a_tree_is_stationary_with_the_values_of_its_prefixes(counts, prefixes):
    uniform = torch.zeros(3, 2, dtype=torch.float64)
    groups = [
        [completion(uniform, outcome, reward)]
        for outcome, reward, n in zip(OUTCOMES, TREE, counts, strict=True)
        for _ in range(n)
    ]
    t = trainer(TREE_OPTIMUM, {"name": "dro", "dro": {"values": prefixes}}, uniform)
    exact = torch.tensor(TREE_VALUES, dtype=torch.float64)
    t._values.model.head.weight.data[0] = exact
    got = descent(t, groups)
    torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-9, rtol=0)
    torch.testing.assert_close(values(t), exact, atol=1e-9, rtol=0)


numbers = st.lists(st.floats(-1.5, 1.5), min_size=6, max_size=6)


def table(numbers):
    return torch.tensor(numbers, dtype=torch.float64).reshape(3, 2)


@settings(max_examples=10, deadline=None)
@given(
    numbers,
    numbers,
    st.lists(st.floats(-1, 1), min_size=4, max_size=4),
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.floats(0.2, 2),
    st.sampled_from(["token", "prompt", None]),
)
def test_gradients_are_those_of_the_exact_loss(
    policy, reference, rewards, start, counts, tau, prefixes
):
    """The gradients of policy and value, each with the other held; DRO-P (None) has no value."""
    parameter, reference = table(policy).requires_grad_(), table(reference)
    v = torch.tensor(start, dtype=torch.float64).requires_grad_()
    residuals = []
    for (a, b), r, n in zip(OUTCOMES, rewards, counts, strict=True):
        ratios = (parameter.log_softmax(-1) - reference.log_softmax(-1))[[2, a], [a, b]]
        rest = torch.stack([ratios.sum(), ratios[1]])
        if prefixes is None:
            residuals += [r - tau * rest[0]] * n
        elif prefixes == "prompt":
            residuals += [(r - v[2] - tau * rest[0]).square()] * n
        else:
            residuals += [(r - v[[2, a]] - tau * rest).square().mean()] * n
    stacked = torch.stack(residuals)
    exact = stacked.var(correction=0) / 2 if prefixes is None else stacked.mean() / 2
    groups = [
        [completion(reference, outcome, reward)]
        for outcome, reward, n in zip(OUTCOMES, rewards, counts, strict=True)
        for _ in range(n)
    ]
    options = {"tau": tau, "form": "policy"} if prefixes is None else {"values": prefixes}
    t = trainer(parameter.detach(), {"name": "dro", "dro": {"tau": tau} | options}, reference)
    if t._values:
        t._values.model.head.weight.data[0] = v.detach()
    got = descent(t, groups)
    (expected,) = torch.autograd.grad(exact, parameter, retain_graph=True)
    torch.testing.assert_close(got, -expected / tau, atol=1e-9, rtol=1e-7)
    if t._values:
        (expected,) = torch.autograd.grad(exact, v)
        torch.testing.assert_close(values(t) - v.detach(), -expected, atol=1e-9, rtol=1e-7)


def test_a_constant_added_to_rewards_and_values_changes_nothing():
    plain, _ = step((0.6, 0.3, 0.1), (1, 2, 1), 0.5)
    shifted, _ = step((0.6, 0.3, 0.1), (1, 2, 1), 2.5, rewards=(3.0, 2.0, 2.0))
    torch.testing.assert_close(shifted, plain)


def offline(seed=0):
    """Single trajectories with rewards, as a batch of groups of one."""
    b = batch(groups=4, size=2, seed=seed)
    b.groups = [[sequence] for group in b.groups for sequence in group]
    return b


def test_the_value_network_begins_at_zero_and_learns_the_rewards_mean():
    t = small_trainer(objective={"name": "dro", "dro": {"tau": 1e-4}}, learning_rate=1e-2)
    b = offline()
    for sequence in b.sequences:
        sequence.reward = 2.0
    assert t.step(b)["value"] == 0
    errors = [t.step(b)["value_error"] for _ in range(12)]
    assert errors[-1] < 0.3 < 1.5 < errors[0]
    policy = dict(t.model.named_parameters())
    for name, parameter in t._values.model.named_parameters():
        assert parameter.requires_grad
        assert name not in policy or parameter.data_ptr() != policy[name].data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_value_network_is_saved_and_resumed_with_the_policy(tmp_path, dtype):
    settings = {"objective": {"name": "dro"}, "dtype": dtype}
    t = small_trainer(**settings)
    t.step(offline())
    t.save_state(tmp_path)
    t.step(offline(1))
    resumed = small_trainer(**settings)
    resumed.load_state(tmp_path)
    resumed.step(offline(1))
    assert equal(resumed.weights(), t.weights())
    assert equal(resumed._values.model.state_dict(), t._values.model.state_dict())


@pytest.mark.parametrize("settings", [{"threads": 2}, {"lora": {"rank": 2}}])
def test_what_a_value_network_does_not_work_with_is_refused(settings):
    (key,) = settings
    with pytest.raises(InputError, match=f"{key}: objective 'dro' trains a value network"):
        parse(TrainerConfig, {"objective": {"name": "dro"}} | settings, "run.yaml")
    without = {"objective": {"name": "dro", "dro": {"form": "policy"}}}
    parse(TrainerConfig, without | settings, "run.yaml")


def test_behavior_log_probs_are_not_read():
    groups = [[completion(bandit(REFERENCE), [a], REWARDS[a])] for a in range(3)]
    for (sequence,) in groups:
        sequence.logprobs, sequence.versions = array("d", [math.nan]), array("i", [ELSEWHERE])
    t = trainer(bandit(REFERENCE), {"name": "dro"}, bandit(REFERENCE))
    assert torch.isfinite(descent(t, groups)).all()
    assert all(math.isfinite(value) for value in t.metrics.values())
