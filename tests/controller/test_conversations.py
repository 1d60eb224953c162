"""Conversations in the asynchronous loop: what is trained on is what was sampled, whatever their
environments take, and nothing is lost with a process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.driven import config as sized
from tests.controller.talking import EOS, TalkingGenerator
from tests.controller.test_bound import Copies, CountingTrainer, HalfRight, Updates
from tramontane.config import Config
from tramontane.controller import conversations as conversations_module
from tramontane.controller.conversations import (
    FORK,
    MAX_FAULTS,
    Conversations,
    _begin_again,
    _Host,
    _take_start,
    end,
    start_conversations,
    take_answer,
)
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.controller.snapshot import FrozenGroup, Snapshot
from tramontane.data.curriculum import Curriculum
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import host
from tramontane.environments.protocol import Broken, Continued, Lost, Started
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.placement import TRAINER
from tramontane.placement.handle import WorkerDied
from tramontane.placement.thread import LocalPlacement, ThreadHandle
from tramontane.run.checkpoint import PipelineCheckpoint, read_pipeline, write_pipeline
from tramontane.status import MOVES, GroupStatus, Status
from tramontane.tokens import INSERTED, AllowedTokens, floats, ints
from tramontane.types import (
    PAPER_TAGS,
    PLACE,
    Completion,
    Group,
    Message,
    Problem,
    SamplingParams,
    ToolCall,
    TurnRecord,
)
from tramontane.verifier.custom import Response
from tramontane.verifier.judge import answer_of

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


def say(completion: Completion, tokens: list[int], version: int) -> None:
    """A turn of the model."""
    turn = completion.copy()
    turn.token_ids.extend(tokens)
    turn.logprobs.extend([-1.0] * len(tokens))
    turn.versions.extend([version] * len(tokens))
    completion.take_turn(turn.completed("stop"))
    completion.move(Status.STEPPING)


def test_a_completion_moves_as_the_table_says() -> None:
    request = Completion.requested(3, 1, [], 7, SamplingParams(9))
    assert request.status is Status.OPENING
    with pytest.raises(RuntimeError, match="completion 3/1 is .*OPENING, and cannot become"):
        request.move(Status.STEPPING)
    with pytest.raises(RuntimeError, match="cannot become"):  # it was read from a record
        Completion(3, 1, [5]).move(Status.SAMPLED)
    assert not MOVES[Status.ENDED]
    assert all(Status.ENDED in MOVES[status] for status in {*Status} - {Status.ENDED})
    assert {*Status} - {Status.OPENING} <= set[object]().union(*MOVES.values())
    assert {*MOVES} == {*Status, *GroupStatus}
    assert all({*map(type, found)} <= {type(status)} for status, found in MOVES.items())


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
    whole, put_in = Completion.requested(3, 1, [5, 6], 7, SamplingParams(99, 0.7)), []
    for number, (tokens, others, forks) in enumerate(turns):
        say(whole, tokens, version=number)
        span = whole.turn_start, len(whole.token_ids)
        record = TurnRecord(*span, len(whole.earlier), f"turn {number}", reward=float(number))
        if number == len(turns) - 1:
            break
        new, seed = {"prompt_ids": others} if forks else {"put": others}, whole.seed
        take_answer(whole, Continued(record, max_tokens=50, **new))
        assert whole.status is Status.SAMPLED and whole.sampling == SamplingParams(50, 0.7)
        assert not forks or whole.seed != seed  # no random number is used twice
        put_in += [] if forks else others
    take_answer(whole, Continued(record, ending="completed", reason="won"))
    assert whole.status is Status.ENDED
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


def test_what_is_known_of_tokens_goes_with_them() -> None:
    """A turn that is dropped, a new sequence and a conversation that begins again keep no experts
    and no allowed tokens of tokens that are gone."""

    def sampled() -> Completion:
        allowed = AllowedTokens(ints([1, 2, 0]), ints([8, 3, 4]))
        whole = Completion.requested(0, 0, [5], 7, SamplingParams(9), ints([8, 3, 1]))
        whole = replace(whole, logprobs=floats([-1.0] * 3), versions=ints([0] * 3))
        return replace(whole, allowed=allowed, experts=np.ones((3, 2), np.int16), turn_start=1)

    first = AllowedTokens(ints([1]), ints([8]))
    kept = sampled()
    kept.keep(kept.turn_start)
    assert kept.allowed == first and kept.experts is not None and len(kept.experts) == 1
    assert sampled().copy(1).allowed == first
    turn = TurnRecord(0, 1, 0, "8")
    fork = replace(sampled(), status=Status.STEPPING)
    take_answer(fork, Continued(turn, prompt_ids=[9], max_tokens=4))
    assert fork.allowed is fork.experts is None
    assert fork.earlier[0].allowed == sampled().allowed and len(fork.earlier[0].versions) == 3
    fork = replace(fork, status=Status.STEPPING)
    take_answer(fork, Continued(replace(turn, text="again"), withdrawn=True, max_tokens=4))
    assert (fork.allowed, [*fork.token_ids], fork.seed) == (first, [8], 7)
    assert fork.prompt_ids == [5]
    # A turn of the second sequence is withdrawn once a third has begun, and the end follows.
    for prompt in ([9], [10]):
        say(fork, [3], 0)
        turn = TurnRecord(fork.turn_start, len(fork.token_ids), len(fork.earlier), "")
        take_answer(fork, Continued(turn, prompt_ids=prompt, max_tokens=4))
    say(fork, [2], 0)
    fork.finish_reason = "length"
    take_answer(fork, Continued(turn, withdrawn=True, ending="completed"))
    assert (fork.prompt_ids, [*fork.token_ids], fork.seed) == ([9], [3], 7 + FORK)
    assert (fork.finish_reason, len(fork.earlier), len(fork.turns)) == ("stop", 1, 3)
    again = replace(sampled(), status=Status.LOST, earlier=fork.earlier, seed=7 + FORK)
    _begin_again(again, 12)
    assert (again.earlier, again.seed) == ([], 7)
    assert again.allowed is again.experts is None and not again.token_ids
    assert again.sampling == SamplingParams(12) and again.status is Status.OPENING


@pytest.mark.parametrize(
    ("prompt", "turns", "kept"), [([5], 0, True), ([6], 0, False), ([6], 1, True)]
)
def test_a_first_turn_under_way_goes_on_if_its_environment_begins_as_before(
    prompt: list[int], turns: int, kept: bool
) -> None:
    whole = Completion.requested(0, 0, [5], 7, SamplingParams(9), ints([8]))
    whole = replace(whole, logprobs=floats([-1.0]), versions=ints([0]), status=Status.LOST)
    whole.turns = [TurnRecord(0, 0, 0, "")] * turns
    _take_start(whole, Started(prompt))
    assert whole.status is Status.SAMPLED and whole.keep_kv
    assert [*whole.token_ids] == [8] * kept
    assert whole.prompt_ids == ([5] if kept else prompt)


def test_a_beginning_that_was_lost_is_taken_as_it_was() -> None:
    """A first turn that had ended is answered, and images are shown again."""
    ended = Completion.requested(0, 0, [5], 7, SamplingParams(9), ints([8]))
    ended = replace(ended, finish_reason="stop", status=Status.LOST)
    _take_start(ended, Started([5]))
    assert ended.status is Status.STEPPING and [*ended.token_ids] == [8]
    shown = Completion.requested(0, 0, [], 7, SamplingParams(9))
    _take_start(shown, Started([5], images=["data:,"]))
    assert [*shown.images] == ["data:,"] and shown.status is Status.SAMPLED


def test_a_judge_is_given_the_chats_that_began_a_conversation() -> None:
    """The first chat is its environment's; a harness began the second behind a turn."""
    first, second = ([Message(role="user", content=text)] for text in ("Draft.", "Improve."))
    whole = Completion.requested(0, 0, [], 7, SamplingParams(99))
    _take_start(whole, Started([5, 6], opened=first))
    say(whole, [8, 1], 0)
    anew = TurnRecord(0, 2, 0, "A draft.", anew=[], opened=second)
    take_answer(whole, Continued(anew, prompt_ids=[9], max_tokens=50))
    say(whole, [8, 1], 1)
    take_answer(whole, Continued(TurnRecord(0, 2, 1, "Better."), ending="completed"))
    response = Response.of(whole)
    assert response.opened == [(0, first), (1, second)]
    said = ("user", "Draft."), ("assistant", "A draft."), ("user", "Improve.")
    assert answer_of(response, PAPER_TAGS) == (*said, ("assistant", "Better."))


