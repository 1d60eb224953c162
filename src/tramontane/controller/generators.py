"""The generators as the controller sees them: who has which requests, and what is known of each.

The controller learns every token within `AHEAD` polls of its being sampled. So when a generator
dies, what it was at goes on in the one that takes its place, from the tokens that are known, under
the newest weights (arXiv 2506.10910, section 3, asks only that sequences go on under new weights;
where they do so is no matter).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tramontane.config import Config
from tramontane.models.weights import Weights
from tramontane.placement.handle import Handle, Limit, WorkerLost, answer, call, started
from tramontane.types import Completion, Progress, Request

AHEAD = 2  # polls in a worker's mailbox: while one is read here, it is at the next
STARTS = 5  # of one generator, without one poll between them, after which a run gives up


class PooledGenerator:
    """One generator, whoever it is at the moment, and the requests that it has.

    A call that loses the worker brings a new one to the same point: the newest weights, the
    unfinished requests as they are known here. What the lost one said after that is not heard.
    """

    def __init__(
        self,
        make: Callable[[], Handle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
        note: Callable[..., None],
    ) -> None:
        self.make, self.config, self.replaced, self.note = make, config, replaced, note
        self.handle = make()
        self.requests: dict[tuple[int, int], Request] = {}  # unfinished, with their tokens so far
        self.generated_tokens, self.busy_seconds = 0, 0.0
        self._busy_before = 0.0  # of the worker at the moment, when last asked
        self._without_work = 0.0  # seconds
        self._without_work_since: float | None = None  # a time, if it is so now
        self._unsent: list[Request] = []
        # Asked of the worker at the moment, with the requests that each takes there.
        self._polls: deque[tuple[Future[Progress], list[Request]]] = deque()
        self._weights: tuple[int, Weights] | None = None
        self._version: int | None = None  # that the newest tokens were sampled under
        self._lost = 0  # workers, since the last poll
        self._replacing = asyncio.Lock()

    @property
    def name(self) -> str:
        """The worker's name, e.g. `generator 0`; a replacement has the same."""
        return self.handle.name

    def submit(self, requests: list[Request]) -> None:
        """Queue requests for the next poll; their tokens grow as they are sampled."""
        self.requests |= {(r.group, r.index): r for r in requests}
        self._unsent += requests

    async def started(self) -> None:
        """Wait until it can be called.

        Raises:
            WorkerLost: it cannot be started.
        """
        handle = await self._worker()
        try:
            await started(handle, Limit.of(self.config.timeouts, "start"))
        except WorkerLost as lost:
            await self._replace(handle, lost)

    async def poll(self) -> list[Completion]:
        """Let it work for a few decode steps; returns what ended (nothing, if it was lost).

        Always `AHEAD` polls are asked for, so that it goes on while the last one is looked at.

        Raises:
            WorkerLost: it cannot be replaced.
        """
        handle = await self._worker()
        while len(self._polls) < AHEAD:
            # The worker's own copies: the tokens of ours grow.
            requests = [replace(r, token_ids=[*r.token_ids]) for r in self._unsent]
            self._polls.append((handle.submit("poll", requests), self._unsent))
            self._unsent = []
        limit, (future, _) = Limit.of(self.config.timeouts, "generation"), self._polls.popleft()
        try:
            progress = await answer(handle, "poll", future, limit=limit)
        except WorkerLost as lost:
            await self._replace(handle, lost)
            return []
        if handle is not self.handle:  # lost meanwhile, over another call
            return []
        self._lost = 0
        self._note(progress)
        return list(progress.completions)

    async def ask(self, limit: str, method: str, *args: Any) -> Any:
        """Any other call, made again where the worker is lost over it."""
        while True:
            handle = await self._worker()
            try:
                return await self._call(handle, limit, method, *args)
            except WorkerLost as lost:
                await self._replace(handle, lost)

    async def update(self, version: int, weights: Weights) -> float:
        """New weights, between two decode steps; returns the pause in seconds."""
        if self.config.placement.replaces_workers:
            self._weights = version, weights
        # Polls that it has not begun come after the weights.
        while self._polls and self._polls[-1][0].cancel():
            self._unsent = self._polls.pop()[1] + self._unsent
        return float(await self.ask("weight_update", "receive", version, weights))

    @property
    def seconds_without_work(self) -> float:
        """The time so far in which it had no requests: `feed` might hand out none."""
        since = self._without_work_since
        return self._without_work + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def without_work(self) -> Iterator[None]:
        """Around a wait for requests."""
        self._without_work_since = time.monotonic()
        yield
        self._without_work = self.seconds_without_work
        self._without_work_since = None

    async def _worker(self) -> Handle:
        async with self._replacing:
            return self.handle

    async def _call(self, handle: Handle, limit: str, method: str, *args: Any) -> Any:
        return await call(handle, method, *args, limit=Limit.of(self.config.timeouts, limit))

    def _note(self, progress: Progress) -> None:
        sampled: list[int] = []  # each new token's version
        for c in progress.completions:
            sampled += c.versions[len(self.requests.pop((c.group, c.index)).token_ids) :]
        for g in progress.grown:
            request = self.requests[g.group, g.index]
            request.token_ids += g.token_ids
            request.logprobs += g.logprobs
            request.versions += g.versions
            sampled += g.versions
        self.generated_tokens += len(sampled)
        for version in dict.fromkeys(sampled):
            if version != self._version:
                self._version = version
                self.note(self.handle.name, version=version)
        self.busy_seconds += progress.busy_seconds - self._busy_before
        self._busy_before = progress.busy_seconds

    async def _replace(self, gone: Handle, lost: WorkerLost) -> None:
        async with self._replacing:
            if self.handle is not gone:  # another call was lost with it, and saw to this
                return
            while True:
                self._lost += 1
                if not self.config.placement.replaces_workers or self._lost > STARTS:
                    raise lost
                self.replaced(lost)
                self.handle.close()
                self.handle, self._busy_before, self._version = self.make(), 0.0, None
                self._polls.clear()
                try:
                    await started(self.handle, Limit.of(self.config.timeouts, "start"))
                    if self._weights is not None:
                        await self._call(self.handle, "weight_update", "receive", *self._weights)
                    break
                except WorkerLost as again:
                    lost = again
            if self.config.placement.lost_sequences == "restart":
                for request in self.requests.values():
                    request.token_ids, request.logprobs, request.versions = [], [], []
            self._unsent = list(self.requests.values())
            begun = [[r.group, r.index, len(r.token_ids)] for r in self._unsent if r.token_ids]
            self.note(self.handle.name, continues=begun)


