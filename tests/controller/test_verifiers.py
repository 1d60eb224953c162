"""Verifiers as workers of a placement, here in threads instead of processes."""

import errno
import os
import queue
import threading
import time

import pytest

from tramontane.config import TimeoutsConfig, VerifierConfig
from tramontane.controller.verifiers import MAX_TRIES, VerifierActors
from tramontane.placement import WorkerDied
from tramontane.placement.thread import ThreadHandle
from tramontane.types import Problem, Verdict
from tramontane.verifier.custom import GroupResult
from tramontane.verifier.pool import PoolStats

PROBLEM = Problem("p", "math", "", answer="1")


class DyingGrader:
    """Grades everything as right, and judges all as ½; or dies if a death is left in the list."""

    def __init__(self, deaths: list[str]) -> None:
        self._deaths = deaths

    def call(self, method, problem, responses, *more):
        if self._deaths:
            raise WorkerDied(self._deaths.pop())
        if method == "judge":
            return GroupResult([0.5 for _ in responses]), PoolStats(judged=1)
        return [Verdict(1.0, {}, "right") for _ in responses], PoolStats(verdicts=len(responses))


def verifiers(deaths, replaced=lambda lost: None, workers=1):
    make = lambda number: ThreadHandle(f"verifier {number}", lambda: DyingGrader(deaths))  # noqa: E731
    return VerifierActors(make, workers, TimeoutsConfig(), VerifierConfig(), replaced)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_is_graded_at_its_last_try(workers):
    lost = queue.SimpleQueue()
    deaths = [f"death {n}" for n in range(MAX_TRIES - 1)]
    with verifiers([*deaths], lost.put, workers) as pool:
        assert len(pool.score(PROBLEM, [("", 1)] * 3).result(30)) == 3
        # Another actor may have graded the group before the last loss is reported.
        assert sorted(str(lost.get(timeout=30)) for _ in deaths) == deaths
        assert lost.empty()
        assert pool.stats().verdicts == 3
        assert pool.judge(PROBLEM, ["", "one"]).result(30).values == [0.5, 0.5]
    assert pool.stats().restarts == MAX_TRIES - 1


def test_statistics_of_lost_actors_are_kept():
    deaths = []
    with verifiers(deaths) as pool:
        pool.score(PROBLEM, [("", 1)] * 3).result(30)
        deaths.append("death")
        pool.score(PROBLEM, [("", 1)] * 2).result(30)
        assert (pool.stats().verdicts, pool.stats().restarts) == (5, 1)


def test_a_group_that_costs_too_many_actors_fails_with_the_last_death():
    with verifiers([f"death {n}" for n in reversed(range(MAX_TRIES))]) as pool:
        future = pool.score(PROBLEM, [("", 1)])
        with pytest.raises(WorkerDied, match=f"death {MAX_TRIES - 1}"):
            future.result(30)
        assert pool.score(PROBLEM, [("", 1)]).result(30)[0].verdict == "right"


def test_an_error_of_the_replacement_reaches_every_caller():
    called = threading.Event()

    def full_disk(lost):
        called.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with verifiers(["death"], full_disk) as pool:
        future = pool.score(PROBLEM, [("", 1)])
        with pytest.raises(OSError, match="No space left"):
            future.result(30)
        assert called.is_set()
        with pytest.raises(OSError, match="No space left"):
            pool.score(PROBLEM, [("", 1)])


def test_a_replacement_that_fails_while_they_close_does_not_hold_them_up():
    handles = []

    def make(number):
        if handles:
            while pool._calls.qsize() < 2:  # the lost group, and the end of the thread
                time.sleep(0.01)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        handles.append(ThreadHandle("verifier 0", lambda: DyingGrader(["death"])))
        return handles[0]

    pool = VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), lambda lost: None)
    future = pool.score(PROBLEM, [("", 1)])
    while not pool.stats().restarts:
        time.sleep(0.01)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(OSError, match="No space left"):
        future.result(0)


def test_a_group_of_programs_has_the_time_that_its_tests_may_take():
    tests = {"type": "stdio", "cases": [{"input": "", "output": ""}] * 20}
    problem = Problem("programs", "code", "?", tests=tests)
    config = VerifierConfig()
    with verifiers([]) as pool:
        each = pool.time_limit(problem, 1)
        assert each >= 20 * config.code_timeout_s  # of processor time; more by the clock
        assert pool.time_limit(problem, 16) == 16 * each > TimeoutsConfig().verification
        assert pool.time_limit(PROBLEM, 16) == 16 * config.timeout_s
        assert len(pool.score(problem, [("", 1)] * 16).result(30)) == 16
