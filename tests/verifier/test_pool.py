"""The pool: verdicts in order, late workers killed, dead ones replaced."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tramontane.config import CustomReward, RewardConfig, VerifierConfig
from tramontane.placement.process import WorkerProcess
from tramontane.types import Problem
from tramontane.verifier.pool import VerifierPool

SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")
ALGEBRA = Problem("algebra", "math", "What is one more than $x$?", "x+1", language="en")
WAIT_SECONDS = 300  # limit for a result; no test depends on speed
# No maths answer is slow enough to be killed: a custom reward hangs instead, and says where.
MODULE = """
import os, time
from pathlib import Path

HANGING = Path(__file__).with_name("hanging")

def patience(problem, text, n_tokens):
    if "hang" in text:
        known = HANGING.read_text() if HANGING.exists() else ""
        if "once" in text and text in known:
            return 1.0
        with HANGING.open("a") as file:
            file.write(f"{os.getpid()} {text}\\n")
        time.sleep(3600)
    started = time.process_time()
    while "burn" in text and time.process_time() < started + 1.2:
        pass
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "patience_reward.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def config(timeout_s):
    patience = CustomReward(name="patience", function="patience_reward.patience", weight=0.0001)
    reward = RewardConfig(custom=(patience,))
    return VerifierConfig(timeout_s=timeout_s, code_timeout_s=3.0, reward=reward)


@pytest.fixture(scope="module")
def pool(folder):
    with VerifierPool(config(timeout_s=3600), 256, 32) as pool:
        yield pool


def response(answer, words=""):
    text = f"<think>I simply add the two numbers. {words}</think>The answer is \\boxed{{{answer}}}."
    return text, 20


def worker_pid(pool):
    process = pool._workers[0].child.process
    return process.pid if process else None


