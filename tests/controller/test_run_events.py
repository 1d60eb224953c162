"""How a whole pipeline begins, continues and ends, over workers that compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.controller.counting import CountingGenerator
from tests.controller.driven import DrivenLedger, config, verdict
from tests.controller.test_bound import Copies, CountingTrainer, HalfRight, Updates
from tests.runs import unheard
from tramontane.batches import Batch, TrainBatch
from tramontane.config import Config
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.observer import Update
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.data.curriculum import Curriculum
from tramontane.models.weights import LocalWeights
from tramontane.placement import TRAINER
from tramontane.placement.thread import ThreadHandle
from tramontane.status import GroupStatus
from tramontane.types import Group, Problem, Verdict


class Noting(Updates):
    """Notes all that happens, in order."""

    def __init__(self, held: tuple[int, ...] = (), stops: int | None = None) -> None:
        self.held, self.stops, self.events = held, stops, list[str]()
        self.spans: list[tuple[str, str]] = []

    def holds(self, update: int) -> bool:
        return update in self.held

    async def trained(self, update: Update, pipeline: Pipeline) -> None:
        await asyncio.sleep(0.02 if update.number in self.held else 0)
        self.events.append(f"recorded {update.number}")
        if update.number in self.held:  # nothing new is handed out meanwhile
            assert pipeline.ledger.generator_version == update.number - 1
        await super().trained(update, pipeline)
        if update.number == self.stops:
            pipeline.stop()

    async def ended(self, pipeline: Pipeline) -> None:
        self.events.append("ended")

    def spent(self, worker: str, activity: str, began: float) -> None:
        self.spans.append((worker, activity))

    def happened(self, event: str) -> None:
        self.events.append(event)


class NotingTrainer(CountingTrainer):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.events.append(f"step {batch.version + 1}")
        return super().step(batch)


class Run:
    """One run; `generators` are its workers."""

    def __init__(self, config: Config, seen: Noting, ledger: Ledger | None = None, **more: Any):
        self.seen, self.generators = seen, list[CountingGenerator]()
        self.ledger = ledger or Ledger(config, Curriculum(config.by_stage()), lambda problem: [1])
        asyncio.run(asyncio.wait_for(self._run(config, more), 60))

    async def _run(self, config: Config, more: dict[str, Any]) -> None:
        pool = GeneratorPool(self._generator, config, unheard, unheard, max_prompt=4)
        trainer = ThreadHandle(TRAINER, lambda: NotingTrainer(self.seen.events))
        weights: Callable[[], Any] = more.pop("new_weights", Copies)
        verifiers = more.pop("verifiers", HalfRight())
        workers = Workers(pool, verifiers, trainer, weights, **more)
        try:
            await Pipeline(config, self.ledger, workers, self.seen).run()
        finally:
            pool.close()
            trainer.close()

    def _generator(self, number: int, *_: int) -> ThreadHandle:
        worker = CountingGenerator()
        self.generators.append(worker)
        return ThreadHandle(f"generator {number}", lambda: worker)


def test_each_batch_is_annotated_and_finished_before_its_step(forty: Path) -> None:
    seen = Noting()

    async def annotate(batch: Batch, made: TrainBatch) -> None:
        seen.events.append(f"annotate {batch.version + 1}")
        assert made.version == batch.version

    def finish(batch: Batch, made: TrainBatch) -> None:
        seen.events.append(f"finish {batch.version + 1}")
        assert made.version == batch.version

    Run(config(forty, pipeline={"updates": 4}), seen, annotate=annotate, finish=finish)
    for number in range(1, 5):
        order = [seen.events.index(f"{what} {number}") for what in ("annotate", "finish", "step")]
        assert order == sorted(order)
        assert seen.events.count(f"finish {number}") == 1
    assert seen.events[-1] == "ended" and [update.number for update in seen] == [1, 2, 3, 4]
    assert {(update.busy_seconds, update.pause_seconds) for update in seen} == {(0.0, 0.0)}
    assert {(TRAINER, "step"), (TRAINER, "wait for a batch")} <= {*seen.spans}


def test_a_held_update_is_recorded_before_the_next_begins(forty: Path) -> None:
    seen = Noting(held=(2, 3))
    Run(config(forty, pipeline={"updates": 4}), seen)
    for number in (2, 3):
        assert seen.events.index(f"recorded {number}") < seen.events.index(f"step {number + 1}")
    assert seen.spans.count((TRAINER, "wait for the record")) == 2


def test_a_synchronous_generator_waits_once_a_round_also_for_held_updates(forty: Path) -> None:
    class Listening(HalfRight):
        def score(
            self, problem: Problem, responses: Any, lengths: Any, progress: Any
        ) -> Future[list[Verdict]]:
            given.append((lengths, progress))
            return super().score(problem, responses, lengths, progress)

    seen, given = Noting(held=(1, 2, 3)), list[tuple[Any, Any]]()
    settings = config(forty, pipeline={"updates": 4, "max_staleness": 0}, timeouts={"batch": 9.0})
    Run(settings, seen, verifiers=Listening())
    assert given == [((10, 2), (update, 4)) for update in range(4) for _ in range(4)]
    assert 3 <= seen.spans.count(("generator 0", "wait for requests")) <= 5


def test_a_run_that_is_stopped_ends_with_the_update_under_way(forty: Path) -> None:
    seen = Noting(held=(2,), stops=2)
    Run(config(forty, pipeline={"updates": 9}), seen)
    assert [update.number for update in seen] == [1, 2]
    assert seen.events[-1] == "ended" and "step 3" not in seen.events


def test_weights_that_are_borrowed_are_fetched_before_the_next_step(forty: Path) -> None:
    class Fetching(CountingGenerator):
        def fetch(self, version: int, weights: Any) -> None:
            super().fetch(version, weights)
            seen.events.append(f"fetch {version}")

    class Borrowing(Run):
        def _generator(self, number: int, *_: int) -> ThreadHandle:
            return ThreadHandle(f"generator {number}", Fetching)

    seen = Noting()
    Borrowing(config(forty, pipeline={"updates": 4}), seen, new_weights=LocalWeights)
    for number in (1, 2, 3):
        assert seen.events.index(f"fetch {number}") < seen.events.index(f"step {number + 1}")


class AllRight(HalfRight):
    def score(self, problem: Problem, responses: Any, *more: Any) -> Future[list[Verdict]]:
        done: Future[list[Verdict]] = Future()
        done.set_result([verdict(True) for _ in responses])
        return done


def test_a_run_ends_when_no_problem_is_left(forty: Path) -> None:
    """Every problem is solved at its first visit, and retired."""
    seen = Noting()
    settings = config(forty, data={"curriculum": {"retire_after": 1}})
    run = Run(settings, seen, verifiers=AllRight())
    assert seen.events == ["no problem is left after update 0", "ended"]
    assert run.ledger.next_group >= 40 and len(run.ledger.filtered) == run.ledger.next_group


def test_the_next_stage_has_generators_of_its_size(forty: Path) -> None:
    stages = [
        {"name": "short", "until": {"updates": 2}},
        {"name": "long", "l_max": 20, "n_async": 24},
    ]
    seen = Noting()
    run = Run(config(forty, stages=stages, pipeline={"updates": 4}), seen)
    assert [w.sizes for w in run.generators] == [[(24, 4 + 20)]]
    begins = "stage 'short' ended after update 2 (2 updates); stage 'long' begins"
    assert begins in seen.events
    lengths = [{c.n_tokens for g in update.batch.groups for c in g.completions} for update in seen]
    assert lengths == [{10}, {10}, {20}, {20}]


def test_a_resumed_run_grades_what_was_whole_and_goes_on_with_what_had_begun(forty: Path) -> None:
    driven = DrivenLedger(config(forty, pipeline={"updates": 2}))
    driven.hand_out()
    driven.complete(4)
    begun = driven.ledger.outstanding[6].requests[1]
    begun.token_ids.append(7)
    begun.logprobs.append(0.0)
    begun.versions.append(0)
    driven.resume()
    assert [*driven.ledger.groups.of(GroupStatus.GRADED)] == [4]
    first: list[tuple[int, int]] = []

    class Listing(Run):
        def _generator(self, number: int, *_: int) -> ThreadHandle:
            class First(CountingGenerator):
                def poll(self, requests: Any, seconds: float = 0.0) -> Any:
                    first.extend((r.group, r.index) for r in requests)
                    return super().poll(requests, seconds)

            return ThreadHandle(f"generator {number}", First)

    seen = Noting()
    Listing(driven.config, seen, driven.ledger)
    assert first[:2] == [(6, 1), (6, 0)]
    assert (4, 0) not in first
    trained: list[Group] = [g for update in seen for g in update.batch.groups]
    assert 4 in {g.id for g in trained}
    assert len({g.id for g in trained}) == len(trained) == 2 * 4
