"""SPO by exact enumeration, through the trainer's step."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tabular import bandit, completion, descent, logits, trainer
from tramontane.config.objectives import SPOOptions
from tramontane.trainer.objectives import Sequences, Tokens, spo

# Two bits, a uniform reference, β = 1, and e^r of 00, 01, 10 and 11.
OUTCOMES = list(product(range(2), repeat=2))
REWARDS = [math.log(r) for r in (4, 2, 1, 1)]
UNIFORM = torch.zeros(3, 2, dtype=torch.float64)
OPTIMUM = torch.stack([logits([2 / 3, 1 / 3]), logits([1 / 2, 1 / 2]), logits([3 / 4, 1 / 4])])
EXACT = {"beta": 1.0, "loss": "squared", "initial_value": "importance"}


def members(counts, rewards=REWARDS):
    """Every outcome as often as `counts` says, with the log-probs of the policy that writes the
    outcomes in these proportions."""
    shares = [n / sum(counts) for n in counts]
    behavior = UNIFORM.clone()
    found = []
    for (a, b), share, n, reward in zip(OUTCOMES, shares, counts, rewards, strict=True):
        for _ in range(n):
            c = completion(behavior, [a, b], reward)
            c.logprobs[0], c.logprobs[1] = math.log(share), 0.0
            found.append(c)
    return found


def step(table, counts, *, rewards=REWARDS, reference=UNIFORM, **options):
    t = trainer(table, {"name": "spo", "spo": EXACT | options}, reference)
    return descent(t, [members(counts, rewards)]), t


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 2, 3, 1), (4, 1, 1, 2)])
def test_the_optimum_is_stationary_for_samples_of_any_policy(counts):
    got, t = step(OPTIMUM, counts)
    torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-9, rtol=0)
    assert t.metrics["q_initial"] == pytest.approx(math.log(2))
    assert t.metrics["q_error"] == pytest.approx(0, abs=1e-9)
    shares = [n / sum(counts) for n in counts]
    mean = sum(p * r for p, r in zip(shares, REWARDS, strict=True))
    assert t.metrics["q_final"] == pytest.approx(mean)  # Q after the last token is the reward
    assert 0 < t.metrics["entropy"] < math.log(2)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 2, 3, 1)])
def test_training_on_samples_of_any_policy_reaches_the_optimum(counts):
    t = trainer(UNIFORM, {"name": "spo", "spo": EXACT}, UNIFORM)
    for _ in range(150):
        descent(t, [members(counts)])
    policy = t.model.table.detach().softmax(-1)
    torch.testing.assert_close(policy, OPTIMUM.softmax(-1), atol=1e-4, rtol=0)
    assert policy[2, 0].item() == pytest.approx(0.75, abs=1e-4)
    assert policy[0, 0].item() == pytest.approx(2 / 3, abs=1e-4)


def test_values_of_prefixes_at_the_optimum():
    """Q_1(0) = ln 3, Q_1(1) = 0, and Q_2 = r."""
    sequence = torch.arange(4).repeat_interleave(2)
    logprobs = torch.cat([OPTIMUM.log_softmax(-1)[[2, a], [a, b]] for a, b in OUTCOMES])
    tokens = Tokens(
        logprobs=logprobs,
        behavior=logprobs,
        advantages=torch.full((8,), math.log(2), dtype=torch.float64),
        weights=torch.ones(8),
        sequence=sequence,
        rewards=torch.zeros(8),
        entropy=torch.zeros(8),
        reference=torch.full((8,), math.log(0.5), dtype=torch.float64),
    )
    got = spo.prefix_values(tokens, SPOOptions(beta=1.0)).reshape(4, 2)
    assert got[:, 0].tolist() == pytest.approx([math.log(3), math.log(3), 0, 0], abs=1e-9)
    assert got[:, 1].tolist() == pytest.approx(REWARDS, abs=1e-9)


tables = st.lists(st.floats(-1.5, 1.5), min_size=6, max_size=6)


def as_table(values):
    return torch.tensor(values, dtype=torch.float64).reshape(3, 2)


@settings(max_examples=10, deadline=None)
@given(
    tables,
    tables,
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.floats(0.1, 2),
)
def test_the_gradient_is_that_of_the_squared_error(policy, reference, rewards, counts, beta):
    parameter, reference = as_table(policy).requires_grad_(), as_table(reference)
    mu = torch.tensor(counts, dtype=torch.float64) / sum(counts)

    def sums(table):
        return torch.stack([table.log_softmax(-1)[[2, a], [a, b]].sum() for a, b in OUTCOMES])

    r = torch.tensor(rewards, dtype=torch.float64)
    initial = beta * (sums(reference) + r / beta).logsumexp(0)
    errors = initial + beta * (sums(parameter) - sums(reference)) - r
    (expected,) = torch.autograd.grad((mu * errors.square()).sum(), parameter)
    got, _ = step(parameter.detach(), counts, rewards=rewards, reference=reference, beta=beta)
    torch.testing.assert_close(got, -expected, atol=1e-9, rtol=1e-7)


def test_an_unscorable_completion_has_no_part_in_the_initial_value():
    """β log of the mean of e^(r/β) over the others."""
    sequences = Sequences(
        rewards=torch.tensor([1.0, 3.0, 100.0], dtype=torch.float64),
        groups=torch.zeros(3, dtype=torch.int64),
        scored=torch.tensor([True, True, False]),
        lengths=torch.ones(3, dtype=torch.int64),
        answers=torch.full((3,), -1),
    )
    options = SPOOptions(beta=2.0, loss="squared", initial_value="group")
    expected = 2 * math.log((math.exp(0.5) + math.exp(1.5)) / 2)
    assert spo.advantages(sequences, options).tolist() == pytest.approx([expected] * 3)


def test_a_constant_added_to_all_rewards_changes_nothing():
    table = as_table([0.3, -0.2, 0.1, 0.9, -0.5, 0.4])
    plain, _ = step(table, (1, 2, 1, 3))
    shifted, _ = step(table, (1, 2, 1, 3), rewards=[r + 2 for r in REWARDS])
    torch.testing.assert_close(shifted, plain)


REFERENCE, SUCCESS = (0.5, 0.3, 0.2), (0.9, 0.5, 0.25)


@pytest.mark.parametrize("counts", [(5, 3, 2), (1, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize(("success", "beta"), [("plain", 1.0), ("plain", 0.5), ("beta", 0.5)])
def test_the_cross_entropy_has_its_optimum_where_q_is_the_log_of_the_success(counts, success, beta):
    """π* ∝ π_ref · success^(s/β), with Q = s log(success): s = 1 (plain) or β."""
    power = 1.0 if success == "beta" else 1 / beta
    weights = [p * q**power for p, q in zip(REFERENCE, SUCCESS, strict=True)]
    optimum = bandit([w / sum(weights) for w in weights])
    behavior = bandit([n / sum(counts) for n in counts])
    group = [completion(behavior, [a], SUCCESS[a]) for a in range(3) for _ in range(counts[a])]
    options = {"initial_value": "importance", "success": success, "beta": beta}
    t = trainer(optimum, {"name": "spo", "spo": options}, bandit(REFERENCE))
    assert descent(t, [group])[-1].tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    # There the loss is the entropy of the successes.
    entropies = [-q * math.log(q) - (1 - q) * math.log(1 - q) for q in SUCCESS]
    mean = sum(n * h for n, h in zip(counts, entropies, strict=True)) / sum(counts)
    assert t.metrics["loss"] == pytest.approx(mean)


def test_a_failure_teaches_even_where_q_is_clipped():
    """Q_0 = β log ½ and a log-ratio of 10: Q is far above 0, where e^Q is no probability."""
    group = [completion(bandit((0.5, 0.5)), [a], float(a == 0)) for a in range(2)]
    policy = bandit((1e-6, 1 - 1e-6))
    t = trainer(policy, {"name": "spo", "spo": {"beta": 20.0}}, bandit((0.5, 0.5)))
    got = descent(t, [group])[-1]
    assert torch.isfinite(got).all()
    assert got[0] > 0 > got[1]
