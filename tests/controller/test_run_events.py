"""How a whole pipeline begins, continues and ends, over workers that compute nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controller.counting import CountingGenerator
from tests.controller.driven import DrivenLedger, config, verdict
from tests.controller.test_bound import Copies, CountingTrainer, HalfRight, Updates
from tests.controller.test_environment_losses import ScriptedHost
from tests.runs import unheard
from tramontane.batches import Batch, TrainBatch
from tramontane.config import Config
from tramontane.controller.conversations import Conversations
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.observer import Update
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.data.curriculum import Curriculum
from tramontane.environments.host import Call
from tramontane.environments.protocol import Continued, Started
from tramontane.models.weights import LocalWeights
from tramontane.placement import TRAINER, WaitTimeout
from tramontane.placement.thread import ThreadHandle
from tramontane.status import GroupStatus
from tramontane.types import Group, Problem, TrainedFigures, TurnRecord, Verdict


class Noting(Updates):
    """Notes all that happens, in order."""

    def __init__(self, held: tuple[int, ...] = (), stops: int | None = None) -> None:
        self.held, self.stops, self.events = held, stops, list[str]()
        self.spans: list[tuple[str, str]] = []
        self.graded_as: dict[int, Any] = {}  # group: why it was filtered, and how many are ready
        self.tasks, self.changes = set[str](), 0

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
        assert isinstance(pipeline, Watched)
        self.events.append("ended")

    def graded(self, group: Group, filtered: Any, ready: int) -> None:
        self.graded_as[group.id] = filtered, ready

    def spent(self, worker: str, activity: str, began: float) -> None:
        assert 0 <= time.time() - began < 60
        self.spans.append((worker, activity))

    def happened(self, event: str) -> None:
        self.events.append(event)


class NotingTrainer(CountingTrainer):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.events.append(f"step {batch.version + 1}")
        return super().step(batch) | {"loss": 0.5 * batch.version}


class Watched(Pipeline):
    """Notes the names of tasks, and how often anything changes."""

    def _notify(self) -> None:
        seen = self.observer
        assert isinstance(seen, Noting) and self.batches.qsize() <= 1
        seen.changes += 1
        super()._notify()

    def _start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = super()._start(coroutine, name)
        assert isinstance(self.observer, Noting)
        self.observer.tasks.add(task.get_name())
        return task


class Run:
    """One run; `generators` are its workers."""

    def __init__(self, config: Config, seen: Noting, ledger: Ledger | None = None, **more: Any):
        self.seen, self.generators = seen, list[CountingGenerator]()
        self.unheard_of: list[Any] = []  # errors that nothing takes
        self.ledger = ledger or Ledger(config, Curriculum(config.by_stage()), lambda problem: [1])
        asyncio.run(asyncio.wait_for(self._run(config, more), 60))

    async def _run(self, config: Config, more: dict[str, Any]) -> None:
        pool = GeneratorPool(self._generator, config, unheard, unheard, max_prompt=4)
        trainer = ThreadHandle(TRAINER, lambda: NotingTrainer(self.seen.events))
        weights: Callable[[], Any] = more.pop("new_weights", Copies)
        verifiers = more.pop("verifiers", HalfRight())
        workers = Workers(pool, verifiers, trainer, weights, **more)
        pipeline = Watched(config, self.ledger, workers, self.seen)
        loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
        loop.set_exception_handler(lambda _, told: self.unheard_of.append(told))
        try:
            await pipeline.run()
        finally:
            assert asyncio.all_tasks() == before and not pipeline._tasks
            assert not self.unheard_of
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

    run = Run(config(forty, pipeline={"updates": 4}), seen, annotate=annotate, finish=finish)
    for number in range(1, 5):
        order = [seen.events.index(f"{what} {number}") for what in ("annotate", "finish", "step")]
        assert order == sorted(order)
        assert seen.events.count(f"finish {number}") == 1
    assert seen.events[-1] == "ended" and [update.number for update in seen] == [1, 2, 3, 4]
    assert {(update.busy_seconds, update.pause_seconds) for update in seen} == {(0.0, 0.0)}
    assert all(update.batch.learned == TrainedFigures() for update in seen)
    assert [update.metrics["loss"] for update in seen] == [0.0, 0.5, 1.0, 1.5]
    assert run.ledger.counts.items() <= seen[-1].metrics.items()
    assert all(update.filtered == [] for update in seen)
    trained = {group.id for update in seen for group in update.batch.groups}
    assert trained <= seen.graded_as.keys()
    assert {filtered for filtered, _ in seen.graded_as.values()} == {None}
    assert all(ready >= 1 for _, ready in seen.graded_as.values())
    spans = {"step", "wait for a batch", "wait for the generators"}
    assert {(TRAINER, activity) for activity in spans} <= {*seen.spans}
    assert seen.tasks >= {"feed", "collect generator 0", "batch", "train", "grade group 0"}
    assert seen.tasks >= {"finish update 1", "send weights 1"}


def test_a_held_update_is_recorded_before_the_next_begins(forty: Path) -> None:
    seen = Noting(held=(2, 3))
    Run(config(forty, pipeline={"updates": 4}), seen)
    for number in (2, 3):
        assert seen.events.index(f"recorded {number}") < seen.events.index(f"step {number + 1}")
    assert seen.spans.count((TRAINER, "wait for the record")) == 2
    assert seen.changes < 500  # no loop asks again and again while an update is recorded


def test_an_update_is_recorded_before_the_second_after_it_begins(forty: Path) -> None:
    class Slow(Noting):
        async def trained(self, update: Update, pipeline: Pipeline) -> None:
            await asyncio.sleep(0.03)
            await super().trained(update, pipeline)

    seen = Slow()
    Run(config(forty, pipeline={"updates": 4}), seen)
    for number in (1, 2):
        assert seen.events.index(f"recorded {number}") < seen.events.index(f"step {number + 2}")


def test_weights_that_travel_as_a_copy_hold_up_no_step(forty: Path) -> None:
    begun = threading.Event()

    class Fetching(CountingGenerator):
        def fetch(self, version: int, weights: Any) -> None:
            assert version > 1 or begun.wait(10)
            super().fetch(version, weights)

    class Slow(Run):
        def _generator(self, number: int, *_: int) -> ThreadHandle:
            return ThreadHandle(f"generator {number}", Fetching)

    class Begun(Noting):
        def spent(self, worker: str, activity: str, began: float) -> None:
            super().spent(worker, activity, began)
            if self.spans.count((TRAINER, "step")) == 2:
                begun.set()

    Slow(config(forty, pipeline={"updates": 3}), Begun())
    assert begun.is_set()


def test_a_wait_that_lasts_too_long_is_named_with_the_state_of_the_run(forty: Path) -> None:
    class Hanging(HalfRight):
        def score(self, *_: Any) -> Future[list[Verdict]]:
            return Future()

    settings = config(forty, timeouts={"batch": 0.1})
    with pytest.raises(
        WaitTimeout, match=r"\(timeouts\.batch\) for .*: .*; .* completions in flight"
    ):
        Run(settings, Noting(), verifiers=Hanging())


async def fails_when_it_is_to_end(batch: Batch, made: TrainBatch) -> None:
    if batch.version:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("at its end")


def test_an_error_ends_the_tasks_and_their_errors_are_not_reported(forty: Path) -> None:
    """The first error is raised; a task that fails when it is to end adds none."""

    def finish(batch: Batch, made: TrainBatch) -> None:
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"):
        Run(config(forty), Noting(), annotate=fails_when_it_is_to_end, finish=finish)


def test_a_task_that_fails_when_a_run_ends_is_not_reported_either(forty: Path) -> None:
    settings = config(forty, pipeline={"updates": 9})
    run = Run(settings, Noting(stops=1), annotate=fails_when_it_is_to_end)
    gc.collect()  # what nothing takes is told then
    assert [update.number for update in run.seen] == [1] and not run.unheard_of


def test_weights_are_sent_before_a_run(forty: Path) -> None:
    class Sending(Run):
        async def _run(self, settings: Config, more: dict[str, Any]) -> None:
            worker = CountingGenerator(pause=0.3)
            make = lambda *_: ThreadHandle("generator 0", lambda: worker)  # noqa: E731
            pool = GeneratorPool(make, settings, unheard, unheard, max_prompt=4)
            trainer = ThreadHandle(TRAINER, CountingTrainer)
            workers = Workers(pool, HalfRight(), trainer, Copies)
            pipeline = Pipeline(settings, self.ledger, workers, self.seen)
            assert await pipeline.send_weights() == 0.3 and worker.fetched == [0]
            pool.close()
            trainer.close()

    Sending(config(forty), Noting())


@pytest.mark.parametrize("bound", [0, 2])
def test_conversations_are_led_to_their_ends_and_graded_by_their_rewards(
    forty: Path, bound: int
) -> None:
    """Two turns each: the first conversation of each group ends with its first."""
    given: list[Any] = []

    def answered(call: Call) -> Started | Continued:
        if call.method == "start":
            assert isinstance(call.arguments[0], Problem)
            return Started([5])
        told, l_max = call.arguments
        assert l_max == 10
        turn = TurnRecord(told.turn_start, len(told.token_ids), 0, "said", reward=0.5)
        if call.key[1] == 0 or len(told.token_ids) > 10:
            return Continued(turn, ending="completed")
        return Continued(turn, put=[6], max_tokens=14)

    class Listening(HalfRight):
        def score(self, problem: Problem, responses: Any, *more: Any) -> Future[list[Verdict]]:
            given.extend(response.earned for response in responses)
            return super().score(problem, responses, *more)

    seen = Noting()
    settings = config(
        forty,
        data={"environment": "tests.controller.talking:Talk"},
        conversation={"reward": "sum"},
        pipeline={"updates": 4, "max_staleness": bound},
    )
    make = lambda number: ThreadHandle("environment", lambda: ScriptedHost(answered))  # noqa: E731
    with Conversations(settings, make, pytest.fail, pytest.fail) as conversations:
        Run(settings, seen, verifiers=Listening(), conversations=conversations)
        assert not conversations._homes
    assert len(seen) == 4
    for group in (group for update in seen for group in update.batch.groups):
        tokens = [[*c.token_ids] for c in sorted(group.completions, key=lambda c: c.index)]
        assert tokens == [[7] * 10, [7] * 10 + [6] + [7] * 3]
        assert all(completion.ending == "completed" for completion in group.completions)
    assert {*given} == {0.5, 1.0}
    assert "environments of 0" in seen.tasks


def two_turns(acts: Callable[[Call], None]) -> Callable[[Call], Started | Continued]:
    """Environments that answer once; `acts` is called before each answer to a turn."""

    def answered(call: Call) -> Started | Continued:
        if call.method == "start":
            return Started([5])
        acts(call)
        told, _ = call.arguments
        turn = TurnRecord(told.turn_start, len(told.token_ids), 0, "said", reward=0.5)
        if len(told.token_ids) > 10:
            return Continued(turn, ending="completed")
        return Continued(turn, put=[6], max_tokens=14)

    return answered


def converse(settings: Config, acts: Callable[[Call], None], kind: type[Run] = Run) -> Run:
    """A run of two processes of `two_turns`."""
    host = lambda: ScriptedHost(two_turns(acts))  # noqa: E731
    make = lambda number: ThreadHandle("environment", host)  # noqa: E731
    with Conversations(settings, make, pytest.fail, pytest.fail) as conversations:
        return kind(settings, Noting(), conversations=conversations)


def talks(forty: Path, bound: int) -> Config:
    return config(
        forty,
        data={"environment": "tests.controller.talking:Talk"},
        conversation={"workers": 2},
        pipeline={"updates": 1, "max_staleness": bound},
    )


def test_no_conversation_waits_for_the_environment_of_another(forty: Path) -> None:
    """The second turn of one is answered while another's first is not."""
    ahead = threading.Event()

    def acts(call: Call) -> None:
        if call.key[1] == 1 and len(call.arguments[0].token_ids) > 10:
            ahead.set()
        assert call.key[1] == 1 or ahead.wait(10)

    converse(talks(forty, bound=2), acts)


