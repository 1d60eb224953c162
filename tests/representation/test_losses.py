"""The losses for networks: their gradients are those of the linear theory, and their options."""

import numpy as np
import pytest
import torch
from torch import nn

from tramontane.representation.dynamics import draw_start
from tramontane.representation.linear import mean_dynamics, predictors, semi_gradient
from tramontane.representation.losses import SelfPrediction, SelfPredictionConfig, TargetNetwork

STATES, ACTIONS, WIDTH = 6, 3, 2


@pytest.mark.parametrize("method", ["pi", "ac", "var"])
def test_the_gradient_of_the_encoder_is_the_semi_gradient_of_the_linear_theory(method) -> None:
    """With deterministic symmetric dynamics, every (x, a) once and exact linear predictors."""
    rng = np.random.default_rng(0)
    successor = np.tile(np.arange(STATES), (ACTIONS, 1))
    for action in range(ACTIONS):
        order = rng.permutation(STATES).reshape(-1, 2)
        successor[action, order[:, 0]], successor[action, order[:, 1]] = order[:, 1], order[:, 0]
    dynamics = np.eye(STATES)[successor][None]
    phi = draw_start(1, states=STATES, width=WIDTH, seed=1)
    options = {"hidden": 0, "normalize": False, "target_rate": 1.0}
    module = SelfPrediction(WIDTH, ACTIONS, SelfPredictionConfig(method=method, **options)).double()
    exact = {"pi": predictors(mean_dynamics(dynamics), phi), "ac": predictors(dynamics, phi)}
    with torch.no_grad():
        for part, members in module.members.items():
            members[0].matrices.copy_(torch.tensor(exact[part][0]))
    encoder = torch.tensor(phi[0], requires_grad=True)
    x = torch.arange(STATES).repeat(ACTIONS)
    a = torch.arange(ACTIONS).repeat_interleave(STATES)
    y = torch.tensor(successor).flatten()
    loss, errors = module(
        encoder[x],
        torch.eye(ACTIONS, dtype=torch.float64)[a][:, None],
        encoder[y][:, None],
        torch.ones(len(x), 1, dtype=torch.bool),
    )
    loss.backward()
    expected = semi_gradient(method, dynamics, phi)[0]
    np.testing.assert_allclose(encoder.grad, expected, atol=1e-12)
    for parameter in module.parameters():  # exact predictors do not move, whatever their sign
        assert parameter.grad.abs().max() < 1e-12
    assert errors.keys() == module.signs.keys()


def test_predictors_of_a_reversed_loss_still_learn() -> None:
    torch.manual_seed(0)
    module = SelfPrediction(4, 2, SelfPredictionConfig(method="var", hidden=8, steps=2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    latents, targets = torch.randn(32, 4), torch.randn(32, 2, 4)
    actions, valid = torch.eye(2)[torch.randint(2, (32, 2))], torch.ones(32, 2, dtype=torch.bool)
    history = []
    for _ in range(60):
        loss, errors = module(latents, actions, targets, valid)
        history.append(errors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for part in ("pi", "ac"):
        assert history[-1][part] < 0.9 * history[0][part]


def test_steps_after_the_end_of_an_episode_do_not_count() -> None:
    torch.manual_seed(1)
    config = SelfPredictionConfig(method="ac", steps=3, hidden=0, normalize=False)
    module = SelfPrediction(4, 2, config)
    latents, targets = torch.randn(5, 4), torch.randn(5, 3, 4)
    actions = torch.eye(2)[torch.randint(2, (5, 3))]
    valid = torch.tensor([[True, True, False]] * 5)
    _, errors = module(latents, actions, targets, valid)
    changed = targets.clone()
    changed[:, 2] += 100
    assert module(latents, actions, changed, valid)[1] == errors
    # Step 2 is predicted from the prediction of step 1.
    member = module.members["ac"][0]
    first = member(latents, actions[:, 0])
    second = member(first, actions[:, 1])
    distances = ((first - targets[:, 0]) ** 2).sum(-1), ((second - targets[:, 1]) ** 2).sum(-1)
    assert errors["ac"] == pytest.approx(torch.stack(distances).mean().item())


def test_the_loss_of_an_ensemble_is_the_mean_over_its_members() -> None:
    torch.manual_seed(2)
    module = SelfPrediction(4, 2, SelfPredictionConfig(method="pi", ensemble=3))
    inputs = (
        torch.randn(8, 4),
        torch.zeros(8, 1, 2),
        torch.randn(8, 1, 4),
        torch.ones(8, 1, dtype=torch.bool),
    )
    _, errors = module(*inputs)
    single = [float(module._error(m, *inputs)) for m in module.members["pi"]]
    assert len(single) == 3 and len(set(single)) == 3
    assert errors["pi"] == pytest.approx(np.mean(single))


@pytest.mark.parametrize(
    ("normalize", "weight", "expected"), [(True, 1.0, 0.4), (True, 2.5, 1.0), (False, 2.0, 26.0)]
)
def test_the_loss_by_hand(normalize: bool, weight: float, expected: float) -> None:
    """(3, 4) stays; (0, 2) was to come. Of unit length: (0.6, 0.8) and (0, 1)."""
    config = SelfPredictionConfig(method="pi", hidden=0, normalize=normalize, weight=weight)
    module = SelfPrediction(2, 2, config)
    with torch.no_grad():
        module.members["pi"][0].matrices.copy_(torch.eye(2))
    loss, errors = module(
        torch.tensor([[3.0, 4.0]]),
        torch.zeros(1, 1, 2),
        torch.tensor([[[0.0, 2.0]]]),
        torch.ones(1, 1, dtype=torch.bool),
    )
    assert float(loss) == pytest.approx(expected)
    assert errors["pi"] == pytest.approx(expected / weight)  # of the predictor alone


def test_a_target_network_follows_its_encoder() -> None:
    encoder = nn.Linear(3, 3)
    target = TargetNetwork(encoder, 0.25)
    before = target.copy.weight.clone()
    with torch.no_grad():
        encoder.weight += 1.0
    target.follow()
    torch.testing.assert_close(target.copy.weight, before + 0.25)
    assert not target.copy.weight.requires_grad


def test_without_a_method_there_is_no_loss() -> None:
    module = SelfPrediction(4, 2, SelfPredictionConfig())
    assert not list(module.parameters())
