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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tramontane.config import Config
from tramontane.generator.pool import GeneratorPool, PooledGenerator
from tramontane.groups import OpenGroup, pack, unpack
from tramontane.placement import Handle, Limit, WorkerStalled, call
from tramontane.staleness import choose, room
from tramontane.types import (
    Batch,
    Completion,
    Group,
    Problem,
    Request,
    SamplingParams,
    Verdict,
)
from tramontane.weights import LocalWeights, Weights

HOPELESS = 64  # groups in a row without a verdict, after which a run gives up


class Problems(Protocol):
    """Where problems come from, without end."""

    def next(self) -> Problem: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Verifiers(Protocol):
    """Completions of one problem in, their verdicts out."""

    def score(self, problem: Problem, responses: list[tuple[str, int]]) -> Any: ...

    def stats(self) -> Any: ...


class Observer(Protocol):
    """Who is told what happened; the run folder and the display hang on it.

    `graded` when a group is; `trained` after each update, `ended` once after the last: both may
    take a `snapshot`.
    """

    def graded(self, ready: int, filtered: list[str]) -> None: ...

    async def trained(self, update: Update) -> None: ...

    async def ended(self) -> None: ...


@dataclass
class Update:
    """One update done: the batch, what was filtered since the one before, the trainer's metrics,
    and the longest that a generator stood still for the new weights, in seconds."""

    number: int
    batch: Batch
    filtered: list[tuple[Group, str]]
    metrics: dict[str, Any]
    pause_seconds: float