def test_images_belong_to_the_sequences_that_show_them(tmp_path: Path) -> None:
    """Behind a turn, or in the prompt of the sequence that a rewritten history begins; so they do
    once the conversation was read from a checkpoint."""
    whole = Completion.requested(0, 0, [5, 6], 7, SamplingParams(99, 0.7), images=["first"])

    def answered(number: int, **new: Any) -> None:
        say(whole, [8, 1], number)
        span = whole.turn_start, len(whole.token_ids)
        shown: Message = {"role": "user", "content": PLACE, "images": [f"{number}"]}
        record = TurnRecord(*span, len(whole.earlier), "", [shown])
        take_answer(whole, Continued(record, max_tokens=50, **new))

    answered(0, put=[3])
    answered(1, put=[3, 3])
    answered(2, prompt_ids=[9])
    answered(3, put=[3])
    kept = replace(whole, index=1)
    answered(4, ending="completed")
    group = Group(0, PROBLEM, [whole], [], deadline=4, requests=[kept])
    snapshot = Snapshot(1, 1, {}, {}, [FrozenGroup(group)], [])
    write_pipeline(tmp_path, PipelineCheckpoint(snapshot, 1.0))
    [(again, _)] = read_pipeline(tmp_path).snapshot.all_groups()
    for each in (whole, kept, *again.thaw().completions, *again.thaw().requests):
        shown = [([*s.images], [*s.put_images]) for s in each.sequences]
        assert shown == [(["first"], ["0", "1"]), (["first", "0", "1", "2"], ["3"])]
    assert PROBLEM.images == []  # they were the environment's


