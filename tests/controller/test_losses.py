"""Generators that are lost, here in threads instead of processes: what their replacements get."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.controller.counting import CountingGenerator
from tests.controller.test_generators import group, pool_of
from tests.runs import small_config
from tramontane.config import Config
from tramontane.controller.interruption import thought_limit
from tramontane.controller.pooled_generator import (
    AHEAD,
    ASKED,
    EVALUATION,
    FEW,
    FIRST_ASKED,
    POLLS_PER_SECOND,
    TRAINING,
    PooledGenerator,
)
from tramontane.models.weights import LocalWeights
from tramontane.placement import WorkerDied, WorkerLost
from tramontane.placement.thread import ThreadHandle
from tramontane.tokens import EarlierSequence, floats, ints
from tramontane.types import Completion, SamplingParams, TurnRecord


class Mortal(CountingGenerator):
    """Dies at its poll, fetch or swap of a given number, counted over all of these."""

    def __init__(self, dies: int | None = None) -> None:
        super().__init__()
        self.calls, self.dies = 0, dies
        self.seconds: list[float] = []  # that each poll was to last
        self.sent: list[tuple[int, int, int]] = []  # group, index and length of each request

    def _live(self) -> None:
        self.calls += 1
        if self.calls == self.dies:
            raise WorkerDied("died")

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Any:
        self._live()
        self.seconds.append(seconds)
        self.sent += [(r.group, r.index, len(r.token_ids)) for r in requests]
        return super().poll(requests, seconds)

    def fetch(self, version: int, weights: Any) -> None:
        self._live()
        super().fetch(version, weights)

    def swap(self, version: int) -> float:
        self._live()
        return super().swap(version)

    def cancel(self, group: int) -> None:
        self.requests = [r for r in self.requests if r.group != group]

    def cancel_all(self) -> None:
        self.requests = []


class Noted(ThreadHandle):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class Lost:
    """One generator whose workers are lost one after another, except the last."""

    def __init__(self, workers: list[Mortal], config: Config) -> None:
        self.losses: list[WorkerLost] = []
        self.notes: list[dict[str, Any]] = []
        self.handles: list[Noted] = []
        self.changes = 0
        left: Iterator[Mortal] = iter(workers)

        def make() -> ThreadHandle:
            worker = next(left)
            self.handles.append(Noted("generator 0", lambda: worker))
            return self.handles[-1]

        def log(name: str, **facts: Any) -> None:
            assert name == "generator 0"
            self.notes.append(facts)

        def changed() -> None:
            self.changes += 1

        self.generator = PooledGenerator(make, config, self.losses.append, log, changed)


def using(
    workers: list[Mortal], use: Callable[[PooledGenerator, Lost], Awaitable[None]], **sections: Any
) -> Lost:
    found = Lost(workers, small_config("unused", **{"placement": {"kind": "ray"}} | sections))

    async def run() -> None:
        await use(found.generator, found)
        found.generator.handle.close()

    asyncio.run(run())
    return found


async def all_of(generator: PooledGenerator) -> list[Completion]:
    done = []
    while generator.has_work:
        done += await generator.poll()
    return done


def test_the_replacement_continues_what_is_known_under_the_newest_weights() -> None:
    first, second = Mortal(5), Mortal()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        generator.submit(group(0, 2, tokens=9))
        while not found.losses:
            await generator.poll()
            if len(next(iter(generator.requests.values())).token_ids) == 1:
                await generator.update(1, LocalWeights())  # two of the calls
        known = found.notes[-1]["continues"][0][2]
        assert found.notes[-1] == {"continues": [[0, 0, known], [0, 1, known]]}
        generator.submit(group(1, 1, tokens=2))
        done = await all_of(generator)
        assert second.sent == [(0, 0, known), (0, 1, known), (1, 0, 0)]
        for completion in done[1:]:
            before = completion.versions.tolist()[:known]
            assert completion.versions.tolist() == before + [1] * (9 - known)
        assert generator.generated_tokens == 2 * 9 + 2
        assert generator.busy_seconds == 0.5 * 9  # by the polls that were read, a token each
        assert generator.unfinished == [0, 0, 0]

    found = using([first, second], use)
    assert [loss.worker for loss in found.losses] == ["generator 0"]
    assert found.handles[0].closed
    assert second.fetched == [1] and second.version == 1


def test_the_replacement_restarts_turns_if_the_config_says_so() -> None:
    first, second = Mortal(3), Mortal()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        own, evaluated = group(0, 1, tokens=9), group(-1, 1, tokens=9)
        later = group(0, 2, tokens=9)[1]  # in its second turn
        later.token_ids.append(5)
        later.logprobs.append(-0.5)
        later.versions.append(0)
        later.turn_start = 1
        for requests in (own, evaluated, [later]):
            generator.submit(requests)
        while not found.losses:
            await generator.poll()
        assert second.sent == []
        assert found.notes[-1] == {"continues": [[0, 1, 1]]}
        await generator.poll()
        assert second.sent == [(0, 1, 1), (0, 0, 0), (-1, 0, 0)]  # begun first
        limits = [r.sampling.max_tokens for r in (*own, later, *evaluated)]
        assert limits == [drawn, drawn, 9]  # thoughts of training are interrupted again
        await generator.update(1, LocalWeights())
        assert second.version == 1

    restart = {"kind": "ray", "lost_sequences": "restart"}
    interrupted = {"interruption": {"after": [4, 90]}}
    settings = small_config("unused", generator=interrupted)
    drawn = thought_limit(settings.generator.interruption, seed=0)  # type: ignore[arg-type]
    using([first, second], use, placement=restart, generator=interrupted)


@pytest.mark.parametrize("dies", [1, 2])
def test_a_loss_in_a_fetch_or_a_swap_is_made_good_by_the_same_weights(dies: int) -> None:
    workers = [Mortal(dies), Mortal()]

    async def use(generator: PooledGenerator, found: Lost) -> None:
        await generator.update(3, LocalWeights())
        assert [w.fetched for w in workers] == [[3] if dies == 2 else [], [3]]
        assert workers[1].version == 3
        generator.submit(group(0, 1, tokens=2))
        assert (await all_of(generator))[0].versions.tolist() == [3, 3]

    assert len(using(workers, use).losses) == 1


def test_losses_end_the_run_only_without_a_poll_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tramontane.controller.pooled_generator.STARTS", 2)

    async def use(generator: PooledGenerator, found: Lost) -> None:
        generator.submit(group(0, 1, tokens=8))
        with pytest.raises(WorkerDied):
            await all_of(generator)

    # Three are lost behind polls, and two more at once: three losses in a row.
    found = using([Mortal(dies) for dies in (3, 3, 3, 1, 1)], use)
    assert len(found.losses) == 4


def test_threads_are_not_replaced() -> None:
    found = Lost([Mortal(2)], small_config("unused"))
    asyncio.run(found.generator.fetch(1, LocalWeights()))
    assert found.generator._weights is None  # no replacement needs them
    found.generator.submit(group(0, 1))
    with pytest.raises(WorkerDied):
        asyncio.run(found.generator.poll())
    assert not found.losses
    found.generator.handle.close()


def test_cleared_generators_have_nothing_left_and_go_on() -> None:
    worker = Mortal()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        for number in (0, -1, FIRST_ASKED):
            generator.submit(group(number, 2, tokens=9))
        await generator.poll(EVALUATION)
        before = found.changes
        await generator.clear()
        assert found.changes == before + 1
        assert not worker.requests and not generator.requests
        assert generator.unfinished == [0, 0, 0]
        assert not any(generator.has(kind) for kind in (TRAINING, EVALUATION, ASKED))
        generator.submit(group(1, 1, tokens=2))
        assert [c.group for c in await all_of(generator)] == [1]
        assert worker.sent[6:] == [(1, 0, 0)]

    using([worker], use)


def test_a_pool_clears_and_fetches_for_all_and_counts_what_is_in_flight() -> None:
    workers = [Mortal(), Mortal()]
    pool = pool_of(workers, [])  # type: ignore[arg-type]

    async def use() -> None:
        pool.submit(group(0, 2) + group(1, 2))
        pool.submit(group(-1, 3))
        assert (pool.in_flight, pool.evaluating, pool.max_len) == (4, 3, 30 + 96)
        await pool.fetch(1, LocalWeights())
        assert [w.fetched for w in workers] == [[1], [1]]
        await pool.clear()
        assert (pool.in_flight, pool.evaluating) == (0, 0)
        assert not any(member.requests for member in pool)
        pool.close()

    asyncio.run(use())


def test_a_cancelled_request_is_left_out_of_what_a_poll_brings() -> None:
    worker = Mortal()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        ended, grown = group(FIRST_ASKED, 2, tokens=5)
        ended.sampling = SamplingParams(1)
        generator.submit([ended, grown, *group(0, 1, tokens=1)])
        polling = asyncio.create_task(generator.poll())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = found.changes
        generator.cancel(FIRST_ASKED)  # on its way
        assert found.changes == before + 1
        assert [c.group for c in await polling] == [0]
        assert generator.unfinished == [0, 0, 0] and not generator.has(ASKED)
        generator.submit(group(FIRST_ASKED - 1, 1) + group(1, 1, tokens=1))
        generator.cancel(FIRST_ASKED - 1)  # not yet sent
        assert [c.group for c in await all_of(generator)] == [1]
        assert worker.sent[3:] == [(1, 0, 0)]

    using([worker], use)


def test_a_worker_gets_tokens_without_turns_and_forgets_a_client_who_leaves() -> None:
    worker = Mortal()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        own = group(0, 1, tokens=90)
        own[0].turns = [TurnRecord(0, 0, 0, "")]
        own[0].earlier = [EarlierSequence([1], ints(), floats(), ints())]
        own[0].opened = [{"role": "user", "content": "Go on."}]
        generator.submit(own + group(FIRST_ASKED, 2, tokens=90))
        await generator.poll()
        await generator.ask("control", "stats")
        sent = worker.requests[0]
        assert (sent.group, sent.turns, sent.earlier, sent.opened) == (0, [], [], ())
        assert own[0].turns and own[0].earlier and own[0].opened
        generator.cancel(FIRST_ASKED)
        await generator.ask("control", "stats")
        assert [r.group for r in worker.requests] == [0]

    using([worker], use)


@pytest.mark.parametrize(("call", "limit"), [("poll", "generation"), ("fetch", "weight_update")])
def test_a_call_that_hangs_is_named(call: str, limit: str) -> None:
    class Hanging(Mortal):
        def poll(self, *_: Any) -> Any:
            time.sleep(0.2)

        fetch = poll

    found = Lost([Hanging()], small_config("unused", timeouts={limit: 0.05}))
    found.generator.submit(group(0, 1))
    message = rf"generator 0\.{call} did not return within 0\.05 s \(timeouts\.{limit}\)"
    generator = found.generator
    with pytest.raises(WorkerLost, match=message):
        asyncio.run(generator.poll() if call == "poll" else generator.fetch(1, LocalWeights()))
    generator.handle.close()


def test_polls_of_many_generators_are_told_how_long_to_last() -> None:
    worker, many = Mortal(), FEW + 1

    async def use(generator: PooledGenerator, found: Lost) -> None:
        generator.submit(group(0, 1, tokens=2))
        await all_of(generator)
        mean = many / POLLS_PER_SECOND
        assert all(0.5 * mean <= seconds <= 1.5 * mean for seconds in worker.seconds)

    using([worker], use, generator={"workers": many}, pipeline={"n_async": 16 * many})


def test_completions_of_a_client_who_left_before_they_were_read_are_dropped() -> None:
    """They ended in a poll of training."""
    worker = CountingGenerator()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        for number in (0, FIRST_ASKED, FIRST_ASKED - 1):
            pool.submit(group(number, 1, tokens=1))
        assert len(await generator.poll()) == 1
        pool.cancel(FIRST_ASKED)
        assert [c.group for c in await generator.poll(ASKED)] == [FIRST_ASKED - 1]
        pool.close()

    asyncio.run(use())


class Held(Mortal):
    """Begins its first poll, and ends it when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Any:
        self.begun.set()
        assert self.may_end.wait(30)
        return super().poll(requests, seconds)

    def fetch(self, version: int, weights: Any) -> None:
        raise WorkerDied("died")


