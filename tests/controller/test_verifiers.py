"""Verifiers as workers of a placement, here in threads instead of processes."""

import asyncio
import errno
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.runs import small_config
from tramontane.config import CustomReward, RewardConfig, TimeoutsConfig, VerifierConfig
from tramontane.controller.verifiers import MAX_TRIES, Grading, VerifierActors, start_verifiers
from tramontane.placement import WaitTimeout, WorkerDied
from tramontane.placement.thread import ThreadHandle
from tramontane.types import Completion, Problem, Verdict
from tramontane.verifier.custom import GroupResult, Response
from tramontane.verifier.format import sample
from tramontane.verifier.pool import PoolStats
from tramontane.verifier.reward import length_penalty

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
    class Restarting(DyingGrader):
        """Its pool has replaced two processes."""

        def call(self, *arguments):
            result, stats = super().call(*arguments)
            return result, replace(stats, restarts=2)

    deaths = []
    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Restarting(deaths))  # noqa: E731
    with VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), lambda lost: None) as pool:
        pool.score(PROBLEM, [("", 1)] * 3).result(30)
        deaths.append("death")
        pool.score(PROBLEM, [("", 1)] * 2).result(30)
        assert (pool.stats().verdicts, pool.stats().restarts) == (5, 1 + 2 * 2)
    with pytest.raises(RuntimeError, match="^the verifiers are closed$"):
        pool.score(PROBLEM, [("", 1)])


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


class Killable:
    """A verifier that answers nothing, until it is killed."""

    name = "verifier 0"

    def __init__(self):
        self.started, self.call = Future(), Future()
        self.busy, self.closed = threading.Event(), False
        self.started.set_result(None)

    def submit(self, *_):
        self.busy.set()
        return self.call

    def close(self):
        self.closed = True
        if not self.call.done():
            self.call.set_exception(WorkerDied("killed", self.name))


def test_closed_verifiers_kill_a_busy_actor_and_replace_none():
    handle, made, lost = Killable(), [], []
    make = lambda number: made.append(number) or handle  # noqa: E731
    pool = VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), lost.append)
    future = pool.score(PROBLEM, [("", 1)])
    assert handle.busy.wait(30)
    assert not future.cancel()  # it is under way
    pool.close()
    with pytest.raises(RuntimeError, match="^the verifiers were closed$"):
        future.result(0)
    assert (made, lost, pool.stats().restarts) == ([0], [], 0)


@pytest.mark.parametrize("fails", [True, False])
def test_a_replacement_while_they_close_does_not_hold_them_up(fails):
    handles = []

    def make(number):
        if handles:
            while pool._calls.qsize() < 2:  # the lost group, and the end of the thread
                time.sleep(0.01)
            if fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        handles.append(Killable())
        return handles[-1]

    pool = VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), lambda lost: None)
    future = pool.score(PROBLEM, [("", 1)])
    handles[0].close()
    while not pool.stats().restarts:
        time.sleep(0.01)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    error, message = (OSError, "No space left") if fails else (RuntimeError, "were closed")
    with pytest.raises(error, match=message):
        future.result(0)
    assert len(handles) == 2 - fails and all(handle.closed for handle in handles)


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


def test_closed_verifiers_refuse_groups_and_fail_those_that_wait():
    busy, go_on = threading.Event(), threading.Event()

    class Waiting(DyingGrader):
        def call(self, method, problem, responses, *more):
            busy.set()
            go_on.wait(30)
            return super().call(method, problem, responses)

    handle = ThreadHandle("verifier 0", lambda: Waiting([]))
    pool = VerifierActors(lambda _: handle, 1, TimeoutsConfig(), VerifierConfig(), print)
    first, second = (pool.score(PROBLEM, [("", 1)]) for _ in range(2))
    busy.wait(30)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool._closing:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="the verifiers are closed"):
        pool.score(PROBLEM, [("", 1)])
    go_on.set()
    closing.join(30)
    assert first.result(0)[0].verdict == "right"
    with pytest.raises(RuntimeError, match="the verifiers were closed"):
        second.result(0)


