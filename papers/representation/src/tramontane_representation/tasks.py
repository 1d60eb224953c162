"""Gymnasium and MiniGrid tasks, and states of a task at which every action is tried."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import minigrid  # noqa: F401  # registers its tasks
import numpy as np
from gymnasium.wrappers import DtypeObservation, FlattenObservation, TransformAction
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.minigrid_env import MiniGridEnv
from minigrid.wrappers import FullyObsWrapper
from pydantic import Field, model_validator

from tramontane.config import Section, key_error
from tramontane.errors import InputError
from tramontane_representation.probes import Targets

LEAST_STATES = 100  # of a task, for a probe
VISITS = 20  # of the uniform policy, for each requested state
WAVES = 256  # of a random reward
SIZES = (len(OBJECT_TO_IDX), len(COLOR_TO_IDX), max(len(STATE_TO_IDX), 4))  # 4: directions
ONE_HOT = tuple(np.eye(n, dtype=np.float32) for n in SIZES)


class Task(Section):
    """A task of Gymnasium or MiniGrid."""

    name: str
    """Gymnasium's name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments that `gymnasium.make` passes to the task; a list arrives as a tuple."""
    actions: tuple[int, ...] = ()
    """The agent's actions; by default, all of the task's."""
    repeat: int = Field(1, ge=1)
    """Steps of the task for which an action is repeated."""
    frequency: float = Field(1.0, gt=0)
    """How rough the random rewards of the probes are: standardized observations whose root mean
    square difference is 1 / `frequency` have rewards that correlate with exp(−½)."""

    @model_validator(mode="after")
    def _two_actions(self) -> Task:
        if self.actions and not 1 < len(set(self.actions)) == len(self.actions):
            raise key_error(
                f"{list(self.actions)}: name at least two actions, and each once", "actions"
            )
        return self


class OneHotGrid(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """The whole grid of a MiniGrid task: each cell's object, color and state, one-hot and flat."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(FullyObsWrapper(env))
        space = self.env.observation_space
        assert isinstance(space, gymnasium.spaces.Dict)
        shape = space["image"].shape
        assert shape is not None
        size = shape[0] * shape[1] * sum(SIZES)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (size,), np.float32)

    def observation(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        image = observation["image"]
        parts = [table[image[..., i]] for i, table in enumerate(ONE_HOT)]
        return np.concatenate(parts, axis=-1).ravel()


class Repeated(gymnasium.Wrapper[np.ndarray, int, np.ndarray, int]):
    """Each action is taken several times, until an episode ends; rewards are summed."""

    def __init__(self, env: gymnasium.Env[np.ndarray, int], times: int) -> None:
        super().__init__(env)
        self.times = times

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def make_task(task: Task) -> gymnasium.Env[np.ndarray, Any]:
    """The task with flat observations in float32 and discrete actions.

    Raises:
        InputError: no such task, options or actions, or a task without two discrete actions or
            without observations in numbers.
    """
    env = _made(task)
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete) or space.n < 2:
        raise InputError(
            f"task {task.name!r}: its actions are {space}; they must be discrete, and at least two"
        )
    if unknown := [a for a in task.actions if not 0 <= a < space.n]:
        raise InputError(
            f"task {task.name!r}: actions: no actions {unknown}; it has 0 to {space.n - 1}"
        )
    if isinstance(env.unwrapped, MiniGridEnv):
        env = OneHotGrid(env)
    seen = env.observation_space
    if not isinstance(seen, gymnasium.spaces.Box):
        raise InputError(
            f"task {task.name!r}: its observations are {seen}; name a task of MiniGrid, or one "
            "whose observations are an array of numbers (Box)"
        )
    if len(seen.shape) != 1:
        env = FlattenObservation(env)
    if seen.dtype != np.float32:
        env = DtypeObservation(env, np.float32)
    if task.actions:
        chosen = gymnasium.spaces.Discrete(len(task.actions))
        env = TransformAction(env, lambda action: task.actions[action], chosen)
    return Repeated(env, task.repeat)


def _made(task: Task) -> gymnasium.Env[Any, Any]:
    """Gymnasium's task as it is."""
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in task.options.items()
    }
    try:
        env = gymnasium.make(task.name, **options)
        env.reset(seed=0)  # some tasks look at their options only here
    except Exception as error:  # whatever the task's own code raises
        given, remedy = (f", options {task.options}", " or options") if options else ("", "")
        said = str(error) or type(error).__name__
        raise InputError(f"task {task.name!r}{given}: {said}; change name{remedy}") from None
    return env


def visited_states(task: Task, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct states that the uniform policy visits, and the state after each action there.

    Every action is tried on a copy of the environment, so that the tasks' dynamics are enumerated
    instead of sampled. All arms with a seed see the same states.

    Args:
        task: the task.
        count: number of states; fewer, if the policy meets no more in `VISITS` visits for each.
        seed: of the policy and the starts.

    Returns:
        (observations [N, size], following observations [N, actions, size]).

    Raises:
        InputError: fewer than `LEAST_STATES` states.
    """
    env = make_task(task)
    rng = np.random.default_rng(seed)
    space = env.action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    actions = int(space.n)
    observation, _ = env.reset(seed=seed)
    states: dict[bytes, np.ndarray] = {}
    following = []
    for _ in range(VISITS * count):
        key = observation.tobytes()
        if key not in states:
            states[key] = observation
            following.append([copy.deepcopy(env).step(action)[0] for action in range(actions)])
        if len(states) == count:
            break
        observation, _, terminated, truncated, _ = env.step(int(rng.integers(actions)))
        if terminated or truncated:
            observation, _ = env.reset()
    if len(states) < LEAST_STATES:
        raise InputError(
            f"task {task.name!r}: the uniform policy meets {len(states)} different states in "
            f"{VISITS * count} steps, and a probe needs {LEAST_STATES}; choose a larger task, or "
            "one with random starts"
        )
    return np.array([*states.values()], dtype=np.float32), np.array(following, dtype=np.float32)


def random_reward_targets(
    following: np.ndarray, functions: int, frequency: float, seed: int
) -> Targets:
    """One-step Q of random rewards of the next state: [states, actions, functions].

    A reward is a sum of random waves of the standardized next observation, nearly a draw of a
    Gaussian process. The linear theory has independent rewards for each state, which continuous
    states do not allow; the higher the frequency, the closer.
    """
    rng = np.random.default_rng(seed)
    states, actions, size = following.shape
    flat = following.reshape(-1, size)
    deviation = flat.std(0)
    x = (flat - flat.mean(0)) / np.maximum(deviation, 0.05)
    scale = frequency / np.sqrt(max(1, (deviation > 0).sum()))
    directions = scale * rng.standard_normal((size, WAVES))
    waves = np.cos(x @ directions + rng.uniform(0, 2 * np.pi, WAVES))
    rewards = waves @ rng.standard_normal((WAVES, functions)) * np.sqrt(2 / WAVES)
    return Targets(rewards.reshape(states, actions, functions))
