"""Tasks, probes, the replay buffer and the agent of byol-deep."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from tramontane.errors import InputError
from tramontane.studies.study import load_study
from tramontane_representation.agent import Encoder, SequenceBuffer
from tramontane_representation.deep_study import DeepSettings, make_agent, run_arm
from tramontane_representation.probes import Targets, held_out_r2, probe, products, residual
from tramontane_representation.tasks import (
    Task,
    make_task,
    random_reward_targets,
    visited_states,
)

GRID = Task(name="MiniGrid-Empty-8x8-v0", options={"agent_start_pos": None}, actions=(0, 1, 2))
TASKS = DeepSettings(**load_study("byol-deep").base).tasks


def test_probes_find_what_is_linear_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 6))
    q = np.stack([features @ rng.standard_normal((6, 5)) for _ in range(3)], axis=1)
    exact = probe(features, Targets(q))
    assert min(exact.values()) > 0.999
    noise = probe(features, Targets(rng.standard_normal((400, 3, 5))))
    assert max(noise.values()) < 0.05
    # Only V is linear: the advantage, on top of it, is noise.
    mixed = probe(features, Targets(q.mean(1, keepdims=True) + rng.standard_normal((400, 3, 5))))
    assert mixed["value"] > mixed["q"] > 0.3 > 0.05 > mixed["advantage"]


def test_a_feature_that_is_constant_where_it_is_fitted_is_left_out() -> None:
    """It varies by a millionth in fitted states, and by 1 in a few of those that are held out."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 4))
    y = features @ rng.standard_normal((4, 3)) + rng.standard_normal((400, 3))
    fitted = np.arange(400) < 280
    collapsed = 1e-6 * rng.standard_normal((400, 12))
    collapsed[-5:] += 1
    joint = held_out_r2(np.hstack([features, collapsed]), y, fitted)
    assert joint == pytest.approx(held_out_r2(features, y, fitted))
    # All features may have collapsed, around a latent that is not 0.
    assert -0.05 < held_out_r2(1 + collapsed, y, fitted) <= 0


def test_v_and_the_advantage_share_the_variance_of_q() -> None:
    rng = np.random.default_rng(0)
    v, a = rng.standard_normal((500, 1, 4)), rng.standard_normal((500, 3, 4))
    q = v + 2 * (a - a.mean(1, keepdims=True))
    # Var(2(a − mean)) is 4(1 − 1/3).
    assert Targets(q).value_share == pytest.approx(1 / (1 + 4 * 2 / 3), abs=0.03)
    assert Targets(q - q.mean(1, keepdims=True)).value_share == pytest.approx(0)


def test_a_residual_is_what_a_table_of_the_cells_leaves() -> None:
    cells = np.array([[0, 1], [0, 1], [0, 2], [0, 2], [1, 2]])
    fitted = np.array([True, True, True, False, False])
    x = np.array([[1.0], [3.0], [5.0], [6.0], [7.0]])
    np.testing.assert_allclose(residual(x, cells, fitted), [[-1], [1], [0], [1], [7]])


def test_products_make_an_agreement_linear() -> None:
    """Whether two representations agree is linear in products and in neither alone."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 2, (2, 600, 3)) * 2.0 - 1
    agree = (x[:, 0] == y[:, 0]).astype(float)[:, None]
    fitted = np.arange(600) < 400
    alone = np.concatenate([x, y], axis=1)
    assert held_out_r2(alone, agree, fitted) < 0.05
    assert held_out_r2(products(x, y, fitted), agree, fitted) > 0.95


def test_states_after_every_action_are_those_of_the_task() -> None:
    states, following = visited_states(GRID, 110, seed=3)
    again, _ = visited_states(GRID, 110, seed=3)
    np.testing.assert_array_equal(states, again)
    assert len(np.unique(states, axis=0)) == len(states) == 110
    env = make_task(GRID)
    first, _ = env.reset(seed=3)
    np.testing.assert_array_equal(states[0], first)
    assert first.sum() == 8 * 8 * 3  # one object, color and state for each cell
    for action in range(3):
        env.reset(seed=3)
        np.testing.assert_array_equal(following[0, action], env.step(action)[0])
    targets = random_reward_targets(following, 4, 1.0, seed=0)
    assert targets.q.shape == (110, 3, 4)
    np.testing.assert_allclose(targets.advantage.mean(1), 0, atol=1e-12)


def test_rewards_of_near_states_are_alike_and_of_far_states_independent() -> None:
    """The correlation is exp(−(frequency · root mean square difference)² / 2)."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((1, 400, 3))
    scale = states[0].std(0)
    near = states + scale * 0.5  # half a standard deviation in each direction
    following = np.concatenate([states, near], axis=1)
    spread = following.reshape(-1, 3).std(0)
    distance = np.sqrt(np.mean((scale * 0.5 / spread) ** 2))
    for frequency in (0.5, 2.0, 8.0):
        q = random_reward_targets(following, 500, frequency, seed=1).q[0]
        found = np.mean(q[:400] * q[400:]) / np.mean(q**2)
        assert found == pytest.approx(np.exp(-((frequency * distance) ** 2) / 2), abs=0.06)


