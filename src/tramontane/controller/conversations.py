"""Conversations with environments, which run in processes of their own.

A conversation that waits for its environment holds no generator slot. `answer` returns the next
turn's request, with the environment's answer appended, for any generator to continue; or the
completion if the conversation has ended. Its group was handed out, and its deadline set, when it
began, so the staleness bound holds however long steps take.

An environment whose process was lost, or whose run was resumed, is rebuilt from the recorded turns
if it and its tools are `deterministic`; otherwise its conversation starts again. One whose own
step hangs ends as `step_timeout`, and one whose process dies `MAX_DEATHS` times during its steps as
`environment_failed`: both are unscorable, never 0. So does one that this package fails; the same
exception ends the run when it comes for the `MAX_FAULTS`-th time.
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
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.host import Call, EnvironmentHost, Lost
from tramontane.environments.loading import deterministic
from tramontane.environments.protocol import Broken, Continued, Started
from tramontane.errors import InputError
from tramontane.placement.handle import Handle, Limit, WorkerLost, call
from tramontane.types import (
    INSERTED,
    Completion,
    EarlierSequence,
    Ending,
    Group,
    Problem,
    Request,
    SamplingParams,
    ToolCall,
    floats,
    ints,
)

if TYPE_CHECKING:
    from tramontane.placement.place import Placement

logger = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.02  # longest wait of a new call while earlier ones are unanswered
CLOSE_SECONDS = 10.0  # limit for a process to end
BEGUN_FIRST = 64  # conversations begun before anything is generated, to measure their prompts
MAX_DEATHS = 3  # process deaths during a conversation's steps, after which it is blamed
MAX_FAULTS = 16  # times that one exception of this package may come; the last ends the run
FORK = 0x9E3779B97F4A7C15  # added to the seed, so a new sequence draws different random numbers
NO_CALL = ToolCall("", {}, "")
Key = tuple[int, int]  # group and index of a conversation


def following(request: Request, answer: Continued) -> Request | Completion:
    """What follows a turn: the next turn's request, in the same sequence or in a new one, or the
    whole conversation if it has ended."""
    if answer.withdrawn:
        request = _without_last(request)
    request = replace(request, turns=[*request.turns, answer.turn])
    if answer.ending is not None:
        return ended(request, answer.ending, answer.reason)
    request.finish_reason = None
    request.sampling = replace(request.sampling, max_tokens=answer.max_tokens)
    if answer.prompt_ids is None:
        put = len(answer.put)
        request.token_ids = request.token_ids + ints(answer.put)
        request.logprobs = request.logprobs + floats([0.0] * put)
        request.versions = request.versions + ints([INSERTED] * put)
        request.turn_start = len(request.token_ids)
        return request
    earlier = EarlierSequence(
        request.prompt_ids, request.token_ids, request.logprobs, request.versions, request.experts
    )
    return replace(
        request,
        prompt_ids=list(answer.prompt_ids),
        seed=request.seed + FORK,
        token_ids=ints(),
        logprobs=floats(),
        experts=None,
        versions=ints(),
        turn_start=0,
        earlier=[*request.earlier, earlier],
    )


def _without_last(request: Request) -> Request:
    """A request up to the turn before its newest, which is not recorded; the record of that turn is
    to come again."""
    *turns, last = request.turns
    own, cut = request.sequences[last.sequence], slice(last.end)
    return replace(
        request,
        prompt_ids=own.prompt_ids,
        seed=request.seed - FORK * (len(request.earlier) - last.sequence),
        token_ids=own.token_ids[cut],
        logprobs=own.logprobs[cut],
        versions=own.versions[cut],
        experts=None if own.experts is None else own.experts[cut],
        turn_start=last.start,
        finish_reason="stop",
        turns=turns,
        earlier=request.earlier[: last.sequence],
    )


def ended(request: Request, ending: Ending, reason: str = "") -> Completion:
    """The completion of a conversation that has ended."""
    completion = request.completed(request.finish_reason or "stop")
    completion.text = "\n\n".join(turn.text for turn in request.turns)
    completion.ending, completion.ending_reason = ending, reason
    return completion


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
        make: Callable[[int], Handle],
        replaced: Callable[[WorkerLost], None],
        failed: Callable[[str], None] = logger.error,
    ) -> None:
        self._limits, self._data, self._failed = config.conversation, config.data, failed
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
        self._loads: Counter[_Host] = Counter(dict.fromkeys(self._hosts, 0))

    def awaits(self, request: Request) -> bool:
        """True if an environment must answer before the request can be generated."""
        return self.converses and (request.waits or _key(request) not in self._homes)

    async def answer(self, l_max: int, problem: Problem, request: Request) -> Request | Completion:
        """Begin a conversation, answer its last turn, or rebuild its environment.

        Args:
            l_max: longest conversation allowed, in tokens.
            problem: what the conversation is about.
            request: the conversation so far.

        Returns:
            The request that a generator can continue, or the conversation that has ended.

        Raises:
            InputError: the environments or tools of the config cannot be used.
            WorkerLost: a host cannot be replaced.
            Exception: of this package, for the `MAX_FAULTS`-th time.
        """
        try:
            return await self._answer(l_max, problem, request)
        except (InputError, WorkerLost):
            raise
        except Exception as error:
            trace = str(error) if isinstance(error, Broken) else traceback.format_exc()
            place = [line.strip() for line in trace.splitlines() if line.startswith("  File ")][-1]
            what = f"{trace.splitlines()[-1]} ({place})"
            self._failed(f"conversation {request.group}/{request.index} failed: {trace}")
            if _key(request) in self._homes:
                self._close(_key(request))
            self._faults[place] += 1
            if self._faults[place] == MAX_FAULTS:
                raise
            return ended(request, "environment_failed", f"this package failed: {what}")

    async def _answer(self, l_max: int, problem: Problem, request: Request) -> Request | Completion:
        key = _key(request)
        while self.awaits(request):
            began = time.time()
            if key in self._homes:
                turn = replace(request.completed(request.finish_reason or "stop"), turns=[])
                answer = await self._call(key, "step", turn, l_max)
                if isinstance(answer, Started):  # nobody read its first turn
                    request = _anew(request, l_max)
            else:
                request, answer = await self._begin(l_max, problem, request)
            if isinstance(answer, Continued):
                if request.group >= 0:  # of training
                    tool = max(answer.turn.calls, key=lambda c: c.seconds, default=NO_CALL).name
                    step = Step(began, time.time(), tool or "environment")
                    self.steps[request.group].append(step)
                next_request = following(request, answer)
                if isinstance(next_request, Completion):
                    self._close(key)
                return next_request
            if isinstance(answer, Started):
                if request.group >= 0:
                    self.tools[request.group] = answer.tools
                request = _begun(request, answer)
                if answer.ending is not None:
                    self._close(key)
                    return ended(request, answer.ending, answer.reason)
                continue
            self._forget(key)
            self._deaths[key] += bool(answer.how)
            if answer.late:
                del self._deaths[key]
                return ended(request, "step_timeout", f"its environment was {answer.how}")
            if self._deaths[key] == MAX_DEATHS:
                del self._deaths[key]
                reason = f"its process died {MAX_DEATHS} times during its steps ({answer.how})"
                return ended(request, "environment_failed", reason)
        return request

    def fate(self, groups: Iterable[Group]) -> str:
        """How many conversations under way a resumed run replays and how many it restarts, in
        words; empty if none are under way."""
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
        requests = [Request(0, -1 - number, [], 0, once) for number in range(len(problems))]
        found = await asyncio.gather(*map(partial(self.answer, 1), problems, requests))
        for problem, begun in zip(problems, found, strict=True):
            if isinstance(begun, Completion):
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

    async def _begin(
        self, l_max: int, problem: Problem, request: Request
    ) -> tuple[Request, Started | Lost]:
        """Begin a conversation in the host with the fewest, or repeat its turns there."""
        key = _key(request)
        host = self._homes[key] = min(self._hosts, key=self._loads.__getitem__)
        self._loads[host] += 1
        seed = request.seed - request.index  # the same for the whole group
        seed -= FORK * len(request.earlier)
        if request.turns and self._replays(problem):
            self.counts["conversations_replayed"] += 1
            so_far = request.completed("stop")
            return request, await self._call(key, "replay", problem, seed, so_far)
        if request.turns:
            self.counts["conversations_restarted"] += 1
            request = _anew(request, l_max)
        return request, await self._call(key, "start", problem, seed, self.max_prompt)

    async def _call(self, key: Key, method: str, *arguments: Any) -> Any:
        host = self._homes[key]
        steps = 1 + (len(arguments[-1].turns) if method == "replay" else 0)
        answer = await host.call(method, key, arguments, steps * self._limits.step_timeout)
        self.counts["environment_restarts"] = sum(host.restarts for host in self._hosts)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _close(self, key: Key) -> None:
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
        self, make: Callable[[], Handle], config: Config, replaced: Callable[[WorkerLost], None]
    ) -> None:
        self._make, self._config, self._replaced = make, config, replaced
        self._handle: Handle | None = None  # until the first call
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
        self._handle = self._handle or self._make()
        try:
            answers, restarts = await call(
                self._handle, "exchange", calls, EXCHANGE_SECONDS, limit=limit
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


def _key(request: Request) -> Key:
    return request.group, request.index


def _anew(request: Request, l_max: int) -> Request:
    """The request of a conversation that begins again."""
    first = request.seed - FORK * len(request.earlier)
    return Request(*_key(request), [], first, replace(request.sampling, max_tokens=l_max))


def _begun(request: Request, started: Started) -> Request:
    """The request of a conversation that has begun. A first turn that was under way continues if
    its environment begins as before."""
    if not request.turns and request.prompt_ids != started.prompt_ids:
        request = Request(*_key(request), started.prompt_ids, request.seed, request.sampling)
    return replace(request, keep_kv=True)
