"""AIPO, CISPO and GSPO by exact enumeration, through the trainer's step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tabular import bandit, completion, descent, trainer
from tramontane.config import ObjectiveConfig
from tramontane.config.objectives import AIPOOptions, CISPOOptions, GSPOOptions
from tramontane.tokens import INSERTED
from tramontane.trainer.objectives import Tokens, aipo, cispo, gspo, load_objective

POLICY, BEHAVIOR = (0.7, 0.2, 0.1), (0.1, 0.2, 0.7)


@pytest.mark.parametrize(
    ("rho", "expected"), [(1e9, [0.21, -0.14, -0.07]), (2.0, [0.06, -0.04, -0.02])]
)
@pytest.mark.parametrize("name", ["aipo", "cispo"])
def test_the_papers_bandit(name, rho, expected):
    cap = {"aipo": "rho", "cispo": "eps_max"}[name]
    options = {cap: rho, "advantage_normalization": "none", "loss_normalization": "sequence_sum"}
    t = trainer(bandit(POLICY), {"name": name, name: options})
    # A group of all ten draws of μ, once each. Its mean reward is μ(0) = 0.1, which changes the
    # expected gradient only where weights are truncated, so the rewards are raised by it.
    table = bandit(BEHAVIOR)
    members = [
        completion(table, [a], float(a == 0)) for a, n in enumerate((1, 2, 7)) for _ in range(n)
    ]
    got = descent(t, [members])[-1]
    weights = [min(p / m, rho) for p, m in zip(POLICY, BEHAVIOR, strict=True)]
    policy = torch.tensor(POLICY, dtype=torch.float64)
    # Σ_y μ w A s with A = r and, for the baseline, A = 1.
    baseline = sum(
        m * w * (torch.eye(3, dtype=torch.float64)[a] - policy)
        for a, (m, w) in enumerate(zip(BEHAVIOR, weights, strict=True))
    )
    assert (got + 0.1 * baseline).tolist() == pytest.approx(expected, abs=1e-9)
    assert t.metrics["ratio_capped"] == pytest.approx(0.1 if rho == 2 else 0)


numbers = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


def row(values):
    return torch.tensor(values, dtype=torch.float64)


def exact(logits, behavior, rewards):
    """Tokens of a bandit with every outcome once, weighted by its probability under μ."""
    return Tokens(
        logprobs=logits.log_softmax(0),
        behavior=behavior.log_softmax(0),
        advantages=rewards,
        weights=behavior.softmax(0),
        sequence=torch.arange(len(logits)),
        rewards=rewards,
        entropy=torch.zeros(len(logits)),
    )


@settings(max_examples=25, deadline=None)
@given(numbers, numbers, numbers)
def test_without_truncation_the_gradient_is_that_of_the_expected_reward(policy, behavior, rewards):
    """Whatever the behavior policy."""
    logits = row(policy).requires_grad_()
    (expected,) = torch.autograd.grad((logits.softmax(0) * row(rewards)).sum(), logits)
    for module, options in ((aipo, AIPOOptions(rho=1e9)), (cispo, CISPOOptions(eps_max=1e9))):
        loss, _ = module.loss(exact(logits, row(behavior), row(rewards)), options)
        (gradient,) = torch.autograd.grad(-loss, logits)
        torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(numbers, numbers, numbers, st.floats(0.1, 3))
def test_a_truncated_token_counts_as_if_the_behavior_were_likelier(policy, behavior, rewards, rho):
    """min(π/μ, ρ) = π/max(μ, π/ρ): the gradient is that of Σ min(1, ρ μ/π) π r, the factor held."""
    logits = row(policy).requires_grad_()
    pi, mu = logits.softmax(0), row(behavior).softmax(0)
    kept = (rho * mu / pi).clamp(max=1).detach()
    (expected,) = torch.autograd.grad((kept * pi * row(rewards)).sum(), logits)
    loss, _ = aipo.loss(exact(logits, row(behavior), row(rewards)), AIPOOptions(rho=rho))
    (gradient,) = torch.autograd.grad(-loss, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31))
def test_gspo_is_the_gradient_of_the_clipped_sequence_surrogate(seed):
    random = torch.Generator().manual_seed(seed)
    table, behavior = torch.randn(2, 4, 3, dtype=torch.float64, generator=random)
    behavior = table + 0.05 * behavior
    lengths = torch.randint(1, 5, (6,), generator=random).tolist()
    actions = [torch.randint(0, 3, (n,), generator=random).tolist() for n in lengths]
    rewards = [1.0, 0.0, 0.5, 0.25, 0.0, 1.0]
    members = [completion(behavior, a, r) for a, r in zip(actions, rewards, strict=True)]
    options = {"eps_low": 0.02, "eps_high": 0.03}
    t = trainer(table, {"name": "gspo", "gspo": options})
    got = descent(t, [members[:3], members[3:]])
    parameter = table.clone().requires_grad_()
    surrogate = 0.0
    for group in (range(3), range(3, 6)):
        r = row([rewards[i] for i in group])
        normalized = (r - r.mean()) / r.std(correction=0)
        for i, advantage in zip(group, normalized, strict=True):
            states = [3, *actions[i][:-1]]
            logprobs = parameter[states].log_softmax(-1)[range(lengths[i]), actions[i]]
            s = (logprobs.sum() - sum(members[i].logprobs)).div(lengths[i]).exp()
            clipped = s.clamp(1 - 0.02, 1 + 0.03)
            surrogate = surrogate + torch.minimum(s * advantage, clipped * advantage) / 6
    (expected,) = torch.autograd.grad(surrogate, parameter)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def test_gspo_clips_whole_sequences():
    """At ratios of 1.2 and 0.8 of two tokens the sequence's ratio is √0.96, far inside ±0.05."""
    table = torch.zeros(3, 2, dtype=torch.float64)
    members = [completion(table, [0, 1], 1.0), completion(table, [1, 1], 0.0)]
    for i, ratio in enumerate((1.2, 0.8)):
        members[0].logprobs[i] -= float(row(ratio).log())
    clip = {"eps_low": 0.05, "eps_high": 0.05}
    per_sequence = trainer(table, {"name": "gspo", "gspo": clip})
    descent(per_sequence, [members])
    assert per_sequence.metrics["clip_fraction_high"] == 0
    assert per_sequence.metrics["sequence_ratio"] == pytest.approx((0.96**0.5 + 1) / 2)
    per_token = trainer(table, {"magistral": clip})
    descent(per_token, [members])
    assert per_token.metrics["clip_fraction_high"] == 0.25


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.5, -1.0, 1, 0),
        (0.75, -0.5, 0, 0),  # on the bound
        (0.5, 0.5, 0, 0),
        (0.5, 0.0, 0, 0),
        (0.8, -1.0, 0, 0),
        (1.5, 0.5, 0, 1),
        (1.25, 1.0, 0, 0),
        (1.5, -1.0, 0, 0),
        (1.5, 0.0, 0, 0),
        (1.2, 1.0, 0, 0),
    ],
)
def test_gspo_counts_the_tokens_whose_gradient_is_clipped(ratio, advantage, low, high):
    """Those beyond a bound in the direction of their advantage; a ratio on a bound is not."""
    tokens = Tokens(
        logprobs=row([0.0, 0.0]),
        behavior=row([-math.log(ratio)] * 2),
        advantages=row([advantage] * 2),
        weights=row([1.0, 1.0]),
        sequence=torch.zeros(2, dtype=torch.int64),
        rewards=row([0.0, 0.0]),
        entropy=torch.zeros(2),
    )
    _, metrics = gspo.loss(tokens, GSPOOptions(eps_low=0.25, eps_high=0.25))
    found = [float(metrics[f"clip_fraction_{side}"][0]) for side in ("low", "high")]
    assert found == [2 * low, 2 * high]