def test_a_snapshot_holds_conversations(tmp_path: Path) -> None:
    first = Completion.requested(
        0, 0, [5, 6], 7, SamplingParams(99, 0.7), token_ids=ints([8, 1]), logprobs=floats([-1, -2])
    )
    first.versions = array("i", [0, 0])
    call = ToolCall("add", {"a": 1, "b": [2]}, "3", seconds=0.5)
    record = TurnRecord(
        0, 2, 0, "é", [{"role": "tool", "content": "half a pair \ud83d"}], [call], 0.5, 2.0
    )
    say(first, [], 0)
    fork = replace(first, index=1)
    take_answer(fork, Continued(record, prompt_ids=[9, 9], max_tokens=40))
    done = replace(fork, index=2)
    say(done, [3, 1], 1)
    take_answer(done, Continued(record, prompt_ids=[4], max_tokens=9))
    say(done, [1], 2)
    end(done, "max_turns", "8")
    done.seed, done.sampling = 0, SamplingParams(0)  # nobody needs them any more
    done.opened = [{"role": "user", "content": "Go on."}]
    unbegun = Completion.requested(0, 3, [], 9, SamplingParams(99, 0.7))
    group = Group(0, PROBLEM, [done], [], deadline=4, requests=[first, fork, unbegun])
    snapshot = Snapshot(1, 1, {}, {}, [FrozenGroup(group)], [])
    write_pipeline(tmp_path, PipelineCheckpoint(snapshot, 0))
    (frozen,) = read_pipeline(tmp_path).snapshot.groups
    assert frozen.thaw() == group
    assert frozen.thaw().completions[0].opened == done.opened  # as the judge reads it


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
        request = Completion.requested(0, 0, [], 0, SamplingParams(96))
        asyncio.run(conversations.answer(96, PROBLEM, request))
    assert request.ending == "context_full"
    assert "5 tokens at its beginning (data.max_prompt_tokens)" in request.ending_reason


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