def test_an_error_of_a_grader_is_its_callers_and_costs_no_actor():
    class Wrong(DyingGrader):
        def call(self, method, problem, responses, *more):
            if not responses:
                raise ValueError("nothing to grade")
            return super().call(method, problem, responses)

    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Wrong([]))  # noqa: E731
    with VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), pytest.fail) as pool:
        with pytest.raises(ValueError, match="nothing to grade"):
            pool.score(PROBLEM, []).result(30)
        assert len(pool.score(PROBLEM, [("", 1)]).result(30)) == 1
    assert pool.stats().restarts == 0


def test_a_grader_that_hangs_is_replaced_after_the_limit_of_its_verdicts():
    hangs, lost = [True], []

    class Hanging(DyingGrader):
        def call(self, method, problem, responses, *more):
            if hangs and hangs.pop():
                time.sleep(0.5)
            return super().call(method, problem, responses)

    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Hanging([]))  # noqa: E731
    limits, config = TimeoutsConfig(verification=0.2), VerifierConfig(timeout_s=0.01)
    with VerifierActors(make, 1, limits, config, lost.append) as pool:
        assert len(pool.score(PROBLEM, [("", 1)] * 2).result(30)) == 2
    message = "took over 0.22 s (timeouts.verification + the limits of its verdicts)"
    assert str(lost[0]) == f"verifier 0.score {message}"


class Slow:
    """Verifiers that grade other groups for a while, and never the one that is asked about."""

    def __init__(self, others):
        self.others, self.asked = others, []

    def score(self, *arguments):
        self.asked.append(arguments)
        return Future()

    def time_limit(self, problem, completions):
        assert problem is PROBLEM
        return 0.001 * completions

    def stats(self):
        self.others -= self.others > 0
        return PoolStats(verdicts=3 - self.others)


def test_a_verdict_is_late_once_nothing_at_all_was_graded_for_its_limit():
    verifiers = Slow(3)
    grading = Grading(verifiers, TimeoutsConfig(verification=0.003, start=0.004))
    began = time.monotonic()
    message = r"no verdict within 0\.01 s \(timeouts\.verification \+ timeouts\.start \+ the limits"
    with pytest.raises(WaitTimeout, match=message):
        asyncio.run(grading.wait(verifiers.score(), PROBLEM, 3))
    assert time.monotonic() - began >= 3 * 0.01
    with pytest.raises(WaitTimeout, match=r"no verdict within 0\.01 s"):  # for the largest group
        asyncio.run(grading.wait(verifiers.score(), PROBLEM, 1))


def test_verdicts_are_asked_for_with_the_sizes_of_the_stage_and_the_progress_of_the_run():
    class Now(Slow):
        def score(self, *arguments):
            future = super().score()
            self.asked[-1] = arguments
            future.set_result([])
            return future

    verifiers = Now(0)
    grading = Grading(verifiers, TimeoutsConfig(), "sum")
    sizes = small_config("unused", pipeline={"l_max": 80, "l_cache": 16, "updates": 9}).pipeline
    talked = Completion(0, 0, [1], [5, 6], [0.0] * 2, [0] * 2, "stop", text="a", ending="completed")
    for given in ((), (sizes, 4)):
        assert asyncio.run(grading.verdicts(PROBLEM, [talked], *given)) == []
    asyncio.run(Grading(verifiers, TimeoutsConfig()).verdicts(PROBLEM, [talked]))
    (problem, responses, *nothing), (_, _, *of_run), (_, plain) = verifiers.asked
    assert problem is PROBLEM and nothing == [] and of_run == [(80, 16), (4, 9)]
    assert [(r.text, r.n_tokens, r.earned) for r in responses] == [("a", 2, 0.0)]
    assert plain[0].earned is None  # the verifier's own reward


