"""Trajectories from elsewhere: which of them each batch gets, and the rules for sampled groups."""

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.driven import DrivenLedger, config, verdict
from tests.trainer import rollouts
from tramontane.batches import Batch, BatchSettings, TrainBatch, TrainSequence
from tramontane.config import Config, TimeoutsConfig, TrainerConfig
from tramontane.controller.ledger import Ledger
from tramontane.controller.replay import Replay, ReplayRules
from tramontane.data.curriculum import Curriculum
from tramontane.placement import Limit
from tramontane.placement.thread import ThreadHandle
from tramontane.status import GroupStatus
from tramontane.tokens import ELSEWHERE, floats, ints
from tramontane.trainer.microbatch import cut_batch
from tramontane.types import Completion, Group, Problem
from tramontane.verifier.math.normalize import vote


def groups(sizes: list[int]) -> list[Group]:
    """Groups of these sizes; a completion's only token is its number among all of them."""
    found, number = [], 0
    for group, size in enumerate(sizes):
        completions = []
        for index in range(size):
            completions.append(
                Completion(-1 - group, index, [1], [number], [-1.0], [ELSEWHERE], "stop")
            )
            number += 1
        problem = Problem(str(group), "math", "?", "1")
        found.append(Group(-1 - group, problem, completions, [verdict(True)] * size))
    return found


def tokens(taken: list[Group]) -> list[int]:
    return [c.token_ids[0] for group in taken for c in group.completions]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.booleans(),
)
def test_each_epoch_has_every_completion_once(
    sizes: list[int], batches: list[int], shuffle: bool
) -> None:
    replay = Replay(groups(sizes), ReplayRules(seed=3, shuffle=shuffle))
    taken: list[int] = []
    for version, size in enumerate(batches):
        found = replay.take(version, size, size)
        assert sum(len(g.completions) for g in found) == size
        assert all(len(g.completions) == len(g.verdicts) and not g.sampled for g in found)
        taken += tokens(found)
    total = sum(sizes)
    for start in range(0, len(taken) - total + 1, total):
        assert sorted(taken[start : start + total]) == list(range(total))
    if not shuffle:
        assert taken == [i % total for i in range(len(taken))]


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def epochs(seed: int) -> list[list[int]]:
        replay = Replay(groups([1] * 12), ReplayRules(seed=seed))
        return [tokens(replay.take(version, 12, 12)) for version in range(3)]

    orders = [*epochs(1), *epochs(2), list(range(12))]
    assert len({tuple(order) for order in orders}) == 7
    assert epochs(1) == orders[:3]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(6, 9), st.integers(1, 4))
def test_groups_of_any_size_fill_the_minibatches(
    sizes: list[int], minibatch: int, count: int
) -> None:
    """A batch is trained in as many steps as it has full minibatches of drawn completions."""
    found = Replay(groups(sizes)).take(0, count * minibatch, minibatch)
    settings = BatchSettings("", 1.0, 100, minibatch)
    sequences = [[TrainSequence.of(c) for c in group.completions] for group in found]
    batch = TrainBatch(0, sequences, settings)
    cut = cut_batch(batch, TrainerConfig())
    assert [len(part.completions) for part in cut] == [minibatch] * count


@given(st.integers(0, 6), st.integers(0, 2))
def test_a_resumed_source_repeats_the_batches_that_were_not_trained_on(
    trained: int, ahead: int
) -> None:
    replay = Replay(groups([2, 3, 1]), ReplayRules(seed=1))
    batches = [tokens(replay.take(version, 4, 4)) for version in range(trained + ahead)]
    resumed = Replay(groups([2, 3, 1]), ReplayRules(seed=1))
    resumed.load_state(replay.state(trained))
    again = [tokens(resumed.take(version, 4, 4)) for version in range(trained, trained + ahead)]
    assert again == batches[trained:]


def test_computed_log_probs_are_computed_again_after_so_many_updates() -> None:
    """Recorded ones stay, missing ones are those of the weights at each refresh."""
    worker = rollouts.trainer()
    handle = ThreadHandle("trainer", lambda: worker)
    found = groups([2, 1])
    for completion in (c for g in found for c in g.completions):
        completion.token_ids, completion.versions = ints([5, 6]), ints([ELSEWHERE] * 2)
        completion.logprobs = floats([math.nan, math.nan])
    found[1].completions[0].logprobs = floats([-1.0, -2.0])
    settings = BatchSettings("", rollouts.TEMPERATURE, 8, 3)
    limit = Limit.of(TimeoutsConfig(), "training")
    seen = []
    replay = Replay(found, ReplayRules(refresh_every=2))
    for version in range(3):
        batch = Batch(version, replay.take(version, 3, 3), settings)
        made = batch.train_batch(vote)
        asyncio.run(replay.refresh(batch, handle, limit))
        assert made == batch.train_batch(vote)  # which also holds of one that waits in the queue
        computed, kept = found[0].completions[0].logprobs, found[1].completions[0].logprobs
        assert list(kept) == [-1.0, -2.0]
        current = worker.logprobs([TrainSequence.of(found[0].completions[0])], rollouts.TEMPERATURE)
        seen.append((list(computed), list(computed) == pytest.approx(current[0])))
        worker.step(rollouts.batch(version))
    assert seen[0][1] and seen[2][1] and not seen[1][1]
    assert seen[0][0] == seen[1][0] != seen[2][0]
    handle.close()