def test_the_polls_of_a_synchronous_run_do_not_depend_on_the_time_of_environments(
    forty: Path,
) -> None:
    def polls_of(pause: float) -> list[list[tuple[int, int]]]:
        polls = []

        class Polled(CountingGenerator):
            def poll(self, requests: Any, seconds: float = 0.0) -> Any:
                polls.append([(each.group, each.index) for each in requests])
                return super().poll(requests, seconds)

        class Listed(Run):
            def _generator(self, number: int, *_: int) -> ThreadHandle:
                return ThreadHandle(f"generator {number}", Polled)

        acts = lambda call: time.sleep(pause * (call.key == (0, 0)))  # noqa: E731
        converse(talks(forty, bound=0), acts, Listed)
        return polls

    assert polls_of(0.0) == polls_of(0.05)


def test_a_synchronous_round_is_handed_out_at_once(forty: Path) -> None:
    first: list[int] = []

    class Counting(Run):
        def _generator(self, number: int, *_: int) -> ThreadHandle:
            class First(CountingGenerator):
                def poll(self, requests: Any, seconds: float = 0.0) -> Any:
                    first.append(len(requests))
                    return super().poll(requests, seconds)

            return ThreadHandle(f"generator {number}", First)

    sizes = {"updates": 1, "n_batch": 80, "n_async": 80, "max_staleness": 0}
    Counting(config(forty, pipeline=sizes), Noting())
    assert first[0] == 80