def test_an_actor_is_given_what_its_pool_is_to_grade_by():
    given = []

    class Listening(DyingGrader):
        def call(self, *arguments):
            given.append(arguments)
            return super().call(*arguments)

    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Listening([]))  # noqa: E731
    with VerifierActors(make, 1, TimeoutsConfig(), VerifierConfig(), print) as pool:
        pool.score(PROBLEM, [("a", 1, [5])], (80, 16), (4, 9)).result(30)
    ((method, problem, (response,), *of_run),) = given
    assert (method, problem, of_run) == ("score", PROBLEM, [(80, 16), (4, 9)])
    assert (response.text, response.n_tokens, response.token_ids) == ("a", 1, None)


@pytest.mark.parametrize(("function", "kept"), [("even", None), ("share", [5])])
def test_tokens_are_sent_to_actors_for_rewards_of_whole_groups_alone(function, kept):
    given = []

    class Listening(DyingGrader):
        def call(self, method, problem, responses, *more):
            given.extend(Response(*response).token_ids for response in responses)
            return super().call(method, problem, responses, *more)

    reward = RewardConfig(custom=(CustomReward(function=f"tests.run.rewards.{function}"),))
    make = lambda number: ThreadHandle(f"verifier {number}", lambda: Listening([]))  # noqa: E731
    config = VerifierConfig(reward=reward)
    with VerifierActors(make, 1, TimeoutsConfig(), config, print) as pool:
        pool.score(PROBLEM, [("a", 1, [5])]).result(30)
    assert given == [kept]


def test_an_actor_that_does_not_start_is_replaced_after_the_limit_of_a_start():
    made, lost, handles = [], [], []

    def grader():
        made.append(1)
        time.sleep(0.5 if len(made) == 1 else 0)
        return DyingGrader([])

    class Noted(ThreadHandle):
        closed = False

        def close(self):
            self.closed = True
            super().close()

    def make(number):
        handles.append(Noted(f"verifier {number}", grader))
        return handles[-1]

    limits = TimeoutsConfig(start=0.2)
    with VerifierActors(make, 1, limits, VerifierConfig(), lost.append) as pool:
        assert len(pool.score(PROBLEM, [("", 1)]).result(30)) == 1
        assert [handle.name for handle in handles] == ["verifier 0"] * 2
        assert handles[0].closed
    assert str(lost[0]) == "verifier 0's start took over 0.2 s (timeouts.start)"


def test_the_ends_of_threads_stay_in_the_queue_when_groups_fail():
    pool = verifiers([], workers=0)
    future = pool.score(PROBLEM, [("", 1)])
    for _ in range(2):
        pool._calls.put(None)
    pool._fail_waiting(ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        future.result(0)
    assert pool._calls.qsize() == 2


@pytest.mark.parametrize("kind", ["thread", "ray"])
def test_verifiers_of_a_placement_grade_by_the_sizes_of_its_config(kind):
    """A pool of processes, or a pool in each actor; here the first actor dies at its start."""
    config = small_config(
        "unused",
        placement={"kind": kind},
        verifier={"workers": 1},
        pipeline={"l_max": 80, "l_cache": 40},
    )
    lost, handles = [], []

    def die():
        raise WorkerDied("death")

    def judge(name, make):
        handles.append(ThreadHandle(name, make if handles else die))
        return handles[-1]

    text = sample(config.verifier.domains["math"].format, "1", config.verifier.tags)
    with start_verifiers(config, SimpleNamespace(judge=judge), lost.append) as pool:
        (verdict,) = pool.score(PROBLEM, [(text, 60)]).result(60)
        assert pool.stats().verdicts == 1
    assert verdict.verdict == "right"
    assert verdict.parts["length"] == pytest.approx(length_penalty(60, 80, 40)) != 0
    assert (len(lost), [handle.name for handle in handles]) == (
        (1, ["verifier 0"] * 2) if kind == "ray" else (0, [])
    )
    for handle in handles[1:]:
        handle._worker._pool.close()  # an actor's ends with its process
