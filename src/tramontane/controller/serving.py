"""Samples for an endpoint on a pool of generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

from tramontane.controller.generators import ASKED, FIRST_ASKED, GeneratorPool, PooledGenerator
from tramontane.errors import InputError
from tramontane.types import Completion, Request, SamplingParams


class PoolSampler:
    """Samples on a pool's generators for whoever asks; a lost generator is replaced, and its
    requests continue.

    Args:
        generators: have slots of `max_len` tokens.
        max_len: longest prompt plus completion, in tokens.
        vocab: number of tokens of the model.
        limit: maximum number of completions sampled at once; further requests wait, in order. None:
            as many as are asked for.

    Attributes:
        failed: holds the error of a generator that cannot be replaced.
    """

    def __init__(
        self, generators: GeneratorPool, max_len: int, vocab: int, limit: int | None = None
    ) -> None:
        self._generators, self.max_len, self.vocab = generators, max_len, vocab
        self._limit, self._sampled, self._room = limit, 0, asyncio.Condition()
        self._groups = count(FIRST_ASKED, -1)
        self._ended: dict[tuple[int, int], Completion] = {}  # until its group has ended
        self._polls: dict[PooledGenerator, asyncio.Task[None]] = {}
        self._report = asyncio.Event()  # of the next poll
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sample(
        self, prompt_ids: list[int], n: int, seed: int, sampling: SamplingParams
    ) -> AsyncGenerator[Sequence[Request | Completion], None]:
        """See `environments.endpoint.Sampler`.

        Raises:
            InputError: more completions than are sampled at once.
        """
        if self._limit is not None and n > self._limit:
            raise InputError(
                f"n: at most {self._limit} completions are sampled at once "
                f"(generator.serve.completions), not {n}"
            )
        return self._sample(prompt_ids, n, seed, sampling)

    async def _sample(
        self, prompt_ids: list[int], n: int, seed: int, sampling: SamplingParams
    ) -> AsyncGenerator[Sequence[Request | Completion], None]:
        limit = self._limit
        async with self._room:
            await self._room.wait_for(lambda: limit is None or self._sampled + n <= limit)
            self._sampled += n
        group = next(self._groups)
        requests = [Request(group, i, prompt_ids, seed + i, sampling) for i in range(n)]
        self._generators.submit(requests)
        for generator in self._generators:
            if generator not in self._polls or self._polls[generator].done():
                self._polls[generator] = asyncio.create_task(self._poll(generator))
        try:
            while True:
                await self._report.wait()
                if self.failed.done():
                    self.failed.result()
                found = [self._ended.get((group, r.index), r) for r in requests]
                yield found
                if all(isinstance(each, Completion) for each in found):
                    return
        finally:
            self._generators.cancel(group)
            for request in requests:
                self._ended.pop((group, request.index), None)
            self._sampled -= n
            async with self._room:
                self._room.notify_all()

    async def _poll(self, generator: PooledGenerator) -> None:
        """Take what one generator samples while it has requests."""
        try:
            while generator.has(ASKED):
                for completion in await generator.poll(ASKED):
                    self._ended[completion.group, completion.index] = completion
                report, self._report = self._report, asyncio.Event()
                report.set()
        except Exception as error:  # e.g. `WorkerLost`; those who wait for tokens raise it
            if not self.failed.done():  # by another generator's
                self.failed.set_exception(error)
            self._report.set()
