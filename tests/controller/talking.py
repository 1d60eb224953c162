"""Environments that talk for a few turns, and a generator without a model that answers them.

Imports no torch, so that its processes start fast.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from tests.controller.counting import CountingGenerator
from tramontane.environments.protocol import Turn
from tramontane.environments.worker import EnvironmentWorker
from tramontane.tokens import Growth
from tramontane.types import Completion, Problem, Progress

EOS = 1  # of the shipped base model's tokenizer


class Talk:
    """Asks for one to four turns. A step's time is lognormal, in one of 50 a hundred times the
    median, and has nothing to do with how many turns there are."""

    median, slowest = 0.002, 100

    def start(self, problem: Problem, seed: int) -> None:
        self.left = Random(seed).randint(1, 4)
        self.random = Random()

    async def step(self, message: dict[str, Any]) -> Turn:
        slow = self.slowest if self.random.random() < 0.02 else 1
        await asyncio.sleep(self.median * slow * self.random.lognormvariate(0, 0.5))
        self.left -= 1
        return Turn("" if not self.left else "Go on!", 1.0, done=not self.left)


class Slow(Talk):
    """Takes longer than an update, so that at any time some conversations are under way."""

    median, slowest = 0.2, 1


class Sleepy(Talk):
    """Takes longer than any test."""

    async def step(self, message: dict[str, Any]) -> Turn:
        await asyncio.sleep(3600)
        return Turn("Good morning!")


class Unequal(Sleepy):
    """The first of a process's conversations ends with its first turn; the others never do."""

    first = True

    async def step(self, message: dict[str, Any]) -> Turn:
        ends, Unequal.first = Unequal.first, False
        return Turn(done=True) if ends else await super().step(message)


class Perilous(Talk):
    """Hangs, or dies, in the second turn of the first conversation of a problem that says so, as
    often as it says."""

    def start(self, problem: Problem, seed: int) -> None:
        super().start(problem, seed)
        self.left, self.problem, self.turn = 3, problem, 0

    async def step(self, message: dict[str, Any]) -> Turn:
        self.turn += 1
        peril = self.problem.metadata.get("peril")
        if peril and self.turn == 2:
            done = Path(str(self.problem.metadata["marks"]))
            with done.open("a") as marks:
                marks.write(".")
            if len(done.read_text()) <= self.problem.metadata.get("times", 1):
                if peril == "hang":
                    time.sleep(3600)  # the process answers nobody any more
                os._exit(9)
        return await super().step(message)


class Tears(Talk):
    """Breaks the first conversation of its process that is answered, inside the package."""

    torn = False

    def start(self, problem: Problem, seed: int) -> None:
        super().start(problem, seed)
        self.left += 1

    async def step(self, message: dict[str, Any]) -> Turn:
        breaks, Tears.torn = not Tears.torn, True
        for worker in gc.get_objects() if breaks else ():
            if isinstance(worker, EnvironmentWorker):
                for conversation in worker._open.values():
                    if getattr(conversation.session, "_environment", None) is self:
                        conversation.said.chat = None  # type: ignore[union-attr]
        return await super().step(message)


class Foreseen(Perilous):
    """May be replayed."""

    deterministic = True


class TalkingGenerator(CountingGenerator):
    """Each poll adds a token to every request; a turn ends at a length drawn from the request's
    seed.

    Attributes:
        sampled: all tokens of each completion, by group and index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sampled: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Progress:
        self.requests += requests
        self.polls += 1
        completions, grown, going_on = [], Growth(), []
        for r in self.requests:
            place = len(r.token_ids)
            random = Random(f"{r.seed}/{place}")
            length = Random(f"{r.seed}/turn {r.turn_start}").randint(1, 8)
            ends = place + 1 - r.turn_start == length
            token = EOS if ends else random.randrange(100, 400)
            self.sampled[r.group, r.index].append((token, self.version))
            r.token_ids.append(token)
            r.logprobs.append(-random.random())
            r.versions.append(self.version)
            if ends or len(r.token_ids) == r.sampling.max_tokens:
                completions.append(r.completed("stop" if ends else "length"))
            else:
                grown.add(r.group, r.index, [token], r.logprobs[-1:], [self.version])
                going_on.append(r)
        self.requests = going_on
        return Progress(completions, grown, busy_seconds=0.5 * self.polls)
