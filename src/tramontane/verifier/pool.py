"""Worker processes that grade groups: killed from outside when late, replaced when they die.

Each worker has one socket and one supervising thread. Verdicts travel one at a time, so that the
completion that hangs or kills its worker is named `unscorable` and its siblings keep their
verdicts. Rewards of a whole group are called once all of its verdicts are in, each function
separately. When a worker dies without being late (killed from outside, say), it is replaced, and
the completion that it was grading is tried once more before it is blamed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tramontane.config import VerifierConfig
from tramontane.errors import InputError
from tramontane.placement.process import WorkerProcess
from tramontane.temporary import temporary_folder
from tramontane.types import Problem, Verdict
from tramontane.verifier import code, correctness, functions
from tramontane.verifier.correctness import unscorable
from tramontane.verifier.custom import (
    NO_PROGRESS,
    Answered,
    GroupCall,
    GroupResult,
    JudgeCall,
    Progress,
    Response,
)
from tramontane.verifier.format import sample
from tramontane.verifier.group_rewards import check_columns, group_calls, with_group_rewards
from tramontane.verifier.judge import Spending

CLOCK = 10  # limit by the clock, as a multiple of a task's limit of processor time
CLOSE_SECONDS = 0.05  # pause between two attempts to end a supervising thread
Responses = Sequence[Response | tuple[str, int]]
Item = Response | code.Trial | GroupCall | JudgeCall


@dataclass
class PoolStats:
    """Counts over the life of a pool; `busy_seconds` is summed over its workers."""

    verdicts: int = 0
    busy_seconds: float = 0.0
    unscorable: int = 0
    timeouts: int = 0
    restarts: int = 0
    judged: int = 0  # groups
    judge_requests: int = 0

    @property
    def progress(self) -> int:
        """Grows as long as anything is graded."""
        return self.verdicts + self.judged


class VerifierPool:
    """Grades groups of completions in `config.workers` processes.

    Args:
        config: workers, limits and reward weights.
        l_max: completion length in tokens at which the length penalty reaches its maximum.
        l_cache: number of tokens below `l_max` at which the penalty starts.

    Raises:
        InputError: a user-defined verifier or reward cannot be imported.
    """

    def __init__(self, config: VerifierConfig, l_max: int, l_cache: int) -> None:
        correctness.check(config)
        self.config = config
        self._lengths = l_max, l_cache
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._to_judge: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stats = PoolStats()
        self._closing = False
        self._folder = temporary_folder("verifier")
        os.chmod(self._folder.name, 0o711)  # programs may run as a user of their own
        most = config.judge.max_requests if config.judge else None
        self._spending = Spending(Path(self._folder.name), most)
        self._workers = [_Worker(self, str(number)) for number in range(config.workers)]
        if config.judge:
            judges = range(config.judge.workers)
            self._workers += [_Worker(self, f"judge {number}", judges=True) for number in judges]
        for worker in self._workers:
            worker.thread.start()

    def score(
        self,
        problem: Problem,
        responses: Responses,
        lengths: tuple[int, int] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Future[list[Verdict]]:
        """Grade the completions of one group.

        The future holds the verdicts in the order of the responses; it fails only when no worker
        can be started.

        Args:
            problem: the problem that all completions answer.
            responses: the text and the number of tokens of each completion, and its tokens for
                rewards of a whole group that ask for them.
            lengths: (l_max, l_cache), if they differ from the pool's.
            progress: updates done and updates of the run, for rewards that depend on them.

        Raises:
            RuntimeError: the pool is closed.
        """
        items = [Response(*response) for response in responses]
        group = _Group(problem, [*items], self.config, lengths or self._lengths, progress)
        limit = correctness.time_limit(problem, self.config)
        # Responses that answer a slow problem alike: each program is run once, on any worker.
        parts: dict[str, list[int]] = {}
        is_slow = correctness.is_slow(problem, self.config)
        for index, response in enumerate(items):
            answer = response.text.rpartition(self.config.tags.closing)[2]
            parts.setdefault(answer if is_slow else "", []).append(index)
        return self._submit(group, [_Task(group, part, limit) for part in parts.values()])

    def judge(self, problem: Problem, answers: Sequence[Answered]) -> Future[GroupResult]:
        """Have the judge grade these answers to a problem, whatever their format.

        Raises:
            RuntimeError: the pool is closed.
        """
        assert self.config.judge
        group = _Group(problem, [JudgeCall("judge", answers)], self.config, calls=[])
        return self._submit(group, [_Task(group, [0], self.config.judge.timeout_s)])

    def try_functions(self, problems: Iterable[Problem]) -> None:
        """Call each user-defined verifier and reward, and the judge, on the first problem of its
        domain: with a well-formed response containing the reference answer, and with an empty one.

        Raises:
            InputError: a function fails, or requires a column that no problem has; or the judge
                gives no answer that can be read.
        """
        problems = list(problems)
        check_columns(self.config.reward.custom, problems)
        first: dict[str, Problem] = {}
        for problem in problems:
            first.setdefault(problem.domain, problem)
        for domain, problem in first.items():
            if not correctness.has_functions(self.config, domain):
                continue
            form = self.config.domains[domain].format
            texts = [sample(form, problem.answer or "0", self.config.tags), ""]
            # An empty completion has a token, too: the one that ended it.
            responses = [Response(text, 1 + len(text.split())) for text in texts]
            for text, verdict in zip(texts, self.score(problem, responses).result(), strict=True):
                if verdict.reason.startswith("judge: "):
                    raise InputError(
                        f"verifier.{verdict.reason}; asked before the start about problem "
                        f"{problem.id!r}"
                    )
                if functions.failed(verdict.reason):
                    raise InputError(
                        f"{verdict.reason}; called before the start with problem {problem.id!r} "
                        f"and {f'the completion {text!r}' if text else 'an empty completion'}. "
                        f"A function that fails makes its completions unscorable: let it return a "
                        f"result for every text"
                    )

    def time_limit(self, problem: Problem, completions: int) -> float:
        """Longest time that the verdicts on a group may take, in seconds."""
        return correctness.group_time_limit(problem, completions, self.config)

    def run(self, trial: code.Trial) -> Future[list[code.TrialOutput]]:
        """Run a program; the future holds its output for each input.

        The future fails only when no worker can be started.

        Raises:
            RuntimeError: the pool is closed.
        """
        group = _Group(None, [trial], self.config)
        return self._submit(group, [_Task(group, [0], trial.time_limit(self.config))])

    def _submit(self, group: _Group, tasks: list[_Task]) -> Future[Any]:
        if self._closing:
            raise _closed()
        group.future.set_running_or_notify_cancel()
        if not group.items:
            group.future.set_result([])
            return group.future
        self._queue(group, tasks)
        return group.future

    def _queue(self, group: _Group, tasks: list[_Task]) -> None:
        for task in tasks:
            judged = group.is_judged(task.pending[0])
            (self._to_judge if judged else self._tasks).put(task)
        if self._closing:  # the workers may have taken their last task
            self._fail(group, _closed())

    def stats(self) -> PoolStats:
        """A copy of the counts so far."""
        with self._lock:
            return PoolStats(**vars(self._stats))

    def close(self) -> None:
        """Kill the workers; groups that are not finished fail with `RuntimeError`."""
        if self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.tasks.put(None)
        for worker in self._workers:
            worker.child.closing = True
            while worker.thread.is_alive():  # killed repeatedly: a new process may be starting
                worker.child.kill()
                worker.thread.join(CLOSE_SECONDS)
        for tasks in (self._tasks, self._to_judge):  # those that no worker has taken
            with contextlib.suppress(queue.Empty):
                while True:
                    if task := tasks.get_nowait():
                        self._fail(task.group, _closed())
        self._folder.cleanup()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ called by supervising threads

    def _finish_item(self, task: _Task, result: Any) -> None:
        """Record the result of the task's current item, and complete the group with its last."""
        group = task.group
        with self._lock:
            index = task.pending.pop(0)
            group.results[index] = result
            if isinstance(result, Verdict):
                self._stats.verdicts += 1
                self._stats.unscorable += result.verdict == "unscorable"
            elif group.is_judged(index):
                self._stats.judged += 1
                self._stats.judge_requests = self._spending.requests
            complete = len(group.results) == len(group.items)
        if group.is_judged(index):
            self._spending.check(self._stats.judge_requests)
        if complete and not self._call_on_group(group):
            group.complete()

    def _call_on_group(self, group: _Group) -> bool:
        """Queue the rewards of the whole group, once; False if none are due."""
        if group.calls is not None or group.problem is None:
            return False
        group.calls = group.rewards_due()
        first = len(group.items)
        group.items += group.calls
        if not group.calls:
            return False
        limit = correctness.call_time_limit(group.problem, first, self.config)
        judge = self.config.judge
        for i in range(first, len(group.items)):
            limit_s = judge.timeout_s if judge and group.is_judged(i) else limit
            self._queue(group, [_Task(group, [i], limit_s)])
        return True

    def _fail(self, group: _Group, error: Exception) -> None:
        with self._lock:
            if not group.future.done():
                group.future.set_exception(error)

    def _count(self, *, timeouts: int = 0, restarts: int = 0, busy: float = 0.0) -> None:
        with self._lock:
            self._stats.timeouts += timeouts
            self._stats.restarts += restarts
            self._stats.busy_seconds += busy