class Scorer:
    """Gives each token the log-prob −1, −2, …, by the number of times that it was asked."""

    asked = 0

    def logprobs(self, sequences: list[TrainSequence], temperature: float) -> list[list[float]]:
        self.asked += 1
        return [[-float(self.asked)] for _ in sequences]


def refreshed(rules: ReplayRules, recorded: float, versions: int) -> list[float]:
    """The log-prob of a trajectory's token after each update. Every update also trains on a sampled
    token, whose log-prob stays."""
    replay, handle = Replay(groups([1]), rules), ThreadHandle("trainer", Scorer)
    limit, seen = Limit.of(TimeoutsConfig(), "training"), []
    (drawn,) = replay.take(0, 1, 1)
    sampled = Group(0, drawn.problem, [Completion(0, 0, [1], [9], [-0.5], [0], "stop")], [])
    drawn.completions[0].logprobs = floats([recorded])
    for version in range(versions):
        batch = Batch(version, [sampled, drawn], BatchSettings("", 1.0, 8, 2))
        asyncio.run(replay.refresh(batch, handle, limit))
        seen += drawn.completions[0].logprobs
        assert sampled.completions[0].logprobs.tolist() == [-0.5]
    handle.close()
    return seen


def test_log_probs_are_computed_where_the_rules_say_so() -> None:
    assert refreshed(ReplayRules(), math.nan, 3) == [-1.0] * 3
    assert refreshed(ReplayRules(), -7.0, 2) == [-7.0] * 2
    assert refreshed(ReplayRules(refresh_all=True), -7.0, 3) == [-1.0] * 3
    assert refreshed(ReplayRules(refresh_every=2), math.nan, 5) == [-1.0, -1.0, -2.0, -2.0, -3.0]
    assert all(map(math.isnan, refreshed(ReplayRules(behavior=False), math.nan, 2)))


def test_a_run_resumed_on_other_trajectories_begins_with_the_first() -> None:
    replay, rules = Replay(groups([2, 3])), ReplayRules(shuffle=False)
    replay.take(0, 3, 3)
    for sizes, first in (([2, 3], 3), ([2, 2], 0)):
        resumed = Replay(groups(sizes), rules)
        resumed.load_state(replay.state(1))
        assert tokens(resumed.take(1, 1, 1)) == [first]


def replaying(train: Path, share: float, **pipeline: Any) -> DrivenLedger:
    class Replaying(DrivenLedger):
        def _new_ledger(self) -> Ledger:
            config: Config = self.config
            problems = Curriculum(config.by_stage())
            return Ledger(config, problems, lambda problem: [1], Replay(groups([2] * 20)))

    source = {"sources": ["elsewhere"], "share": share}
    return Replaying(config(train, data={"trajectories": source}, pipeline=pipeline))


@pytest.mark.parametrize("staleness", [0, 2])
def test_half_of_each_batch_is_sampled_within_the_bound(forty: Path, staleness: int) -> None:
    run = replaying(forty, 0.5, max_staleness=staleness)
    ledger = run.ledger
    for _ in range(12):
        run.hand_out()
        assert len(ledger.outstanding) <= 2 * (staleness + 1)
        for group in [g.id for g in ledger.outstanding.values() if g.requests]:
            ledger.grade(run.complete(group), [verdict(True), verdict(False)])
        batch = ledger.batch()
        assert Counter(g.sampled for g in batch.groups) == {True: 2, False: 2}
        ages = [batch.version - v for c in batch.completions for v in c.versions if v >= 0]
        assert max(ages) <= staleness
        ledger.trained_version += 1
        ledger.trained(batch)
        ledger.generator_version = ledger.trained_version
    run.hand_out()
    assert not ledger.groups.of(GroupStatus.BATCHED) and not ledger.outstanding


def test_a_run_on_trajectories_alone_hands_out_nothing(forty: Path) -> None:
    run = replaying(forty, 1.0)
    taken = []
    for version in range(5):
        run.hand_out()
        assert not run.ledger.outstanding
        assert run.ledger.batch_is_complete
        batch = run.ledger.batch()
        assert batch.version == version
        assert len(batch.completions) == 8
        taken += tokens(batch.groups)
        if version == 2:
            continue  # formed, and not trained on
        if version < 2:
            run.ledger.trained_version += 1
            run.ledger.trained(batch)
    assert sorted(taken) == list(range(40))
    run.resume()
    assert tokens(run.ledger.batch().groups) == taken[16:24]
