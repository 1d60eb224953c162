"""The staleness bound of a whole pipeline whose generators take new weights slowly.

The workers compute nothing. A token's version is that of the weights that its generator held when
it sampled the token, whatever the controller believes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.controller.counting import CountingGenerator
from tests.controller.driven import config, verdict
from tramontane.batches import Batch, TrainBatch
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.observer import Update
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.data.curriculum import Curriculum
from tramontane.models.weights import LocalWeights, Weights
from tramontane.placement import TRAINER, WorkerLost
from tramontane.placement.thread import ThreadHandle
from tramontane.types import Problem, TrainedFigures, Verdict
from tramontane.verifier.pool import PoolStats

SECONDS = 0.03  # of a weight update


class SlowGenerator(CountingGenerator):
    """Holds its old weights for a while after the trainer has sent new ones."""

    def fetch(self, version: int, weights: Any) -> None:
        time.sleep(SECONDS)
        super().fetch(version, weights)

    def swap(self, version: int) -> float:
        time.sleep(SECONDS)
        return super().swap(version)


class Copies(LocalWeights):
    """Weights that travel while the trainer is at its next update."""

    borrowed = False


class CountingTrainer:
    """Counts its updates; `lead` is by how many it is ahead of the controller."""

    def __init__(self, lead: int = 0) -> None:
        self.version = lead

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.version += 1
        return {}

    def learned(self) -> TrainedFigures:
        return TrainedFigures()

    def stats(self) -> dict[str, Any]:
        return {"busy_seconds": 0.0, "version": self.version}

    def publish(self, weights: Weights) -> Weights:
        return weights


class HalfRight:
    """A verifier to whom every second completion of a group is right."""

    def score(
        self, problem: Problem, responses: Any, lengths: Any, progress: Any
    ) -> Future[list[Verdict]]:
        done: Future[list[Verdict]] = Future()
        done.set_result([verdict(bool(n % 2)) for n in range(len(responses))])
        return done

    def time_limit(self, problem: Problem, completions: int) -> float:
        return 1.0

    def stats(self) -> PoolStats:
        return PoolStats()


class Updates(list[Update]):
    """An observer that keeps the updates, and counts the groups that were graded."""

    groups = 0

    def holds(self, update: int) -> bool:
        return False

    async def trained(self, update: Update, pipeline: Pipeline) -> None:
        self.append(update)

    async def ended(self, pipeline: Pipeline) -> None: ...

    def graded(self, *_: Any) -> None:
        self.groups += 1

    def spent(self, *_: Any) -> None: ...

    happened = spent


Annotate = Callable[[Updates, Batch, TrainBatch], Awaitable[None]]


def run(
    train: Path, trainer: CountingTrainer, annotate: Annotate | None = None, **sizes: Any
) -> Updates:
    settings, updates = config(train, pipeline=sizes), Updates()
    annotated = partial(annotate, updates) if annotate else None

    def never(lost: WorkerLost) -> None:
        raise lost

    async def use() -> None:
        generators = GeneratorPool(
            lambda number, *_: ThreadHandle(f"generator {number}", SlowGenerator),
            settings,
            never,
            lambda *_, **__: None,
            max_prompt=4,
        )
        handle = ThreadHandle(TRAINER, lambda: trainer)
        await generators.started()
        await asyncio.wrap_future(handle.started)
        ledger = Ledger(settings, Curriculum(settings.by_stage()), lambda problem: [1])
        workers = Workers(generators, HalfRight(), handle, Copies, annotate=annotated)
        try:
            await Pipeline(settings, ledger, workers, updates).run()
        finally:
            generators.close()
            handle.close()

    asyncio.run(use())
    return updates


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_trained_token_is_older_than_the_bound_while_weights_travel(
    forty: Path, most: int
) -> None:
    ages = [
        update.batch.version - version
        for update in run(forty, CountingTrainer(), max_staleness=most)
        for group in update.batch.groups
        for completion in group.completions
        for version in completion.versions
    ]
    assert len(ages) == 12 * 8 * 10
    assert 0 <= min(ages) and max(ages) == most


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_batch_that_waits_for_its_annotation_holds_up_no_generator(
    forty: Path, most: int
) -> None:
    """While the first batch waits, the generators complete all that the staleness bound admits:
    at `most` 2 the batch's own 8 completions, and `n_async` (16) more."""
    admitted = (most + 1) * 4  # groups
    reached = []

    async def hang(updates: Updates, batch: Batch, made: TrainBatch) -> None:
        if batch.version == 0:
            deadline = time.monotonic() + 20
            while updates.groups < admitted and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            reached.append((updates.groups, len(updates)))

    updates = run(forty, CountingTrainer(), hang, max_staleness=most)
    assert reached == [(admitted, 0)]
    assert len(updates) == 12


def test_a_trainer_that_counts_other_updates_than_the_controller_ends_the_run(forty: Path) -> None:
    message = "the trainer has made 6 updates, the controller 1"
    with pytest.raises(RuntimeError, match=message) as raised:
        run(forty, CountingTrainer(lead=5))
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["raised in the task 'train'"]