async def until(ledger: Ledger, kind: Config, holds: Callable[[Group], bool]) -> Snapshot:
    """The state of a run once one of its groups is as it should be."""
    with environments(kind) as conversations:
        make = lambda *_: ThreadHandle("generator", TalkingGenerator)  # noqa: E731
        generators = GeneratorPool(make, kind, unheard, unheard, max_prompt=200)
        handle = ThreadHandle(TRAINER, CountingTrainer)
        workers = Workers(generators, HalfRight(), handle, Copies, conversations=conversations)
        running = asyncio.create_task(Pipeline(kind, ledger, workers, Updates()).run())
        end = time.monotonic() + 60
        while not any(map(holds, ledger.outstanding.values())):
            assert time.monotonic() < end and not running.done()
            await asyncio.sleep(0.01)
        state = ledger.snapshot()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        generators.close()
        handle.close()
        return state


@pytest.mark.slow
def test_conversations_that_wait_together_are_recorded_one_by_one(forty: Path) -> None:
    """After a resumption, those of a group wait for their environments at once."""
    sizes = {"n_async": 4, "n_batch": 4, "group_size": 4, "l_max": 96}

    def ledger(config: Config) -> Ledger:
        return Ledger(config, Curriculum(config.by_stage()), lambda problem: [1])

    asleep, unequal = (talking(forty, kind, pipeline=sizes) for kind in ("Sleepy", "Unequal"))
    waits = lambda group: {r.status for r in group.requests} == {Status.STEPPING}  # noqa: E731
    state = asyncio.run(until(ledger(asleep), asleep, waits))
    resumed = ledger(unequal)
    resumed.restore(state)
    (group,) = resumed.outstanding.values()
    assert {request.status for request in group.requests} == {Status.LOST}
    state = asyncio.run(until(resumed, unequal, lambda group: len(group.completions) == 1))
    again = ledger(unequal)
    again.restore(state)
    (group,) = again.outstanding.values()
    assert [c.ending for c in group.completions] == ["completed"] and len(group.requests) == 3


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
    whole = Completion.requested(group, 0, [], 0, SamplingParams(96))
    await conversations.answer(96, about, whole)
    while whole.status is not Status.ENDED:
        say(whole, [200, EOS], 0)
        await conversations.answer(96, about, whole)
    return whole


def test_an_exception_fails_one_conversation_and_the_run_when_it_repeats(forty: Path) -> None:
    """The process raises one where tokens do not extend those of the turn before."""

    async def torn(conversations: Conversations, group: int) -> Completion:
        torn = Completion.requested(group, 0, [], 0, SamplingParams(9))
        await conversations.answer(96, PROBLEM, torn)
        torn.prompt_ids = [*torn.prompt_ids[1:], 7]
        say(torn, [200, EOS], 0)
        await conversations.answer(96, PROBLEM, torn)
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
        safe = Completion.requested(1, 0, [], 0, SamplingParams(96))
        await conversations.answer(96, problem(folder, ""), safe)
        hung = await talk(conversations, problem(folder, "hang"), 0)
        # The other conversation learns of the loss at its next step.
        say(safe, [200, EOS], 0)
        await conversations.answer(96, problem(folder, ""), safe)
        assert safe.status is Status.SAMPLED and len(safe.turns) == 1
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


def test_a_new_call_does_not_wait_for_the_answers_of_earlier_ones(
    forty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations_module, "LOOK_SECONDS", 600.0)
    config = talking(forty, "Sleepy")

    async def others(conversations: Conversations) -> None:
        sleepy = Completion.requested(0, 0, [], 0, SamplingParams(96))
        await conversations.answer(96, problem("", ""), sleepy)
        say(sleepy, [200, EOS], 0)
        asleep = asyncio.create_task(conversations.answer(96, problem("", ""), sleepy))
        await asyncio.sleep(0.1)
        for group in range(1, 20):
            begun = Completion.requested(group, 0, [], 0, SamplingParams(96))
            await asyncio.wait_for(conversations.answer(96, problem("", ""), begun), 60)
            assert begun.status is Status.SAMPLED
        assert not asleep.done()
        asleep.cancel()

    with environments(config) as conversations:
        asyncio.run(others(conversations))


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
    assert isinstance(first, Lost)
    assert isinstance(second, Started) and isinstance(third, Started)
    handles[0].close()