class Pipeline:
    """Runs `config.pipeline.updates` updates over the given workers.

    Invariants: at most `n_async` completions are in flight; a batch is exactly `n_batch`
    completions of whole groups; none is dropped for its length; no trained token is more than
    `max_staleness` versions old; every problem handed out is trained on, filtered with a recorded
    reason, or in `snapshot()`.
    """

    def __init__(
        self,
        config: Config,
        generators: GeneratorPool,
        trainer: Handle,
        verifiers: Verifiers,
        problems: Problems,
        encode: Callable[[Problem], list[int]],
        observer: Observer,
        new_weights: Callable[[], Weights] = LocalWeights,
    ) -> None:
        self.config, self.sizes, self.timeouts = config, config.pipeline, config.timeouts
        self.generators, self.trainer, self.verifiers = generators, trainer, verifiers
        self.new_weights = new_weights
        self.problems, self.encode, self.observer = problems, encode, observer
        self.sampling = SamplingParams(self.sizes.l_max, config.generator.temperature)

        self.trained_version = 0  # updates done
        self.generator_version = 0  # the weights that all generators sample with now
        self.next_version = 0  # the version that the next batch will be trained at
        self.next_group = 0
        self.outstanding: dict[int, OpenGroup] = {}  # handed out, neither batched nor filtered
        self.ready: list[int] = []  # of those, graded and kept, in order of completion
        self.batched: dict[int, OpenGroup] = {}  # in a batch that is not trained yet
        self.filtered: list[tuple[OpenGroup, str]] = []  # since the last update, with the reason
        self.batches: asyncio.Queue[Batch] = asyncio.Queue(maxsize=1)
        self.stopping = False
        self._changed = asyncio.Condition()
        self._round: dict[str, Any] = {}  # the state before a synchronous round
        self._tasks: set[asyncio.Task[None]] = set()  # the loops, and groups being graded

    @property
    def in_flight(self) -> int:
        """Completions in the generators."""
        return self.generators.in_flight

    async def run(self) -> None:
        """Run all loops until `train` is done, or until one fails: its error is raised."""
        loops = [self.feed(), self.batch(), *(self.collect(g) for g in self.generators)]
        self._tasks |= {asyncio.create_task(loop) for loop in loops}
        for group in self.outstanding.values():  # restored
            if not group.requests and not group.verdicts:
                self._grade_soon(group)
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
        """Hand out problems. Waits for room among `n_async` and under the staleness bound;
        unblocked by `collect` (a completion ends, a group is filtered) and `train` (new weights).
        """
        while True:
            await self._until(self._room, "feed: room to hand out a group")
            if self.sizes.max_staleness == 0:
                self._round = self._state()
            for _ in range(self._room()):
                self.generators.submit(self._open(self.problems.next()).requests)
            await self._notify()

    async def collect(self, generator: PooledGenerator) -> None:
        """Take one generator's completions as they end, and have each group graded once it is
        whole. Waits for the generator; unblocked by `feed` (it has something to do)."""
        while True:
            await self._until(lambda: generator.requests, "collect: something in flight")
            for completion in await generator.poll():
                self._take(completion)
            await self._notify()

    async def batch(self) -> None:
        """Form batches. Waits for enough graded groups, those about to be too old among them;
        unblocked by `collect`. The queue holds one batch: a trainer that lags blocks this loop,
        and through the staleness bound `feed`."""
        while self.next_version < self.sizes.updates:
            await self._until(self._choice, "batch: enough graded groups")
            groups = [self.outstanding.pop(i) for i in sorted(self._choice())]
            self.batched.update((g.id, g) for g in groups)
            self.ready = [i for i in self.ready if i not in self.batched]
            batch = Batch(self.next_version, [g.group() for g in groups])
            self.next_version += 1
            await self._notify()
            await self.batches.put(batch)

    async def train(self) -> None:
        """Train on each batch and send the new weights to the generators, whose sequences stay in
        flight. Waits for a batch; unblocked by `batch`. Ends the run."""
        while self.trained_version < self.sizes.updates and not self.stopping:
            await self._until(
                lambda: not self.batches.empty() or self.stopping, "train: a batch to train on"
            )
            if self.stopping:
                break
            batch = self.batches.get_nowait()
            limit = Limit.of(self.timeouts, "training")
            metrics = await call(self.trainer, "step", batch, limit=limit)
            self.trained_version += 1
            pause = await self.send_weights()
            for group in batch.groups:
                del self.batched[group.id]
            filtered, self.filtered = [(g.group(), why) for g, why in self.filtered], []
            await self.observer.trained(
                Update(self.trained_version, batch, filtered, metrics, pause)
            )
            # Only now may `feed` count on the new weights: so a synchronous run has nothing in
            # flight while the observer takes a checkpoint.
            self.generator_version = self.trained_version
            await self._notify()
        await self.observer.ended()

    async def send_weights(self) -> float:
        """Trainer → generators, between two decode steps; returns the pause in seconds."""
        limit = Limit.of(self.timeouts, "weight_update")
        weights = await call(self.trainer, "publish", self.new_weights(), limit=limit)
        return await self.generators.update(self.trained_version, weights)

    async def stop(self) -> None:
        """End `run` cleanly after the update under way."""
        self.stopping = True
        await self._notify()

    def snapshot(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the trainer's own state: JSON-able.

        Of a synchronous round under way, the state before it: begun again as a whole, it gives the
        same bits, which completions continued from their last token would not.
        """
        if self.sizes.max_staleness == 0 and len(self.ready) < len(self.outstanding):
            return self._round
        return self._state()

    def _state(self) -> dict[str, Any]:
        groups = [*self.batched.values(), *self.outstanding.values()]
        return {
            "version": self.trained_version,
            "next_group": self.next_group,
            "problems": self.problems.state(),
            "groups": [pack(group) for group in groups],
            "filtered": [[pack(group), why] for group, why in self.filtered],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `snapshot`; completions begun go on from their last token."""
        version = state["version"]
        self.trained_version = self.generator_version = self.next_version = version
        self.next_group = state["next_group"]
        self.problems.load_state(state["problems"])
        self.filtered = [(unpack(row), why) for row, why in state["filtered"]]
        for row in state["groups"]:
            group = unpack(row)
            self.outstanding[group.id] = group
            self.generators.submit(group.requests)
            if group.verdicts:
                self.ready.append(group.id)

    def _room(self) -> int:
        """Groups to hand out now."""
        sizes = self.sizes
        free = (sizes.n_async - self.in_flight) // sizes.group_size
        allowed = room(
            len(self.outstanding),
            self.generator_version,
            self.next_version,
            sizes.groups_per_batch,
            sizes.max_staleness,
        )
        # The last batches need no more than this; what is left over is in the last checkpoint.
        useful = sizes.groups_per_batch * (sizes.updates - self.next_version)
        if sizes.max_staleness == 0 and len(self.ready) < len(self.outstanding):
            return 0  # synchronous: in whole rounds, so that timing decides nothing
        return max(0, min(free, allowed, useful - len(self.outstanding)))

    def _open(self, problem: Problem) -> OpenGroup:
        number, self.next_group = self.next_group, self.next_group + 1
        prompt = self.encode(problem)
        requests = [
            Request(number, i, prompt, _seed(self.config.seed, number, i), self.sampling)
            for i in range(self.sizes.group_size)
        ]
        deadline = self.generator_version + self.sizes.max_staleness
        group = self.outstanding[number] = OpenGroup(number, problem, deadline, requests)
        return group

    def _take(self, completion: Completion) -> None:
        group = self.outstanding[completion.group]
        group.completions[completion.index] = completion
        group.requests = [r for r in group.requests if r.index != completion.index]
        if not group.requests:
            self._grade_soon(group)

    def _grade_soon(self, group: OpenGroup) -> None:
        self._tasks.add(asyncio.create_task(self._grade(group)))

    async def _grade(self, group: OpenGroup) -> None:
        """Grade a whole group; keep it if it can teach anything (paper: section 2.1, diversity)."""
        group.verdicts = await self._verdicts(group)
        reason = self._why_filtered(group.verdicts)
        if reason is None:
            self.ready.append(group.id)
        else:
            del self.outstanding[group.id]
            self.filtered.append((group, reason))
            self._check_verifiers()
        self.observer.graded(len(self.ready), [why for _, why in self.filtered])
        await self._notify()

    def _check_verifiers(self) -> None:
        reasons = [why for _, why in self.filtered[-HOPELESS:]]
        if len(reasons) == HOPELESS and all(why.startswith("unscorable") for why in reasons):
            raise RuntimeError(f"the last {HOPELESS} groups were all {reasons[-1]}")

    async def _verdicts(self, group: OpenGroup) -> list[Verdict]:
        """Wait for a group's verdicts for as long as the verifiers give any at all."""
        responses = [(c.text, len(c.token_ids)) for c in group.group().completions]
        future = asyncio.wrap_future(self.verifiers.score(group.problem, responses))
        limit, seen = Limit.of(self.timeouts, "verification"), -1
        while not future.done():
            if (graded := self.verifiers.stats().verdicts) == seen:
                raise WorkerStalled(f"no verdict within {limit.seconds:g} s ({limit.key})")
            seen = graded
            await asyncio.wait({future}, timeout=limit.seconds)
        return future.result()

    def _why_filtered(self, verdicts: list[Verdict]) -> str | None:
        if unscorable := [v.reason for v in verdicts if v.verdict == "unscorable"]:
            return f"unscorable: {unscorable[0]}"
        if self.sizes.diversity == "none":
            return None
        if self.sizes.diversity == "correctness":
            values = {v.parts["correctness"] for v in verdicts}
        else:
            values = {round(v.reward, 9) for v in verdicts}
        return "no diversity" if len(values) == 1 else None

    def _choice(self) -> list[int]:
        """The groups of the next batch; none where it cannot be formed yet."""
        ids = list(self.outstanding)
        position = {group: i for i, group in enumerate(ids)}
        chosen = choose(
            [g.deadline for g in self.outstanding.values()],
            [position[group] for group in self.ready],
            self.next_version,
            self.sizes.groups_per_batch,
        )
        return [ids[i] for i in chosen or ()]

    async def _until(self, condition: Callable[[], Any], name: str) -> None:
        """Wait until `condition()` is true; it is looked at whenever something changed."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(condition()))

        try:
            await asyncio.wait_for(wait(), self.timeouts.batch)
        except asyncio.TimeoutError:
            raise WorkerStalled(
                f"waited {self.timeouts.batch:g} s (timeouts.batch) for {name}; "
                f"{self.in_flight} completions in flight, {len(self.ready)} groups graded, "
                f"{len(self.filtered)} filtered since update {self.trained_version}"
                + (f" (the last: {self.filtered[-1][1]})" if self.filtered else "")
            ) from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _seed(run: int, group: int, index: int) -> int:
    """A request's seed depends on nothing but its place in the run."""
    return (run * 1_000_003 + group) * 65_537 + index
