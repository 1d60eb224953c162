"""The controller: Magistral's asynchronous loop (arXiv 2506.10910, section 3, figure 3) as code.

Four small loops around three kinds of workers; no worker waits for another:

    feed ──requests──▶ generators ──completions──▶ collect ──groups──▶ verifiers
      ▲                    ▲                                               │
      │                    └──weights── train ◀──batches── batch ◀─────────┘

The loops share state and touch it only between awaits, so it needs no locks. Every wait is for a
condition (`waits.Waits`) or for a worker, and has a name and a timeout.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tramontane.batches import Batch, TrainBatch
from tramontane.config import Config, PipelineConfig
from tramontane.controller.conversations import Conversations
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.observer import Activity, Observer, Update
from tramontane.controller.pooled_generator import PooledGenerator
from tramontane.controller.verifiers import Grading, Verifiers
from tramontane.controller.waits import Waits
from tramontane.models.weights import Weights
from tramontane.placement import TRAINER, Handle, Limit, call
from tramontane.status import GroupStatus, Status
from tramontane.types import Completion, Group
from tramontane.verifier.math.normalize import vote

HANDFUL = 32  # groups handed out in one turn of the event loop: encoding prompts takes time


@dataclass(frozen=True)
class Workers:
    """The workers that a pipeline connects.

    `new_weights` makes an empty container that carries one version of the weights from the trainer
    to the generators. `conversations`, if any, have environments answer turns. `annotate` adds
    further inputs to a batch while the one before is trained on, such as a teacher's scores;
    `finish` may change tokens just before the step, when their log-probs have been refreshed.
    """

    generators: GeneratorPool
    verifiers: Verifiers
    trainer: Handle
    new_weights: Callable[[], Weights]
    conversations: Conversations | None = None
    annotate: Callable[[Batch, TrainBatch], Awaitable[None]] | None = None
    finish: Callable[[Batch, TrainBatch], None] | None = None


class Pipeline:
    """Runs `config.pipeline.updates` updates over the given workers, stage by stage.

    Invariants: at most `n_async` completions are in flight; a batch is exactly `n_batch`
    completions of whole groups; none is dropped for its length; no trained token that was sampled
    here is more than `max_staleness` versions old; every problem handed out is trained on, filtered
    with a recorded reason, or in the ledger's snapshot.
    """

    def __init__(
        self, config: Config, ledger: Ledger, workers: Workers, observer: Observer
    ) -> None:
        self.timeouts, self.ledger, self.observer = config.timeouts, ledger, observer
        self.generators, self.trainer = workers.generators, workers.trainer
        self.new_weights, self.conversations = workers.new_weights, workers.conversations
        self.annotate, self.finish = workers.annotate, workers.finish
        self.grading = Grading(workers.verifiers, config.timeouts, config.conversation.reward)
        self.waits = Waits(config.timeouts, ledger, workers.generators)
        self.batches: asyncio.Queue[tuple[Batch, TrainBatch]] = asyncio.Queue(maxsize=1)
        self.stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loops and the tasks that they started
        self._failure: asyncio.Future[None]  # fails with the first task that fails

    @property
    def sizes(self) -> PipelineConfig:
        """Pipeline sizes of the current stage."""
        return self.ledger.sizes

    @property
    def version(self) -> int:
        return self.ledger.trained_version

    async def run(self) -> None:
        """Run all loops until `train` is done; raises the error of the first task that fails."""
        self._failure = asyncio.get_running_loop().create_future()
        # Restored from a snapshot: groups that were in flight first.
        restored = self.ledger.outstanding.values()
        for group in sorted(restored, key=lambda g: not any(r.token_ids for r in g.requests)):
            self._send_on(group.requests)
        for group in self.ledger.groups.of(GroupStatus.GRADED).values():
            self._start(self._grade(group), f"grade group {group.id}")
        self._hand_out()
        self._start(self.feed(), "feed")
        for generator in self.generators:
            self._start(self.collect(generator), f"collect {generator.name}")
        self._start(self.batch(), "batch")
        train = self._start(self.train(), "train")
        try:
            await asyncio.wait({train, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
        finally:
            self._failure.cancel()  # later failures are cancellations
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def feed(self) -> None:
        """Hand out problems. Waits for room among `n_async` and under the staleness bound, or for
        the stage's end; unblocked by `collect` (a completion ends, a group is filtered) and `train`
        (new weights).
        """
        while True:
            await self.waits.until(
                lambda: self.ledger.room() or self.ledger.stage_is_over, "feed: room for a group"
            )
            if self.ledger.stage_is_over:
                await self._end_stage()
                if self.stopped.is_set():
                    return
            self._hand_out()
            self._notify()
            await asyncio.sleep(0)  # let the other loops run

    async def collect(self, generator: PooledGenerator) -> None:
        """Take one generator's completions as they end, and have each complete group graded. Waits
        for the generator; unblocked by `feed` (new requests) and `_converse` (requests of next
        turns).

        A generator waits for requests only while no group may be handed out: a group that may be
        handed out is in the generator's mailbox before its next poll.
        """
        while True:
            if not generator.has_work:
                with generator.without_work(), self._span(generator.name, "wait for requests"):
                    await self.waits.end_of(generator.wait_for_work(), "collect: new requests")
            if not (completions := await generator.poll()):
                continue  # no other loop waits for these
            for completion in completions:
                self.ledger.turn_ended(completion)
            if self.ledger.synchronous:  # the next poll must not depend on environments' time
                if step := self._send_on(completions):
                    await step
            else:
                for completion in completions:
                    self._send_on([completion])
            self._hand_out()
            self._notify()

    async def batch(self) -> None:
        """Form batches. Waits for enough graded groups, including all that would become too old;
        unblocked by `collect`; and for its annotation. The queue holds one batch: a trainer that
        lags blocks this loop, and through the staleness bound `feed`."""
        while self.ledger.next_version < self.sizes.updates:
            await self.waits.until(
                lambda: self.ledger.batch_is_complete, "batch: enough graded groups"
            )
            batch = self.ledger.batch()
            self._notify()  # there may be room for more groups, even while the queue is full
            made = batch.train_batch(vote)
            if self.annotate:
                await self.annotate(batch, made)
            await self.batches.put((batch, made))
            self._notify()

    async def train(self) -> None:
        """Train on each batch. Waits for a batch; unblocked by `batch`. Ends the run.

        The next update, whose batch was chosen before, begins while the current one is still being
        recorded and, if the trainer published a copy, while its weights are on their way to the
        generators.
        """
        ledger, finishing = self.ledger, None
        limit = Limit.of(self.timeouts, "training")
        while ledger.trained_version < self.sizes.updates and not self.stopped.is_set():
            with self._span(TRAINER, "wait for a batch"):
                await self.waits.until(
                    lambda: not self.batches.empty() or self.stopped.is_set(), "train: a batch"
                )
            if self.stopped.is_set():
                break
            batch, made = self.batches.get_nowait()
            with self._span(TRAINER, "step"):
                await ledger.replay.refresh(batch, self.trainer, limit)  # in place
                if self.finish:
                    self.finish(batch, made)
                metrics = await call(self.trainer, "step", made, limit=limit)
            stats = await call(self.trainer, "stats", limit=limit)
            batch.learned = await call(self.trainer, "learned", limit=limit)
            if finishing is not None:  # so that at most one copy of the weights is on its way
                with self._span(TRAINER, "wait for the generators"):
                    await finishing
            ledger.trained_version += 1
            self.check_trainer(stats)
            sending = await self._start_sending()
            finishing = self._start(
                self._finish_update(batch, metrics, stats["busy_seconds"], sending),
                f"finish update {ledger.trained_version}",
            )
            if self.observer.holds(ledger.trained_version):
                with self._span(TRAINER, "wait for the record"):
                    await finishing
        if finishing is not None:
            await finishing
        await self.observer.ended(self)

    async def _finish_update(
        self, batch: Batch, metrics: dict[str, Any], busy: float, sending: asyncio.Task[float]
    ) -> None:
        """Wait until the generators have the new weights; then let `feed` rely on them, and report
        the update to the observer."""
        ledger, number = self.ledger, batch.version + 1
        filtered, metrics = ledger.trained(batch), metrics | ledger.counts
        update = Update(number, batch, filtered, metrics, busy, await sending)
        held = self.observer.holds(number)
        if not held:
            ledger.generator_version = number
            self._notify()
        await self.observer.trained(update, self)
        if held:
            # Only now may `feed` rely on the new weights, so a synchronous run has nothing in
            # flight while the observer takes a checkpoint.
            ledger.generator_version = number
            self._notify()

    def check_trainer(self, stats: Mapping[str, Any]) -> None:
        """Check that the trainer's `stats` count as many updates as the ledger.

        Raises:
            RuntimeError: the counts differ: the trainer's weights are not those of the ledger's
                version.
        """
        if stats["version"] != self.ledger.trained_version:
            raise RuntimeError(
                f"the trainer has made {stats['version']} updates, the controller "
                f"{self.ledger.trained_version}: their states come from two different runs"
            )

    async def send_weights(self) -> float:
        """Send the trainer's weights to the generators; returns their longest pause in seconds."""
        return await (await self._start_sending())

    async def _start_sending(self) -> asyncio.Task[float]:
        """Publish the trainer's weights; returns the sending task once the trainer may step
        again."""
        limit, version = Limit.of(self.timeouts, "weight_update"), self.ledger.trained_version
        weights: Weights = await call(self.trainer, "publish", self.new_weights(), limit=limit)
        if weights.borrowed:
            await self.generators.fetch(version, weights)
        return self._start(self.generators.update(version, weights), f"send weights {version}")

    async def _end_stage(self) -> None:
        """Enter the next stage, or end a run without problems left; nothing is in flight."""
        ledger, stages = self.ledger, self.ledger.stages
        if stages.last:
            self.observer.happened(f"no problem is left after update {ledger.trained_version}")
            self.stop()
        else:
            await self.generators.resize(stages.configs[stages.number + 1])
            self.observer.happened(ledger.begin_next_stage())

    def stop(self) -> None:
        """End `run` cleanly after the update under way."""
        self.stopped.set()
        self._notify()

    def _hand_out(self) -> None:
        """Hand out a handful of groups, or a whole synchronous round at once."""
        if room := self.ledger.room():
            whole = self.ledger.synchronous
            groups = self.ledger.open(room if whole else min(room, HANDFUL))
            for together in [groups] if whole else [[group] for group in groups]:
                self._send_on([request for group in together for request in group.requests])

    def _send_on(self, completions: Sequence[Completion]) -> asyncio.Task[None] | None:
        """Have completions generated, and groups graded once they are complete; returns the task
        that waits for environments, if any must act first."""
        for completion in completions:
            if completion.status is Status.ENDED:
                self._take(completion)
        requests = [c for c in completions if c.status is not Status.ENDED]
        if any(request.status is not Status.SAMPLED for request in requests):
            return self._start(self._converse(requests), f"environments of {requests[0].group}")
        self.generators.submit(requests)
        return None

    async def _converse(self, requests: list[Completion]) -> None:
        """Have environments begin or answer. Waits for the slowest of them, whose step takes at
        most `conversation.step_timeout`."""
        await asyncio.gather(*map(self._answer, requests))
        self._send_on([r for r in requests if r.status is not Status.ENDED])
        self._hand_out()
        self._notify()

    async def _answer(self, request: Completion) -> None:
        """Have one environment act. A conversation that it ends is taken at once: the ledger keeps
        none that has ended among the unfinished ones."""
        assert self.conversations
        problem = self.ledger.outstanding[request.group].problem
        await self.conversations.answer(problem.longest(self.sizes.l_max), problem, request)
        if request.status is Status.ENDED:
            self._take(request)

    def _take(self, completion: Completion) -> None:
        """Record a completion that has ended; a complete group is graded."""
        if group := self.ledger.take(completion):
            self._start(self._grade(group), f"grade group {group.id}")

    def _start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task whose failure ends `run`, named for tracebacks and debuggers."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._failure.done():
            return
        if sys.version_info >= (3, 11):
            error.add_note(f"raised in the task {task.get_name()!r}")
        self._failure.set_exception(error)

    @contextmanager
    def _span(self, worker: str, activity: Activity) -> Iterator[None]:
        """Report the time of the block to the observer as one activity of a worker."""
        began = time.time()
        yield
        self.observer.spent(worker, activity, began)

    async def _grade(self, group: Group) -> None:
        ledger = self.ledger
        verdicts = await self.grading.verdicts(
            group.problem, group.completions, self.sizes, self.version
        )
        filtered = ledger.grade(group, verdicts)
        self.observer.graded(group, filtered, len(ledger.ready))
        self._notify()

    def _notify(self) -> None:
        self.waits.notify()
