"""Handles over real threads and processes: order, errors, deaths, timeouts."""

import asyncio
import os
import signal
import time
from functools import partial

import pytest

from tramontane.errors import InputError
from tramontane.placement import Limit, ProcessRanks, ThreadHandle, WorkerStalled, call, started
from tramontane.placement.ranks import RankFailed

LIMIT = Limit(60.0, "timeouts.start")


class Worker:
    """Remembers what it was asked."""

    def __init__(self, broken: str = "") -> None:
        if broken:
            raise InputError(broken)
        self.calls: list[int] = []

    def note(self, n: int) -> list[int]:
        self.calls.append(n)
        return list(self.calls)

    def pid(self) -> int:
        return os.getpid()

    def wrong(self) -> None:
        raise InputError("mend this")

    def slow(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture(params=["thread", "ranks"])
def make(request: pytest.FixtureRequest):
    handles = []

    def build(worker=Worker):
        if request.param == "thread":
            handles.append(ThreadHandle("worker", worker))
        else:
            handles.append(ProcessRanks("worker", worker, 2, "gloo"))
        return handles[-1]

    yield build
    for handle in handles:
        handle.close()


def test_calls_run_in_order_and_errors_reach_the_caller(make) -> None:
    async def use() -> None:
        handle = make()
        await started(handle, LIMIT)
        futures = [handle.submit("note", n) for n in range(5)]
        assert await asyncio.wrap_future(futures[-1]) == [0, 1, 2, 3, 4]
        with pytest.raises(InputError, match="mend this"):
            await call(handle, "wrong", limit=LIMIT)

    asyncio.run(use())


def test_a_worker_that_cannot_be_made_says_why(make) -> None:
    async def use() -> None:
        handle = make(partial(Worker, "no such model"))
        with pytest.raises(InputError, match="no such model"):
            await started(handle, LIMIT)

    asyncio.run(use())


def test_a_wait_is_bounded_and_named(make) -> None:
    async def use() -> None:
        handle = make()
        await started(handle, LIMIT)
        short = Limit(0.05, "timeouts.training")
        with pytest.raises(WorkerStalled, match=r"worker\.slow .* 0\.05 s \(timeouts\.training\)"):
            await call(handle, "slow", 0.5, limit=short)

    asyncio.run(use())


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    handle = ProcessRanks("trainer", Worker, 2, "gloo")
    handle.started.result(60)
    os.kill(handle.submit("pid").result(60), signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"trainer rank 0 died \(exit code -9\)"):
        handle.submit("note", 1).result(60)
    # And the next call, where the pipe is known to be broken.
    with pytest.raises(RankFailed, match="rank 0 died"):
        handle.submit("note", 1).result(60)
    handle.close()


def test_ctrl_c_does_not_reach_a_rank() -> None:
    handle = ProcessRanks("trainer", Worker, 2, "gloo")
    handle.started.result(60)
    os.kill(handle.submit("pid").result(60), signal.SIGINT)
    assert handle.submit("note", 7).result(60) == [7]
    handle.close()
