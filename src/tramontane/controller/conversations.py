"""Conversations with environments, which run in processes of their own.

A conversation that waits for its environment holds no generator slot; `status.Status` has its
states and their moves. `answer` appends the environment's answer, for any generator to continue, or
ends the conversation. Its group was handed out, and its deadline set, when it began, so the
staleness bound holds however long steps take.

An environment whose process was lost, or whose run was resumed, is rebuilt from the recorded turns
if it and its tools are `deterministic`; otherwise its conversation starts again. If a
step hangs, its conversation ends as `step_timeout`; if the process dies `MAX_DEATHS` times during
its steps, or this package raises an exception, as `environment_failed`. Both are unscorable, never
a reward of 0. The same exception ends the run when it comes for the `MAX_FAULTS`-th time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from tramontane.config import Config
from tramontane.controller.images import unsupported
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.host import Call, EnvironmentHost
from tramontane.environments.loading import deterministic
from tramontane.environments.protocol import Broken, Continued, Lost, Started
from tramontane.errors import InputError
from tramontane.placement.handle import ConcurrentHandle, Limit, WorkerLost, call
from tramontane.status import Status
from tramontane.tokens import EarlierSequence
from tramontane.types import Completion, Ending, Group, Problem, SamplingParams

if TYPE_CHECKING:
    from tramontane.placement.place import Placement

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at whether a step is late
CLOSE_SECONDS = 10.0  # limit for a process to end
BEGUN_FIRST = 64  # conversations begun before anything is generated, to measure their prompts
MAX_DEATHS = 3  # process deaths during a conversation's steps, after which it is blamed
MAX_FAULTS = 16  # times that one exception of this package may come; the last ends the run
FORK = 0x9E3779B97F4A7C15  # added to the seed, so a new sequence draws different random numbers
Key = tuple[int, int]  # group and index of a conversation


def take_answer(completion: Completion, answer: Continued) -> None:
    """Take what an environment answered to a turn: the next turn begins, in the same sequence or in
    a new one, or the conversation has ended."""
    if answer.withdrawn:
        _drop_last(completion)
    completion.turns = [*completion.turns, answer.turn]
    if answer.ending is not None:
        end(completion, answer.ending, answer.reason)
        return
    images = completion.sequences[0].images
    if answer.prompt_ids is not None:
        _fork(completion, list(answer.prompt_ids))
    completion.put_in(answer.put, answer.max_tokens)
    completion.illustrate(images)
    completion.turn_start = len(completion.token_ids)


def _fork(completion: Completion, prompt_ids: list[int]) -> None:
    """Begin a new sequence of a conversation."""
    own = EarlierSequence(completion.prompt_ids, **completion.part(slice(None)))
    completion.earlier, completion.seed = [*completion.earlier, own], completion.seed + FORK
    completion.prompt_ids = prompt_ids
    completion.keep(0)


def _drop_last(completion: Completion) -> None:
    """Go back to the turn before the newest, which is not recorded; the record of that turn is to
    come again."""
    *turns, last = completion.turns
    own = completion.sequences[last.sequence]
    completion.seed -= FORK * (len(completion.earlier) - last.sequence)
    completion.prompt_ids = own.prompt_ids
    completion.keep(last.end, own)
    completion.turn_start, completion.turns = last.start, turns
    completion.earlier, completion.finish_reason = completion.earlier[: last.sequence], "stop"


def end(completion: Completion, ending: Ending, reason: str = "") -> None:
    """End a conversation."""
    completion.finish_reason = completion.finish_reason or "stop"
    completion.text = "\n\n".join(turn.text for turn in completion.turns)
    completion.ending, completion.ending_reason = ending, reason
    completion.move(Status.ENDED)


class Step(NamedTuple):
    """A step of an environment: when it began and ended, and the tool that took longest."""

    began: float
    ended: float
    tool: str


class Conversations:
    """The environments of a run's conversations, in `conversation.workers` processes.

    Args:
        config: the run's; `conversation` and `timeouts` are read.
        make: starts the `EnvironmentHost` with a given number.
        replaced: called with each loss of a host, before its replacement starts.
        failed: called with the traceback of each exception that failed a conversation.

    Attributes:
        converses: False if completions have no environment.
        max_prompt: longest prompt of a first turn, in tokens; a conversation with a longer one ends
            as `context_full`.
        opening: prompt of the first conversation that `fit` began, with what its environment wrote.
        counts: conversations that were `conversations_restarted` and `conversations_replayed`
            after the loss of their environment, and `environment_restarts` of processes.
        steps: for each group not yet recorded, when each step of its conversations began and ended,
            and the step's slowest tool.
        tools: for each group not yet graded, names of the tools that the model may call.
    """

    def __init__(
        self,
        config: Config,
        make: Callable[[int], ConcurrentHandle],
        replaced: Callable[[WorkerLost], None],
        failed: Callable[[str], None] = logger.error,
    ) -> None:
        self._limits, self._data, self._failed = config.conversation, config.data, failed
        self._config = config
        self.converses = config.converses
        self.max_prompt = sys.maxsize
        self.opening: list[int] = []
        self.counts = dict.fromkeys(
            ("conversations_restarted", "conversations_replayed", "environment_restarts"), 0
        )
        self.steps: defaultdict[int, list[Step]] = defaultdict(list)
        self.tools: dict[int, Sequence[str]] = {}
        self._hosts = [
            _Host(partial(make, number), config, replaced)
            for number in range(config.conversation.workers)
        ]
        self._homes: dict[Key, _Host] = {}  # of conversations whose environments have begun
        self._deaths: Counter[Key] = Counter()  # of processes, during a conversation's steps
        self._faults: Counter[str] = Counter()  # by the exception and its place
        self._loads: Counter[_Host] = Counter()  # their conversations

    async def answer(self, l_max: int, problem: Problem, completion: Completion) -> None:
        """Begin a conversation, answer its last turn, or rebuild its environment: until generators
        can sample it, or it has ended.

        Args:
            l_max: longest conversation allowed, in tokens.
            problem: what the conversation is about.
            completion: the conversation so far.

        Raises:
            InputError: the environments or tools of the config cannot be used.
            WorkerLost: a host cannot be replaced.
            Exception: of this package, for the `MAX_FAULTS`-th time.
        """
        try:
            while completion.status not in (Status.SAMPLED, Status.ENDED):
                await self._act(l_max, problem, completion)
        except (InputError, WorkerLost):
            raise
        except Exception as error:
            trace = str(error) if isinstance(error, Broken) else traceback.format_exc()
            place = [line.strip() for line in trace.splitlines() if line.startswith("  File ")][-1]
            what = f"{trace.splitlines()[-1]} ({place})"
            self._failed(f"conversation {completion.group}/{completion.index} failed: {trace}")
            end(completion, "environment_failed", f"this package failed: {what}")
            self._faults[place] += 1
            if self._faults[place] == MAX_FAULTS:
                raise
        finally:
            if completion.status is Status.ENDED:
                self._close(_key(completion))

    async def _act(self, l_max: int, problem: Problem, completion: Completion) -> None:
        """Have the environment do what the status says."""
        began, training = time.time(), completion.group >= 0
        if completion.status is Status.STEPPING:
            turn = replace(_as_known(completion), turns=[], experts=None, allowed=None)
            answer = await self._call(completion, "step", turn, l_max)
            if isinstance(answer, Started):  # nobody read its first turn
                _begin_again(completion, l_max)
        else:
            answer = await self._begin(l_max, problem, completion)
        if isinstance(answer, Lost):
            self._take_loss(completion, answer)
            return
        if answer.images if isinstance(answer, Started) else answer.turn.images:
            self._check_images(training)
        if isinstance(answer, Started):
            if training:
                self.tools[completion.group] = answer.tools
            _take_start(completion, answer)
        else:
            if training:
                slowest = max(answer.turn.calls, key=lambda c: c.seconds, default=None)
                tool = (slowest and slowest.name) or "environment"
                step = Step(began, time.time(), tool)
                self.steps[completion.group].append(step)
            take_answer(completion, answer)

    def _check_images(self, training: bool) -> None:
        for key, what in unsupported(self._config, None, False if training else None):
            raise InputError(
                f"an environment or a tool gave an image, and {what} take none yet ({key}): change "
                f"that key, or let it give text (docs/images.md)"
            )

    def _take_loss(self, completion: Completion, lost: Lost) -> None:
        """Let a conversation whose environment is gone begin elsewhere, or blame it."""
        key = _key(completion)
        self._forget(key)
        completion.move(Status.LOST)
        self._deaths[key] += bool(lost.how)
        if lost.late:
            end(completion, "step_timeout", f"its environment was {lost.how}")
        elif self._deaths[key] == MAX_DEATHS:
            reason = f"its process died {MAX_DEATHS} times during its steps ({lost.how})"
            end(completion, "environment_failed", reason)

    def fate(self, groups: Iterable[Group]) -> str:
        """Describes how many unfinished conversations a resumed run will replay or restart; empty
        if there are none."""
        begun = [self._replays(g.problem) for g in groups for r in g.requests if r.turns]
        again = len(begun) - sum(begun)
        told = f"{len(begun)} conversations under way: {sum(begun)} replayed, {again} restarted"
        return told if begun else ""

    def _replays(self, problem: Problem) -> bool:
        return self._limits.replay or deterministic(self._data, problem)

    async def fit(
        self,
        problems: Sequence[Problem],
        encode: Callable[[Problem], list[int]],
        longest: int,
        room: int = sys.maxsize,
    ) -> int:
        """Begin conversations about the first `BEGUN_FIRST` problems, to see what environments and
        tools add to a prompt; returns and sets `max_prompt`.

        An environment that writes its own first prompt may later exceed the one seen here by a
        quarter.

        Args:
            problems: some of the run's.
            encode: returns the tokens of a problem's own prompt.
            longest: upper bound of these, in tokens.
            room: tokens that the model's context leaves for a first prompt.

        Raises:
            InputError: an environment cannot begin, or its first prompt leaves too little room.
        """
        if not self.converses:
            return longest
        bounds, once, problems = [longest], SamplingParams(1), problems[:BEGUN_FIRST]
        numbers = range(-1, -1 - len(problems), -1)
        opened = [Completion.requested(0, number, [], 0, once) for number in numbers]
        await asyncio.gather(*map(partial(self.answer, 1), problems, opened))
        for problem, begun in zip(problems, opened, strict=True):
            if begun.status is Status.ENDED:
                raise InputError(
                    f"{problem.where or problem.id}: the conversation cannot begin "
                    f"({begun.ending}: {begun.ending_reason})"
                )
            self._close(_key(begun))
            self.opening = self.opening or begun.prompt_ids
            tokens = len(begun.prompt_ids)
            if tokens > room:
                raise InputError(
                    f"{problem.where or problem.id}: the conversation begins with {tokens:,} "
                    f"tokens, and the model's context has room for {max(0, room):,}: lower "
                    f"pipeline.l_max (max_tokens of an evaluation), shorten what the environment "
                    f"and its tools write, or take a model with more context"
                )
            bounds += [longest + tokens - len(encode(problem)), math.ceil(1.25 * tokens)]
        self.max_prompt = min(max(bounds), room)
        return self.max_prompt

    async def _begin(self, l_max: int, problem: Problem, completion: Completion) -> Started | Lost:
        """Begin a conversation in the host with the fewest, or repeat its turns there."""
        host = self._homes[_key(completion)] = min(self._hosts, key=self._loads.__getitem__)
        self._loads[host] += 1
        seed = completion.seed - completion.index  # the same for the whole group
        seed -= FORK * len(completion.earlier)
        if completion.turns and self._replays(problem):
            self.counts["conversations_replayed"] += 1
            told = replace(_as_known(completion), finish_reason="stop")
            return await self._call(completion, "replay", problem, seed, told)
        if completion.turns:
            self.counts["conversations_restarted"] += 1
            _begin_again(completion, l_max)
        return await self._call(completion, "start", problem, seed, self.max_prompt)

    async def _call(self, completion: Completion, method: str, *arguments: Any) -> Any:
        key = _key(completion)
        steps = 1 + (len(completion.turns) if method == "replay" else 0)
        limit = steps * self._limits.step_timeout
        answer = await self._homes[key].call(method, key, arguments, limit)
        self.counts["environment_restarts"] = sum(host.restarts for host in self._hosts)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _close(self, key: Key) -> None:
        if key in self._homes:
            self._homes[key].send("close", key, (), 0.0)
            self._forget(key)
        del self._deaths[key]

    def _forget(self, key: Key) -> None:
        self._loads[self._homes.pop(key)] -= 1

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()


class _Host:
    """The controller's side of one `EnvironmentHost`: calls in, answers out."""

    def __init__(
        self,
        make: Callable[[], ConcurrentHandle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        self._make, self._config, self._replaced = make, config, replaced
        self._handle: ConcurrentHandle | None = None  # until the first call
        self._waits = False  # for answers, and will not see a new call
        self._numbers = count()
        self._unsent: list[Call] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self.restarts = self._restarts_before = 0

    def call(
        self, method: str, key: Key, arguments: tuple[Any, ...], limit_s: float
    ) -> asyncio.Future[Any]:
        """Call a method of the `EnvironmentWorker`; see `EnvironmentHost.exchange`."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting[self.send(method, key, arguments, limit_s)] = answer
        return answer

    def send(self, method: str, key: Key, arguments: tuple[Any, ...], limit_s: float) -> int:
        """Call a method without waiting for its answer; returns the call's number."""
        number = next(self._numbers)
        self._unsent.append(Call(number, method, key, arguments, limit_s))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._exchange(), name="exchange with environments")
        elif self._waits and self._handle is not None:
            self._waits = False
            self._handle.submit_background("wake")
        return number

    async def _exchange(self) -> None:
        """Send calls and take answers until no call is waiting; an error fails all that are, as
        the loss of a process that cannot be replaced."""
        try:
            while self._waiting or self._unsent:
                for number, result in await self._answers():
                    if not (waiting := self._waiting.pop(number)).done():
                        waiting.set_result(result)
        except Exception as error:
            if not isinstance(error, (InputError, WorkerLost)):
                error = WorkerLost(f"environments: {error}")
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)
            self._waiting.clear()

    async def _answers(self) -> list[tuple[int, Any]]:
        limit = Limit.of(self._config.timeouts, "start")
        calls, self._unsent = self._unsent, []
        self._handle, self._waits = self._handle or self._make(), True
        try:
            answers, restarts = await call(
                self._handle, "exchange", calls, LOOK_SECONDS, limit=limit
            )
        except WorkerLost as lost:
            if not self._config.placement.replaces_workers:
                raise
            self._replaced(lost)
            self._restarts_before = self.restarts + 1
            self._handle.close()
            self._handle, restarts = self._make(), 0
            unsent = {each.number for each in self._unsent}  # queued meanwhile, for the new process
            answers = [(n, Lost(str(lost))) for n in self._waiting if n not in unsent]
        finally:
            self._waits = False
        self.restarts = self._restarts_before + restarts
        return list(answers)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._handle is not None:
            with suppress(WorkerLost, TimeoutError):  # it ends with this process in any case
                self._handle.submit("close").result(CLOSE_SECONDS)
            self._handle.close()


