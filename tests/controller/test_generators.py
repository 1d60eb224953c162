"""Generators that share completions, and one that is killed over them."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import small_config, unheard
from tramontane.controller.generators import GeneratorPool, PooledGenerator, slots
from tramontane.generator import Generator
from tramontane.placement import Handle, WorkerDied, WorkerLost
from tramontane.types import Completion, Request, SamplingParams


class Nobody:
    """A handle that is never called."""

    name = "nobody"


@given(
    workers=st.integers(1, 5),
    group_size=st.integers(2, 6),
    more=st.integers(0, 40),
    order=st.lists(st.integers(0, 10**6), max_size=120),
)
def test_no_generator_ever_has_more_than_its_slots(workers, group_size, more, order):
    n_async = workers * group_size + more
    config = small_config(
        "unused",
        pipeline={"n_async": n_async, "n_batch": group_size * 8, "group_size": group_size},
        generator={"workers": workers},
    )
    pool = GeneratorPool(lambda number: Nobody(), config, print, unheard, max_prompt=8)
    assert workers > 1 or slots(config) == n_async
    for number, choice in enumerate(order):
        if pool.in_flight + group_size <= n_async and choice % 2:
            sampling = SamplingParams(4)
            pool.submit([Request(number, i, [1], 0, sampling) for i in range(group_size)])
        elif pool.in_flight:
            every = [(m, key) for m in pool for key in m.requests]
            member, key = every[choice % len(every)]
            del member.requests[key]
        assert max(len(m.requests) for m in pool) <= slots(config)


@pytest.mark.parametrize("lost_sequences", ["continue", "restart"])
def test_what_a_killed_generator_was_at_ends_as_if_it_had_lived(
    ray_cluster, tmp_path, lost_sequences
):
    """Under the newest weights (here equal ones), from the known tokens on or from the start."""
    from tramontane.placement.actors import ActorHandle, StoredWeights

    config = small_config(tmp_path, placement={"kind": "ray", "lost_sequences": lost_sequences})
    load = partial(Generator.load, "tiny", config.generator, 4, 64)
    sampling = SamplingParams(40)
    requests = [Request(0, i, [1, 5, 9], seed, sampling) for i, seed in enumerate((3, 4, 5))]
    alone = load()
    alone.submit(requests)
    expected = {}
    while alone.pending():
        expected |= {c.index: c for c in alone.step()}

    def make() -> Handle:
        return ActorHandle("generator 0", {"num_cpus": 1.0}, 30.0).start(load)

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(make, config, lost.append, unheard)
        generator.submit(requests)
        assert await generator.poll() == []
        assert {len(r.token_ids) for r in generator.requests.values()} == {8}
        weights = StoredWeights(alone.model.dtype)
        weights.add(dict(alone.model.state_dict()))
        await generator.update(1, weights)
        os.kill(generator.handle._place[1], signal.SIGKILL)
        done: dict[int, Completion] = {}
        while not lost:  # the poll that was asked for ahead may have ended before
            known, left = {len(r.token_ids) for r in generator.requests.values()}, set(expected)
            left -= set(done)
            done |= {c.index: c for c in await generator.poll()}
        assert known in ({8}, {16}) and left
        old = max(known) if lost_sequences == "continue" else 0
        assert [type(error) for error in lost] == [WorkerDied]
        while generator.requests:
            done |= {c.index: c for c in await generator.poll()}
        generator.handle.close()
        for index, completion in done.items():
            assert completion.token_ids == expected[index].token_ids
            assert completion.logprobs == pytest.approx(expected[index].logprobs, abs=1e-4)
            length = len(completion.token_ids)
            first = old if index in left else length
            assert completion.versions == [0] * first + [1] * (length - first)
        lost_tokens = 0 if lost_sequences == "continue" else max(known) * len(left)
        tokens = sum(len(c.token_ids) for c in done.values())
        assert generator.generated_tokens == tokens + lost_tokens

    asyncio.run(use())


def test_one_that_dies_again_and_again_ends_the_run(ray_cluster, tmp_path, monkeypatch):
    from tramontane.placement.actors import ActorHandle

    monkeypatch.setattr("tramontane.controller.generators.STARTS", 1)
    config = small_config(tmp_path, placement={"kind": "ray"})
    lost: list[WorkerLost] = []

    def make() -> Handle:
        return ActorHandle("generator 0", {"num_cpus": 1.0}, 30.0).start(partial(os._exit, 3))

    async def use() -> None:
        generator = PooledGenerator(make, config, lost.append, unheard)
        with pytest.raises(WorkerLost, match="generator 0"):
            await generator.started()
        assert len(lost) == 1
        generator.submit([Request(0, 0, [1], 0, SamplingParams(4))])
        with pytest.raises(WorkerLost, match="generator 0"):
            await generator.poll()

    asyncio.run(use())


def test_what_a_lost_worker_said_is_not_heard_once_it_is_replaced(ray_cluster, tmp_path):
    """Its last poll comes in while another call finds it dead: the tokens are sampled again, by
    its successor, and counted once."""
    from tramontane.placement.actors import ActorHandle

    config = small_config(tmp_path, placement={"kind": "ray"})
    load = partial(Generator.load, "tiny", config.generator, 2, 64)

    def make() -> Handle:
        return ActorHandle("generator 0", {"num_cpus": 1.0}, 30.0).start(load)

    async def use() -> None:
        lost: list[WorkerLost] = []
        generator = PooledGenerator(make, config, lost.append, unheard)
        generator.submit([Request(0, i, [1, 5, 9], i, SamplingParams(40)) for i in range(2)])
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
        assert sorted(done) == [0, 1]
        assert generator.generated_tokens == sum(len(c.token_ids) for c in done.values())

    asyncio.run(use())