def wait_for(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


class Hangs:
    """Waits for completions that hang, except those from before its construction."""

    def __init__(self, folder):
        self.file = Path(folder, "hanging")
        self.seen = len(self._pids())

    def _pids(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [int(line.split()[0]) for line in lines]

    def next_pid(self):
        """The process of the next completion that hangs."""
        pids = wait_for(lambda: self._pids()[self.seen :])
        self.seen += 1
        return pids[0]


def outcomes(future):
    return [verdict.verdict for verdict in future.result(timeout=WAIT_SECONDS)]


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_verdicts_come_in_order(pool):
    before = pool.stats()
    group = [response(5), response(6), response("5."), ("5", 1)]
    futures = [pool.score(SUM, group) for _ in range(20)]
    for future in futures:
        assert outcomes(future) == ["right", "wrong", "right", "malformed"]
    assert pool.score(SUM, []).result(timeout=0) == []
    after = pool.stats()
    assert (after.verdicts - before.verdicts, after.unscorable - before.unscorable) == (80, 0)
    assert after.busy_seconds > before.busy_seconds


@pytest.mark.slow
def test_a_completion_that_hangs_is_named_and_its_process_killed(folder):
    hangs = Hangs(folder)
    with VerifierPool(config(timeout_s=3), 256, 32) as pool:
        answers = [response("1+x"), response("x+1", "hang"), response("x"), response("x+1")]
        verdicts = pool.score(ALGEBRA, answers).result(timeout=WAIT_SECONDS)
        assert [v.verdict for v in verdicts] == ["right", "unscorable", "wrong", "right"]
        reward = f"reward 'patience' ({folder / 'patience_reward.py'}:7)"
        assert (verdicts[1].reason, verdicts[1].reward) == (f"{reward}: timed out after 3 s", 0)
        assert verdicts[1].seconds == 3
        stats = pool.stats()
        assert (stats.timeouts, stats.restarts, stats.unscorable) == (1, 1, 1)
        assert is_gone(pid := hangs.next_pid()) and worker_pid(pool) != pid


@pytest.mark.slow
def test_an_answer_that_is_late_is_wrong_where_its_reference_can_be_judged():
    late = r"\prod_{k=1}^{999} \frac{k+\sin(kx)}{\sqrt{k}+x}"  # takes 7 s
    with VerifierPool(VerifierConfig(timeout_s=1), 256, 32) as pool:
        verdicts = pool.score(ALGEBRA, [response("1+x"), response(late)]).result(WAIT_SECONDS)
        assert [v.verdict for v in verdicts] == ["right", "wrong"]
        assert (verdicts[1].reason, verdicts[1].reward) == ("timed out after 1 s", 0)
        problem = replace(ALGEBRA, id="late", answer=late)
        [verdict] = pool.score(problem, [response("1+x")]).result(WAIT_SECONDS)
        assert (verdict.verdict, verdict.reason) == ("unscorable", "timed out after 1 s")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs schedstat")
def test_waiting_for_a_processor_does_not_count(folder):
    """A worker on one processor with four busy processes has its limit of processor time."""
    processor = min(os.sched_getaffinity(0))
    burn = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    with VerifierPool(config(timeout_s=2), 256, 32) as pool:
        (first,) = pool.score(SUM, [response(5)]).result(WAIT_SECONDS)
        assert first.verdict == "right", first.reason
        os.sched_setaffinity(pool._workers[0].child.process.pid, {processor})
        rivals = [
            subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) for _ in range(4)
        ]
        try:
            started = time.monotonic()
            (verdict,) = pool.score(SUM, [response(5, "burn")]).result(WAIT_SECONDS)
        finally:
            for rival in rivals:
                rival.kill()
                rival.wait()
    assert time.monotonic() - started > 2
    assert verdict.verdict == "right", verdict.reason


@pytest.mark.slow
def test_a_hanging_program_is_wrong_and_its_siblings_are_not(pool):
    tests = {"type": "stdio", "cases": [{"input": "", "output": "7"}]}
    problem = Problem("seven", "code", "Print seven.", tests=tests)
    texts = [
        f"<think>Easy.</think>\n```python\n{p}\n```"
        for p in ("print(7)", "while True: pass", "print(8)")
    ]
    assert outcomes(pool.score(problem, [(t, 5) for t in texts])) == ["right", "wrong", "wrong"]


def test_equal_programs_are_run_once_and_graded_each(pool):
    """The program draws its output at random: two runs of it would not agree on ten tests."""
    cases = [{"input": "", "output": "1"}] * 10
    draw = "import os\nprint(os.urandom(1)[0] % 2)"
    problem = Problem("draw", "code", "Print 1.", tests={"type": "stdio", "cases": cases})

    def answers(program, words):
        return f"<think>I just print it{words}.</think>\n```python\n{program}\n```"

    group = [(answers(draw, " now" * i), 20 * i) for i in range(14)]
    group.insert(7, (answers("print(1)", ""), 20))
    found = pool.score(problem, group).result(timeout=WAIT_SECONDS)
    assert found.pop(7).verdict == "right"
    assert len({(v.verdict, v.reason) for v in found}) == 1
    # Each has the length penalty of its own tokens.
    assert [v.parts["length"] for v in found[:12]] == [0.0] * 12
    assert found[12].parts["length"] == pytest.approx(-0.05)
    assert found[13].parts["length"] == pytest.approx(-0.1)


def test_a_worker_killed_while_grading_costs_no_verdict(pool, folder):
    hangs, before = Hangs(folder), pool.stats()
    answers = [response("x+1"), response("1+x", "hang once"), response("x+2")]
    future = pool.score(ALGEBRA, answers)
    later = pool.score(SUM, [response(5)])
    os.kill(hangs.next_pid(), signal.SIGKILL)
    assert outcomes(future) == ["right", "right", "wrong"]
    assert outcomes(later) == ["right"]
    after = pool.stats()
    assert (after.restarts - before.restarts, after.verdicts - before.verdicts) == (1, 4)


def test_a_completion_whose_worker_dies_twice_is_not_tried_again(pool, folder):
    hangs = Hangs(folder)
    future = pool.score(ALGEBRA, [response("x+1", "hang"), response("x+1")])
    os.kill(hangs.next_pid(), signal.SIGKILL)
    os.kill(hangs.next_pid(), signal.SIGKILL)
    verdicts = future.result(timeout=WAIT_SECONDS)
    assert [v.verdict for v in verdicts] == ["unscorable", "right"]
    assert verdicts[0].reason.startswith("reward 'patience' (")
    assert verdicts[0].reason.endswith("): the worker died (signal 9 (Killed))")


def test_a_worker_killed_while_idle_is_replaced(pool):
    assert outcomes(pool.score(SUM, [response(5)])) == ["right"]
    os.kill(worker_pid(pool), signal.SIGKILL)
    assert outcomes(pool.score(SUM, [response(5), response(6)])) == ["right", "wrong"]


@pytest.mark.slow
def test_a_worker_that_stops_reading_is_replaced(monkeypatch):
    """The group is larger than a socket's buffer: the pool waits for it to be read."""
    monkeypatch.setattr("tramontane.placement.process.TRANSFER_SECONDS", 1)
    with VerifierPool(VerifierConfig(timeout_s=60), 256, 32) as pool:
        assert outcomes(pool.score(SUM, [response(5)])) == ["right"]
        os.kill(worker_pid(pool), signal.SIGSTOP)
        long = ("<think>" + "2 + 3 = 5. " * 100_000 + "</think>", 300)
        assert outcomes(pool.score(SUM, [long, response(5)])) == ["malformed", "right"]
        assert pool.stats().restarts == 1


def test_kills_under_load_cost_no_verdict(pool):
    group = [response(5), response(6)] * 8
    futures = []
    before = pool.stats()
    for _ in range(2):
        start = pool.stats().verdicts
        futures += [pool.score(SUM, group) for _ in range(20)]
        wait_for(lambda start=start: pool.stats().verdicts > start + 50)
        os.kill(worker_pid(pool), signal.SIGKILL)
        assert not futures[-1].done()
    assert [outcomes(future) for future in futures] == [["right", "wrong"] * 8] * 40
    assert pool.stats().restarts - before.restarts == 2


def test_close_kills_workers_and_fails_unfinished_groups(folder):
    hangs = Hangs(folder)
    pool = VerifierPool(config(timeout_s=3600), 256, 32)
    hanging = pool.score(ALGEBRA, [response("x+1", "hang")])
    waiting = pool.score(ALGEBRA, [response("x+1")])
    pid = hangs.next_pid()
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(WAIT_SECONDS)  # the task itself hangs for longer
    assert not closing.is_alive() and is_gone(pid)
    pool.close()
    for future in (hanging, waiting):
        with pytest.raises(RuntimeError, match="closed"):
            future.result(timeout=0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(SUM, [response(5)])


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    process = partial(WorkerProcess, module="tests.no_such_module")
    monkeypatch.setattr(
        "tramontane.verifier.pool.WorkerProcess", lambda name, _, label: process(name, label=label)
    )
    with VerifierPool(VerifierConfig(), 256, 32) as pool:
        future = pool.score(SUM, [response(5)])
        with pytest.raises(RuntimeError, match="could not be started \\(exit code 1\\)"):
            future.result(timeout=WAIT_SECONDS)


def test_files_of_the_user_s_folder_are_not_the_library_s(tmp_path, monkeypatch):
    for name in ("dis", "random", "queue", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')\n")
    (tmp_path / "own_reward.py").write_text("def one(problem, text, n_tokens):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as of a script in that folder
    custom = CustomReward(name="one", function="own_reward.one", weight=1.0)
    config = VerifierConfig(reward=RewardConfig(custom=(custom,)))
    with VerifierPool(config, 100, 0) as pool:
        problem = Problem("p", "math", "1 + 1?", "2")
        [verdict] = pool.score(problem, [("<think>\na\n</think>\n\\boxed{2}", 1)]).result()
    assert verdict.verdict == "right"
    assert verdict.parts["one"] == 1.0