def test_losses_of_sequences_are_sums_over_their_tokens_by_default_in_aipo():
    """So the gradient is that of the expected reward, however long completions are."""
    table = torch.zeros(3, 2, dtype=torch.float64)
    short, long = completion(table, [0], 1.0), completion(table, [1, 0, 1], 0.0)
    t = trainer(table, {"name": "aipo"})
    got = descent(t, [[short, long]])
    # A = ±½, each sequence counts ½; s of the first action at equal odds is ±½.
    assert got[-1].tolist() == pytest.approx([0.25, -0.25])
    assert got[1].tolist() == pytest.approx([-0.125, 0.125])
    assert got[0].tolist() == pytest.approx([0.125, -0.125])


@pytest.mark.parametrize("normalization", ["sequence", "group_tokens", "sequence_sum"])
def test_inserted_tokens_teach_nothing_and_count_in_no_normalizer(normalization):
    """The middle token was put in: the others learn as if the completion had two tokens."""
    table = row([[0.1, 0.2], [0.3, -0.1], [0.0, 0.4]])
    members = [completion(table, [0, 1, 0], 1.0), completion(table, [1, 1, 1], 0.0)]
    for member in members:
        member.versions[1] = INSERTED
    options = {"loss_normalization": normalization}
    t = trainer(table, {"name": "aipo", "aipo": options})
    got = descent(t, [members])
    parameter = table.clone().requires_grad_()
    logprobs = parameter.log_softmax(-1)
    divisor = {"sequence": 4, "group_tokens": 4, "sequence_sum": 2}[normalization]
    chosen = logprobs[2, 0] + logprobs[1, 0] - logprobs[2, 1] - logprobs[1, 1]
    (expected,) = torch.autograd.grad(chosen / 2 / divisor, parameter)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("distance", [94.0, -94.0])
@pytest.mark.parametrize("name", ["magistral", "gspo", "aipo", "cispo", "agro"])
def test_a_token_far_from_the_policy_that_sampled_it_leaves_the_gradient_finite(name, distance):
    """e⁹⁴ overflows in float32, and a clipped infinity has a gradient of NaN."""
    options = ObjectiveConfig.model_validate({"name": name}).options
    logprobs = torch.tensor([-100.0, -1.0]) if distance < 0 else torch.tensor([-1.0, -1.0])
    logprobs.requires_grad_()
    tokens = Tokens(
        logprobs=logprobs,
        behavior=logprobs.detach() - torch.tensor([distance, 0.0]),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.5, 0.5]),
        sequence=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, 0.0]),
        entropy=torch.zeros(2),
    )
    loss, metrics = load_objective(ObjectiveConfig(name=name)).loss(tokens, options)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert all(total.isfinite() for total, _ in metrics.values())
