"""Environments of skyrl-gym, as `skyrl:gsm8k_multi_turn`.

- seed: skyrl-gym has none.
- reward: of each turn; set `conversation.reward` to `last` or `sum`, as the environment intends.
- ending: `completed` when the environment is done.

Its `extras` are the row's fields; `reward_model` and `reward_spec` hold the problem's answer unless
the row has them.
"""

from __future__ import annotations

from typing import Any

import skyrl_gym

from tramontane.environments.protocol import Turn
from tramontane.errors import InputError
from tramontane.types import Message, Problem


class SkyRL:
    """An environment of skyrl-gym, which reads the model's message without its thoughts."""

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """Look the environment up.

        Raises:
            InputError: none of that name is registered.
        """
        if name not in skyrl_gym.registry:
            known = ", ".join(sorted(skyrl_gym.registry))
            raise InputError(f"not registered with skyrl-gym, which has {known}")

    def start(self, problem: Problem) -> list[Message]:
        truth = {"ground_truth": problem.answer}
        given = {"reward_model": truth, "reward_spec": truth, "extra_info": {}, **problem.metadata}
        self._environment: Any = skyrl_gym.make(self.name, extras=given)
        chat = problem.messages or [Message(role="user", content=problem.problem)]
        shown, _ = self._environment.init([dict(message) for message in chat])
        return list(shown)

    def step(self, message: dict[str, Any]) -> Turn:
        answered = self._environment.step(message["content"])
        return Turn(answered["observations"], float(answered["reward"]), bool(answered["done"]))

    def close(self) -> None:
        self._environment.close()
