"""Environments of OpenEnv, for tests; as a program, a server of one: `PORT`."""

import random
import sys

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class Guessing(Environment[Guess, Hint, State]):
    """Higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, highest=9):
        self.number = random.Random(seed).randint(0, highest)
        return Hint(hint=f"Guess from 0 to {highest}.")

    def step(self, action: Guess, timeout_s=None, **kwargs) -> Hint:
        guess = int(action.text)
        if guess == self.number:
            return Hint(hint="", done=True, reward=1.0)
        return Hint(hint="higher" if guess < self.number else "lower", reward=0.0)

    @property
    def state(self):
        return State()


class Move(Action):
    row: int
    column: int


class Board(Observation):
    cells: list[list[int]]


class Grid(Environment[Move, Board, State]):
    """Fills a field."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.cells = [[0, 0], [0, 0]]
        return Board(cells=self.cells)

    def step(self, action: Move, timeout_s=None, **kwargs) -> Board:
        self.cells[action.row][action.column] = 1
        return Board(cells=self.cells, done=action.row == action.column)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