class GeneratorPool:
    """`config.generator.workers` generators that share `n_async` completions.

    Args:
        make: a handle on the generator of a given number.
        config: sizes, timeouts, and what becomes of a lost worker's sequences.
        replaced: told of each worker that is lost and about to be replaced.
        note: told, by a generator's name, each `version` of the weights that it begins to sample
            under, and what the one that takes its place `continues`: [group, index, tokens] each.
        max_prompt: tokens of the longest prompt.
    """

    def __init__(
        self,
        make: Callable[[int], Handle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
        note: Callable[..., None],
        max_prompt: int,
    ) -> None:
        def one(number: int) -> PooledGenerator:
            return PooledGenerator(lambda: make(number), config, replaced, note)

        self._members = [one(number) for number in range(config.generator.workers)]
        self._max_prompt = max_prompt

    def __iter__(self) -> Iterator[PooledGenerator]:
        return iter(self._members)

    @property
    def in_flight(self) -> int:
        """Completions submitted and unfinished."""
        return sum(len(m.requests) for m in self._members)

    @property
    def generated_tokens(self) -> int:
        return sum(m.generated_tokens for m in self._members)

    @property
    def busy_seconds(self) -> float:
        """Mean over the generators."""
        return sum(m.busy_seconds for m in self._members) / len(self._members)

    @property
    def seconds_without_work(self) -> float:
        """Mean over the generators."""
        return sum(m.seconds_without_work for m in self._members) / len(self._members)

    async def started(self) -> None:
        """Wait until all can be called.

        Raises:
            WorkerLost: one cannot be started.
        """
        await asyncio.gather(*(m.started() for m in self._members))

    def submit(self, requests: list[Request]) -> None:
        """Give a group to the generator that has least; it stays whole, since it shares a prompt.

        With at most `n_async` in flight, none ever has more than `slots(config)`.
        """
        min(self._members, key=lambda m: len(m.requests)).submit(requests)

    async def resize(self, config: Config) -> None:
        """Make room for other sizes in all, with nothing in flight."""
        size = slots(config), self._max_prompt + config.pipeline.l_max
        await asyncio.gather(*(m.ask("start", "resize", *size) for m in self._members))

    async def update(self, version: int, weights: Weights) -> float:
        """New weights for all; returns the longest pause in seconds."""
        return max(await asyncio.gather(*(m.update(version, weights) for m in self._members)))

    def close(self) -> None:
        for member in self._members:
            member.handle.close()


def slots(config: Config) -> int:
    """What each generator must hold: a group goes to the least loaded of W, which has at most
    (n_async − G) / W in flight when another G fit under n_async."""
    sizes = config.pipeline
    return (sizes.n_async - sizes.group_size) // config.generator.workers + sizes.group_size
