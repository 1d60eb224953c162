"""Lost environments, here in threads: which conversations go on, and how."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.driven import config
from tramontane.config import Config
from tramontane.controller import conversations as conversations_module
from tramontane.controller.conversations import (
    FORK,
    LOOK_SECONDS,
    MAX_DEATHS,
    Conversations,
    end,
    start_conversations,
)
from tramontane.environments.host import Call
from tramontane.environments.protocol import Continued, Lost, Started
from tramontane.errors import InputError
from tramontane.placement import WorkerDied, WorkerLost
from tramontane.placement.thread import ThreadHandle
from tramontane.status import Status
from tramontane.tokens import EarlierSequence, floats, ints
from tramontane.types import Completion, Group, Problem, SamplingParams, ToolCall, TurnRecord

PROBLEM = Problem("p", "math", "1 + 1?", "2")


class Noted(ThreadHandle):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class ScriptedHost:
    """Answers each call by a function; keeps the calls.

    Attributes:
        restarts: of its process, as it reports them.
    """

    def __init__(self, answer: Callable[[Call], Any]) -> None:
        self.answer, self.calls, self.restarts, self.closed = answer, list[Call](), 0, False

    def exchange(self, calls: list[Call], seconds: float) -> tuple[list[tuple[int, Any]], int]:
        assert seconds == LOOK_SECONDS
        self.calls += calls
        found = [(c.number, self.answer(c)) for c in calls if c.method != "close"]
        return found, self.restarts

    def wake(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def answered(call: Call) -> Started | Continued:
    """The first prompt is a token, as is each answer; the third turn ends the conversation."""
    if call.method == "start":
        return Started([5], tools=["add"])
    told = call.arguments[-1] if call.method == "replay" else call.arguments[0]
    turns = len(told.turns)
    record = TurnRecord(told.turn_start, len(told.token_ids), 0, f"turn {turns}")
    return Continued(record, put=[6], max_tokens=96)


def talking(train: Path, **sections: Any) -> Config:
    """A config whose environment does not say that it may be replayed."""
    return config(train, data={"environment": "tests.controller.talking:Talk"}, **sections)


def say(completion: Completion) -> None:
    """A turn of the model: one token."""
    completion.token_ids.append(7)
    completion.logprobs.append(-1.0)
    completion.versions.append(0)
    completion.take_turn(completion.completed("stop"))
    completion.move(Status.STEPPING)


def using(
    settings: Config,
    hosts: list[ScriptedHost],
    use: Callable[[Conversations], Any],
    replaced: Callable[[WorkerLost], None] = lambda lost: None,
) -> Conversations:
    left, handles = iter(hosts), list[Noted]()

    def make(number: int) -> ThreadHandle:
        assert 0 <= number < settings.conversation.workers
        host = next(left)
        handles.append(Noted(f"environment {number}", lambda: host))
        return handles[-1]

    with Conversations(settings, make, replaced, pytest.fail) as conversations:
        asyncio.run(asyncio.wait_for(use(conversations), 30))
    assert all(handle.closed for handle in handles)
    return conversations


def begun(seed: int = 0, group: int = 0, index: int = 0) -> Completion:
    return Completion.requested(group, index, [], seed + index, SamplingParams(96))


@pytest.mark.parametrize("replay", [False, True])
def test_a_lost_conversation_is_replayed_or_begins_again_until_it_is_blamed(
    forty: Path, replay: bool
) -> None:
    losses = [Lost(), *[Lost("exit code 9")] * MAX_DEATHS]

    def answer(call: Call) -> Any:
        return losses.pop(0) if call.method == "step" and losses else answered(call)

    host = ScriptedHost(answer)

    async def use(conversations: Conversations) -> None:
        whole = begun(seed=40 + FORK, index=1)
        whole.earlier = [EarlierSequence([4], ints(), floats(), ints())]
        whole.turns = [TurnRecord(0, 1, 0, "turn 0")]  # as if read from a checkpoint
        whole.prompt_ids, whole.status = [5], Status.LOST
        for array, value in ((whole.token_ids, 7), (whole.logprobs, -1.0), (whole.versions, 0)):
            array.append(value)  # type: ignore[arg-type]
        deaths = 0
        while whole.status is not Status.ENDED:
            await conversations.answer(96, PROBLEM, whole)
            if whole.status is Status.SAMPLED:
                say(whole)
                deaths += 1
        assert whole.ending == "environment_failed"
        assert whole.ending_reason == "its process died 3 times during its steps (exit code 9)"

    conversations = using(talking(forty, conversation={"replay": replay}), [host], use)
    counts = conversations.counts
    again = sum(call.method in ("start", "replay") for call in host.calls)
    assert again == 2 + MAX_DEATHS - 1
    if replay:
        assert counts["conversations_replayed"] == again
        assert counts["conversations_restarted"] == 0
        told = next(call for call in host.calls if call.method == "replay")
        assert told.arguments[:2] == (PROBLEM, 40)  # the seed of its group
        assert told.arguments[2].finish_reason == "stop"
        assert told.limit_s == 2 * 30.0  # a step of the replay, and one more
    else:
        assert counts["conversations_restarted"] == 1  # later it had no turn to lose
        assert counts["conversations_replayed"] == 0
        started = next(call for call in host.calls if call.method == "start")
        assert started.arguments == (PROBLEM, 40, sys.maxsize) and started.limit_s == 30.0
    assert {call.limit_s for call in host.calls if call.method == "step"} == {30.0}
    assert not any(conversations._loads.values())


def test_a_step_that_was_late_ends_its_conversation_at_once(forty: Path) -> None:
    def answer(call: Call) -> Any:
        if call.method != "step":
            return answered(call)
        turn = call.arguments[0]
        # It needs none of these, and has the others.
        assert (turn.turns, turn.experts, turn.allowed) == ([], None, None)
        assert (turn.images, turn.put_images, turn.opened) == ((), (), ())
        return Lost("killed", late=True)

    async def use(conversations: Conversations) -> None:
        whole = begun()
        await conversations.answer(96, PROBLEM, whole)
        assert conversations.tools == {0: ["add"]}
        say(whole)
        whole.turns = [TurnRecord(0, 1, 0, "")]
        whole.experts = whole.allowed = "known"  # type: ignore[assignment]
        whole.images = whole.put_images = ["data:,"]
        whole.opened = [{"role": "user", "content": "Go on."}]
        await conversations.answer(96, PROBLEM, whole)
        assert whole.ending == "step_timeout"
        assert whole.ending_reason == "its environment was killed"

    conversations = using(talking(forty), [ScriptedHost(answer)], use)
    assert not conversations._homes and not conversations._deaths


def test_a_conversation_whose_first_turn_nobody_read_begins_again(forty: Path) -> None:
    """A resumed run's conversation, which had turns and is not replayed, does so too."""

    def answer(call: Call) -> Any:
        return Started([9]) if call.method == "step" else answered(call)

    async def use(conversations: Conversations) -> None:
        unread = begun()
        await conversations.answer(96, PROBLEM, unread)
        say(unread)
        resumed = [begun(group=group) for group in (1, 2)]
        for each in resumed:
            each.turns, each.status = [TurnRecord(0, 1, 0, "")], Status.LOST
        for each in (unread, *resumed):
            each.sampling = SamplingParams(1)
            await conversations.answer(96, PROBLEM, each)
            assert (each.status, each.turns, [*each.token_ids]) == (Status.SAMPLED, [], [])
            assert each.sampling == SamplingParams(96)
        assert unread.prompt_ids == [9] and conversations.counts["conversations_restarted"] == 2

    using(talking(forty), [ScriptedHost(answer)], use)


