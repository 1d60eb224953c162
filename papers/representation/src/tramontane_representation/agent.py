"""Stable-Baselines3's DQN with self-prediction as an auxiliary loss of its encoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn
from torch.nn import functional as F

from tramontane_representation.losses import SelfPrediction, SelfPredictionConfig, TargetNetwork


class Encoder(BaseFeaturesExtractor):
    """Observation → latent: two layers, normalized to zero mean and unit variance."""

    def __init__(
        self, observation_space: gymnasium.spaces.Box, features_dim: int = 64, hidden: int = 128
    ) -> None:
        super().__init__(observation_space, features_dim)
        size = int(np.prod(observation_space.shape))
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, features_dim),
            nn.LayerNorm(features_dim),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)  # type: ignore[no-any-return]


class Sequences(NamedTuple):
    """B stretches of an episode, of H steps.

    Fields: `observations` [B, size]; `actions` [B, H] int64; `following` [B, H, size], the
    observation after each action; `valid` [B, H] bool, False after the end of an episode and
    beyond the newest step.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    following: torch.Tensor
    valid: torch.Tensor


class SequenceBuffer(ReplayBuffer):
    """A replay buffer of one environment that also samples stretches of several steps."""

    def sequences(self, count: int, steps: int) -> Sequences:
        """Draw stretches that start anywhere; the newest steps are not followed by the oldest."""
        size = self.size()
        oldest = self.pos if self.full else 0
        starts = np.random.randint(0, max(1, size - steps + 1), size=count)
        index = (oldest + starts[:, None] + np.arange(steps)) % self.buffer_size
        ended = self.dones[index, 0].cumsum(1) - self.dones[index, 0]
        filled = starts[:, None] + np.arange(steps) < size
        return Sequences(
            torch.as_tensor(self.observations[index[:, 0], 0]),
            torch.as_tensor(self.actions[index, 0, 0]).long(),
            torch.as_tensor(self.next_observations[index, 0]),
            torch.as_tensor((ended == 0) & filled),
        )


class SelfPredictiveDQN(DQN):
    """DQN whose loss adds that of `SelfPrediction` on the encoder's latents.

    Args:
        auxiliary: the auxiliary loss.
        arguments: arguments of DQN, with an `Encoder`, a `SequenceBuffer` and one environment.
    """

    def __init__(self, *, auxiliary: SelfPredictionConfig, **arguments: Any) -> None:
        self.auxiliary = auxiliary
        super().__init__(**arguments)

    def _setup_model(self) -> None:
        super()._setup_model()
        assert isinstance(self.action_space, gymnasium.spaces.Discrete)
        encoder = self.q_net.features_extractor
        assert isinstance(encoder, Encoder)
        self.encoder = encoder
        self.predictions = SelfPrediction(
            encoder.features_dim, int(self.action_space.n), self.auxiliary
        )
        self.slow_encoder = TargetNetwork(encoder, self.auxiliary.target_rate)
        self.predictor_optimizer = None
        if self.auxiliary.method != "none":
            rate = self.lr_schedule(1) * self.auxiliary.predictor_speed
            self.predictor_optimizer = torch.optim.Adam(self.predictions.parameters(), lr=rate)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """DQN's steps, with both losses in one gradient."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        for _ in range(gradient_steps):
            loss = self._q_loss(batch_size)
            self.policy.optimizer.zero_grad()
            if self.predictor_optimizer is not None:
                loss = loss + self._auxiliary_loss(batch_size)
                self.predictor_optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            if self.predictor_optimizer is not None:
                self.predictor_optimizer.step()
                self.slow_encoder.follow()
        self._n_updates += gradient_steps

    def _q_loss(self, batch_size: int) -> torch.Tensor:
        assert self.replay_buffer is not None
        data = self.replay_buffer.sample(batch_size)
        with torch.no_grad():
            # Double Q-learning: the network chooses, the target network values.
            chosen = self.q_net(data.next_observations).argmax(1, keepdim=True)
            following = self.q_net_target(data.next_observations).gather(1, chosen)
            target = data.rewards + (1 - data.dones) * self.gamma * following
        taken = self.q_net(data.observations).gather(1, data.actions.long())
        return F.smooth_l1_loss(taken, target)

    def _auxiliary_loss(self, batch_size: int) -> torch.Tensor:
        assert isinstance(self.replay_buffer, SequenceBuffer)
        drawn = self.replay_buffer.sequences(batch_size, self.auxiliary.steps)
        actions = F.one_hot(drawn.actions, int(self.action_space.n)).float()  # type: ignore[attr-defined]
        with torch.no_grad():
            flat = drawn.following.flatten(0, 1)
            targets = self.slow_encoder.copy(flat).view(*drawn.actions.shape, -1)
        loss, self.errors = self.predictions(
            self.encoder(drawn.observations), actions, targets, drawn.valid
        )
        return loss  # type: ignore[no-any-return]
