"""What the agent of byol-deep does with the options of its auxiliary loss, and with its buffer."""

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tramontane_representation.agent import SelfPredictiveDQN
from tramontane_representation.deep_study import DeepSettings, make_agent

STEPS = 200


def cartpole(auxiliary: dict[str, object], **keys: object) -> SelfPredictiveDQN:
    tasks = {"cartpole": {"name": "CartPole-v1"}}
    settings = DeepSettings(tasks=tasks, steps=STEPS, auxiliary=auxiliary, **keys)
    return make_agent(settings.tasks["cartpole"], settings, seed=0)


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


@cache
def learned_encoder(**auxiliary: object) -> torch.Tensor:
    agent = cartpole({"method": "ac", **auxiliary})
    agent.learn(STEPS)
    return flat(agent.encoder)


def test_the_same_options_and_seed_learn_the_same_encoder() -> None:
    again = cartpole({"method": "ac"})
    again.learn(STEPS)
    torch.testing.assert_close(flat(again.encoder), learned_encoder(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "option",
    [
        {"method": "none"},
        {"method": "pi"},
        {"method": "var"},
        {"weight": 0.0},
        {"weight": 5.0},
        {"steps": 3},
        {"ensemble": 3},
        {"hidden": 0},
        {"target_rate": 1.0},
        {"predictor_speed": 20.0},
        {"normalize": False},
    ],
    ids=str,
)
def test_every_option_changes_what_the_encoder_learns(option: dict[str, object]) -> None:
    assert (learned_encoder(**option) - learned_encoder()).norm() > 0.1


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("batch_size", 8, lambda agent: agent.batch_size),
        ("train_every", 8, lambda agent: agent.train_freq.frequency),
        ("learning_rate", 0.25, lambda agent: agent.policy.optimizer.param_groups[0]["lr"]),
        ("features", 5, lambda agent: agent.encoder.features_dim),
    ],
)
def test_the_agent_has_the_settings_of_its_arm(key, value, found) -> None:
    assert found(cartpole({}, **{key: value})) == value
    assert found(cartpole({})) == DeepSettings.model_fields[key].default != value


@pytest.mark.parametrize("method", ["pi", "ac", "var"])
def test_a_step_moves_the_predictors_and_the_slow_encoder(method: str) -> None:
    agent = cartpole({"method": method, "target_rate": 0.25})
    agent.learn(16)  # no more than the uniform steps, so that the buffer has transitions
    for _ in range(2):
        slow, predictors = flat(agent.slow_encoder.copy), flat(agent.predictions)
        agent.train(1, batch_size=8)
        moved = slow.lerp(flat(agent.encoder), 0.25)
        torch.testing.assert_close(flat(agent.slow_encoder.copy), moved)
        assert (flat(agent.slow_encoder.copy) - slow).norm() > 1e-4
        assert (flat(agent.predictions) - predictors).norm() > 1e-2
        assert agent.errors.keys() == agent.predictions.signs.keys()


def filled(agent: SelfPredictiveDQN, dones: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Observations [N] and the observations after them, with a step for each of `dones`."""
    rng = np.random.default_rng(0)
    here, after = rng.standard_normal((2, len(dones), 4)).astype(np.float32)
    for n, done in enumerate(dones):
        agent.replay_buffer.add(
            here[n][None], after[n][None], np.array([n % 2]), np.ones(1), np.array([done]), [{}]
        )
    return torch.as_tensor(here), torch.as_tensor(after)


@pytest.mark.parametrize(
    ("dones", "counted"),
    [([False, False, False], 3), ([False, True, False], 2), ([True, False, False], 1),
     ([False, False], 2)],
)  # fmt: skip
def test_the_loss_of_several_steps_ends_with_the_episode(dones: list[bool], counted: int) -> None:
    """And with the newest step. Predictions start at the encoder, targets are of the slow one."""
    options = {"method": "ac", "steps": 3, "hidden": 0, "normalize": False, "weight": 0.5}
    agent = cartpole(options)
    here, after = filled(agent, dones)
    with torch.no_grad():
        for parameter in agent.slow_encoder.copy.parameters():
            parameter += 0.1
        matrices = agent.predictions.members["ac"][0].matrices
        predicted, distances = agent.encoder(here[:1]), []
        for h in range(counted):
            predicted = predicted @ matrices[h % 2]
            distances.append(((predicted - agent.slow_encoder.copy(after[h : h + 1])) ** 2).sum())
        found = agent._auxiliary_loss(8)
    torch.testing.assert_close(found, 0.5 * torch.stack(distances).mean())


@pytest.mark.parametrize("done", [False, True])
def test_nothing_is_worth_anything_after_the_end_of_an_episode(done: bool) -> None:
    agent = cartpole({})
    here, after = filled(agent, [done])
    with torch.no_grad():
        for parameter in agent.q_net_target.parameters():
            parameter += 0.1
        best = agent.q_net(after)[0].argmax()
        later = 0.0 if done else 0.99 * agent.q_net_target(after)[0, best]
        expected = F.smooth_l1_loss(agent.q_net(here)[0, 0], torch.tensor(1.0) + later)
        torch.testing.assert_close(agent._q_loss(8), expected)
