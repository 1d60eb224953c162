"""Gymnasium's environments whose observations and actions are texts, as `gymnasium:NAME` or, with
a module that registers it, `gymnasium:my_module:NAME`.

- seed: given to `reset`, with the row's other fields as its `options`.
- reward: of each turn; `conversation.reward: sum` adds them up.
- ending: `completed` when the environment has terminated or truncated the episode.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Space, Text

from tramontane.environments.adapters import seed_of
from tramontane.environments.protocol import Turn
from tramontane.errors import InputError
from tramontane.types import Message, Problem


class Gymnasium:
    """An environment of Gymnasium. A message that is not in its space of actions is answered with
    an error text, and the episode continues."""

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """Make the environment once.

        Raises:
            InputError: it cannot be made, or its spaces are not texts.
        """
        try:
            made: Any = gymnasium.make(name)
        except Exception as error:  # its constructor may raise anything
            raise InputError(f"cannot be made: {type(error).__name__}: {error}") from None
        spaces: dict[str, Space[Any]] = {
            "observations": made.observation_space,
            "actions": made.action_space,
        }
        made.close()
        for what, space in spaces.items():
            if not isinstance(space, Text):
                raise InputError(
                    f"its {what} are {space}, not Text; wrap it with gymnasium.wrappers."
                    f"Transform{what.capitalize()[:-1]}, and register that"
                )

    def start(self, problem: Problem, seed: int) -> list[Message]:
        self._environment: Any = gymnasium.make(self.name)
        shown, _ = self._environment.reset(
            seed=seed_of(problem, seed), options=dict(problem.metadata)
        )
        return [Message(role="user", content=shown)]

    def step(self, message: dict[str, Any]) -> Turn:
        action, space = message["content"], self._environment.action_space
        if action not in space:
            return Turn(f"error: not an action of {space}")
        shown, reward, terminated, truncated, _ = self._environment.step(action)
        done = bool(terminated or truncated)
        return Turn([Message(role="user", content=shown)], float(reward), done)

    def close(self) -> None:
        self._environment.close()
