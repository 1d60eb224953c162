"""More conversations, and calls, than a process has threads."""

import asyncio
import threading
import time

from tests.environments import worlds
from tests.environments.test_worker import problem, worker_of
from tramontane.environments.running import THREADS, Runner

SECONDS = 120.0
MORE = THREADS + 44


def test_each_synchronous_conversation_has_a_thread(monkeypatch) -> None:
    """All of them meet in `start`: none waits for another's end, and none is lost."""
    monkeypatch.setattr(worlds.Meets, "place", threading.Barrier(MORE, timeout=SECONDS))
    worker = worker_of(environment="Meets")

    async def run():
        keys = [(number, 0) for number in range(MORE)]
        started = await asyncio.gather(*(worker.start(key, problem(), 7) for key in keys))
        await asyncio.gather(*(worker.close(key) for key in keys))
        return started

    started = asyncio.run(run())
    assert [answer.ending for answer in started] == [None] * MORE


def test_calls_beyond_the_threads_wait_for_one() -> None:
    runner, running, most = Runner(), set(), list[int]()

    def call(number: int) -> int:
        running.add(number)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(number)
        return number

    async def run() -> list[int]:
        return await asyncio.gather(*(runner.run(call, number) for number in range(MORE)))

    assert asyncio.run(run()) == [*range(MORE)]
    assert max(most) <= THREADS
    runner.end()