def start_conversations(
    config: Config,
    encoder: PromptEncoder,
    placement: Placement,
    replaced: Callable[[WorkerLost], None],
    failed: Callable[[str], None] = logger.error,
) -> Conversations:
    """The conversations of a run. `placement` starts each process when it is first needed; for the
    functions, see `Conversations`."""
    make = partial(EnvironmentHost, config, encoder)
    hosts = lambda n: placement.judge(f"environment {n}", make)  # noqa: E731
    return Conversations(config, hosts, replaced, failed)


def _as_known(completion: Completion) -> Completion:
    """A completion without the images and the chat that its environment gave."""
    return replace(completion, images=(), put_images=(), opened=())


def _key(completion: Completion) -> Key:
    return completion.group, completion.index


def _begin_again(completion: Completion, l_max: int) -> None:
    """Forget all turns of a conversation."""
    completion.seed -= FORK * len(completion.earlier)
    completion.sampling = replace(completion.sampling, max_tokens=l_max)
    completion.turns, completion.earlier = [], []
    completion.move(Status.OPENING)
    _open_with(completion, [])


def _take_start(completion: Completion, started: Started) -> None:
    """Take the prompt of an environment that has begun. A first turn that was under way continues
    if its environment begins as before."""
    completion.opened = started.opened
    begun = list(completion.prompt_ids), list(completion.images)
    if not completion.turns and begun != (list(started.prompt_ids), list(started.images)):
        _open_with(completion, list(started.prompt_ids))
        completion.illustrate(started.images)
    completion.keep_kv = True
    if started.ending is not None:
        end(completion, started.ending, started.reason)
    else:
        turn_ended = completion.finish_reason is not None
        completion.move(Status.STEPPING if turn_ended else Status.SAMPLED)


def _open_with(completion: Completion, prompt_ids: list[int]) -> None:
    """Begin the only sequence of a conversation."""
    completion.prompt_ids, completion.turn_start, completion.finish_reason = prompt_ids, 0, None
    completion.keep(0)