def test_features_without_structure_explain_nothing() -> None:
    """Independent features of each state know a state that was fitted, and no other."""
    states, following = visited_states(GRID, 200, seed=0)
    targets = random_reward_targets(following, 32, 1.0, seed=0)
    known: dict[bytes, np.ndarray] = {}
    rng = np.random.default_rng(1)
    features = np.array([known.setdefault(s.tobytes(), rng.standard_normal(64)) for s in states])
    assert max(probe(features, targets).values()) < 0.05


@pytest.mark.parametrize("label", TASKS)
def test_an_untrained_encoder_leaves_room_and_q_is_not_v(label: str) -> None:
    task = TASKS[label]
    states, following = visited_states(task, 300, seed=0)
    targets = random_reward_targets(following, 32, task.frequency, seed=0)
    torch.manual_seed(0)
    encoder = Encoder(make_task(task).observation_space, DeepSettings(tasks=TASKS).features)
    with torch.no_grad():
        features = encoder(torch.as_tensor(states)).double().numpy()
    assert max(probe(features, targets).values()) < 0.75
    assert 0.2 < targets.value_share < 0.85


def test_a_task_with_few_states_is_refused_before_it_is_learned(tmp_path: Path) -> None:
    few = {"name": "MiniGrid-Empty-5x5-v0", "actions": (0, 1, 2)}  # 8 cells and 4 directions
    with pytest.raises(InputError, match="32 different states .* a probe needs 100"):
        run_arm({"tasks": {"empty": few}, "probe_states": 100}, 0, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_action_is_repeated_until_the_episode_ends() -> None:
    slow, fast = (make_task(Task(name="CartPole-v1", repeat=n)) for n in (3, 1))
    slow.reset(seed=0)
    fast.reset(seed=0)
    ended, total = False, 0.0
    while not ended:
        observation, reward, ended, *_ = slow.step(1)
        total += float(reward)
    ended, steps = False, 0
    while not ended:
        expected, _, ended, *_ = fast.step(1)
        steps += 1
    np.testing.assert_array_equal(observation, expected)
    assert total == steps


def test_the_agent_has_the_actions_that_are_named() -> None:
    forward = make_task(GRID.model_copy(update={"actions": (2, 1)}))
    assert forward.action_space == gymnasium.spaces.Discrete(2)
    every = make_task(GRID.model_copy(update={"actions": ()}))
    for chosen, action in ((0, 2), (1, 1)):
        forward.reset(seed=5)
        every.reset(seed=5)
        np.testing.assert_array_equal(forward.step(chosen)[0], every.step(action)[0])


class Digits(gymnasium.Env):
    """Two rows of bytes, and a choice of one action or more."""

    def __init__(self, actions: int = 2) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (2, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.arange(6, dtype=np.uint8).reshape(2, 3), {}

    def step(self, action):
        return np.full((2, 3), action, np.uint8), 0.0, False, False, {}


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {**gymnasium.registry})
    gymnasium.register("Digits-v0", Digits)
    return "Digits-v0"


def test_any_array_of_numbers_is_seen_flat_and_in_float32(digits: str) -> None:
    env = make_task(Task(name=digits))
    observation, _ = env.reset()
    assert observation.dtype == env.observation_space.dtype == np.float32
    np.testing.assert_array_equal(observation, np.arange(6))
    np.testing.assert_array_equal(env.step(1)[0], np.ones(6))
    with pytest.raises(InputError, match=r"actions are Discrete\(1\); they must be .* two"):
        make_task(Task(name=digits, options={"actions": 1}))


@pytest.mark.parametrize("name", ["minigrid:MiniGrid-Empty-5x5-v0", "BabyAI-GoToObj-v0"])
def test_a_task_of_minigrid_is_seen_whole_whatever_its_name(name: str) -> None:
    env = make_task(Task(name=name))
    observation, _ = env.reset(seed=0)
    assert observation.shape == env.observation_space.shape
    assert observation.sum() == 3 * env.unwrapped.width * env.unwrapped.height


def test_a_list_of_a_file_is_a_place_in_a_grid() -> None:
    env = make_task(Task(name="MiniGrid-Empty-8x8-v0", options={"agent_start_pos": [2, 3]}))
    env.reset(seed=0)
    assert tuple(env.unwrapped.agent_pos) == (2, 3)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "Nowhere-v0"}, "Nowhere.*; change name$"),
        ({"name": "nowhere:Grid-v0"}, "No module named 'nowhere'.*; change name$"),
        ({"name": "Pendulum-v1"}, "discrete"),
        ({"name": "FrozenLake-v1"}, r"observations are Discrete\(16\); name a task of MiniGrid"),
        ({"name": "Blackjack-v1"}, "observations are Tuple.*; name a task of MiniGrid"),
        ({"name": "CartPole-v1", "actions": (0, 2)}, r"actions: no actions \[2\]; it has 0 to 1"),
        ({"name": "CartPole-v1", "options": {"pole": 2}}, "CartPole.*pole.*; change name or opt"),
        (
            {"name": "MiniGrid-Empty-8x8-v0", "options": {"agent_start_pos": [50, 50]}},
            r"agent_start_pos.*\[50, 50\].*AssertionError; change name or options",
        ),
    ],
)
def test_a_task_that_does_not_exist_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_task(Task(**keys))