def test_an_exception_of_this_package_is_told_with_its_place(forty: Path) -> None:
    said: list[str] = []

    def answer(call: Call) -> Any:
        return Started(None)  # type: ignore[arg-type]

    async def use(conversations: Conversations) -> None:
        conversations._failed = said.append
        whole = begun()
        await conversations.answer(96, PROBLEM, whole)
        assert whole.ending == "environment_failed"
        message = r"this package failed: TypeError: .* is not iterable \(File .*, in _take_start\)"
        assert re.fullmatch(message, whole.ending_reason)

    using(talking(forty), [ScriptedHost(answer)], use)
    assert said[0].startswith("conversation 0/0 failed: Traceback")


def test_conversations_go_to_the_process_with_the_fewest(forty: Path) -> None:
    hosts = [ScriptedHost(answered) for _ in range(3)]

    async def use(conversations: Conversations) -> None:
        assert [*conversations.counts.items()] == [
            ("conversations_restarted", 0),
            ("conversations_replayed", 0),
            ("environment_restarts", 0),
        ]
        for group in range(5):
            await conversations.answer(96, PROBLEM, begun(group=group))
        found = [sorted(call.key[0] for call in host.calls) for host in hosts]
        assert sorted(found) == [[0, 3], [1, 4], [2]]
        conversations._close((2, 0))
        await conversations.answer(96, PROBLEM, begun(group=5))
        assert [call.method for call in hosts[2].calls] == ["start", "close", "start"]
        _, _, *closed = hosts[2].calls[1]
        assert closed == [(2, 0), (), 0.0]

    using(talking(forty, conversation={"workers": 3}), hosts, use)
    assert all(host.closed for host in hosts)


