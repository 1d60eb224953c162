"""Games of TextArena for one player, as `textarena:GuessTheNumber-v0`.

- seed: the games draw from Python's and NumPy's global generators. Each conversation has its own
  states, which are swapped in for its calls, so games do not affect one another.
- reward: of the last turn, TextArena's own: usually 1 if won, else the share that was achieved.
- ending: `completed` when the game is over, also by its own limit of turns or invalid moves.

The model reads the game's messages as they come, without the echo of its own moves.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import textarena

from tramontane.environments.adapters import seed_of
from tramontane.environments.protocol import Turn
from tramontane.errors import InputError
from tramontane.types import Message, Problem

_ONE_AT_A_TIME = threading.Lock()  # the global generators belong to one game


class TextArena:
    """A game of TextArena; the problem's statement is not used."""

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """Begin a game.

        Raises:
            InputError: there is no such game, or it cannot begin, e.g. because it needs more
                players or a download.
        """
        game = cls()
        game.name = name
        try:
            game.start(Problem("", "", ""), 0)
        except Exception as error:  # each game fails in its own way
            raise InputError(
                f"the game cannot begin with one player: {type(error).__name__}: {error}"
            ) from None

    def start(self, problem: Problem, seed: int) -> list[Message]:
        seed = seed_of(problem, seed)
        numpy_seed = np.random.RandomState(seed % 2**32)
        self._generators = random.Random(seed).getstate(), numpy_seed.get_state()
        with self._own_generators():
            self._game: Any = textarena.make(self.name)
            self._game.reset(num_players=1, seed=seed)
        return self._shown()

    def step(self, message: dict[str, Any]) -> Turn:
        with self._own_generators():
            done, _ = self._game.step(action=message["content"])
        if not done:
            return Turn(self._shown())
        rewards, info = self._game.close()
        reason, reward = str(info[0].get("reason", "")), rewards[0]
        if isinstance(reward, str):  # some games swap the two for invalid moves
            reason, reward = reward, reason.rpartition(" ")[2]
        return Turn(reason, float(reward), done=True)

    def _shown(self) -> list[Message]:
        said = self._game.state.get_current_player_observation()
        echo = textarena.ObservationType.PLAYER_ACTION
        text = "\n".join(str(text) for _, text, kind in said if kind != echo)
        return [Message(role="user", content=text)]

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._generators[0])
            np.random.set_state(self._generators[1])
            try:
                yield
            finally:
                self._generators = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])
