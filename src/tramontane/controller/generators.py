"""The generators of a run or an evaluation, which share its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Any

from tramontane.config import Config
from tramontane.controller.pooled_generator import (
    EVALUATION,
    TRAINING,
    PooledGenerator,
    begun_first,
)
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import load_generator
from tramontane.models.weights import Weights
from tramontane.placement.handle import ConcurrentHandle, WorkerLost
from tramontane.placement.place import Placement
from tramontane.types import Completion


class Loads:
    """Unfinished requests of each generator: finds the sums and the least loaded generator without
    a scan.

    Attributes:
        total: unfinished requests of all generators.
        others: how many of these are not training requests.
    """

    def __init__(self, generators: int) -> None:
        self.total = self.others = 0
        self._loads = [(0, 0)] * generators
        self._heap = [(0, number) for number in range(generators)]  # (requests, generator)

    def note(self, number: int, requests: int, others: int) -> None:
        """Set the current load of generator `number`."""
        before = self._loads[number]
        self.total += requests - before[0]
        self.others += others - before[1]
        self._loads[number] = requests, others
        if len(self._heap) > 4 * len(self._loads):  # outdated entries
            self._heap = [(load, n) for n, (load, _) in enumerate(self._loads)]
            heapify(self._heap)
        else:
            heappush(self._heap, (requests, number))

    def of(self, number: int) -> int:
        """Unfinished requests of generator `number`."""
        return self._loads[number][0]

    def least(self) -> int:
        """The generator with the fewest requests; of several, the first."""
        while self._heap[0][0] != self._loads[self._heap[0][1]][0]:
            heappop(self._heap)
        return self._heap[0][1]


class GeneratorPool:
    """`config.generator.workers` generators that share `n_async` completions.

    Evaluation requests, whose groups have negative numbers, share the generators with training and
    do not count towards `n_async`.

    Args:
        make: starts the generator with a given number, number of slots and length of a slot in
            tokens, and returns its handle.
        config: sizes, timeouts, and what to do with a lost worker's sequences.
        replaced: called with each loss of a worker, before its replacement starts.
        log_worker: called with a generator's name and either `version`, when it begins to sample
            under those weights, or `continues`, a replacement's begun requests as a list of
            [group, index, tokens so far].
        max_prompt: length of the longest prompt in tokens.
        evaluated_l_max: longest evaluation completion during training, in tokens; 0 without
            evaluations.
    """

    def __init__(
        self,
        make: Callable[[int, int, int], ConcurrentHandle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
        log_worker: Callable[..., None],
        max_prompt: int,
        evaluated_l_max: int = 0,
    ) -> None:
        self._max_prompt, self._evaluated_l_max = max_prompt, evaluated_l_max
        self._make, self._size = make, self._size_for(config)
        self._synchronous = not config.pipeline.max_staleness
        numbers = range(config.generator.workers)
        self._loads = Loads(len(numbers))
        self._members = [
            PooledGenerator(
                partial(self._start, number),
                config,
                replaced,
                log_worker,
                partial(self._note_load, number),
            )
            for number in numbers
        ]

    def __iter__(self) -> Iterator[PooledGenerator]:
        return iter(self._members)

    @property
    def in_flight(self) -> int:
        """Number of training completions submitted and unfinished."""
        return self._loads.total - self._loads.others

    @property
    def evaluating(self) -> int:
        """Number of evaluation completions submitted and unfinished."""
        return sum(m.unfinished[EVALUATION] for m in self._members)

    @property
    def max_len(self) -> int:
        """Length of a slot, in tokens."""
        return self._size[1]

    async def started(self) -> None:
        """Wait until all generators can be called; raises `WorkerLost` if one cannot be started."""
        await asyncio.gather(*(m.started() for m in self._members))

    def submit(self, requests: list[Completion]) -> None:
        """Give each group to the least loaded generator, since its requests share a prompt; in a
        synchronous run to one that does not depend on time. A request that continues returns to its
        previous generator, which may still have its keys and values, if a slot is free there.

        With at most `n_async` in flight, no generator ever has more than `share(config)` training
        requests. Those beyond its slots or its memory wait in its queue; evaluation requests queue
        behind them.
        """
        for (number, home), members in groupby(requests, key=lambda r: (r.group, self._home(r))):
            group = begun_first(members)
            if self._synchronous:
                chosen = number % len(self._members)
            elif home is not None and self._loads.of(home) + len(group) <= self._size[0]:
                chosen = home
            else:
                chosen = self._loads.least()
            for request in group:
                request.generator = chosen
            self._members[chosen].submit(group)

    @staticmethod
    def _home(request: Completion) -> int | None:
        """The generator that may hold keys and values of a request."""
        return request.generator if request.keep_kv and request.token_ids else None

    def cancel(self, group: int) -> None:
        """Drop the requests of a client's group; no other group may have its number."""
        for member in self._members:
            member.cancel(group)

    async def resize(self, config: Config, longest: int = 0) -> None:
        """Resize all generators for another stage; nothing may be in flight.

        Args:
            config: the config of the stage.
            longest: longest completion in tokens, if it exceeds the stage's.
        """
        self._synchronous = not config.pipeline.max_staleness
        count, length = self._size_for(config)
        size = count, max(length, self._max_prompt + longest)
        if size != self._size:
            self._size = size
            await asyncio.gather(*(m.ask("control", "resize", *size) for m in self._members))

    async def clear(self) -> None:
        """Drop all unfinished requests."""
        await asyncio.gather(*(m.clear() for m in self._members))

    def _note_load(self, number: int) -> None:
        member = self._members[number]
        requests = len(member.requests)
        self._loads.note(number, requests, requests - member.unfinished[TRAINING])

    def _start(self, number: int) -> ConcurrentHandle:
        return self._make(number, *self._size)

    def _size_for(self, config: Config) -> tuple[int, int]:
        """Slots of each generator, and their length in tokens."""
        longest = max(config.pipeline.l_max, self._evaluated_l_max)
        return slots(config), self._max_prompt + longest

    async def fetch(self, version: int, weights: Weights) -> None:
        """Have all generators copy and check new weights while they keep generating."""
        await asyncio.gather(*(m.fetch(version, weights) for m in self._members))

    async def update(self, version: int, weights: Weights) -> float:
        """Replace the weights of each generator once it has fetched the new ones; returns the
        longest pause in seconds."""
        pauses = await asyncio.gather(*(m.update(version, weights) for m in self._members))
        return max(pauses, default=0.0)

    def close(self) -> None:
        for member in self._members:
            member.handle.close()


def share(config: Config) -> int:
    """Maximum number of unfinished completions in each generator, clients' included: a group
    goes to the least loaded of W generators, which has at most (n − G) / W in flight when G more
    fit under n = in_flight + generator.serve.completions."""
    sizes, serve = config.pipeline, config.generator.serve
    asked = serve.completions if serve else 0
    largest = max(sizes.group_size, asked)
    return (sizes.in_flight + asked - largest) // max(1, config.generator.workers) + largest


def slots(config: Config) -> int:
    """Maximum number of completions that each generator decodes at once."""
    return min(config.generator.slots or share(config), share(config))


def generator_maker(
    config: Config, model: str, encoder: PromptEncoder, placement: Placement
) -> Callable[[int, int, int], ConcurrentHandle]:
    """A function that starts a generator of a model, by its number, slots and maximum length."""
    portable: Any = placement.model(model)
    response, beat = encoder.response, config.timeouts.heartbeat

    def make(number: int, slots: int, max_len: int) -> ConcurrentHandle:
        device = placement.seats.generators[number]
        own = config.generator.model_copy(update={"device": device})
        load = partial(load_generator, portable, own, slots, max_len, response, beat)
        return placement.generator(number, load)

    return make