def test_polls_that_wait_in_the_mailbox_are_cleared() -> None:
    worker = Held()

    async def use(generator: PooledGenerator, found: Lost) -> None:
        generator.submit(group(0, 1, tokens=9))
        polling = asyncio.create_task(generator.poll())
        await asyncio.to_thread(worker.begun.wait, 30)
        assert len(generator._polls) == AHEAD - 1  # and the one that has begun
        clearing = asyncio.create_task(generator.clear())
        await asyncio.sleep(0)
        worker.may_end.set()
        await clearing
        assert worker.polls == 1 and await polling == []
        generator.submit(group(1, 1, tokens=2))
        assert [c.group for c in await all_of(generator)] == [1]

    using([worker], use)


def test_a_late_answer_of_a_lost_worker_is_ignored() -> None:
    """A fetch finds the worker dead while its poll is under way."""
    first, second, losses = Held(), Mortal(), list[WorkerLost]()
    left = iter([first, second])

    def replaced(lost: WorkerLost) -> None:
        losses.append(lost)
        first.may_end.set()  # the handle's end waits for it

    def make() -> ThreadHandle:
        worker = next(left)
        return ThreadHandle("generator 0", lambda: worker)

    async def use() -> None:
        config = small_config("unused", placement={"kind": "ray"})
        generator = PooledGenerator(make, config, replaced, lambda _, **facts: None)
        generator.submit(group(0, 1, tokens=3))
        polling = asyncio.create_task(generator.poll())
        await asyncio.to_thread(first.begun.wait, 30)
        await generator.update(1, LocalWeights())
        assert await polling == [] and first.polls == 1
        (done,) = await all_of(generator)
        assert done.versions.tolist() == [1, 1, 1] and generator.generated_tokens == 3
        generator.handle.close()

    asyncio.run(use())
    assert len(losses) == 1


def test_a_worker_that_two_calls_find_dead_is_replaced_once() -> None:
    class Dead(Mortal):
        def poll(self, *_: Any) -> Any:
            raise WorkerDied("died")

        stats = poll

    async def use(generator: PooledGenerator, found: Lost) -> None:
        generator.submit(group(0, 1, tokens=2))
        await asyncio.gather(generator.ask("control", "stats"), generator.poll())
        assert [c.group for c in await all_of(generator)] == [0]

    found = using([Dead(), Mortal()], use)
    assert len(found.losses) == 1 and found.handles[0].closed