def test_a_process_that_dies_is_replaced_and_its_conversations_begin_again(forty: Path) -> None:
    def dies(call: Call) -> Any:
        raise WorkerDied("it is gone")

    first, second = ScriptedHost(dies), ScriptedHost(answered)
    second.restarts, lost = 2, list[WorkerLost]()

    async def use(conversations: Conversations) -> None:
        both = [begun(group=group) for group in range(2)]
        await asyncio.gather(*(conversations.answer(96, PROBLEM, whole) for whole in both))
        assert all(whole.status is Status.SAMPLED for whole in both)
        assert conversations.counts["environment_restarts"] == 3  # itself, and those of the second

    using(talking(forty, placement={"kind": "ray"}), [first, second], use, lost.append)
    assert [str(loss) for loss in lost] == ["it is gone"]


def test_a_conversation_whose_process_dies_again_and_again_is_blamed(forty: Path) -> None:
    def answer(call: Call) -> Any:
        if call.method == "step":
            raise WorkerDied("it is gone")
        return answered(call)

    async def use(conversations: Conversations) -> None:
        whole = begun()
        await conversations.answer(96, PROBLEM, whole)
        while whole.status is not Status.ENDED:
            say(whole)
            await conversations.answer(96, PROBLEM, whole)
        assert whole.ending_reason == "its process died 3 times during its steps (it is gone)"
        assert conversations.counts["environment_restarts"] == MAX_DEATHS

    hosts = [ScriptedHost(answer) for _ in range(MAX_DEATHS + 1)]
    using(talking(forty, placement={"kind": "ray"}), hosts, use)


