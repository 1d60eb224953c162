"""Verifiers as workers of a placement, with threads in the place of processes."""

import errno
import os
import threading

import pytest

from tramontane.config import TimeoutsConfig
from tramontane.controller.verifiers import MAX_TRIES, VerifierActors
from tramontane.placement import WorkerDied
from tramontane.placement.thread import ThreadHandle
from tramontane.types import Problem, Verdict
from tramontane.verifier.pool import PoolStats

PROBLEM = Problem("p", "math", "", answer="1")


class Mortal:
    """Grades, unless it is told to die."""

    def __init__(self, deaths: list[str]) -> None:
        self._deaths = deaths

    def score(self, problem, responses, lengths):
        if self._deaths:
            raise WorkerDied(self._deaths.pop())
        return [Verdict(1.0, {}, "right") for _ in responses], PoolStats(verdicts=len(responses))


def verifiers(deaths, replaced=lambda lost: None, workers=1):
    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Mortal(deaths))  # noqa: E731
    return VerifierActors(make, workers, TimeoutsConfig(), replaced)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_outlives_all_but_the_last_of_its_tries(workers):
    lost = []
    deaths = [f"death {n}" for n in range(MAX_TRIES - 1)]
    with verifiers(deaths, lambda error: lost.append(str(error)), workers) as pool:
        assert len(pool.score(PROBLEM, [("", 1)] * 3).result(30)) == 3
        assert pool.stats().verdicts == 3
    assert sorted(lost) == [f"death {n}" for n in range(MAX_TRIES - 1)]


def test_a_group_graded_in_vain_too_often_names_the_last_death():
    with verifiers([f"death {n}" for n in reversed(range(MAX_TRIES))]) as pool:
        future = pool.score(PROBLEM, [("", 1)])
        with pytest.raises(WorkerDied, match=f"death {MAX_TRIES - 1}"):
            future.result(30)
        assert pool.score(PROBLEM, [("", 1)]).result(30)[0].verdict == "right"


def test_what_keeps_a_verifier_from_being_replaced_reaches_who_waits():
    told = threading.Event()

    def full_disk(lost):
        told.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with verifiers(["death"], full_disk) as pool:
        future = pool.score(PROBLEM, [("", 1)])
        with pytest.raises(OSError, match="No space left"):
            future.result(30)
        assert told.is_set()
        with pytest.raises(OSError, match="No space left"):
            pool.score(PROBLEM, [("", 1)])
