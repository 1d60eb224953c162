"""Samples for an endpoint on a pool of generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

from tramontane.controller.generators import GeneratorPool, PooledGenerator
from tramontane.types import Completion, Request, SamplingParams


class PoolSampler:
    """Samples on a pool's generators for whoever asks; a lost generator is replaced, and its
    requests continue.

    Args:
        generators: have slots of `max_len` tokens.
        max_len: longest prompt plus completion, in tokens.
        vocab: number of tokens of the model.

    Attributes:
        failed: holds the error of a generator that cannot be replaced.
    """

    def __init__(self, generators: GeneratorPool, max_len: int, vocab: int) -> None:
        self._generators, self.max_len, self.vocab = generators, max_len, vocab
        self._groups = count(-1, -1)  # negative: of no training
        self._ended: dict[tuple[int, int], Completion] = {}  # until its group has ended
        self._polls: dict[PooledGenerator, asyncio.Task[None]] = {}
        self._report = asyncio.Event()  # of the next poll
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def sample(
        self, prompt_ids: list[int], n: int, seed: int, sampling: SamplingParams
    ) -> AsyncGenerator[Sequence[Request | Completion], None]:
        """See `environments.endpoint.Sampler`."""
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

    async def _poll(self, generator: PooledGenerator) -> None:
        """Take what one generator samples while it has requests."""
        try:
            while generator.has_evaluation:
                for completion in await generator.poll_evaluation():
                    self._ended[completion.group, completion.index] = completion
                report, self._report = self._report, asyncio.Event()
                report.set()
        except Exception as error:  # e.g. `WorkerLost`; those who wait for tokens raise it
            self.failed.set_exception(error)
            self._report.set()