def test_environments_of_a_placement_are_named_and_their_losses_told(forty: Path) -> None:
    def dies(call: Call) -> Any:
        raise WorkerDied("it is gone")

    names, lost, left = list[str](), list[WorkerLost](), iter([dies, answered])

    def judge(name: str, make: Any) -> ThreadHandle:
        names.append(name)
        host = ScriptedHost(next(left))
        return ThreadHandle(name, lambda: host)

    settings, unread = talking(forty, placement={"kind": "ray"}), SimpleNamespace()
    placement = SimpleNamespace(judge=judge)
    with start_conversations(settings, unread, placement, lost.append) as conversations:  # type: ignore[arg-type]
        asyncio.run(conversations.answer(96, PROBLEM, begun()))
    assert names == ["environment 0"] * 2 and [str(loss) for loss in lost] == ["it is gone"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (WorkerDied("it is gone"), WorkerDied("it is gone")),
        (ValueError("odd"), WorkerLost("environments: odd")),
        (InputError("no such tool"), InputError("no such tool")),
    ],
)
def test_an_error_of_a_process_that_is_not_replaced_reaches_all_who_wait(
    forty: Path, error: Exception, raised: Exception
) -> None:
    def fails(call: Call) -> Any:
        raise error

    async def use(conversations: Conversations) -> None:
        (host,) = conversations._hosts
        host.call("start", (9, 0), (), 1.0).cancel()  # gave up, and holds nobody up
        asked = (conversations.answer(96, PROBLEM, begun(group=group)) for group in range(2))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [(type(e), str(e)) for e in found] == [(type(raised), str(raised))] * 2
        assert not host._waiting

    using(talking(forty), [ScriptedHost(fails)], use)


def test_a_process_that_ends_with_its_conversations_is_not_replaced(forty: Path) -> None:
    asked, over, lost = threading.Event(), threading.Event(), list[WorkerLost]()

    def dies(call: Call) -> Any:
        asked.set()
        assert over.wait(10)
        raise WorkerDied("it was closed")

    async def use(settings: Config) -> None:
        make = lambda number: ThreadHandle("environment 0", lambda: ScriptedHost(dies))  # noqa: E731
        with Conversations(settings, make, lost.append, pytest.fail) as conversations:
            waits = asyncio.create_task(conversations.answer(96, PROBLEM, begun()))
            assert await asyncio.to_thread(asked.wait, 10)
            threading.Timer(0.01, over.set).start()
        exchange = asyncio.all_tasks() - {asyncio.current_task(), waits}
        assert len(exchange) == 1 and (await asyncio.wait(exchange, timeout=10))[0]
        waits.cancel()

    asyncio.run(use(talking(forty, placement={"kind": "ray"})))
    assert not lost


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_fails_or_hangs_at_its_end_holds_nobody_up(
    forty: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations_module, "CLOSE_SECONDS", 0.01)
    given_up = threading.Event()

    class Stubborn(ScriptedHost):
        def close(self) -> None:
            if not hangs:
                raise WorkerDied("it is gone")
            assert given_up.wait(10)

    class Killed(ThreadHandle):
        def close(self) -> None:
            given_up.set()
            super().close()

    make = lambda number: Killed("environment 0", lambda: Stubborn(answered))  # noqa: E731
    with Conversations(talking(forty), make, pytest.fail, pytest.fail) as conversations:
        asyncio.run(conversations.answer(96, PROBLEM, begun()))
    assert given_up.is_set()


@pytest.mark.parametrize(("before", "after"), [(None, "stop"), ("length", "length")])
def test_an_ended_conversation_keeps_why_its_last_turn_ended(before: Any, after: str) -> None:
    whole = begun()
    whole.finish_reason = before
    whole.turns = [TurnRecord(0, 1, 0, "a"), TurnRecord(1, 2, 0, "b")]
    end(whole, "max_turns")
    assert (whole.finish_reason, whole.text, whole.status) == (after, "a\n\nb", Status.ENDED)
    assert (whole.ending, whole.ending_reason) == ("max_turns", "")


def test_the_slowest_tool_of_a_training_step_is_noted(forty: Path) -> None:
    calls = [ToolCall("add", {}, "3", seconds=0.1), ToolCall("look", {}, "4", seconds=0.5)]

    def answer(call: Call) -> Any:
        if call.method == "start":
            return answered(call)
        record = TurnRecord(0, 1, 0, "", calls=[] if call.key[1] else calls)
        return Continued(record, ending="completed")

    async def use(conversations: Conversations) -> None:
        for group in (0, -1):
            for index in range(2):
                whole = begun(group=group, index=index)
                await conversations.answer(96, PROBLEM, whole)
                say(whole)
                await conversations.answer(96, PROBLEM, whole)
        assert [step.tool for step in conversations.steps[0]] == ["look", "environment"]
        assert all(step.began <= step.ended for step in conversations.steps[0])
        assert [*conversations.steps] == [*conversations.tools] == [0]

    using(talking(forty), [ScriptedHost(answer)], use)


