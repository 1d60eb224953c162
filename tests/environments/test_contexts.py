"""Context variables of environments, toolboxes and tools belong to their conversation."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from tramontane.environments.running import Runner

SEED: ContextVar[int] = ContextVar("seed")


class Synchronous:
    def start(self, seed: int) -> None:
        SEED.set(seed)

    def step(self) -> int:
        return SEED.get()


class Mixed(Synchronous):
    async def step(self) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return SEED.get()


class Asynchronous(Mixed):
    async def start(self, seed: int) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        SEED.set(seed)


async def conversation(process: Runner, kind: type[Synchronous], seed: int) -> int:
    runner = process.of_conversation()
    runner.environment = kind
    environment = await runner.run(kind)
    await runner.run(environment.start, seed)
    found: int = await runner.run(environment.step)
    runner.end()
    return found


@pytest.mark.parametrize("kind", [Synchronous, Mixed, Asynchronous])
def test_what_start_sets_is_found_in_step_and_by_no_other_conversation(
    kind: type[Synchronous],
) -> None:
    async def all_of_them() -> list[int]:
        process = Runner()
        return await asyncio.gather(*(conversation(process, kind, n) for n in range(8)))

    assert asyncio.run(all_of_them()) == [*range(8)]


def found_and_set(new: int) -> int:
    before = SEED.get(0)
    SEED.set(new)
    return before


async def found_and_set_later(new: int) -> int:
    return found_and_set(new)


@pytest.mark.parametrize("function", [found_and_set, found_and_set_later])
def test_what_a_function_sets_is_seen_by_no_other_call(function: Callable[[int], Any]) -> None:
    async def calls() -> list[int]:
        runner = Runner(threads=1)
        found = [await runner.run(function, n) for n in (5, 7, 9)]
        runner.end()
        return found

    assert asyncio.run(calls()) == [0, 0, 0]
