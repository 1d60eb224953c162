"""Generators that share completions, and the replacement of one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.counting import CountingGenerator, NoWeights
from tests.runs import small_config, unheard
from tramontane.config import Config
from tramontane.controller import pooled_generator
from tramontane.controller.generators import GeneratorPool, Loads, share, slots
from tramontane.controller.pooled_generator import (
    AHEAD,
    ASKED,
    EVALUATION,
    FEW,
    FIRST_ASKED,
    POLLS_PER_SECOND,
    TRAINING,
    PooledGenerator,
    begun_first,
    poll_seconds,
)
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models.weights import LocalWeights, Part
from tramontane.placement import ConcurrentHandle, WorkerDied, WorkerLost
from tramontane.placement.thread import ThreadHandle
from tramontane.tokens import ints
from tramontane.types import Completion, SamplingParams


class Idle:
    """A handle that is never called."""

    name, closed = "idle", False

    def close(self) -> None:
        self.closed = True


def group(number: int, size: int, tokens: int = 4) -> list[Completion]:
    return [Completion.requested(number, i, [1], 0, SamplingParams(tokens)) for i in range(size)]


SIZES = {"n_async": 23, "group_size": 4, "n_batch": 12, "l_max": 96}


def pool_of(
    workers: list[CountingGenerator], notes: list[tuple[str, dict[str, object]]], **sizes: Any
) -> GeneratorPool:
    config = small_config("unused", pipeline=SIZES | sizes, generator={"workers": len(workers)})
    return GeneratorPool(
        lambda number, *size: ThreadHandle(f"generator {number}", lambda: workers[number]),
        config,
        print,
        lambda name, **facts: notes.append((name, facts)),
        max_prompt=30,
    )


def test_a_pool_spreads_groups_and_speaks_for_all_its_generators():
    workers, notes = [CountingGenerator(pause) for pause in (0.1, 0.3, 0.2)], []
    pool = pool_of(workers, notes)

    async def use() -> None:
        await pool.started()
        for number, size in enumerate((4, 2, 3, 1, 2)):
            pool.submit(group(number, size))
        held = [{key[0] for key in member.requests} for member in pool]
        assert held == [{0}, {1, 3, 4}, {2}]  # each group is whole, at the least loaded
        assert pool.in_flight == 12
        assert await pool.update(1, LocalWeights()) == 0.3
        for member in pool:
            while member.requests:
                await member.poll()
        assert (pool.in_flight, sum(m.generated_tokens for m in pool)) == (0, 12 * 4)
        config = small_config(
            "unused",
            pipeline={"n_async": 23, "group_size": 4, "n_batch": 12, "l_max": 80},
            generator={"workers": 3},
        )
        await pool.resize(config)
        await pool.resize(config)  # nothing to change
        await pool.resize(config, longest=90)
        slots_each = (23 - 4) // 3 + 4
        assert [w.sizes for w in workers] == [[(slots_each, 30 + 80), (slots_each, 30 + 90)]] * 3
        pool.close()

    asyncio.run(use())
    assert notes == [(f"generator {n}", {"version": 1}) for n in range(3)]


def test_a_generators_tokens_are_known_as_they_are_sampled_and_each_version_is_logged_once():
    worker, notes = CountingGenerator(), []
    (generator,) = pool = pool_of([worker], notes)

    async def use() -> None:
        generator.submit(group(0, 1, tokens=10**6))
        (request,) = generator.requests.values()
        for polls in (1, 2, 3):
            assert await generator.poll() == []
            assert request.versions.tolist() == [0] * polls
        assert notes == [("generator 0", {"version": 0})]
        await generator.update(1, LocalWeights())
        while 1 not in request.versions:
            await generator.poll()
        # At most the polls that were under way or in the mailbox precede the weights.
        assert 3 <= request.versions.count(0) <= 3 + AHEAD
        assert notes[1:] == [("generator 0", {"version": 1})]
        assert generator.generated_tokens == len(request.token_ids)
        read = len(request.token_ids)  # polls, a token each
        assert generator.busy_seconds == 0.5 * read
        assert (generator.prefilled_tokens, generator.parked_tokens) == (3 * read, 2 * read)
        pool.close()

    asyncio.run(use())


class SlowFetcher(CountingGenerator):
    """A fetch ends once the generator has been polled as often as its weights say."""

    def fetch(self, version: int, weights: int) -> None:
        while self.polls < weights:
            time.sleep(0.001)
        super().fetch(version, weights)


def test_generation_goes_on_while_weights_are_fetched():
    worker = SlowFetcher()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        generator.submit(group(0, 1, tokens=10**6))
        (request,) = generator.requests.values()
        fetching = asyncio.create_task(generator.fetch(1, 20))
        while not fetching.done():
            await generator.poll()
        assert request.versions.count(0) >= 18  # polled 20 times, of which two may be unread
        while len(request.versions) < 40:  # fetched, and not in use before `update`
            await generator.poll()
        assert set(request.versions) == {0}
        await generator.update(1, 20)
        assert worker.fetched == [1]  # only once
        while 1 not in request.versions:
            await generator.poll()
        pool.close()

    asyncio.run(use())


def test_a_newer_version_is_used_although_an_older_one_was_still_being_fetched():
    worker = SlowFetcher()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        generator.submit(group(0, 1, tokens=10**6))
        (request,) = generator.requests.values()
        both = asyncio.gather(generator.update(1, 10), generator.update(2, 20))
        while not both.done():
            await generator.poll()
        assert worker.fetched == [1, 2]
        while 2 not in request.versions:
            await generator.poll()
        assert sorted(request.versions) == request.versions.tolist()
        await generator.update(1, 0)  # late, and not fetched again
        assert worker.fetched == [1, 2]
        pool.close()

    asyncio.run(use())


class StrictFetcher(CountingGenerator):
    """Refuses the weights of version 1."""

    def fetch(self, version: int, weights: Any) -> None:
        if version == 1:
            raise InputError("weights of model.norm.weight are not finite")
        super().fetch(version, weights)


def test_a_version_that_fails_its_check_is_named_and_not_used():
    (generator,) = pool = pool_of([StrictFetcher()], [])

    async def use() -> None:
        generator.submit(group(0, 1, tokens=20))
        (request,) = generator.requests.values()
        with pytest.raises(InputError, match=r"model\.norm\.weight"):
            await generator.update(1, LocalWeights())
        await generator.poll()
        assert set(request.versions) == {0}
        await generator.update(2, LocalWeights())
        while generator.requests:
            await generator.poll()
        assert set(request.versions) == {0, 2}
        pool.close()

    asyncio.run(use())


def test_a_request_that_goes_on_returns_to_its_generator_if_that_has_a_free_slot():
    workers = [CountingGenerator() for _ in range(3)]
    pool, slots_each = pool_of(workers, []), (23 - 4) // 3 + 4

    async def use() -> None:
        parked = replace(group(0, 1)[0], keep_kv=True)
        pool.submit([parked])
        assert parked.generator == 0
        first = next(iter(pool))
        while first.requests:
            await first.poll()
        goes_on = replace(parked, token_ids=ints([7] * 4), sampling=SamplingParams(8))
        pool.submit(group(1, slots_each - 1))
        held = [{key[0] for key in member.requests} for member in pool]
        assert held == [{1}, set(), set()]
        pool.submit([goes_on])  # although others have less to do
        assert (0, 0) in first.requests and len(first.requests) == slots_each
        again = replace(goes_on, index=1)
        pool.submit([again])  # it would wait there
        assert again.generator == 1
        pool.close()

    asyncio.run(use())


def test_only_a_request_whose_keys_were_kept_returns_to_its_generator():
    pool = pool_of([CountingGenerator() for _ in range(3)], [])

    async def use() -> None:
        pool.submit(group(0, 2))
        known = replace(group(1, 1)[0], token_ids=ints([7]), generator=0)
        unbegun = replace(group(2, 1)[0], keep_kv=True, generator=0)
        pool.submit([known])
        pool.submit([unbegun])
        assert (known.generator, unbegun.generator) == (1, 2)
        pool.close()

    asyncio.run(use())


def test_a_synchronous_stage_shares_groups_by_their_numbers():
    pool = pool_of([CountingGenerator() for _ in range(3)], [], max_staleness=0)

    async def use() -> None:
        for bound, numbers, homes in (
            (None, (3, 1, 2, 6), [0, 1, 2, 0]),
            (2, (33,), [2]),
            (0, (36,), [0]),
        ):
            if bound is not None:
                settings = small_config(
                    "unused", pipeline=SIZES | {"max_staleness": bound}, generator={"workers": 3}
                )
                await pool.resize(settings)
            given = [group(number, 1 + number % 2) for number in numbers]
            for requests in given:
                pool.submit(requests)
            assert [requests[0].generator for requests in given] == homes
        pool.close()

    asyncio.run(use())


def test_training_an_evaluation_and_clients_are_read_apart():
    worker = CountingGenerator()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        for number in (0, -1, FIRST_ASKED):
            pool.submit(group(number, 2))
        assert (pool.in_flight, pool.evaluating, generator.unfinished) == (2, 2, [2, 2, 2])
        pool.submit(group(FIRST_ASKED - 1, 1, tokens=90))
        pool.cancel(FIRST_ASKED - 1)
        while generator.requests:
            assert all(c.group == -1 for c in await generator.poll(EVALUATION))
        assert [c.group for c in await generator.poll()] == [0, 0]
        assert [c.group for c in await generator.poll(ASKED)] == [FIRST_ASKED] * 2
        assert not any(map(generator.has, range(3)))
        pool.close()

    asyncio.run(use())


def test_a_cancelled_request_does_not_come_back_after_an_update():
    class Slow(CountingGenerator):
        """Lets polls wait in its mailbox."""

        def __init__(self) -> None:
            super().__init__()
            self.given: list[tuple[int, int]] = []
            self.may = threading.Semaphore(1)  # poll as often

        def poll(self, requests: list[Completion], seconds: float = 0.0) -> Any:
            assert self.may.acquire(timeout=30)
            self.given += [(r.group, r.index) for r in requests]
            return super().poll(requests)

        def cancel(self, group: int) -> None:
            self.requests = [r for r in self.requests if r.group != group]

    worker = Slow()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        await pool.started()
        pool.submit(group(0, 1, tokens=90))
        await generator.poll()  # another poll waits already
        pool.submit(group(FIRST_ASKED, 1, tokens=90))
        polled = asyncio.create_task(generator.poll())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert any(carried for _, carried in generator._polls)  # the client's is in the mailbox
        pool.cancel(FIRST_ASKED)
        updating = asyncio.create_task(generator.update(1, LocalWeights()))
        while any(carried for _, carried in generator._polls):  # until the mailbox is taken back
            await asyncio.sleep(0.001)
        worker.may.release(100)
        await updating
        await polled
        for _ in range(3):
            await generator.poll()
        assert worker.given == [(0, 0)] and [r.group for r in worker.requests] == [0]
        pool.close()

    asyncio.run(use())


def test_completions_wait_for_their_own_reader_whoever_polled_last():
    """Training and an evaluation share a generator's polls: the last completions of one may arrive
    in a poll of the other."""
    worker = CountingGenerator()
    (generator,) = pool = pool_of([worker], [])

    async def use() -> None:
        generator.submit(group(0, 3, tokens=4))
        generator.submit(group(-1, 2, tokens=4))
        evaluated = []
        while generator.requests:
            evaluated += await generator.poll(EVALUATION)
        assert [c.index for c in evaluated] == [0, 1]
        assert (pool.in_flight, pool.evaluating) == (0, 0)
        assert generator.has_work
        await generator.ask("control", "stats")  # behind the polls under way
        polls = worker.polls
        assert [c.index for c in await generator.poll()] == [0, 1, 2]
        await generator.ask("control", "stats")
        assert worker.polls == polls  # they were there
        assert not generator.has_work

        generator.submit(group(1, 3, tokens=4))
        generator.submit(group(-2, 2, tokens=4))
        trained = []
        while generator.requests:
            trained += await generator.poll()
        assert [c.index for c in trained] == [0, 1, 2]
        assert generator.has(EVALUATION)
        assert [c.index for c in await generator.poll(EVALUATION)] == [0, 1]
        assert not generator.has(EVALUATION)
        pool.close()

    asyncio.run(use())


def test_time_without_work_is_counted_while_it_lasts(monkeypatch):
    clock = iter([10.0, 12.5, 14.0, 20.0])
    pool = pool_of([CountingGenerator()], [])
    (generator,) = pool
    monkeypatch.setattr(pooled_generator.time, "monotonic", lambda: next(clock))
    assert generator.seconds_without_work == 0.0
    with generator.without_work():
        assert generator.seconds_without_work == 2.5
    assert generator.seconds_without_work == 4.0
    monkeypatch.undo()
    pool.close()


@given(
    workers=st.integers(1, 5),
    group_size=st.integers(2, 6),
    more=st.integers(0, 40),
    order=st.lists(st.integers(0, 10**6), max_size=120),
)
def test_no_generator_ever_has_more_than_its_share(workers, group_size, more, order):
    n_async = workers * group_size + more
    config = small_config(
        "unused",
        pipeline={"n_async": n_async, "n_batch": group_size * 8, "group_size": group_size},
        generator={"workers": workers},
    )
    pool = GeneratorPool(lambda *_: Idle(), config, print, unheard, max_prompt=8)
    assert slots(config) == share(config)
    assert workers > 1 or share(config) == config.pipeline.in_flight
    for number, choice in enumerate(order):
        if pool.in_flight + group_size <= n_async and choice % 2:
            sampling = SamplingParams(4)
            pool.submit(
                [Completion.requested(number, i, [1], 0, sampling) for i in range(group_size)]
            )
        elif pool.in_flight:
            every = [(m, key) for m in pool for key in m.requests]
            member, key = every[choice % len(every)]
            del member.requests[key]
            member.unfinished[TRAINING] -= 1
            member.changed()
        assert max(len(m.requests) for m in pool) <= share(config)


@pytest.mark.parametrize(("configured", "expected"), [(None, 10), (3, 3), (10, 10), (500, 10)])
def test_slots_are_as_configured_and_at_most_a_generators_share(configured, expected):
    config = small_config(
        "unused",
        pipeline={"n_async": 16, "n_batch": 32, "group_size": 4},
        generator={"workers": 2, "slots": configured},
    )
    sizes = []
    pool = GeneratorPool(
        lambda number, slots, max_len: sizes.append((slots, max_len)) or Idle(),
        config,
        print,
        unheard,
        max_prompt=8,
    )
    assert [m.name for m in pool] == ["idle", "idle"]
    assert sizes == [(expected, 8 + config.pipeline.l_max)] * 2
    pool.close()
    assert all(m.handle.closed for m in pool)


@pytest.mark.parametrize(("asked", "expected"), [(2, (18 - 4) // 2 + 4), (6, (22 - 6) // 2 + 6)])
def test_a_generators_share_has_room_for_clients(asked, expected):
    config = small_config(
        "unused",
        pipeline={"n_async": 16, "n_batch": 32, "group_size": 4},
        generator={"workers": 2, "serve": {"completions": asked}},
    )
    assert share(config) == slots(config) == expected


def test_a_pool_without_generators_does_not_pause():
    """A run on recorded completions alone has such a pool."""
    config = small_config("unused")
    none = config.generator.model_copy(update={"workers": 0})
    config = config.model_copy(update={"generator": none})
    pool = GeneratorPool(lambda *_: Idle(), config, print, unheard, max_prompt=8)
    assert asyncio.run(pool.update(1, LocalWeights())) == 0.0


def test_begun_requests_come_first_in_their_order():
    requests = [*group(0, 2), *group(1, 2)]
    requests[1].token_ids.append(5)
    requests[2].token_ids.append(5)
    order = [(r.group, r.index) for r in begun_first(requests)]
    assert order == [(0, 1), (1, 0), (0, 0), (1, 1)]


def actor(make: Callable[[], Any]) -> ConcurrentHandle:
    from tramontane.placement.actors import ActorHandle

    return ActorHandle("generator 0", {"num_cpus": 1.0}, 30.0).start(make)


def requests_of(max_tokens: int) -> list[Completion]:
    sampling = SamplingParams(max_tokens)
    return [
        Completion.requested(0, i, [1, 5, 9], seed, sampling) for i, seed in enumerate((3, 4, 5))
    ]


async def finish_after_a_kill(
    generator: PooledGenerator, weights: Any, lost: list[WorkerLost]
) -> tuple[dict[int, Completion], set[int], int]:
    """Kill a generator after its first polls, with new weights on their way.

    Returns:
        All completions; indices of those that had not ended at the kill; and the number of tokens
        that were known of each of these.
    """
    assert await generator.poll() == []
    await generator.update(1, weights)
    os.kill(generator.handle._place[1], signal.SIGKILL)
    done: dict[int, Completion] = {}
    while not lost:  # the poll that was asked for ahead may have ended before
        known = {(r.index, len(r.token_ids)) for r in generator.requests.values()}
        done |= {c.index: c for c in await generator.poll()}
    left = {index for index, _ in known}
    (tokens,) = {count for _, count in known}
    assert left and tokens
    assert [type(error) for error in lost] == [WorkerDied]
    while generator.requests:
        done |= {c.index: c for c in await generator.poll()}
    assert len(lost) == 1  # the polls of the lost worker are forgotten
    generator.handle.close()
    return done, left, tokens


@pytest.mark.slow
def test_requests_of_a_killed_generator_continue_as_if_it_had_lived(ray_cluster, tmp_path):
    """They end under the newest weights (equal here), from the known tokens on."""
    from tramontane.placement.stored import StoredWeights

    config = small_config(tmp_path, placement={"kind": "ray", "lost_sequences": "continue"})
    load = partial(Generator.load, "tiny", config.generator, 4, 64)
    alone = load()
    alone.submit(requests_of(40))
    expected = {}
    while alone.pending():
        expected |= {c.index: c for c in alone.step()}

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(lambda: actor(load), config, lost.append, unheard)
        generator.submit(requests_of(40))
        weights = StoredWeights(alone.model.dtype)
        weights.add([Part.whole([n], t) for n, t in alone.model.state_dict().items()])
        done, left, known = await finish_after_a_kill(generator, weights, lost)
        for index, completion in done.items():
            assert completion.token_ids == expected[index].token_ids
            assert completion.logprobs == pytest.approx(expected[index].logprobs, abs=1e-4)
            length = len(completion.token_ids)
            first = known if index in left else length
            assert completion.versions.tolist() == [0] * first + [1] * (length - first)
        assert generator.generated_tokens == sum(len(c.token_ids) for c in done.values())

    asyncio.run(use())


@pytest.mark.slow
def test_an_evaluation_goes_on_when_its_generator_is_killed(ray_cluster, tmp_path):
    """Beside training, whose requests continue as well; each reader gets its own completions."""
    config = small_config(tmp_path, placement={"kind": "ray"})

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(lambda: actor(CountingGenerator), config, lost.append, unheard)
        generator.submit(group(0, 3, tokens=40))
        generator.submit(group(-1, 2, tokens=60))
        trained, evaluated = [], []

        async def train() -> None:
            while generator.has_work:
                trained.extend(await generator.poll())

        async def evaluate() -> None:
            evaluated.extend(await generator.poll(EVALUATION))
            os.kill(generator.handle._place[1], signal.SIGKILL)
            while generator.has(EVALUATION):
                evaluated.extend(await generator.poll(EVALUATION))

        await asyncio.gather(train(), evaluate())
        generator.handle.close()
        assert [type(error) for error in lost] == [WorkerDied]
        assert [(c.index, len(c.token_ids)) for c in trained] == [(i, 40) for i in range(3)]
        assert [(c.index, len(c.token_ids)) for c in evaluated] == [(i, 60) for i in range(2)]

    asyncio.run(use())


def test_requests_of_a_killed_generator_restart_under_the_newest_weights(ray_cluster, tmp_path):
    config = small_config(tmp_path, placement={"kind": "ray", "lost_sequences": "restart"})

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(lambda: actor(CountingGenerator), config, lost.append, unheard)
        generator.submit(requests_of(10))
        done, left, known = await finish_after_a_kill(generator, NoWeights(), lost)
        assert left == {0, 1, 2}
        assert all(c.versions.tolist() == [1] * 10 for c in done.values())
        assert generator.generated_tokens == 3 * 10 + 3 * known

    asyncio.run(use())


class DyingFetcher(CountingGenerator):
    """Its first process dies in a fetch."""

    def __init__(self, died: Path) -> None:
        super().__init__()
        self.died = died

    def fetch(self, version: int, weights: Any) -> None:
        if not self.died.exists():
            self.died.touch()
            os._exit(3)
        super().fetch(version, weights)


@pytest.mark.slow
def test_a_generator_that_dies_in_a_fetch_is_replaced_and_fetches_the_same_weights(
    ray_cluster, tmp_path
):
    config = small_config(tmp_path, placement={"kind": "ray"})

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(
            lambda: actor(partial(DyingFetcher, tmp_path / "died")), config, lost.append, unheard
        )
        generator.submit(requests_of(10))
        assert await generator.poll() == []
        await generator.update(1, NoWeights())
        assert [type(error) for error in lost] == [WorkerDied]
        done = []
        while generator.requests:
            done += await generator.poll()
        generator.handle.close()
        for completion in done:
            known = completion.versions.count(0)
            assert known >= 1
            assert completion.versions.tolist() == [0] * known + [1] * (10 - known)

    asyncio.run(use())


def test_a_generator_that_dies_at_every_start_ends_the_run(ray_cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("tramontane.controller.pooled_generator.STARTS", 1)
    config = small_config(tmp_path, placement={"kind": "ray"})
    lost: list[WorkerLost] = []

    async def use() -> None:
        generator = PooledGenerator(
            lambda: actor(partial(os._exit, 3)), config, lost.append, unheard
        )
        with pytest.raises(WorkerLost, match="generator 0"):
            await generator.started()
        assert len(lost) == 1
        generator.submit([Completion.requested(0, 0, [1], 0, SamplingParams(4))])
        with pytest.raises(WorkerLost, match="generator 0"):
            await generator.poll()

    asyncio.run(use())


def test_a_loss_has_the_name_of_its_handle(tmp_path, monkeypatch):
    """An engine's own process does not know it. A pool tells of the loss, and cannot start."""
    monkeypatch.setattr("tramontane.controller.pooled_generator.STARTS", 1)
    config = small_config(tmp_path, placement={"kind": "ray"})
    lost: list[WorkerLost] = []

    def die() -> None:
        raise WorkerDied("vLLM's process 7 died")

    pool = GeneratorPool(
        lambda *_: ThreadHandle("generator 0", die), config, lost.append, unheard, max_prompt=8
    )
    with pytest.raises(WorkerDied, match="process 7"):
        asyncio.run(pool.started())
    assert [loss.worker for loss in lost] == ["generator 0"]


