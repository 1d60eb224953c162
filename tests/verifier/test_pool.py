"""The pool: verdicts in order, late workers killed, dead ones replaced."""

import os
import signal
import time

import pytest

from tramontane.config import CustomReward, RewardConfig, VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import VerifierPool

SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")
ALGEBRA = Problem("algebra", "math", "What is one more than $x$?", "x+1", language="en")
# No answer is slow enough any more: a reward of the user's own is.
SLOW = "hang"
MODULE = """
import time

def patience(problem, text, n_tokens):
    if "hang" in text:
        time.sleep(60)
    return 1.0
"""


def response(answer):
    return (f"<think>I simply add the two numbers.</think>The answer is \\boxed{{{answer}}}.", 20)


def patient(timeout_s):
    own = CustomReward(name="patience", function="patience_reward.patience", weight=0.0001)
    reward = RewardConfig(custom=(own,))
    return VerifierConfig(timeout_s=timeout_s, code_timeout_s=1.0, reward=reward)


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "patience_reward.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def pool(module):
    with VerifierPool(patient(1.0), 256, 32) as pool:
        yield pool


def worker_pid(pool):
    process = pool._workers[0].process
    return process.pid if process else None


def outcomes(future):
    return [verdict.verdict for verdict in future.result(timeout=60)]


def test_verdicts_in_order(pool):
    futures = [
        pool.score(SUM, [response(5), response(6), response("5."), ("5", 1)]) for _ in range(20)
    ]
    for future in futures:
        assert outcomes(future) == ["right", "wrong", "right", "malformed"]
    assert pool.score(SUM, []).result() == []
    stats = pool.stats()
    assert stats.verdicts >= 80
    assert stats.busy_seconds > 0


def test_the_one_that_hangs_is_named(pool):
    pool.score(ALGEBRA, [response("x+1")]).result(timeout=60)
    before = pool.stats()
    verdicts = pool.score(ALGEBRA, [response(a) for a in ("1+x", SLOW, "x", "x+1")]).result(
        timeout=60
    )
    assert [v.verdict for v in verdicts] == ["right", "unscorable", "wrong", "right"]
    assert verdicts[1].reason == "timed out after 1 s"
    assert verdicts[1].reward == 0
    after = pool.stats()
    assert (after.timeouts - before.timeouts, after.unscorable - before.unscorable) == (1, 1)


def test_a_hanging_program_is_wrong_and_its_siblings_are_not(pool):
    tests = {"type": "stdio", "cases": [{"input": "", "output": "7"}]}
    problem = Problem("seven", "code", "Print seven.", tests=tests)
    texts = [
        f"<think>Easy.</think>\n```python\n{p}\n```"
        for p in ("print(7)", "while True: pass", "print(8)")
    ]
    assert outcomes(pool.score(problem, [(t, 5) for t in texts])) == ["right", "wrong", "wrong"]


def test_a_worker_killed_midway_costs_no_verdict(pool):
    pool.score(SUM, [response(5)]).result(timeout=60)
    before = pool.stats().restarts
    future = pool.score(ALGEBRA, [response("x+1"), response(SLOW), response("x+2")])
    later = pool.score(SUM, [response(5)])
    time.sleep(0.4)
    os.kill(worker_pid(pool), signal.SIGKILL)
    assert outcomes(future) == ["right", "unscorable", "wrong"]
    assert outcomes(later) == ["right"]
    assert pool.stats().restarts > before


def test_a_worker_that_dies_twice_on_one_answer_is_not_tried_again(pool):
    future = pool.score(ALGEBRA, [response(SLOW), response("x+1")])
    time.sleep(0.4)
    first = worker_pid(pool)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while worker_pid(pool) in (None, first) or not pool._workers[0]._warm:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(worker_pid(pool), signal.SIGKILL)
    verdicts = future.result(timeout=60)
    assert [v.verdict for v in verdicts] == ["unscorable", "right"]
    assert verdicts[0].reason == "the worker died (signal 9 (Killed))"


def test_a_worker_killed_while_idle_is_replaced(pool):
    pool.score(SUM, [response(5)]).result(timeout=60)
    os.kill(worker_pid(pool), signal.SIGKILL)
    assert outcomes(pool.score(SUM, [response(5), response(6)])) == ["right", "wrong"]


def test_a_worker_that_stops_hearing_is_replaced(monkeypatch):
    """The group is larger than a socket's buffer: the pool waits for it to be read."""
    monkeypatch.setattr("tramontane.verifier.pool.TRANSFER_SECONDS", 1)
    with VerifierPool(VerifierConfig(), 256, 32) as pool:
        assert outcomes(pool.score(SUM, [response(5)])) == ["right"]
        os.kill(worker_pid(pool), signal.SIGSTOP)
        long = ("<think>" + "2 + 3 = 5. " * 100_000 + "</think>", 300)
        assert outcomes(pool.score(SUM, [long, response(5)])) == ["malformed", "right"]
        assert pool.stats().restarts == 1


def test_kills_under_load(pool):
    group = [response(5), response(6)] * 8
    futures = [pool.score(SUM, group) for _ in range(600)]
    for _ in range(2):
        deadline = time.monotonic() + 60
        while not pool._workers[0]._warm:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = worker_pid(pool)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        while worker_pid(pool) == pid:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not futures[-1].done()
    assert [outcomes(future) for future in futures] == [["right", "wrong"] * 8] * 600


def test_close_is_prompt_and_fails_what_is_pending():
    pool = VerifierPool(patient(30), 256, 32)
    future = pool.score(ALGEBRA, [response(SLOW)])
    waiting = pool.score(ALGEBRA, [response("x+1")])
    time.sleep(0.1)
    started = time.perf_counter()
    pool.close()
    pool.close()
    assert time.perf_counter() - started < 3
    for one in (future, waiting):
        with pytest.raises(RuntimeError, match="closed"):
            one.result(timeout=1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(SUM, [response(5)])


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("tramontane.verifier.pool.sys.executable", "/bin/false")
    with VerifierPool(VerifierConfig(), 256, 32) as pool:
        future = pool.score(SUM, [response(5)])
        with pytest.raises(RuntimeError, match="could not be started \\(exit code 1\\)"):
            future.result(timeout=20)