def try_functions(config: VerifierConfig, problems: Sequence[Problem]) -> None:
    """Like `VerifierPool.try_functions`, in a separate pool, which is only started if there are
    user-defined functions."""
    domains = {problem.domain for problem in problems}
    if any(correctness.has_functions(config, domain) for domain in domains):
        with VerifierPool(config.model_copy(update={"workers": 1}), sys.maxsize, 0) as pool:
            pool.try_functions(problems)


def _closed() -> RuntimeError:
    return RuntimeError("the verifier pool was closed")


@dataclass
class _Group:
    """The completions of a problem and their verdicts; or one program, or one call of the judge."""

    problem: Problem | None
    items: list[Item]  # completions, then calls on all of them
    config: VerifierConfig
    lengths: tuple[int, int] = (0, 0)  # l_max and l_cache; unused for a program
    progress: Progress = NO_PROGRESS
    future: Future[Any] = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)
    calls: list[GroupCall | JudgeCall] | None = None  # None until all completions are graded

    def rewards_due(self) -> list[GroupCall | JudgeCall]:
        """The calls on the whole group, whose completions have all been graded."""
        responses = [item for item in self.items if isinstance(item, Response)]
        assert self.problem
        return group_calls(self.problem, self._ordered(), responses, self.config, self.progress)

    def is_judged(self, index: int) -> bool:
        return isinstance(self.items[index], JudgeCall)

    def complete(self) -> None:
        results = self._ordered()
        if not isinstance(self.items[0], Response):
            self.future.set_result(results[0])
            return
        if calls := self.calls:
            found = {c.name: r for c, r in zip(calls, results[-len(calls) :], strict=True)}
            verdicts = results[: -len(calls)]
            assert self.problem
            results = with_group_rewards(self.problem, verdicts, found, self.config)
        self.future.set_result(results)

    def _ordered(self) -> list[Any]:
        return [self.results[index] for index in range(len(self.items))]


