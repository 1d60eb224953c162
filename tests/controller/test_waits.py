"""Waits of the pipeline's loops: what ends them, and what a wait that lasts too long says."""

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.controller.driven import DrivenLedger, config, verdict
from tramontane.config import TimeoutsConfig
from tramontane.controller.waits import Waits, in_background
from tramontane.placement import WaitTimeout

LIMIT = 0.05


class Pool:
    """What a wait reads of the generators; `evaluating` is one of `answers` each time."""

    in_flight = 7

    def __init__(self, answers: Iterable[bool]) -> None:
        self._answers = iter(answers)

    @property
    def evaluating(self) -> bool:
        return next(self._answers)


def waits(
    train: Path, limit: float = LIMIT, evaluating: Iterable[bool] = (False,)
) -> tuple[Waits, DrivenLedger]:
    run = DrivenLedger(config(train))
    run.hand_out()
    pool: Any = Pool(evaluating)
    return Waits(TimeoutsConfig(batch=limit), run.ledger, pool), run


def test_a_wait_ends_when_its_condition_has_become_true_and_not_before(forty: Path) -> None:
    made, _ = waits(forty, 60.0)
    batches: list[int] = []

    async def wait() -> list[bool]:
        await made.until(lambda: True, "what is true already")
        waiting = in_background(made.until(lambda: len(batches) > 1, "two batches"), "wait")
        ended = []
        for number in range(2):
            await asyncio.sleep(0)
            batches.append(number)
            made.notify()
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(waiting.done())
        return ended

    assert asyncio.run(wait()) == [False, True]


def test_a_wait_that_lasts_too_long_says_for_what_and_how_the_run_stands(forty: Path) -> None:
    made, run = waits(forty)
    run.ledger.grade(run.complete(0), [verdict(True), verdict(True)])
    message = r"waited 0\.05 s \(timeouts\.batch\) for enough groups; 7 completions in flight, 0 "
    message += r"groups graded, 1 filtered since update 0 \(the last: .*no diversity"
    with pytest.raises(WaitTimeout, match=message):
        asyncio.run(made.until(lambda: False, "enough groups"))


def test_an_evaluation_does_not_count_and_an_update_begins_the_limit_again(forty: Path) -> None:
    made, run = waits(forty, evaluating=(during for during in (True, True, False)))
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        asyncio.run(made.until(lambda: False, "an evaluation"))
    assert time.monotonic() - began >= 3 * LIMIT

    def updating() -> Iterable[bool]:
        run.ledger.trained_version += 1
        yield True
        yield False

    made, run = waits(forty, evaluating=updating())
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"since update 1$"):
        asyncio.run(made.until(lambda: False, "an update"))
    assert time.monotonic() - began >= 3 * LIMIT


class Never:
    """A condition that is not met."""

    def __call__(self) -> bool:
        return False


def test_a_wait_that_was_given_up_is_left_alone_and_forgotten(forty: Path) -> None:
    made, _ = waits(forty, 60.0)
    met: list[int] = []

    async def give_up(condition: Callable[[], Any]) -> None:
        waiting = in_background(made.until(condition, "what nobody waits for"), "wait")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    async def wait() -> None:
        never = Never()
        left = weakref.ref(never)
        await give_up(never)
        made.notify()
        del never
        gc.collect()
        assert left() is None
        await give_up(lambda: met)
        met.append(1)
        made.notify()

    asyncio.run(wait())


def test_a_wait_ends_with_what_it_waits_for_and_ends_that_with_itself(forty: Path) -> None:
    made, _ = waits(forty)
    ended: list[str] = []

    async def fails() -> None:
        raise ValueError("broken")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hangs")

    async def wait(awaited: Awaitable[None]) -> None:
        with pytest.raises((ValueError, WaitTimeout)) as raised:
            await made.end_of(awaited, "a part")
        await asyncio.sleep(0)
        ended.append(type(raised.value).__name__)

    asyncio.run(wait(fails()))
    asyncio.run(wait(hangs()))
    assert ended == ["ValueError", "hangs", "WaitTimeout"]


def test_an_error_in_the_background_is_not_reported_as_never_retrieved() -> None:
    reported: list[Any] = []

    async def fails() -> None:
        raise ValueError

    async def forget() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        assert in_background(fails(), "fails").get_name() == "fails"
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(forget())
    assert reported == []