def test_images_of_environments_are_refused_where_a_worker_takes_none(forty: Path) -> None:
    def answer(call: Call) -> Any:
        return Started([5], images=["data:,"])

    async def use(conversations: Conversations) -> None:
        with pytest.raises(InputError, match=r"gave an image, and judges take none"):
            await conversations.answer(96, PROBLEM, begun())

    judge = {"judge": {"checkpoint": {"path": "tiny"}, "rubric": ["It is short."]}}
    verifier = {**judge, "reward": {"judge": 0.5}}
    using(talking(forty, verifier=verifier), [ScriptedHost(answer)], use)

    async def trained(conversations: Conversations) -> None:
        await conversations.answer(96, PROBLEM, begun(group=-1))  # an evaluation's
        with pytest.raises(InputError, match="gave an image, and ranks that share rows take none"):
            await conversations.answer(96, PROBLEM, begun())

    ranks = {"ranks": 2, "context_parallel": 2}
    using(talking(forty, trainer=ranks), [ScriptedHost(answer)], trained)


def test_a_resumed_run_tells_what_becomes_of_its_conversations(forty: Path) -> None:
    async def use(conversations: Conversations) -> None:
        assert conversations.fate([Group(0, PROBLEM, [], [], requests=[begun()])]) == ""
        talked = begun()
        talked.turns = [TurnRecord(0, 1, 0, "")]
        groups = [Group(n, PROBLEM, [], [], requests=[begun(), talked]) for n in range(3)]
        told.append(conversations.fate(groups))

    told: list[str] = []
    for replay in (False, True):
        using(talking(forty, conversation={"replay": replay}), [], use)
    assert told == [
        "3 conversations under way: 0 replayed, 3 restarted",
        "3 conversations under way: 3 replayed, 0 restarted",
    ]


def test_prompts_are_measured_by_beginning_conversations(forty: Path) -> None:
    problems = [Problem(f"p{n}", "math", "?", where=f"row {n}") for n in range(3)]
    tokens = {"p0": 4, "p1": 40, "p2": 8}

    def answer(call: Call) -> Any:
        return Started([1] * tokens[call.arguments[0].id])

    def refuses(call: Call) -> Any:
        return Started([], "environment_failed", "no such game")

    async def use(conversations: Conversations) -> None:
        assert await conversations.fit(problems[::2], lambda problem: [1] * 3, 10) == 15
        assert conversations.opening == [1] * 4 and not conversations._homes
        # 10 tokens and the 37 that were added, and a quarter more than was seen.
        assert await conversations.fit(problems, lambda problem: [1] * 3, 10) == 50
        assert await conversations.fit(problems, lambda problem: [1] * 3, 10, 42) == 42
        assert await conversations.fit(problems, lambda problem: [1] * 3, 10, 40) == 40
        assert conversations.max_prompt == 40
        with pytest.raises(InputError, match="has room for 0: "):
            await conversations.fit(problems, lambda problem: [1] * 3, 10, -5)
        with pytest.raises(InputError, match=r"row 1: .* begins with 40 tokens, .* room for 39: "):
            await conversations.fit(problems, lambda problem: [1] * 3, 10, 39)

    async def refused(conversations: Conversations) -> None:
        message = r"row 0: the conversation cannot begin \(environment_failed: no such game\)"
        with pytest.raises(InputError, match=message):
            await conversations.fit(problems, lambda problem: [1] * 3, 10)

    async def plain(conversations: Conversations) -> None:
        assert await conversations.fit(problems, lambda problem: [1] * 3, 10, 2) == 10

    using(talking(forty), [ScriptedHost(answer)], use)
    using(talking(forty), [ScriptedHost(refuses)], refused)
    using(config(forty), [], plain)
