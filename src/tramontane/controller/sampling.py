"""Sampling outside of training, on a pool of generators."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from tramontane.controller.conversations import Conversations
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.pooled_generator import ASKED, EVALUATION, FIRST_ASKED, PooledGenerator
from tramontane.errors import InputError
from tramontane.status import Status
from tramontane.types import Completion, Problem, SamplingParams


class Sampler:
    """Samples what is not trained on, on generators that training or clients share: the completions
    of an evaluation, and what the clients of an endpoint ask for. A lost generator is replaced, and
    its requests continue. A worker that asks a model of its own, such as a judge, has
    `asking.checkpoint` (docs/architecture.md).

    Args:
        generators: have slots for the longest request.
        kind: the kind of its requests; each sampler of these generators has a different one.
        limit: maximum number of completions of clients that are sampled at once; further requests
            wait, in order. None: as many as are asked for.

    Attributes:
        failed: holds the error of a generator that cannot be replaced. It is also raised wherever a
            completion is awaited.
    """

    def __init__(
        self, generators: GeneratorPool, kind: int = EVALUATION, limit: int | None = None
    ) -> None:
        self._generators, self._kind = generators, kind
        self._limit, self._room = limit, _Room(limit)
        self._groups = count(FIRST_ASKED, -1)  # of clients' requests
        self._waiting: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self._polls: dict[PooledGenerator, asyncio.Task[None]] = {}
        self._report = asyncio.Event()  # of the next poll
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit(self, requests: Sequence[Completion]) -> list[asyncio.Future[Completion]]:
        """Submit requests; returns a future for each one's completion."""
        if self.failed.done():
            self.failed.result()
        new = asyncio.get_running_loop().create_future
        futures = {(r.group, r.index): new() for r in requests}
        self._waiting |= futures
        self._generators.submit([*requests])
        for generator in self._generators:
            if generator.has(self._kind) and generator not in self._polls:
                self._polls[generator] = asyncio.create_task(self._poll(generator))
        return [*futures.values()]

    async def complete(
        self,
        problem: Problem,
        requests: Sequence[Completion],
        conversations: Conversations,
    ) -> list[Completion]:
        """The completions of a problem's requests, in order; their environments, if any, begin and
        answer them.

        Raises:
            WorkerLost: a generator, or a process of environments, cannot be replaced.
        """
        if not conversations.converses:
            completions = await asyncio.gather(*self.submit(requests))
            for completion in completions:
                completion.move(Status.ENDED)
            return completions
        seed = requests[0].seed  # environments of one problem begin alike
        begun = [
            Completion.requested(r.group, r.index, [], seed + r.index, r.sampling) for r in requests
        ]
        await asyncio.gather(*(self._converse(problem, r, conversations) for r in begun))
        return begun

    async def _converse(
        self, problem: Problem, completion: Completion, conversations: Conversations
    ) -> None:
        limit = completion.sampling.max_tokens
        await conversations.answer(limit, problem, completion)
        while completion.status is not Status.ENDED:
            await self.submit([completion])[0]
            completion.move(Status.STEPPING)
            await conversations.answer(limit, problem, completion)

    def sample(
        self,
        prompt_ids: list[int],
        n: int,
        seed: int,
        sampling: SamplingParams,
        images: Sequence[str] = (),
    ) -> AsyncGenerator[Sequence[Completion], None]:
        """Yield the `n` completions of a client's prompt whenever they have new tokens, until all
        have ended. Closing the generator earlier drops them.

        Raises:
            InputError: more completions than are sampled at once.
        """
        if self._limit is not None and n > self._limit:
            raise InputError(
                f"n: at most {self._limit} completions are sampled at once "
                f"(generator.serve.completions), not {n}"
            )
        group, seeds = next(self._groups), range(seed, seed + n)
        return self._sample(Completion.for_seeds(group, prompt_ids, seeds, sampling, images))

    async def _sample(
        self, requests: Sequence[Completion]
    ) -> AsyncGenerator[Sequence[Completion], None]:
        async with self._room.of(len(requests)):
            # Each report is known before its tokens are read: those of a later one are not missed.
            report = self._report
            try:
                futures = self.submit(requests)
                while True:
                    await report.wait()
                    report, pairs = self._report, zip(futures, requests, strict=True)
                    ended = all(future.done() for future in futures)
                    yield [f.result() if f.done() else r for f, r in pairs]
                    if ended:
                        for request in requests:
                            request.move(Status.ENDED)
                        return
            finally:
                self._generators.cancel(requests[0].group)
                for request in requests:
                    self._waiting.pop((request.group, request.index), None)

    async def _poll(self, generator: PooledGenerator) -> None:
        """Take what one generator samples while it has requests; the pipeline shares its polls."""
        try:
            while generator.has(self._kind):
                for completion in await generator.poll(self._kind):
                    waiting = self._waiting.pop((completion.group, completion.index))
                    if not waiting.done():
                        waiting.set_result(completion)
                self._tell()
        except Exception as error:  # e.g. `WorkerLost`
            futures: list[asyncio.Future[Any]] = [self.failed, *self._waiting.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # not all are awaited
            self._tell()
        del self._polls[generator]

    def _tell(self) -> None:
        report, self._report = self._report, asyncio.Event()
        report.set()

    async def aclose(self) -> None:
        """End the polls."""
        polls = [*self._polls.values()]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def EndpointSampler(
    generators: GeneratorPool, max_len: int, vocab: int, limit: int | None = None
) -> Sampler:
    """The sampler of an endpoint's clients, by the name and with the arguments that it had in
    0.1.0; `max_len` and `vocab` are not read."""
    return Sampler(generators, ASKED, limit)


class _Room:
    """Limits the number of completions sampled at once. Requests are admitted in the order in
    which they came, so that small ones do not overtake a large one forever."""

    def __init__(self, limit: int | None) -> None:
        self._free = math.inf if limit is None else limit
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, n: int) -> AsyncIterator[None]:
        """Context manager: room for `n` completions."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((n, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._free += n
            self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            n, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= n
                turn.set_result(None)
