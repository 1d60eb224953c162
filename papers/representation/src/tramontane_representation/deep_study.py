"""The study `byol-deep`: DQN with each auxiliary loss on Gymnasium and MiniGrid tasks.

An arm is an auxiliary loss, or no training at all, and one run of an arm learns all tasks, one
after another.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor

from tramontane.config import Section, key_error, parse
from tramontane.workplace import write_whole
from tramontane_representation.agent import Encoder, SelfPredictiveDQN, SequenceBuffer
from tramontane_representation.linear import FUNCTIONS
from tramontane_representation.losses import SelfPredictionConfig, evaluating
from tramontane_representation.probes import Targets, probe
from tramontane_representation.tasks import (
    LEAST_STATES,
    Task,
    make_task,
    random_reward_targets,
    visited_states,
)

RECENT_EPISODES = 20  # behind a point of a learning curve
TASK_LABEL = re.compile(r"(?!summary$)[\w-]+")  # of a file next to the run's summary.json


class DeepSettings(Section):
    """Keys of an arm of `byol-deep`."""

    tasks: dict[str, Task] = Field(min_length=1)
    """The tasks, by their names in the measures, of letters, digits, `_` and `-`."""
    learns: bool = True
    """Whether the agent learns; otherwise it acts uniformly, and its encoder stays at its initial
    weights."""
    auxiliary: SelfPredictionConfig = SelfPredictionConfig()
    """The auxiliary loss."""
    steps: int = Field(30_000, ge=200)
    """Environment steps on each task."""
    points: int = Field(20, ge=1)
    """Points of a learning curve, at most one for each step."""
    features: int = Field(16, ge=1)
    """Size of a latent."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate of the agent."""
    train_every: int = Field(4, ge=1)
    """Environment steps between gradient steps."""
    batch_size: int = Field(64, ge=1)
    """Transitions of a gradient step, and sequences of the auxiliary loss."""
    evaluation_episodes: int = Field(20, ge=1)
    """Episodes of the greedy policy after training."""
    probe_states: int = Field(600, ge=LEAST_STATES)
    """States of the uniform policy at which the frozen encoder is probed; fewer if a task has
    fewer."""
    probe_functions: int = Field(32, ge=1)
    """Random rewards whose V, Q and advantage the probes fit."""

    @model_validator(mode="after")
    def _can_be_written(self) -> DeepSettings:
        if self.points > self.steps:
            raise key_error(
                f"{self.points} points in {self.steps} steps; ask for at most one for each step",
                "points",
                "steps",
            )
        for label in self.tasks:
            if not TASK_LABEL.fullmatch(label):
                raise key_error(
                    f"{label!r} cannot name a task and its file; choose a name of letters, "
                    "digits, _ and -",
                    "tasks",
                )
        return self


def run_arm(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Learn every task, probe the frozen encoders, and write learning curves to `metrics.jsonl`.

    Tasks finished by an earlier call are skipped.

    Returns:
        For each task: `return_TASK`, mean return of the greedy policy after training;
        `curve_TASK`, mean of the learning curve; `value_TASK`, `q_TASK`, `advantage_TASK`, R² of
        linear probes; `share_TASK`, the share of V in the variance of Q. And `value`, `q`,
        `advantage`: means over tasks.

    Raises:
        InputError: invalid keys, or a task that cannot be made or has too few states.
    """
    settings = parse(DeepSettings, keys, "study byol-deep")
    probed = {label: _probed(task, settings, seed) for label, task in settings.tasks.items()}
    found = {}
    for label, task in settings.tasks.items():
        file = folder / f"{label}.json"
        if not file.is_file():
            write_whole(file, json.dumps(_learn(task, probed[label], settings, seed)))
        found[label] = json.loads(file.read_text())
    with (folder / "metrics.jsonl").open("w") as log:
        for point in range(settings.points):
            line = {"step": next(iter(found.values()))["steps"][point]}
            returns = {f"return_{label}": task["curve"][point] for label, task in found.items()}
            line |= {key: value for key, value in returns.items() if value is not None}
            log.write(json.dumps(line) + "\n")
    measures = {
        f"{key}_{label}": task[key]
        for key in ("return", *FUNCTIONS)
        for label, task in found.items()
    }
    for label, task in found.items():
        known = [value for value in task["curve"] if value is not None]
        measures[f"curve_{label}"] = float(np.mean(known)) if known else math.nan
        measures[f"share_{label}"] = probed[label].targets.value_share
    means = {key: float(np.mean([t[key] for t in found.values()])) for key in FUNCTIONS}
    return measures | means


@dataclass(frozen=True)
class _Probed:
    """States of a task, [N, size], and the functions that probes fit there."""

    states: np.ndarray
    targets: Targets


def _probed(task: Task, settings: DeepSettings, seed: int) -> _Probed:
    states, following = visited_states(task, settings.probe_states, seed)
    functions = settings.probe_functions
    return _Probed(states, random_reward_targets(following, functions, task.frequency, seed))


class _Curve(BaseCallback):
    """Mean return of recent episodes, at evenly spaced steps; None before the first has ended."""

    def __init__(self, steps: int, points: int) -> None:
        super().__init__()
        self.steps = [round(steps * (i + 1) / points) for i in range(points)]
        self.values: list[float | None] = []

    def _on_step(self) -> bool:
        if (
            len(self.values) < len(self.steps)
            and self.num_timesteps >= self.steps[len(self.values)]
        ):
            recent = [episode["r"] for episode in self.model.ep_info_buffer or []]
            self.values.append(float(np.mean(recent[-RECENT_EPISODES:])) if recent else None)
        return True


def make_agent(task: Task, settings: DeepSettings, seed: int) -> SelfPredictiveDQN:
    """The agent of a task before it learns."""
    torch.manual_seed(seed)
    # Until training starts, actions are uniform.
    uniform_steps = min(1000, settings.steps // 10) if settings.learns else 2 * settings.steps
    agent = SelfPredictiveDQN(
        auxiliary=settings.auxiliary,
        policy="MlpPolicy",
        env=Monitor(make_task(task)),
        learning_rate=settings.learning_rate,
        buffer_size=settings.steps,
        learning_starts=uniform_steps,
        batch_size=settings.batch_size,
        train_freq=settings.train_every,
        target_update_interval=500,
        exploration_fraction=0.3,
        replay_buffer_class=SequenceBuffer,
        policy_kwargs={
            "features_extractor_class": Encoder,
            "features_extractor_kwargs": {"features_dim": settings.features},
            "net_arch": [64],
        },
        seed=seed,
        device="cpu",
    )
    agent.set_logger(Logger(None, []))  # the default one leaves a folder in the system's /tmp
    return agent


def _learn(task: Task, probed: _Probed, settings: DeepSettings, seed: int) -> dict[str, Any]:
    """One task: its learning curve, return after training, and R² of probes."""
    agent = make_agent(task, settings, seed)
    curve = _Curve(settings.steps, settings.points)
    agent.learn(settings.steps, callback=curve)
    with evaluating(agent.encoder):
        features = agent.encoder(torch.as_tensor(probed.states)).numpy().astype(np.float64)
    return {
        "steps": curve.steps,
        "curve": curve.values,
        "return": greedy_return(agent, task, settings.evaluation_episodes, seed),
        **probe(features, probed.targets, seed),
    }


def greedy_return(agent: SelfPredictiveDQN, task: Task, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy over episodes with separate starts."""
    env = make_task(task)
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=1_000_000 + 1000 * seed + episode)
        ended = False
        while not ended:
            action, _ = agent.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(int(action))
            total += float(reward)
            ended = terminated or truncated
    return total / episodes
