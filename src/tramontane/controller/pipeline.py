"""The controller: Magistral's asynchronous loop (arXiv 2506.10910, section 3, figure 3) as code.

Four small loops around three kinds of workers, none of which waits for another:

    feed ──requests──▶ generators ──completions──▶ collect ──groups──▶ verifiers
      ▲                    ▲                                               │
      │                    └──weights── train ◀──batches── batch ◀─────────┘

State is shared by the loops and touched only between awaits, so there are no locks around it.
Every wait is `_until` (a condition, with a name and a timeout) or on a worker, likewise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tramontane.config import Config, PipelineConfig
from tramontane.controller.generators import GeneratorPool, PooledGenerator
from tramontane.controller.groups import OpenGroup
from tramontane.controller.ledger import Ledger
from tramontane.controller.observer import Observer, Update
from tramontane.models.weights import Weights
from tramontane.placement import Handle, Limit, WorkerStalled, call
from tramontane.types import Batch, Problem, Verdict


class Verifiers(Protocol):
    """Completions of one problem in, their verdicts out; `lengths` are l_max and l_cache."""

    def score(
        self, problem: Problem, responses: list[tuple[str, int]], lengths: tuple[int, int]
    ) -> Any: ...

    def stats(self) -> Any: ...


class Pipeline:
    """Runs `config.pipeline.updates` updates over the given workers, stage by stage.

    Invariants: at most `n_async` completions are in flight; a batch is exactly `n_batch`
    completions of whole groups; none is dropped for its length; no trained token is more than
    `max_staleness` versions old; every problem handed out is trained on, filtered with a recorded
    reason, or in the ledger's snapshot.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        generators: GeneratorPool,
        verifiers: Verifiers,
        trainer: Handle,
        new_weights: Callable[[], Weights],
        observer: Observer,
    ) -> None:
        self.timeouts, self.ledger = config.timeouts, ledger
        self.generators, self.verifiers, self.trainer = generators, verifiers, trainer
        self.new_weights, self.observer = new_weights, observer
        self.batches: asyncio.Queue[Batch] = asyncio.Queue(maxsize=1)
        self.stopping = False
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loops, and what they began

    @property
    def sizes(self) -> PipelineConfig:
        """Pipeline sizes of the current stage."""
        return self.ledger.sizes

    @property
    def version(self) -> int:
        return self.ledger.trained_version

    def snapshot(self) -> dict[str, Any]:
        return self.ledger.snapshot()

    def problem_records(self) -> Iterable[dict[str, Any]]:
        return self.ledger.problems.records()

    async def run(self) -> None:
        """Run all loops until `train` is done, or until one fails: its error is raised."""
        for group in self.ledger.outstanding.values():  # restored: back to where they were
            self.generators.submit(group.requests)
        for group in self.ledger.ungraded():
            self._grade_soon(group)
        self._hand_out()
        loops = [self.feed(), self.batch(), *(self.collect(g) for g in self.generators)]
        self._tasks |= {asyncio.create_task(loop) for loop in loops}
        train = asyncio.create_task(self.train())
        try:
            while not train.done():
                # A timeout, so that tasks begun meanwhile are looked at too.
                done, _ = await asyncio.wait(
                    [*self._tasks, train], timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                self._tasks -= done
        finally:
            tasks = [*self._tasks, train]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def feed(self) -> None:
        """Hand out problems. Waits for room among `n_async` and under the staleness bound, or for
        the stage's end; unblocked by `collect` (a completion ends, a group is filtered) and `train`
        (new weights).
        """
        while True:
            await self._until(
                lambda: self._room() or self.ledger.stage_is_over, "feed: room to hand out a group"
            )
            if self.ledger.stage_is_over:
                await self._move_on()
                if self.stopping:
                    return
            self._hand_out()
            await self._notify()

    async def collect(self, generator: PooledGenerator) -> None:
        """Take one generator's completions as they end, and have each group graded once it is
        whole. Waits for the generator; unblocked by `feed` (it has something to do).

        A generator that is out of work waits only where no group may be handed out: what can be
        is in its mailbox before its next poll.
        """
        while True:
            if not generator.requests:
                with generator.without_work():
                    await self._until(lambda: generator.requests, "collect: something in flight")
            for completion in await generator.poll():
                if group := self.ledger.take(completion):
                    self._grade_soon(group)
            self._hand_out()
            await self._notify()

    async def batch(self) -> None:
        """Form batches. Waits for enough graded groups, those about to be too old among them;
        unblocked by `collect`. The queue holds one batch: a trainer that lags blocks this loop,
        and through the staleness bound `feed`."""
        while self.ledger.next_version < self.sizes.updates:
            await self._until(self.ledger.choice, "batch: enough graded groups")
            batch = self.ledger.batch()
            await self._notify()
            await self.batches.put(batch)

    async def train(self) -> None:
        """Train on each batch. Waits for a batch; unblocked by `batch`. Ends the run.

        What follows an update goes on beside the next one, whose batch was chosen before: its
        record, and where weights are copied to be sent, their way to the generators.
        """
        ledger, following = self.ledger, None
        limit = Limit.of(self.timeouts, "training")
        while ledger.trained_version < self.sizes.updates and not self.stopping:
            await self._until(
                lambda: not self.batches.empty() or self.stopping, "train: a batch to train on"
            )
            if self.stopping:
                break
            batch = self.batches.get_nowait()
            metrics = await call(self.trainer, "step", batch.train_batch(), limit=limit)
            busy = (await call(self.trainer, "stats", limit=limit))["busy_seconds"]
            if following is not None:  # so that one copy of the weights at most is on its way
                await following
            ledger.trained_version += 1
            following = asyncio.create_task(self._follow(batch, metrics, busy, await self._send()))
            self._tasks.add(following)
            if self.observer.holds(ledger.trained_version):
                await following
        if following is not None:
            await following
        await self.observer.ended(self)

    async def _follow(
        self, batch: Batch, metrics: dict[str, Any], busy: float, sending: asyncio.Task[float]
    ) -> None:
        """Once the new weights are with the generators: what depends on it, and the observer."""
        ledger, number = self.ledger, batch.version + 1
        filtered, metrics = ledger.trained(batch), metrics | ledger.counts
        update = Update(number, batch, filtered, metrics, busy, await sending)
        held = self.observer.holds(number)
        if not held:
            ledger.generator_version = number
            await self._notify()
        await self.observer.trained(update, self)
        if held:
            # Only now may `feed` count on the new weights: so a synchronous run has nothing in
            # flight while the observer takes a checkpoint.
            ledger.generator_version = number
            await self._notify()

    async def send_weights(self) -> float:
        """Trainer → generators, between two decode steps; returns the pause in seconds."""
        return await (await self._send())

    async def _send(self) -> asyncio.Task[float]:
        """Publish the trainer's weights; returns their sending, once the trainer may step on."""
        limit = Limit.of(self.timeouts, "weight_update")
        weights: Weights = await call(self.trainer, "publish", self.new_weights(), limit=limit)
        sending = asyncio.create_task(self.generators.update(self.ledger.trained_version, weights))
        self._tasks.add(sending)
        if weights.borrowed:
            await sending
        return sending

    async def _move_on(self) -> None:
        """To the next stage, or the end of a run without problems left; nothing is in flight."""
        ledger, stages = self.ledger, self.ledger.stages
        if stages.last:
            self.observer.happened(f"no problem is left after update {ledger.trained_version}")
            await self.stop()
        else:
            await self.generators.resize(stages.configs[stages.number + 1])
            self.observer.happened(ledger.move_on())

    async def stop(self) -> None:
        """End `run` cleanly after the update under way."""
        self.stopping = True
        await self._notify()

    def _room(self) -> int:
        """Groups to hand out now."""
        return self.ledger.room(self.generators.in_flight)

    def _hand_out(self) -> None:
        if room := self._room():
            for group in self.ledger.open(room):
                self.generators.submit(group.requests)

    def _grade_soon(self, group: OpenGroup) -> None:
        self._tasks.add(asyncio.create_task(self._grade(group)))

    async def _grade(self, group: OpenGroup) -> None:
        ledger = self.ledger
        ledger.grade(group, await self._verdicts(group))
        self.observer.graded(len(ledger.ready), [why for _, why in ledger.filtered])
        await self._notify()

    async def _verdicts(self, group: OpenGroup) -> list[Verdict]:
        """Wait for a group's verdicts for as long as the verifiers give any at all.

        One that hangs is found by whoever asked it, after `verification`, and what takes its place
        has `start` to begin: only then is it too late.
        """
        responses = [(c.text, len(c.token_ids)) for c in group.group().completions]
        lengths = self.sizes.l_max, self.sizes.l_cache
        future = asyncio.wrap_future(self.verifiers.score(group.problem, responses, lengths))
        limit, seen = Limit.of(self.timeouts, "verification", "start"), -1
        while not future.done():
            if (graded := self.verifiers.stats().verdicts) == seen:
                raise WorkerStalled(f"no verdict within {limit.seconds:g} s ({limit.key})")
            seen = graded
            await asyncio.wait({future}, timeout=limit.seconds)
        verdicts: list[Verdict] = future.result()
        return verdicts

    async def _until(self, condition: Callable[[], Any], name: str) -> None:
        """Wait until `condition()` is true; it is looked at whenever something changed."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(condition()))

        try:
            await asyncio.wait_for(wait(), self.timeouts.batch)
        except asyncio.TimeoutError:
            ledger = self.ledger
            raise WorkerStalled(
                f"waited {self.timeouts.batch:g} s (timeouts.batch) for {name}; "
                f"{self.generators.in_flight} completions in flight, {len(ledger.ready)} groups "
                f"graded, {len(ledger.filtered)} filtered since update {ledger.trained_version}"
                + (f" (the last: {ledger.filtered[-1][1]})" if ledger.filtered else "")
            ) from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