@dataclass
class _Task:
    """Items of a group for one worker, in order, with a time limit in seconds for each."""

    group: _Group
    pending: list[int]  # indices of the group's items; the first is being graded
    limit_s: float
    retried: set[int] = field(default_factory=set)

    @property
    def pending_items(self) -> list[Item]:
        """The items as sent to a worker: tokens are sent only to functions that may use them."""
        items = (self.group.items[index] for index in self.pending)
        return [i._replace(token_ids=None) if isinstance(i, Response) else i for i in items]

    def failure(self, reason: str, seconds: float = 0.0) -> Any:
        """The result of the current item when its worker gave none."""
        item = self.group.items[self.pending[0]]
        if isinstance(item, code.Trial):
            return [code.TrialOutput("", reason)] * len(item.inputs)
        if isinstance(item, GroupCall | JudgeCall):
            return GroupResult([], reason if isinstance(item, GroupCall) else f"judge: {reason}")
        return unscorable(reason, self.group.config.reward.parts, seconds=seconds)


class _Worker:
    """One process, and the thread that sends it tasks, kills it when late, and replaces it."""

    def __init__(self, pool: VerifierPool, name: str, judges: bool = False) -> None:
        self.pool, self.judges = pool, judges
        self.folder = Path(pool._folder.name) / name
        self.tasks = pool._to_judge if judges else pool._tasks
        # Named by a string: the judge's module imports the verifier, not the other way around.
        module = "tramontane.asking.judge" if judges else "tramontane.verifier.worker"
        name, label = ("judge", "judge") if judges else ("verifier worker", "reward")
        self.child = WorkerProcess(name, module, label)
        self.thread = threading.Thread(target=self._serve, name=f"verifier-{name}", daemon=True)

    def _serve(self) -> None:
        """Waits for a task; unblocked by `score`, `run` and `close`."""
        while (task := self._next_task()) is not None:
            started = time.perf_counter()
            try:
                self._run(task)
            except Exception as error:
                # Only this thread can complete the group: pass the error on to its future.
                self.pool._fail(task.group, error)
            if not self.judges:
                self.pool._count(busy=time.perf_counter() - started)
        self.child.stop()

    def _next_task(self) -> _Task | None:
        """The next task; a missing grading process is started before the wait, to warm up during
        it."""
        if not self.pool._closing and not self.judges and self.child.process is None:
            with contextlib.suppress(OSError):  # `ready` reports it to the group that needs it
                self.child.start(self._settings())
        return self.tasks.get()

    def _settings(self) -> tuple[VerifierConfig, str]:
        shutil.rmtree(self.folder, ignore_errors=True)  # left over from a killed process
        self.folder.mkdir()
        return self.pool.config, str(self.folder)

    def _run(self, task: _Task) -> None:
        """Get a result for each of the task's items, with as many processes as that takes."""
        while task.pending:
            if self.pool._closing:
                raise _closed()
            self.pool._count(restarts=int(self.child.died))  # it was killed while idle
            connection = self.child.ready(self._settings)
            try:
                connection.send((task.group.problem, task.pending_items, *task.group.lengths))
                while task.pending:
                    if not self._answers_within(connection, task.limit_s):
                        self.child.stop()
                        self.pool._count(timeouts=1, restarts=1)
                        reason = f"timed out after {task.limit_s:g} s"
                        self.pool._finish_item(task, self._late(task, reason))
                        break
                    self.pool._finish_item(task, connection.recv())
            except (EOFError, OSError):  # the worker is gone
                self._blame_or_retry(task, self.child.stop())

    def _answers_within(self, connection: Connection, limit_s: float) -> bool:
        """True once an answer has arrived; False if the process has run and slept for `limit_s`.

        Time in which it waited for a processor on a busy machine does not count, up to `CLOCK`
        times the limit.
        """
        started, waited = time.monotonic(), self._waited()
        remaining = limit_s
        while not connection.poll(remaining):
            clock = time.monotonic() - started
            remaining = min(limit_s - clock + self._waited() - waited, CLOCK * limit_s - clock)
            if remaining <= 0:
                return False
        return True

    def _waited(self) -> float:
        """Seconds that the process has waited for a processor; 0 if they are not counted."""
        assert self.child.process is not None
        statistics = Path(f"/proc/{self.child.process.pid}/schedstat")
        return int(statistics.read_text().split()[1]) / 1e9 if statistics.exists() else 0.0

    def _blame_or_retry(self, task: _Task, ending: str) -> None:
        """After a worker's death: the item that it was grading is tried once more."""
        if self.pool._closing:
            return
        self.pool._count(restarts=1)
        current = task.pending[0]
        if current in task.retried:
            self.pool._finish_item(task, self._late(task, f"the worker died ({ending})"))
        else:
            task.retried.add(current)

    def _late(self, task: _Task, reason: str) -> Any:
        """The result of an item that was late or ended its worker. A completion is wrong if the
        problem's other answers can be judged: otherwise a policy could learn to be late."""
        called = functions.read_trail(self.folder)
        is_response = isinstance(task.group.items[task.pending[0]], Response)
        if called or not is_response or not self._can_judge(task):
            return task.failure(f"{called}: {reason}" if called else reason, task.limit_s)
        parts = dict.fromkeys(task.group.config.reward.parts, 0.0)
        return Verdict(0.0, parts, "wrong", reason, task.limit_s)

    def _can_judge(self, task: _Task) -> bool:
        """Ask a new process whether a plain answer to the task's problem can be judged in time."""
        connection = self.child.ready(self._settings)
        try:
            check = [correctness.ReferenceCheck()]
            connection.send((task.group.problem, check, *task.group.lengths))
            if self._answers_within(connection, task.limit_s):
                return bool(connection.recv())
        except (EOFError, OSError):
            pass
        self.child.stop()
        return False
