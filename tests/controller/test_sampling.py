"""Samples beside training, from generators without a model."""

import asyncio
import gc
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.counting import CountingGenerator
from tests.controller.test_generators import group, pool_of
from tramontane.controller.pooled_generator import ASKED
from tramontane.controller.sampling import EndpointSampler, Sampler
from tramontane.errors import InputError
from tramontane.status import Status
from tramontane.types import Completion, Problem, SamplingParams

PROBLEM = Problem("p", "math", "1 + 1?", "2")
ALONE: Any = SimpleNamespace(converses=False)


def test_completions_come_in_the_order_of_their_requests_whatever_is_trained() -> None:
    pool = pool_of([CountingGenerator(), CountingGenerator()], [])

    async def use() -> None:
        pool.submit(group(0, 4, tokens=90))  # training's
        async with aclosing(Sampler(pool)) as sampler:
            long, short = await asyncio.gather(
                sampler.complete(PROBLEM, group(-1, 3, tokens=8), ALONE),
                sampler.complete(PROBLEM, group(-2, 2, tokens=3), ALONE),
            )
        assert [(c.group, c.index, c.n_tokens) for c in long] == [(-1, i, 8) for i in range(3)]
        assert [(c.group, c.index, c.n_tokens) for c in short] == [(-2, i, 3) for i in range(2)]
        assert {c.status for c in (*long, *short)} == {Status.ENDED}
        assert (pool.in_flight, pool.evaluating) == (4, 0)
        pool.close()

    asyncio.run(use())


class Full(CountingGenerator):
    def poll(self, *_: Any) -> Any:
        raise RuntimeError("no memory")


def test_an_error_of_a_generator_reaches_all_who_wait_and_who_come_later() -> None:
    pool = pool_of([Full()], [])

    async def use() -> None:
        sampler = Sampler(pool)
        sampler.submit(group(-4, 1))[0].cancel()  # gave up, and holds nobody up
        asked = (sampler.complete(PROBLEM, group(n, 2), ALONE) for n in (-1, -2))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in found] == ["no memory"] * 2
        with pytest.raises(RuntimeError, match="no memory"):
            sampler.submit(group(-3, 1))
        assert sampler.failed.done()
        pool.close()

    asyncio.run(use())


def test_an_error_of_a_generator_reaches_its_clients() -> None:
    pool = pool_of([Full()], [])

    async def use() -> None:
        told = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, error: told.append(error))
        with pytest.raises(RuntimeError, match="no memory"):
            await anext(Sampler(pool, ASKED).sample([1], 9, 0, SamplingParams(5)))
        gc.collect()
        assert not told  # nobody has to await `failed`, too
        pool.close()

    asyncio.run(use())


def test_a_completion_that_nobody_awaits_any_more_holds_up_no_other() -> None:
    pool = pool_of([CountingGenerator()], [])

    async def use() -> None:
        sampler = Sampler(pool)
        gone, other = sampler.submit(group(-1, 2))
        gone.cancel()
        assert (await other).index == 1 and not sampler.failed.done()
        pool.close()

    asyncio.run(use())


def test_clients_see_tokens_as_they_come_and_wait_for_room() -> None:
    pool = pool_of([CountingGenerator()], [])

    async def use() -> None:
        sampler, running = Sampler(pool, ASKED, 2), list[int]()

        async def ask(number: int) -> list[list[int]]:
            seen = []
            async for found in sampler.sample([1], 2, 0, SamplingParams(5)):
                seen.append([len(each.token_ids) for each in found])
                running.append(number)
            assert {each.status for each in found} == {Status.ENDED}
            return seen

        for seen in await asyncio.gather(ask(0), ask(1)):
            assert seen[-1] == [5, 5] and seen == sorted(seen) and len(seen) > 1
        assert running == sorted(running)  # one after the other
        with pytest.raises(InputError, match="at most 2 completions"):
            sampler.sample([1], 3, 0, SamplingParams(5))
        pool.close()

    asyncio.run(use())


def test_requests_wait_in_order_and_one_that_leaves_does_not_hold_up_the_rest() -> None:
    pool = pool_of([CountingGenerator()], [])

    async def use() -> None:
        sampler, done = Sampler(pool, ASKED, 4), list[str]()
        (generator,) = pool

        async def ask(name: str, n: int) -> None:
            async for _ in sampler.sample([1], n, 0, SamplingParams(20)):
                assert generator.unfinished[ASKED] <= 4
            done.append(name)

        async def small(name: str) -> None:
            for number in range(8):
                await ask(f"{name} {number}", 1)

        smalls = [asyncio.create_task(small(name)) for name in "ab"]
        await asyncio.sleep(0)
        gone, large = (asyncio.create_task(ask(name, 4)) for name in ("gone", "large"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(asyncio.gather(large, *smalls), 60)
        assert done.index("large") <= 3 and "gone" not in done
        assert len(done) == 17
        pool.close()

    asyncio.run(use())


class Asking:
    """Environments that answer two turns with a token each; the third ends the conversation."""

    converses = True

    def __init__(self) -> None:
        self.began: list[tuple[int, int, int]] = []  # limit, index and seed of each conversation

    async def answer(self, limit: int, problem: Problem, completion: Completion) -> None:
        assert problem is PROBLEM and limit == 3
        if completion.status is Status.OPENING:
            assert completion.prompt_ids == []
            self.began.append((limit, completion.index, completion.seed))
            completion.prompt_ids = [1]
            completion.move(Status.SAMPLED)
        elif completion.n_tokens > 8:
            completion.move(Status.ENDED)
        else:
            assert completion.status is Status.STEPPING
            completion.put_in([5], completion.n_tokens + 4)


def test_conversations_are_sampled_turn_by_turn_until_their_environments_end_them() -> None:
    pool, asking = pool_of([CountingGenerator(), CountingGenerator()], []), Asking()

    async def use() -> None:
        async with aclosing(Sampler(pool)) as sampler:
            requests = [
                Completion.requested(-1, i, [9, 9], 40 + 7 * i, SamplingParams(3)) for i in range(3)
            ]
            done = await sampler.complete(PROBLEM, requests, asking)  # type: ignore[arg-type]
        assert [c.index for c in done] == [0, 1, 2]
        for completion in done:
            assert completion.token_ids.tolist() == [7, 7, 7, 5, 7, 7, 7, 5, 7, 7, 7]
            assert completion.status is Status.ENDED
        # Environments of one problem begin alike: the seeds of a group differ by the index.
        assert sorted(asking.began) == [(3, i, 40 + i) for i in range(3)]
        pool.close()

    asyncio.run(use())


def test_a_closed_sampler_leaves_no_polls() -> None:
    pool = pool_of([CountingGenerator()], [])

    async def use() -> None:
        sampler = EndpointSampler(pool, 96, 400, limit=2)
        with pytest.raises(InputError, match="at most 2 completions"):
            sampler.sample([1], 3, 0, SamplingParams(5))
        both = [sampler.sample([1, n], 1, 5 + n, SamplingParams(90), ["data:,"]) for n in range(2)]
        for n, seen in enumerate(both):
            (request,) = await anext(seen)
            told = request.prompt_ids, request.seed, [*request.images]
            assert told == ([1, n], 5 + n, ["data:,"])
        assert len(asyncio.all_tasks()) == 2  # this, and the polls of a generator for both
        await sampler.aclose()
        assert len(asyncio.all_tasks()) == 1
        assert all(member.requests for member in pool)  # not waited for
        for seen in both:
            await seen.aclose()
        assert not sampler._waiting and not any(member.requests for member in pool)
        pool.close()

    asyncio.run(use())
