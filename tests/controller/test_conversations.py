"""Conversations in the asynchronous loop: what is trained on is what was sampled, whatever their
environments take, and nothing is lost with a process."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.driven import config as sized
from tests.controller.talking import EOS, TalkingGenerator
from tests.controller.test_bound import Copies, CountingTrainer, HalfRight, Updates
from tramontane.config import Config
from tramontane.controller.conversations import (
    MAX_FAULTS,
    Conversations,
    _Host,
    ended,
    following,
    start_conversations,
)
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.controller.snapshot import FrozenGroup, Snapshot
from tramontane.data.curriculum import Curriculum
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import host
from tramontane.environments.protocol import Broken, Continued, Started
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.placement import TRAINER
from tramontane.placement.handle import WorkerDied
from tramontane.placement.thread import LocalPlacement, ThreadHandle
from tramontane.run.checkpoint import PipelineCheckpoint, read_pipeline, write_pipeline
from tramontane.types import (
    INSERTED,
    Completion,
    Group,
    Problem,
    Request,
    SamplingParams,
    ToolCall,
    TurnRecord,
    floats,
    ints,
)

SIZES = {"updates": 12, "n_batch": 8, "n_async": 16, "max_staleness": 2, "l_max": 96}
PROBLEM = Problem("p", "math", "1 + 1?", "2")


def unheard(*_: object, **__: object) -> None:
    """Ignore facts about workers."""


def environments(config: Config) -> Conversations:
    """Real processes of environments."""
    encoder = PromptEncoder(load_tokenizer("tiny"), config.data)
    return start_conversations(config, encoder, LocalPlacement(config, unheard), unheard)


def talking(train: Path, kind: str = "Talk", **sections: Any) -> Config:
    sections["pipeline"] = SIZES | sections.get("pipeline", {})
    data = {"environment": f"tests.controller.talking:{kind}"} | sections.pop("data", {})
    return sized(train, data=data, **sections)


# ------------------------------------------------------------------------------ tokens


def sampled(request: Request, tokens: list[int], version: int) -> Completion:
    """The completion of a request after more tokens."""
    copy = request.copy()
    copy.token_ids.extend(tokens)
    copy.logprobs.extend([-1.0] * len(tokens))
    copy.versions.extend([version] * len(tokens))
    return copy.completed("stop")


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 500), min_size=1, max_size=5),  # sampled
        st.lists(st.integers(0, 500), min_size=1, max_size=5),  # put in, or a new prompt
        st.booleans(),  # forks
    ),
    min_size=1,
    max_size=5,
)


@given(turns)
def test_a_conversation_has_what_was_sampled_and_what_was_put_in(turns: Any) -> None:
    request, put_in = Request(3, 1, [5, 6], 7, SamplingParams(99, 0.7)), []
    for number, (tokens, others, forks) in enumerate(turns):
        completion = sampled(request, tokens, version=number)
        waiting = request.turn_ended(completion)
        assert waiting.waits and (waiting.group, waiting.index) == (3, 1)
        span = request.turn_start, len(completion.token_ids)
        record = TurnRecord(*span, len(request.earlier), f"turn {number}", reward=float(number))
        if number == len(turns) - 1:
            break
        new = {"prompt_ids": others} if forks else {"put": others}
        answer = following(waiting, Continued(record, max_tokens=50, **new))
        assert isinstance(answer, Request)
        assert not answer.waits and answer.sampling == SamplingParams(50, 0.7)
        assert not forks or answer.seed != request.seed  # no random number is used twice
        put_in += [] if forks else others
        request = answer
    whole = following(waiting, Continued(record, ending="completed", reason="won"))
    assert isinstance(whole, Completion)
    assert (whole.ending, whole.ending_reason, whole.finish_reason) == ("completed", "won", "stop")
    assert whole.text == "\n\n".join(f"turn {n}" for n in range(len(turns)))
    assert [t.reward for t in whole.turns] == [*range(len(turns))]
    kept, inserted = [], []
    for sequence in whole.sequences:
        for token, version in zip(sequence.token_ids, sequence.versions, strict=True):
            (inserted if version == INSERTED else kept).append(token)
    assert kept == [token for tokens, _, _ in turns for token in tokens]
    assert inserted == put_in
    assert whole.n_tokens == len(kept) + len(inserted)
    for turn, (tokens, _, _) in zip(whole.turns, turns, strict=True):
        assert [*whole.sequences[turn.sequence].token_ids[turn.start : turn.end]] == tokens
    assert all(
        (logprob == 0) == (version == INSERTED)
        for s in whole.sequences
        for logprob, version in zip(s.logprobs, s.versions, strict=True)
    )


def test_a_snapshot_holds_conversations(tmp_path: Path) -> None:
    first = Request(0, 0, [5, 6], 7, SamplingParams(99, 0.7), ints([8, 1]), floats([-1, -2]))
    first.versions = array("i", [0, 0])
    call = ToolCall("add", {"a": 1, "b": [2]}, "3", seconds=0.5)
    record = TurnRecord(
        0, 2, 0, "é", [{"role": "tool", "content": "half a pair \ud83d"}], [call], 0.5, 2.0
    )
    waiting = first.turn_ended(first.completed("stop"))
    fork = following(waiting, Continued(record, prompt_ids=[9, 9], max_tokens=40))
    assert isinstance(fork, Request)
    fork.index = 1
    forked_twice = following(
        fork.turn_ended(sampled(fork, [3, 1], 1)), Continued(record, prompt_ids=[4], max_tokens=9)
    )
    assert isinstance(forked_twice, Request)
    done = ended(forked_twice.turn_ended(sampled(forked_twice, [1], 2)), "max_turns", "8")
    done.index = 2
    unbegun = Request(0, 3, [], 9, SamplingParams(99, 0.7))
    group = Group(0, PROBLEM, [done], [], deadline=4, requests=[waiting, fork, unbegun])
    snapshot = Snapshot(1, 1, {}, {}, [FrozenGroup(group)], [])
    write_pipeline(tmp_path, PipelineCheckpoint(snapshot, 0))
    (frozen,) = read_pipeline(tmp_path).snapshot.groups
    assert frozen.thaw() == group


# ------------------------------------------------------------------------------ the whole loop


class Watched(Pipeline):
    """Checks the invariants at every change of state."""

    def _notify(self) -> None:
        ledger = self.ledger
        unfinished = sum(len(g.requests) for g in ledger.outstanding.values())
        assert ledger.unfinished == unfinished <= self.sizes.n_async
        assert self.generators.in_flight <= unfinished
        super()._notify()


class Run:
    """A run over generators without a model and real processes of environments."""

    def __init__(self, config: Config, kills: int = 0) -> None:
        self.config, self.updates, self.workers = config, Updates(), list[TalkingGenerator]()
        with environments(config) as conversations:
            self.conversations = conversations
            asyncio.run(self._run(kills))

    async def _run(self, kills: int) -> None:
        config = self.config
        generators = GeneratorPool(self._generator, config, unheard, unheard, max_prompt=4)
        handle = ThreadHandle(TRAINER, CountingTrainer)
        await generators.started()
        await self.conversations.fit([PROBLEM], lambda problem: [1] * 20, 20)
        self.ledger = Ledger(config, Curriculum(config.by_stage()), lambda problem: [1])
        workers = Workers(generators, HalfRight(), handle, Copies, conversations=self.conversations)
        pipeline = Watched(config, self.ledger, workers, self.updates)
        tasks = [asyncio.create_task(self._kill()) for _ in range(kills)]
        try:
            await pipeline.run()
        finally:
            for task in tasks:
                task.cancel()
            generators.close()
            handle.close()

    async def _kill(self) -> None:
        """Kill the process of environments once conversations are beyond their first turn."""
        while len(self.updates) < 3 or self._answered() < 4:
            await asyncio.sleep(0)
        os.kill(pid(self.conversations), signal.SIGKILL)

    def _answered(self) -> int:
        """Unfinished conversations that an environment has answered."""
        groups = self.ledger.outstanding.values()
        return sum(bool(request.turns) for group in groups for request in group.requests)

    def _generator(self, number: int, *_: int) -> ThreadHandle:
        worker = TalkingGenerator()
        self.workers.append(worker)
        return ThreadHandle(f"generator {number}", lambda: worker)

    @property
    def trained(self) -> list[tuple[int, Completion]]:
        """All completions trained on, each with the version that it was trained at."""
        batches = [update.batch for update in self.updates]
        return [(b.version, c) for b in batches for g in b.groups for c in g.completions]

    def check(self) -> None:
        """What was trained on is what was sampled, and all that was due."""
        bound = self.config.pipeline.max_staleness
        for trained_at, c in self.trained:
            assert c.ending == "completed"
            tokens = [*zip(c.token_ids, c.versions, strict=True)]
            kept = [(token, version) for token, version in tokens if version != INSERTED]
            streams = [w.sampled[c.group, c.index] for w in self.workers]
            assert kept in [stream[-len(kept) :] for stream in streams]  # the last of its starts
            assert all(0 <= trained_at - version <= bound for _, version in kept)
            places = [i for turn in c.turns for i in range(turn.start, turn.end)]
            assert places == [i for i, (_, version) in enumerate(tokens) if version != INSERTED]
            assert all(c.token_ids[turn.end - 1] == EOS for turn in c.turns[:-1])
        trained = {c.group for _, c in self.trained}
        last = self.updates[-1].batch.version
        left = [g for g in self.ledger.outstanding.values() if g.id not in trained]
        assert all(g.deadline > last for g in left)  # none was left out for its length
        assert {*range(self.ledger.next_group)} == trained | {g.id for g in left}


@pytest.mark.xdist_group("environment process")
def test_slow_environments_decide_nothing_about_what_is_trained_on(forty: Path) -> None:
    run = Run(talking(forty, pipeline={"updates": 16}))
    run.check()
    assert {len(c.turns) for _, c in run.trained} == {1, 2, 3, 4}
    assert len({v for _, c in run.trained for v in c.versions}) > 5
    assert any(len({*c.versions} - {INSERTED}) > 1 for _, c in run.trained)  # while in flight
    assert not any(run.conversations.counts.values())


@pytest.mark.slow
def test_a_prompt_that_is_too_long_ends_its_conversation(forty: Path) -> None:
    config = talking(forty)
    with environments(config) as conversations:
        conversations.max_prompt = 5
        request = Request(0, 0, [], 0, SamplingParams(96))
        ended = asyncio.run(conversations.answer(96, PROBLEM, request))
    assert isinstance(ended, Completion) and ended.ending == "context_full"
    assert "5 tokens at its beginning (data.max_prompt_tokens)" in ended.ending_reason


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_a_killed_process_loses_no_conversation(forty: Path, replay: bool) -> None:
    run = Run(talking(forty, "Perilous", conversation={"replay": replay}), kills=1)
    run.check()
    counts = run.conversations.counts
    assert counts["environment_restarts"] == 1
    assert bool(counts["conversations_replayed"]) == replay
    assert bool(counts["conversations_restarted"]) != replay


@pytest.mark.slow
def test_a_synchronous_run_repeats(forty: Path) -> None:
    """Whatever the environments take: the same requests in each poll, and the same completions."""

    def repeated() -> list[tuple[int, Completion]]:
        run = Run(talking(forty, pipeline={"max_staleness": 0, "updates": 6}))
        assert {v for _, c in run.trained for v in c.versions} == {INSERTED, *range(6)}
        for _, c in run.trained:
            for turn in c.turns:
                turn.seconds = 0.0
        polls.append([w.polls for w in run.workers])
        return run.trained

    polls: list[list[int]] = []
    assert repeated() == repeated()


# ------------------------------------------------------------------------------ lost processes


def pid(conversations: Conversations) -> int:
    handle = conversations._hosts[0]._handle
    assert isinstance(handle, ThreadHandle)
    return int(handle._worker._process.process.pid)


def problem(folder: str, peril: str, times: int = 1) -> Problem:
    data = {"peril": peril, "times": times, "marks": f"{folder}/{peril}"}
    return Problem(peril or "safe", "math", "1 + 1?", "2", metadata=data)


async def talk(conversations: Conversations, about: Problem, group: int) -> Completion:
    """A whole conversation whose turns are a token and EOS."""
    request: Request | Completion = Request(group, 0, [], 0, SamplingParams(96))
    while isinstance(request, Request):
        if not conversations.awaits(request):
            request = request.turn_ended(sampled(request, [200, EOS], 0))
        request = await conversations.answer(96, about, request)
    return request


def test_an_exception_fails_one_conversation_and_the_run_when_it_repeats(forty: Path) -> None:
    """The process raises one where tokens do not extend those of the turn before."""

    async def torn(conversations: Conversations, group: int) -> Completion:
        begun = await conversations.answer(96, PROBLEM, Request(group, 0, [], 0, SamplingParams(9)))
        assert isinstance(begun, Request)
        begun.prompt_ids = [*begun.prompt_ids[1:], 7]
        answered = begun.turn_ended(sampled(begun, [200, EOS], 0))
        torn = await conversations.answer(96, PROBLEM, answered)
        assert isinstance(torn, Completion)
        return torn

    async def all_of(conversations: Conversations) -> None:
        for group in range(1, MAX_FAULTS):
            ended = await torn(conversations, group)
            assert ended.ending == "environment_failed"
            assert "do not extend" in ended.ending_reason and "worker.py" in ended.ending_reason
            assert len(said) == group and "Traceback" in said[-1]
            assert f"conversation {group}/0" in said[-1]
        assert (await talk(conversations, PROBLEM, 0)).ending == "completed"
        with pytest.raises(Broken, match="do not extend"):
            await torn(conversations, MAX_FAULTS)

    said: list[str] = []
    config = talking(forty)
    encoder, placement = PromptEncoder(load_tokenizer("tiny"), config.data), LocalPlacement
    heard = unheard, said.append
    with start_conversations(config, encoder, placement(config, unheard), *heard) as conversations:
        asyncio.run(all_of(conversations))
        assert not conversations._homes


def test_a_conversation_that_does_not_fit_the_context_is_found_before_the_run(forty: Path) -> None:
    config = talking(forty)
    with environments(config) as conversations:
        longest = asyncio.run(conversations.fit([PROBLEM], lambda problem: [1] * 20, 20, 40))
        assert longest <= 40
        opened = len(conversations.opening)
        with pytest.raises(InputError, match=rf"begins with {opened} tokens.* room for 5"):
            asyncio.run(conversations.fit([PROBLEM], lambda problem: [1] * 20, 20, 5))


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_a_hang_ends_the_conversation_that_caused_it_and_no_other(
    forty: Path, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LATE_SECONDS", 1.0)
    config = talking(forty, "Perilous", conversation={"replay": replay, "step_timeout": 4.0})

    async def both(conversations: Conversations, folder: str) -> list[Completion]:
        safe = await conversations.answer(
            96, problem(folder, ""), Request(1, 0, [], 0, SamplingParams(96))
        )
        assert isinstance(safe, Request)
        hung = await talk(conversations, problem(folder, "hang"), 0)
        # The other conversation learns of the loss at its next step.
        waiting = safe.turn_ended(sampled(safe, [200, EOS], 0))
        answered = await conversations.answer(96, problem(folder, ""), waiting)
        assert isinstance(answered, Request)
        assert len(answered.turns) == 1
        return [hung, await talk(conversations, problem(folder, ""), 2)]

    with TemporaryDirectory() as folder, environments(config) as conversations:
        hung, safe = asyncio.run(both(conversations, folder))
    assert (hung.ending, len(hung.turns)) == ("step_timeout", 1)
    assert "killed, since a step was late" in hung.ending_reason
    assert (safe.ending, len(safe.turns)) == ("completed", 3)
    assert conversations.counts["environment_restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
def test_a_conversation_whose_process_dies_is_tried_again_before_it_is_blamed(
    forty: Path, replay: bool
) -> None:
    config = talking(forty, "Perilous", conversation={"replay": replay})
    with TemporaryDirectory() as folder, environments(config) as conversations:
        once = asyncio.run(talk(conversations, problem(folder, "die"), 0))
        assert once.ending == "completed"
        assert [turn.text for turn in once.turns] == [once.turns[0].text] * 3
        (Path(folder) / "die").unlink()
        often = asyncio.run(talk(conversations, problem(folder, "die", times=9), 1))
    assert often.ending == "environment_failed"
    assert often.ending_reason.startswith("its process died 3 times during its steps (exit code 9)")
    key = "conversations_replayed" if replay else "conversations_restarted"
    assert conversations.counts == {
        "conversations_restarted": 0,
        "conversations_replayed": 0,
        "environment_restarts": 4,
        key: 3,
    }


@pytest.mark.slow
def test_a_class_says_itself_that_it_may_be_replayed(forty: Path) -> None:
    config = talking(forty, "Perilous", data={"tools": ["calculator"]})
    with TemporaryDirectory() as folder, environments(config) as conversations:
        for group, own in enumerate(("", "tests.controller.talking:Foreseen")):
            about = problem(folder, "die")
            about.metadata["environment"] = own
            done = asyncio.run(talk(conversations, about, group))
            assert (done.ending, len(done.turns)) == ("completed", 3)
            (Path(folder) / "die").unlink()
    assert conversations.counts == {
        "conversations_restarted": 1,
        "conversations_replayed": 1,
        "environment_restarts": 2,
    }


def test_a_call_that_comes_while_a_worker_dies_is_sent_to_the_next() -> None:
    environment = {"train": "playground:", "environment": "tests.environments.worlds:Guess"}
    config = Config(model="tiny", data=environment, placement={"kind": "ray"})
    encoder, died = PromptEncoder(load_tokenizer("tiny"), config.data), Future[Any]()
    handles: list[ThreadHandle] = []

    def make() -> ThreadHandle:
        handle = ThreadHandle("environment 0", partial(host.EnvironmentHost, config, encoder))
        if not handles:  # its first call ends with its death
            handle.submit = lambda *_: died  # type: ignore[method-assign]
        handles.append(handle)
        return handle

    async def calls(worker: _Host) -> list[Any]:
        first = worker.call("start", (0, 0), (PROBLEM, 0), 20.0)
        while worker._unsent:
            await asyncio.sleep(0)
        second = worker.call("start", (1, 0), (PROBLEM, 1), 20.0)
        died.set_exception(WorkerDied("it is gone", "environment 0"))
        answers = await asyncio.gather(first, second)
        answers.append(await worker.call("start", (2, 0), (PROBLEM, 2), 20.0))
        worker.close()
        return answers

    first, second, third = asyncio.run(calls(_Host(make, config, unheard)))
    assert isinstance(first, host.Lost)
    assert isinstance(second, Started) and isinstance(third, Started)
    handles[0].close()
