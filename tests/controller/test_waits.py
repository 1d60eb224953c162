"""Waits of the pipeline's loops: what ends them, and what a wait that lasts too long says."""

import asyncio
import gc
import time
from collections.abc import Iterable
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
    with pytest.raises(WaitTimeout, match="since update 1"):
        asyncio.run(made.until(lambda: False, "an update"))
    assert time.monotonic() - began >= 3 * LIMIT


def test_an_error_in_the_background_is_not_reported_as_never_retrieved() -> None:
    reported: list[Any] = []

    async def fails() -> None:
        raise ValueError

    async def forget() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        in_background(fails(), "fails")
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(forget())
    assert reported == []
