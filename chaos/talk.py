"""An environment for chaos: it has the model check its answer up to three times, and some of its
steps take a hundred times as long as most."""

from __future__ import annotations

import asyncio
from random import Random

from tramontane.environments.protocol import Turn
from tramontane.types import Problem

SECONDS = 0.02  # the median of a step


class Talk:
    """Says the same in every replay; only the duration of its steps differs."""

    def start(self, problem: Problem, seed: int) -> None:
        self.left, self.random = Random(seed).randint(0, 3), Random()

    async def step(self, message: dict[str, object]) -> Turn:
        slow = 100 if self.random.random() < 0.02 else 1
        await asyncio.sleep(slow * SECONDS * self.random.lognormvariate(0, 1))
        self.left -= 1
        return Turn("Check it again." if self.left >= 0 else "", done=self.left < 0)