def test_a_synchronous_generator_waits_once_a_round_also_for_held_updates(forty: Path) -> None:
    class Listening(HalfRight):
        def score(
            self, problem: Problem, responses: Any, lengths: Any, progress: Any
        ) -> Future[list[Verdict]]:
            given.append((lengths, progress))
            assert isinstance(problem, Problem)
            scored: Future[list[Verdict]] = Future()
            found = super().score(problem, responses, lengths, progress).result()
            scored.set_result([replace(each, answer=" 1") for each in found])
            return scored

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
    assert all(filtered and not ready for filtered, ready in seen.graded_as.values())
    assert run.ledger.next_group >= 40 and len(run.ledger.filtered) == run.ledger.next_group


def test_the_next_stage_has_generators_of_its_size(forty: Path) -> None:
    stages = [
        {"name": "short", "until": {"updates": 2}},
        {"name": "long", "l_max": 20, "n_async": 24, "until": {"updates": 2}},
        {"name": "last", "l_max": 15},
    ]
    seen = Noting()
    run = Run(config(forty, stages=stages, pipeline={"updates": 5}), seen)
    assert [w.sizes for w in run.generators] == [[(24, 4 + 20), (16, 4 + 15)]]
    begins = "stage 'short' ended after update 2 (2 updates); stage 'long' begins"
    assert begins in seen.events
    lengths = [{c.n_tokens for g in update.batch.groups for c in g.completions} for update in seen]
    assert lengths == [{10}, {10}, {20}, {20}, {15}]


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