def test_answers_of_a_lost_worker_are_ignored_once_it_is_replaced(ray_cluster, tmp_path):
    """The lost worker's last poll arrives while another call finds the worker dead. The replacement
    samples the same tokens again, and they are counted once."""
    config = small_config(tmp_path, placement={"kind": "ray"})

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(lambda: actor(CountingGenerator), config, lost.append, unheard)
        generator.submit(requests_of(10))
        done = {c.index: c for c in await generator.poll()}
        os.kill(generator.handle._place[1], signal.SIGKILL)
        # Both find the worker dead; it is replaced once.
        _, ended = await asyncio.gather(generator.ask("start", "stats"), generator.poll())
        done |= {c.index: c for c in ended}
        assert len(lost) == 1
        while generator.requests:
            for completion in await generator.poll():
                assert completion.index not in done
                done[completion.index] = completion
        generator.handle.close()
        assert sorted(done) == [0, 1, 2]
        assert generator.generated_tokens == sum(len(c.token_ids) for c in done.values())

    asyncio.run(use())


@pytest.mark.slow
def test_a_restarted_thought_is_interrupted_again(ray_cluster, tmp_path):
    """Its request was to sample an answer behind the sentence that ends its thoughts."""
    config = small_config(
        tmp_path,
        placement={"kind": "ray", "lost_sequences": "restart"},
        generator={"interruption": {"after": [4, 4]}},
    )

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(lambda: actor(CountingGenerator), config, lost.append, unheard)
        generator.submit(requests_of(30))
        done, left, _ = await finish_after_a_kill(generator, NoWeights(), lost)
        assert left == {0, 1, 2}
        assert all(len(c.token_ids) == 4 for c in done.values())

    asyncio.run(use())


