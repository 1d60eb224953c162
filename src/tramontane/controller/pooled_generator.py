"""The controller's side of one generator: its requests, and their tokens known so far.

The controller learns every token within `AHEAD` polls after it is sampled. So when a generator
dies, its replacement continues the unfinished requests from the tokens that are known, under the
newest weights (arXiv 2506.10910, section 3, requires only that sequences continue under new
weights, not in the same generator).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tramontane.config import Config
from tramontane.controller.interruption import thought_limit
from tramontane.models.weights import Weights
from tramontane.placement.handle import (
    ConcurrentHandle,
    Handle,
    Limit,
    WorkerLost,
    answer,
    call,
    started,
)
from tramontane.types import Completion, Progress

AHEAD = 2  # polls in a worker's mailbox: it runs the next while the controller reads the last
# With many generators, polls last longer, so that the controller reads at most this many a second
# in total. One call of a Ray actor takes 0.8 ms of its CPU time.
POLLS_PER_SECOND = 250
FEW = 64  # generators whose polls may all be as short as `steps_per_call`
# Kinds of requests, by group number: training's from 0 up, an evaluation's below 0, those of an
# endpoint's clients from FIRST_ASKED down.
TRAINING, EVALUATION, ASKED = range(3)
FIRST_ASKED = -(1 << 30)  # group numbers have 32 bits
STARTS = 5  # starts of one generator without a poll in between, after which a run gives up


class PooledGenerator:
    """One generator and its unfinished requests; a lost worker is replaced.

    After the loss, the replacement has the newest weights and the unfinished requests as the
    controller knows them. Late answers of the lost worker are ignored.

    Args:
        make: starts the worker, or its replacement.
        config: timeouts, and what to do with a lost worker's sequences.
        replaced: called with each loss that leads to a replacement.
        log_worker: called with the worker's name and facts about it; see `GeneratorPool`.
        changed: called after each change in the number of unfinished requests.
    """

    def __init__(
        self,
        make: Callable[[], ConcurrentHandle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
        log_worker: Callable[..., None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.make, self.config = make, config
        self.replaced, self.log_worker, self.changed = replaced, log_worker, changed
        self.handle = make()
        self.requests: dict[
            tuple[int, int], Completion
        ] = {}  # unfinished, with their tokens so far
        self.unfinished = [0, 0, 0]  # number of them, by kind
        # Until `poll` returns them, by kind: requests whose turn has ended, and what was completed.
        self._ended: list[list[tuple[Completion, Completion]]] = [[], [], []]
        self.generated_tokens = self.prefilled_tokens = self.parked_tokens = 0
        self.busy_seconds = 0.0
        self._worker_busy_seconds = 0.0  # reported by the current worker at its last poll
        self._without_work = 0.0  # seconds
        self._without_work_since: float | None = None  # None while it has requests
        self._unsent: list[Completion] = []
        self._submitted = asyncio.Event()
        # Polls submitted to the current worker, each with the requests that it carries.
        self._polls: deque[tuple[Future[Progress], list[Completion]]] = deque()
        self._weights: tuple[int, Weights] | None = None
        self._fetched: int | None = None  # the newest version that the worker has fetched
        self._version: int | None = None  # the weights that sampled the newest tokens
        self._losses = 0  # workers lost since the last poll
        self._replacing, self._polling = asyncio.Lock(), asyncio.Lock()

    @property
    def name(self) -> str:
        return self.handle.name

    def submit(self, requests: list[Completion]) -> None:
        """Queue requests for the next poll; their tokens grow as they are sampled."""
        self.requests |= {(r.group, r.index): r for r in requests}
        for request in requests:
            self.unfinished[kind_of(request)] += 1
        self._unsent += requests
        self._submitted.set()
        self.changed()

    async def started(self) -> None:
        """Wait until the worker can be called; raises `WorkerLost` if it cannot be started."""
        handle = await self._worker()
        try:
            await started(handle, Limit.of(self.config.timeouts, "start"))
        except WorkerLost as lost:
            await self._replace(handle, lost)

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished, or `poll` has completions to return."""
        return bool(self.requests or self._ended[TRAINING])

    async def wait_for_work(self) -> None:
        """Wait until it `has_work`."""
        while not self.has_work:
            self._submitted.clear()
            await self._submitted.wait()

    def has(self, kind: int) -> bool:
        """`has_work`, of one kind."""
        return bool(self.unfinished[kind] or self._ended[kind])

    async def poll(self, kind: int = TRAINING) -> list[Completion]:
        """Return the requests of a kind whose turn has ended; if there are none yet, wait for the
        next few decode steps. May return none, e.g. if the worker was lost. Several kinds may be
        waited for at once: each poll of the worker serves all.

        Raises:
            WorkerLost: the worker cannot be replaced.
        """
        if not self._ended[kind]:
            await self._next_poll()
        ended, self._ended[kind] = self._ended[kind], []
        for request, completed in ended:
            request.take_turn(completed)
        return [request for request, _ in ended]

    def cancel(self, group: int) -> None:
        """Drop the requests of a client's group; no other group may have its number."""
        self._ended[ASKED] = [pair for pair in self._ended[ASKED] if pair[0].group != group]
        keys = [key for key in self.requests if key[0] == group]
        if not keys:
            return
        for key in keys:
            del self.requests[key]
        self.unfinished[ASKED] -= len(keys)
        self.handle.submit("cancel", group)  # after the polls that may carry its requests
        self.changed()

    def _knows(self, request: Completion) -> bool:
        """False if a request was cancelled."""
        return self.requests.get((request.group, request.index)) is request

    async def clear(self) -> None:
        """Drop all unfinished requests."""
        for future, _ in self._polls:
            future.cancel()
        self._polls.clear()
        self.requests, self._unsent, self._ended = {}, [], [[], [], []]
        self.unfinished = [0, 0, 0]
        self.changed()
        await self.ask("control", "cancel_all")

    async def _next_poll(self) -> None:
        """Take the answer of the oldest of `AHEAD` polls."""
        async with self._polling:
            handle = await self._worker()
            while len(self._polls) < AHEAD:
                known, self._unsent = [r for r in self._unsent if self._knows(r)], []
                # Copies, since the tokens of the controller's requests grow.
                requests = [replace(r.copy(), turns=[], earlier=[], opened=()) for r in known]
                seconds = poll_seconds(self.config)
                self._polls.append((handle.submit("poll", requests, seconds), known))
            limit, (future, _) = Limit.of(self.config.timeouts, "generation"), self._polls.popleft()
            try:
                progress = await answer(handle, "poll", future, limit=limit)
            except WorkerLost as lost:
                await self._replace(handle, lost)
                return
            if handle is self.handle:  # not lost meanwhile, in another call
                self._losses = 0
                self._record(progress)

    async def ask(self, limit: str, method: str, *args: Any) -> Any:
        """Make any other call; if the worker is lost, repeat the call with the replacement."""
        while True:
            handle = await self._worker()
            try:
                return await self._call(handle, limit, method, *args)
            except WorkerLost as lost:
                await self._replace(handle, lost)

    async def fetch(self, version: int, weights: Weights) -> None:
        """Have the worker copy and check new weights while it generates under the old ones."""
        if self.config.replaces_generators:
            self._weights = version, weights
        while self._fetched is None or self._fetched < version:
            handle = await self._worker()
            try:
                await self._fetch(handle, version, weights)
            except WorkerLost as lost:
                await self._replace(handle, lost)

    async def update(self, version: int, weights: Weights) -> float:
        """Replace the weights between two decode steps, once they have been fetched; returns the
        pause in seconds."""
        await self.fetch(version, weights)
        # The swap goes ahead of polls that the worker has not begun.
        while self._polls and self._polls[-1][0].cancel():
            self._unsent = self._polls.pop()[1] + self._unsent
        return float(await self.ask("weight_update", "swap", version))

    @property
    def seconds_without_work(self) -> float:
        """Seconds so far without requests, because `feed` could not hand out any."""
        since = self._without_work_since
        return self._without_work + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def without_work(self) -> Iterator[None]:
        """Count the time of the block, a wait for requests, as time without work."""
        self._without_work_since = time.monotonic()
        yield
        self._without_work = self.seconds_without_work
        self._without_work_since = None

    async def _worker(self) -> ConcurrentHandle:
        async with self._replacing:
            return self.handle

    async def _fetch(self, handle: ConcurrentHandle, version: int, weights: Weights) -> None:
        fetched = handle.submit_background("fetch", version, weights)
        limit = Limit.of(self.config.timeouts, "weight_update")
        await answer(handle, "fetch", fetched, limit=limit)
        if handle is self.handle:
            self._fetched = version

    async def _call(self, handle: Handle, limit: str, method: str, *args: Any) -> Any:
        return await call(handle, method, *args, limit=Limit.of(self.config.timeouts, limit))

    def _record(self, progress: Progress) -> None:
        grown = progress.grown
        sampled = [grown.versions]  # each new token's version
        for c in progress.completions:
            if (request := self.requests.pop((c.group, c.index), None)) is None:  # cancelled
                continue
            known = len(request.token_ids)
            sampled.append(c.versions[known:])
            self.unfinished[kind_of(c)] -= 1
            self._ended[kind_of(c)].append((request, c))
        for key, new in grown.places():
            if (request := self.requests.get(key)) is not None:
                request.grow(grown, new)
        self.generated_tokens += sum(map(len, sampled))
        self.prefilled_tokens += progress.prefilled_tokens
        self.parked_tokens += progress.parked_tokens
        if progress.completions:
            self.changed()
        # Versions rise with time: the smallest is the oldest, and the largest the newest.
        parts = [np.asarray(new) for new in sampled if new]
        ends = {int(end) for new in parts for end in (new.min(), new.max())}
        for version in sorted(ends):
            if version != self._version:
                self._version = version
                self.log_worker(self.handle.name, version=version)
        self.busy_seconds += progress.busy_seconds - self._worker_busy_seconds
        self._worker_busy_seconds = progress.busy_seconds

    async def _replace(self, gone: Handle, lost: WorkerLost) -> None:
        async with self._replacing:
            if self.handle is not gone:  # already replaced, after another call
                return
            while True:
                self._losses += 1
                if not self.config.replaces_generators or self._losses > STARTS:
                    raise lost
                lost.worker = self.handle.name  # an engine's own process does not know it
                self.replaced(lost)
                self.handle.close()
                self.handle, self._worker_busy_seconds, self._version = self.make(), 0.0, None
                self._fetched = None
                self._polls.clear()
                try:
                    await started(self.handle, Limit.of(self.config.timeouts, "start"))
                    if self._weights is not None:
                        await self._fetch(self.handle, *self._weights)
                        await self._call(self.handle, "weight_update", "swap", self._fetched)
                    break
                except WorkerLost as again:
                    lost = again
            if self.config.placement.lost_sequences == "restart":
                for request in self.requests.values():
                    self._restart(request)
            self._unsent = begun_first(self.requests.values())
            begun = [[r.group, r.index, len(r.token_ids)] for r in self._unsent if r.token_ids]
            self.log_worker(self.handle.name, continues=begun)

    def _restart(self, request: Completion) -> None:
        """Forget the tokens of a request's current turn, and that its thoughts were interrupted."""
        request.keep(request.turn_start)
        interruption = self.config.generator.interruption
        if interruption and kind_of(request) == TRAINING:
            limit = thought_limit(interruption, request.seed)
            request.sampling = replace(request.sampling, max_tokens=limit)


def poll_seconds(config: Config) -> float:
    """Shortest duration of a generator's next poll, in seconds.

    Many generators are polled less often, so that the controller's work does not grow with their
    number. The durations vary, so that polls which began together do not end together. 0 in a
    synchronous run, which must not depend on time.
    """
    generators = config.generator.workers
    if generators <= FEW or not config.pipeline.max_staleness:
        return 0.0
    return generators / POLLS_PER_SECOND * random.uniform(0.5, 1.5)


def kind_of(item: Completion) -> int:
    """The kind of a request."""
    return (item.group < 0) + (item.group <= FIRST_ASKED)


def begun_first(requests: Iterable[Completion]) -> list[Completion]:
    """Requests in order, but those with tokens first: a sequence that was in flight should not wait
    behind new ones."""
    return sorted(requests, key=lambda request: not request.token_ids)
