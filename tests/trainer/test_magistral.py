import math

import pytest
import torch

from tramontane.config import ObjectiveConfig
from tramontane.config.objectives import MagistralOptions
from tramontane.trainer.advantages import loss_weights
from tramontane.trainer.objectives import Sequences, Tokens, load_objective, magistral

LOGP = math.log(0.3)


def tokens(ratios, advantages, weights=None, logprobs=None, **more):
    """Tokens whose π_θ/μ is as given; `more` overrides any field."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    n = len(ratios)
    logprobs = torch.full_like(ratios, LOGP).requires_grad_() if logprobs is None else logprobs
    fields = {
        "logprobs": logprobs,
        "behavior": logprobs.detach() - ratios.log(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "weights": torch.ones(n).double() if weights is None else weights,
        "sequence": torch.zeros(n, dtype=torch.int64),
        "rewards": torch.zeros(n),
        "entropy": torch.ones(n),
    }
    return Tokens(**fields | more)


def loss_and_gradient(t, **config):
    objective = load_objective(ObjectiveConfig.model_validate({"magistral": config}))
    loss, metrics = objective.loss(t, MagistralOptions(**config))
    (gradient,) = torch.autograd.grad(loss, t.logprobs)
    return loss.item(), gradient.tolist(), {n: float(s / w) for n, (s, w) in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "flows"),
    [
        (1.5, 1.0, 1.28, False),
        (1.5, -1.0, -1.5, True),
        (0.5, -1.0, -0.8, False),
        (0.5, 1.0, 0.5, True),
        (1.0, 1.0, 1.0, True),
        (1.2, -1.0, -1.2, True),
        (1.1, 3.0, 3.3, True),
        (1.5, 0.25, 0.32, False),
    ],
)
def test_the_clip_table(ratio, advantage, value, flows):
    loss, (gradient,), metrics = loss_and_gradient(tokens([ratio], [advantage]))
    assert -loss == pytest.approx(value)
    # Where it flows, ∂(ρ A)/∂ log π = ρ A.
    assert -gradient == pytest.approx(ratio * advantage if flows else 0.0)
    assert metrics["clip_fraction_high"] == (ratio > 1.28 and advantage > 0)
    assert metrics["clip_fraction_low"] == (ratio < 0.8 and advantage < 0)


def test_lengths_10_and_30_weigh_by_tokens():
    def objective(normalization):
        lengths = torch.tensor([10, 30])
        weights = loss_weights(
            lengths, torch.tensor([0, 0]), torch.tensor([True, True]), normalization, 100
        ).repeat_interleave(lengths)
        return -loss_and_gradient(tokens([1.0] * 40, [1.0] * 10 + [-1.0] * 30, weights))[0]

    assert objective("group_tokens") == pytest.approx(-0.5)
    assert objective("sequence") == pytest.approx(0.0)
    assert objective("constant") == pytest.approx(-20 / 200)


def test_metrics_hold_sums_and_counts_in_closed_form():
    entropy = torch.tensor([0.5, 0.25, 2.0, 0.0, 0.0])
    # Without advantage no gradient is removed, so the last two tokens are not clipped.
    t = tokens([1.5, 0.5, 3.0, 0.5, 2.0], [1.0, -1.0, -1.0, 0.0, 0.0], entropy=entropy)
    _, metrics = magistral.loss(t, MagistralOptions())
    sums = {name: (float(s), float(w)) for name, (s, w) in metrics.items()}
    assert sums == {
        "clip_fraction_low": (1.0, 5.0),
        "clip_fraction_high": (1.0, 5.0),  # 3.0 is above the bound too, but A < 0 is not clipped
        "ratio": (pytest.approx(7.5), 5.0),
        "entropy": (pytest.approx(2.75), 5.0),
        "kl_behavior": (pytest.approx(7.5 - 5 - math.log(1.5 * 0.5 * 3.0 * 0.5 * 2.0)), 5.0),
    }


def test_a_microbatch_without_a_token_to_learn_from_has_loss_and_gradient_zero():
    t = tokens([], [])
    loss, metrics = magistral.loss(t, MagistralOptions())
    assert loss.item() == 0.0 and loss.requires_grad
    assert {(float(s), float(w)) for s, w in metrics.values()} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("correction", "cap", "weights", "capped"),
    [
        ("truncated", 2.0, [2.0, 1.5, 0.25], 1),
        ("clipped", 2.0, [2.0, 1.5, 0.5], 2),
        ("truncated", 5.0, [4.0, 1.5, 0.25], 0),
        ("clipped", 3.5, [3.5, 1.5, 1 / 3.5], 2),
    ],
)
def test_importance_corrections(correction, cap, weights, capped):
    # π_old/μ = 4, 1.5, 0.25, and π_θ/π_old = 1.1, 0.9, 1.5: the last is clipped at A = 1.
    drift = torch.tensor([4.0, 1.5, 0.25], dtype=torch.float64)
    ratio = torch.tensor([1.1, 0.9, 1.5], dtype=torch.float64)
    t = tokens((drift * ratio).tolist(), [1.0, -1.0, 1.0])
    t = Tokens(**{**vars(t), "proximal": t.logprobs.detach() - ratio.log()})
    loss, gradient, metrics = loss_and_gradient(
        t, importance_correction=correction, importance_cap=cap
    )
    surrogates = [1.1, -0.9, 1.28]
    assert -loss == pytest.approx(sum(w * s for w, s in zip(weights, surrogates, strict=True)))
    # The weight is a constant: the gradient is w · ρ · A where not clipped.
    assert [-g for g in gradient] == pytest.approx([weights[0] * 1.1, weights[1] * -0.9, 0.0])
    assert metrics["importance_weight"] == pytest.approx(sum(weights) / 3)
    assert metrics["importance_capped"] == pytest.approx(capped / 3)


def test_without_correction_the_behavior_is_the_old_policy():
    t = tokens([1.2], [1.0])
    assert -loss_and_gradient(t)[0] == pytest.approx(1.2)


def test_entropy_bonus_lowers_the_loss_by_the_entropy():
    entropy = torch.tensor([0.3, 0.9], dtype=torch.float64, requires_grad=True)
    t = tokens([1.0, 1.0], [0.0, 0.0], torch.tensor([0.25, 0.75]), entropy=entropy)
    loss, _ = magistral.loss(t, MagistralOptions(entropy_coef=0.1))
    assert loss.item() == pytest.approx(-0.1 * (0.25 * 0.3 + 0.75 * 0.9))
    (gradient,) = torch.autograd.grad(loss, entropy)
    assert gradient.tolist() == pytest.approx([-0.025, -0.075])


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({}, set()),
        ({"kl_coef": 0.1}, {"reference", "conversations"}),
        ({"kl_coef": 0.1, "kl_as": "loss"}, {"reference"}),
        ({"entropy_coef": -0.1}, {"entropy"}),
        ({"importance_correction": "clipped"}, {"proximal"}),
    ],
)
def test_it_asks_only_for_what_it_uses(config, needs):
    assert MagistralOptions(**config).needs == needs


@pytest.mark.parametrize("normalization", ["minibatch", "group", "none"])
def test_advantages_are_normalized_as_configured(normalization):
    sequences = Sequences(
        rewards=torch.tensor([1.0, 0.0, 0.6, 0.4], dtype=torch.float64),
        groups=torch.tensor([0, 0, 1, 1]),
        scored=torch.ones(4, dtype=torch.bool),
        lengths=torch.ones(4, dtype=torch.int64),
        answers=torch.zeros(4, dtype=torch.int64),
    )
    config = MagistralOptions(advantage_normalization=normalization)
    std = {"minibatch": (0.26 / 2) ** 0.5, "none": 1.0, "group": None}[normalization]
    expected = [0.5 / (std or 0.5), -0.5 / (std or 0.5), 0.1 / (std or 0.1), -0.1 / (std or 0.1)]
    assert magistral.advantages(sequences, config).tolist() == pytest.approx(expected)