def test_an_unknown_key_is_refused_with_its_name(tmp_path: Path) -> None:
    keys = {"tasks": {"cartpole": {"name": "CartPole-v1"}}, "auxiliary": {"methd": "pi"}}
    with pytest.raises(InputError, match="study byol-deep: auxiliary.methd: .*'method'"):
        run_arm(keys, 0, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"points": 201}, "points: 201 points in 200 steps; ask for at most one for each step"),
        ({"label": "a/b"}, "tasks: 'a/b' cannot name a task .* letters, digits"),
        ({"label": "summary"}, "tasks: 'summary' cannot name a task"),
        ({"actions": (1,)}, r"tasks.pole.actions: \[1\]: name at least two"),
        ({"actions": (0, 1, 0)}, r"tasks.pole.actions: \[0, 1, 0\]: .*, and each once"),
    ],
)
def test_what_could_not_be_written_is_refused_before_it_is_learned(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    task = {"name": "CartPole-v1", "actions": changes.get("actions", ())}
    keys = {"tasks": {changes.get("label", "pole"): task}, "steps": 200}
    with pytest.raises(InputError, match=f"study byol-deep: {said}"):
        run_arm({**keys, "points": changes.get("points", 20)}, 0, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_learning_curve_may_have_a_point_for_each_step(tmp_path: Path) -> None:
    keys = {"steps": 200, "points": 200, "probe_states": 100, "evaluation_episodes": 1}
    run_arm({**keys, "tasks": {"pole-1": {"name": "CartPole-v1"}}}, 0, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [*range(1, 201)]


@pytest.mark.parametrize("added", [7, 25])  # not full, and overwritten twice
def test_sequences_stay_in_order_and_mark_the_end_of_an_episode(added: int) -> None:
    space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float32)
    buffer = SequenceBuffer(10, space, gymnasium.spaces.Discrete(100), device="cpu")
    for i in range(added):
        here, following = np.array([[float(i)]]), np.array([[i + 1.0]])
        buffer.add(here, following, np.array([[i]]), np.zeros(1), np.array([i % 4 == 3]), [{}])
    drawn = buffer.sequences(200, 3)
    starts = drawn.observations[:, 0]
    assert starts.min() == max(0, added - 10) and starts.max() == added - 3
    torch.testing.assert_close(drawn.actions[:, 2], starts.long() + 2)
    torch.testing.assert_close(drawn.following[:, 2, 0], starts + 3)
    for start, valid in zip(starts.tolist(), drawn.valid.tolist(), strict=True):
        steps_left = 4 - int(start) % 4
        assert valid == [h < steps_left for h in range(3)]


@pytest.mark.parametrize("changes", [{"learns": False}, {"auxiliary": {"method": "var"}}])
def test_an_arm_learns_its_tasks_and_returns_the_measures(
    changes: dict[str, object], tmp_path: Path
) -> None:
    study = load_study("byol-deep")
    for arm in study.arms.values():
        DeepSettings(**{**study.base, **arm})
    keys = {
        "tasks": {"cartpole": {"name": "CartPole-v1"}},
        "steps": 300,
        "points": 4,
        "probe_states": 100,
        "evaluation_episodes": 1,
        **changes,
    }
    (tmp_path / "cartpole.json.1.tmp").write_text('{"return": 7')  # of a call that was killed
    found = run_arm(keys, 0, tmp_path)
    named = {name for name in study.measures if "_" not in name or name.endswith("_cartpole")}
    assert found.keys() == named
    assert found["return_cartpole"] >= 8  # no pole falls sooner
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [75, 150, 225, 300]
    assert lines[-1]["return_cartpole"] >= 8
    # A finished task is not learned again.
    (tmp_path / "cartpole.json").write_text(
        json.dumps({**json.loads((tmp_path / "cartpole.json").read_text()), "return": 77.0})
    )
    assert run_arm(keys, 0, tmp_path)["return_cartpole"] == 77.0


def test_an_agent_that_does_not_learn_keeps_its_encoder() -> None:
    settings = DeepSettings(tasks={"cartpole": Task(name="CartPole-v1")}, steps=300, learns=False)
    agent = make_agent(settings.tasks["cartpole"], settings, seed=0)
    before = [p.clone() for p in agent.encoder.parameters()]
    agent.learn(settings.steps)
    for first, last in zip(before, agent.encoder.parameters(), strict=True):
        assert torch.equal(first, last)