@given(
    generators=st.integers(1, 6),
    notes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=80),
)
def test_the_least_loaded_generator_is_the_first_of_those_with_fewest_requests(
    generators: int, notes: list[tuple[int, int, int]]
) -> None:
    loads, known = Loads(generators), [(0, 0)] * generators
    for place, requests, evaluating in notes:
        number = place % generators
        known[number] = requests, min(requests, evaluating)
        loads.note(number, *known[number])
        assert loads.total == sum(load for load, _ in known)
        assert loads.others == sum(load for _, load in known)
        assert loads.least() == min(range(generators), key=lambda n: known[n][0])
        assert len(loads._heap) <= 4 * generators + 1  # outdated entries are dropped


def test_polls_of_many_generators_are_longer_and_vary_but_not_in_a_synchronous_run() -> None:
    def seconds(generators: int, bound: int) -> float:
        return poll_seconds(
            Config.model_validate(
                {
                    "pipeline": {"max_staleness": bound, "n_async": 16 * generators},
                    "generator": {"workers": generators},
                }
            )
        )

    assert seconds(FEW, 2) == seconds(10_000, 0) == 0.0
    mean = 10_000 / POLLS_PER_SECOND
    found = [seconds(10_000, 2) for _ in range(200)]
    assert all(0.5 * mean <= poll <= 1.5 * mean for poll in found)
    # Polls that began together end over about their mean length.
    assert max(found) - min(found) > 0.9 * mean
