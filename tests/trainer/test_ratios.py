"""The KL divergence as a reward and as a loss, by exact enumeration through the trainer's step."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from tests.trainer.tabular import bandit, completion, descent, every_group, logits, trainer
from tramontane.config.objectives import AIPOOptions
from tramontane.tokens import INSERTED
from tramontane.trainer.ratios import estimate, returns, sums_to_end

DOCS = ROOT / "docs" / "kl.md"
UNIFORM = torch.zeros(3, 2, dtype=torch.float64)


def kl_gradient(policy, reference, groups, estimator, place, level):
    """The gradient of the KL term alone, ∂/∂ logits: all rewards are equal, and β is 1."""
    options = {
        "kl_coef": 1.0,
        "kl_estimator": estimator,
        "kl_as": place,
        "kl_level": level,
        "loss_normalization": "sequence_sum",
    }
    return -descent(trainer(policy, {"name": "aipo", "aipo": options}, reference), groups)


def log_odds(gradient):
    """∂/∂θ of a row of logits (θ/2, −θ/2)."""
    return float(gradient[0] - gradient[1]) / 2


def tree(table):
    """Every pair of actions, and its probability."""
    first, second = table[-1].softmax(0), table[:2].softmax(1)
    return [([a, b], float(first[a] * second[a, b])) for a in range(2) for b in range(2)]


def pairs(policy, draws):
    """Groups of two completions in all combinations, as often as they are drawn; each outcome's
    probability is a multiple of 1/draws."""
    outcomes = tree(policy)
    weights = [round(draws * p) for _, p in outcomes]
    return [
        [completion(policy, outcomes[i][0]) for i in group] for group in every_group(weights, 2)
    ]


def one_step(*combination):
    """π = (.8, .2), π_ref uniform, the logit of the first action."""
    policy = bandit([0.8, 0.2])
    groups = [[completion(policy, [a]) for a in group] for group in every_group([4, 1], 2)]
    return log_odds(kl_gradient(policy, UNIFORM, groups, *combination)[-1])


def two_steps(*combination):
    """P(y1=1) = .5, P(y2=1|1) = .8, P(y2=1|0) = .5, π_ref uniform, the logit of y1 = 1."""
    policy = torch.stack([logits([0.5, 0.5]), logits([0.2, 0.8]), logits([0.5, 0.5])])
    return -log_odds(kl_gradient(policy, UNIFORM, pairs(policy, 20), *combination)[-1])


def test_the_papers_bandit():
    def got(*combination):
        return one_step(*combination, "token")

    true = 0.221807
    assert got("k1", "loss") == pytest.approx(0, abs=1e-9)
    assert got("k1", "reward") == pytest.approx(true, abs=1e-6)
    assert got("k2", "loss") == pytest.approx(true, abs=1e-6)
    assert got("k3", "loss") == pytest.approx(0.3, abs=1e-6)
    assert got("k3", "reward") == pytest.approx(-0.078193, abs=1e-6)
    assert got("k3", "both") == pytest.approx(true, abs=1e-6)


def test_two_steps_of_the_paper():
    true = 0.048186
    assert two_steps("k2", "loss", "token") == pytest.approx(0, abs=1e-9)
    assert two_steps("k2", "loss", "sequence") == pytest.approx(true, abs=1e-6)
    assert two_steps("k1", "reward", "token") == pytest.approx(true, abs=1e-6)
    assert two_steps("k1", "reward", "sequence") == pytest.approx(true, abs=1e-6)


def test_the_table_in_the_docs_is_measured():
    # The second table, of the tiny base, is a study's: its figures are on the reproduction page.
    exact = DOCS.read_text().partition("## On the tiny base")[0]
    rows = re.findall(r"^\| (k\d) \| (\w+) \| (.*) \|$", exact, re.M)
    assert len(rows) == 9
    for estimator, place, cells in rows:
        numbers = [float(cell.strip("* ").replace("−", "-")) for cell in cells.split("|")]
        measured = [
            one_step(estimator, place, "token"),
            two_steps(estimator, place, "token"),
            two_steps(estimator, place, "sequence"),
        ]
        assert numbers == pytest.approx(measured, abs=5.1e-5), (estimator, place)


CORRECT = [
    ("k1", "reward", "token"),
    ("k1", "both", "token"),
    ("k3", "both", "token"),
    ("k1", "reward", "sequence"),
    ("k1", "both", "sequence"),
    ("k2", "loss", "sequence"),
    ("k3", "both", "sequence"),
]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**31))
def test_correct_combinations_have_the_gradient_of_the_divergence(seed):
    """On random trees of two steps, against autograd of Σ_y π(y) log π(y)/π_ref(y)."""
    random = torch.Generator().manual_seed(seed)
    counts = 1 + torch.eye(2)[torch.randint(0, 2, (3,), generator=random)]  # (1, 2) or (2, 1)
    policy = (counts / 3).double().log()
    reference = torch.randn(3, 2, dtype=torch.float64, generator=random)
    parameter = policy.clone().requires_grad_()
    rows, others = parameter.log_softmax(-1), reference.log_softmax(-1)
    divergence = 0.0
    for actions, _ in tree(policy):
        places = [2, actions[0]], actions
        logprob = rows[places].sum()
        divergence = divergence + logprob.exp() * (logprob - others[places].sum())
    (expected,) = torch.autograd.grad(divergence, parameter)
    groups = pairs(policy, 9)
    for combination in CORRECT:
        got = kl_gradient(policy, reference, groups, *combination)
        torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-6)


def test_the_default_is_a_correct_combination():
    options = AIPOOptions(kl_coef=0.1)
    assert (options.kl_estimator, options.kl_as, options.kl_level) in CORRECT
    assert options.needs == {"reference", "conversations"} and options.charge.baseline
    assert AIPOOptions().needs == set()


def test_the_baseline_leaves_out_the_completion_itself():
    """Equal completions of one group have no gradient: each one's penalty is the others' mean."""
    policy, reference = bandit([0.8, 0.2]), bandit([0.3, 0.7])
    group = [completion(policy, [0]) for _ in range(3)]
    for level in ("token", "sequence"):
        got = kl_gradient(policy, reference, [group], "k1", "reward", level)
        torch.testing.assert_close(got, torch.zeros_like(got))


def test_the_penalty_of_a_token_is_that_of_the_tokens_from_it_on():
    ratios = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sequence = torch.tensor([0, 0, 0, 2, 2])  # sequence 1 is not learned from
    options = AIPOOptions(kl_coef=1.0)
    assert returns(ratios, sequence, options.charge).tolist() == [7, 6, 4, 24, 16]
    whole = AIPOOptions(kl_coef=1.0, kl_level="sequence")
    assert returns(ratios, sequence, whole.charge).tolist() == [7, 7, 7, 24, 24]


def test_tokens_that_were_put_in_count_in_no_penalty_and_in_no_baseline():
    """Equal completions have no gradient, as above: the policy did not choose the token that was
    put in, however unlikely the reference finds it."""
    policy = torch.stack([logits([0.5, 0.5]), logits([0.2, 0.8]), logits([0.5, 0.5])])
    reference = torch.stack([logits([0.5, 0.5]), logits([0.999, 0.001]), logits([0.5, 0.5])])
    for level in ("token", "sequence"):
        group = [completion(policy, [1, 1]) for _ in range(3)]
        for member in group:
            member.versions[1] = INSERTED
        got = kl_gradient(policy, reference, [group], "k1", "reward", level)
        torch.testing.assert_close(got, torch.zeros_like(got))
        one = [completion(policy, [1, 1]), completion(policy, [1, 0])]
        one[0].versions[1] = one[1].versions[1] = INSERTED
        got = kl_gradient(policy, reference, [one], "k1", "reward", level)
        torch.testing.assert_close(got, torch.zeros_like(got))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_distant_policies_are_finite(estimator):
    log_ratio = torch.tensor([-94.0, 0.5, 94.0], requires_grad=True)
    estimates = estimate(log_ratio, estimator)
    estimates.sum().backward()
    assert estimates.isfinite().all() and log_ratio.grad.isfinite().all()


def test_sums_to_the_end_of_a_long_row_are_exact():
    """In float32, a small last sequence would be the difference of two large sums."""
    values = torch.cat([torch.full((200_000,), 100.1), torch.tensor([1e-3, 2e-3])])
    sequence = torch.cat(
        [torch.zeros(200_000, dtype=torch.int64), torch.ones(2, dtype=torch.int64)]
    )
    assert sums_to_end(values, sequence)[0] == pytest.approx(200_000 * float(values[0]), rel=1e-6)
    torch.testing.assert_close(
        sums_to_end(values.flip(0), 1 - sequence.flip(0))[:2], torch.tensor([3e-3, 1e-3])
    )
