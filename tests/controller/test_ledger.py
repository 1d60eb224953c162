"""The ledger: which groups are kept, which seeds they get, and what a snapshot brings back."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.controller.driven import DrivenLedger, config, unscorable, verdict
from tramontane.controller.groups import UNREADY, Groups
from tramontane.controller.ledger import Ledger
from tramontane.status import MOVES, GroupStatus, Status
from tramontane.types import Completion, FilterReason, Group, Problem, Verdict

RIGHT, WRONG = verdict(True), verdict(False)


def reason_for(train: Path, verdicts: list[Verdict], **pipeline: Any) -> FilterReason | None:
    """The reason for filtering a group with these verdicts; None if the group is kept."""
    run = DrivenLedger(config(train, pipeline=pipeline))
    run.hand_out()
    reason = run.ledger.grade(run.complete(0), verdicts)
    kept = [*run.ledger.ready] == [0]
    assert kept == (0 in run.ledger.outstanding) == (not run.ledger.filtered) == (reason is None)
    assert kept or run.ledger.filtered[0][1] == reason
    return reason


@pytest.mark.parametrize(
    ("diversity", "verdicts", "kind"),
    [
        ("rewards", [verdict(True, 1.0), verdict(True, 0.9)], None),
        ("correctness", [verdict(True, 1.0), verdict(True, 0.9)], "no diversity"),
        ("rewards", [verdict(True, 0.5), verdict(False, 0.5)], "no diversity"),
        ("correctness", [verdict(True, 0.5), verdict(False, 0.5)], None),
        ("none", [RIGHT, RIGHT], None),
        # A sum of parts in another order is the same reward.
        ("rewards", [verdict(True, 0.1 + 0.2), verdict(True, 0.3)], "no diversity"),
        ("rewards", [verdict(True, 0.3), verdict(True, 0.3 + 1e-6)], None),
        ("rewards", [verdict(True, 0.3), verdict(True, 0.3 + 2e-10)], "no diversity"),
    ],
)
def test_a_group_is_kept_if_what_diversity_names_differs(
    forty: Path, diversity: str, verdicts: list[Verdict], kind: str | None
) -> None:
    reason = reason_for(forty, verdicts, diversity=diversity)
    assert (reason and reason.kind) == kind


@pytest.mark.parametrize(
    ("policy", "verdicts", "reason"),
    [
        ("drop", [RIGHT, unscorable()], FilterReason("unscorable", "timed out")),
        ("wrong", [RIGHT, unscorable()], None),
        ("wrong", [WRONG, unscorable()], FilterReason("no diversity")),
        ("wrong", [unscorable("a"), unscorable("b")], FilterReason("unscorable", "a")),
    ],
)
def test_an_unscorable_completion_drops_its_group_or_counts_as_wrong(
    forty: Path, policy: str, verdicts: list[Verdict], reason: FilterReason | None
) -> None:
    assert reason_for(forty, verdicts, unscorable=policy) == reason


@pytest.mark.parametrize("tokens", [[], [1]])
def test_a_completion_that_never_began_drops_its_group(forty: Path, tokens: list[int]) -> None:
    """One whose environment failed later is judged by its verdict."""
    run = DrivenLedger(config(forty))
    run.hand_out()
    group = run.complete(0)
    first = group.completions[0]
    first.ending, first.ending_reason, first.token_ids = "environment_failed", "broke", tokens
    reason = run.ledger.grade(group, [RIGHT, WRONG])
    dropped = FilterReason("unscorable", "environment_failed: broke")
    assert reason == (None if tokens else dropped)


def test_a_reason_reads_as_its_kind_and_detail() -> None:
    assert str(FilterReason("no diversity")) == "no diversity"
    assert str(FilterReason("unscorable", "timed out")) == "unscorable: timed out"


def seeds(train: Path, seed: int, groups: int = 8) -> list[int]:
    run = DrivenLedger(config(train, seed=seed))
    run.hand_out()
    found = [r.seed for g in run.ledger.outstanding.values() for r in g.requests]
    assert len(found) == 2 * groups
    return found


def test_each_request_of_each_run_has_its_own_seed(forty: Path) -> None:
    first, other = seeds(forty, 1), seeds(forty, 2)
    assert seeds(forty, 1) == first
    assert len({*first, *other}) == len(first) + len(other)


def test_a_seed_is_a_fixed_function_of_run_group_and_index(forty: Path) -> None:
    """A later release repeats a recorded run only if this function stays as it is."""
    run = DrivenLedger(config(forty, seed=7))
    run.hand_out()
    found = [[r.seed for r in g.requests] for g in run.ledger.outstanding.values()]
    assert found[3] == [458_760_572_888, 458_760_572_889]
    assert all(type(seed) is int for group in found for seed in group)


def test_a_request_carries_its_group_its_index_and_the_prompt_of_its_problem(forty: Path) -> None:
    run = DrivenLedger(config(forty))
    run.ledger.encode = lambda problem: list(problem.id.encode())
    run.hand_out()
    for number, group in run.ledger.outstanding.items():
        prompt = list(group.problem.id.encode())
        found = [(r.group, r.index, r.prompt_ids) for r in group.requests]
        assert found == [(number, 0, prompt), (number, 1, prompt)]
        assert not any(r.keep_kv for r in group.requests)  # nothing continues them


def test_the_prompt_of_a_conversation_is_left_to_its_environment(forty: Path) -> None:
    run = DrivenLedger(config(forty, data={"tools": ["calculator"]}))
    run.ledger.encode = lambda problem: pytest.fail("encoded")
    (group,) = run.ledger.open(1)
    assert [(r.prompt_ids, r.status) for r in group.requests] == [([], Status.OPENING)] * 2


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_a_group_is_whole_once_all_its_completions_are_taken(forty: Path, order: list[int]) -> None:
    run = DrivenLedger(config(forty, pipeline={"group_size": 3, "n_batch": 12}))
    run.hand_out()
    group = run.ledger.outstanding[1]
    for number, index in enumerate(order, start=1):
        whole = run.ledger.take(Completion(1, index, [1], [1], [0.0], [0], "stop"))
        assert {r.index for r in group.requests} == set(order[number:])
        assert whole is (group if number == 3 else None)
    assert [c.index for c in group.completions] == [0, 1, 2]


def test_a_problem_that_is_too_hard_comes_back_after_that_many_updates(forty: Path) -> None:
    rules = {"too_hard": {"after": 1, "return_after": 2}}
    run = DrivenLedger(config(forty, data={"limit": 4, "curriculum": rules}))
    (hard,) = run.ledger.open(1)
    run.generate(hard.id, [False, False])
    for version in (1, 2):
        run.ledger.trained_version = version
        drawn = {group.problem.id for group in run.ledger.open(8)}  # two epochs at least
        assert len(drawn) == 2 + version
        assert (hard.problem.id in drawn) == (version == 2)


def test_resting_problems_are_counted_at_the_update_and_in_the_stage_of_now(forty: Path) -> None:
    def resting(return_after: int | str, move: Callable[[Ledger], object]) -> list[int]:
        rules = {"too_hard": {"after": 1, "return_after": return_after}}
        stages = [{"name": "a", "until": {"updates": 3}}, {"name": "b"}]
        run = DrivenLedger(config(forty, data={"curriculum": rules}, stages=stages))
        run.generate(run.ledger.open(1)[0].id, [False, False])
        counts = [run.ledger.counts["problems_resting"]]
        move(run.ledger)
        return [*counts, run.ledger.counts["problems_resting"]]

    assert resting(2, lambda ledger: setattr(ledger, "trained_version", 1)) == [1, 1]
    assert resting(2, lambda ledger: setattr(ledger, "trained_version", 2)) == [1, 0]
    assert resting("stage", lambda ledger: setattr(ledger, "trained_version", 2)) == [1, 1]
    assert resting("stage", lambda ledger: ledger.begin_next_stage()) == [1, 0]


def test_a_stage_is_over_once_its_last_weights_have_arrived(forty: Path) -> None:
    stages = [{"name": "a", "until": {"updates": 1}}, {"name": "b"}]
    run = DrivenLedger(config(forty, stages=stages))
    run.hand_out()
    for group in range(4):
        run.generate(group, [True, False])
    run.form()
    assert not run.ledger.stage_is_over  # its batch is being trained on
    run.train()
    assert run.ledger.stage_is_over
    run.ledger.generator_version = 0  # the weights are on their way
    assert not run.ledger.stage_is_over


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_a_synchronous_round_is_noted_in_the_order_of_its_groups(
    forty: Path, order: list[int]
) -> None:
    """Two problems, each twice in the round: the newer group is noted last."""
    two = forty.with_name("two_of_forty.jsonl")
    two.write_text("".join(line + "\n" for line in forty.read_text().splitlines()[:2]))
    run = DrivenLedger(config(two, pipeline={"max_staleness": 0}))
    run.hand_out()
    ledger = run.ledger
    problems = [group.problem.id for group in ledger.outstanding.values()]
    assert sorted(problems[:2]) == sorted(problems[2:]) == ["p0", "p1"]
    right = {problems[0]: [True, False], problems[1]: [False, True]}  # first group, second group
    for group in order:
        # In the middle of a round nothing is noted, and nothing handed out.
        assert not [*ledger.problems.records()] and ledger.room() == 0
        run.generate(group, [right[problems[group]][group // 2]] * 2)
    # visits, attempts, solved, all solved last, none solved last, version, stage
    assert [*ledger.problems.state()["records"].items()] == [
        (problems[0], (2, 4, 2, 0, 1, 0, 0)),
        (problems[1], (2, 4, 2, 1, 0, 0, 0)),
    ]


def test_a_restored_ledger_forms_the_batch_that_the_snapshot_allowed(forty: Path) -> None:
    run = DrivenLedger(config(forty))
    run.hand_out()
    for group in (5, 2, 7, 3):
        run.generate(group, [True, False])
    run.generate(1, [True, True])
    expected = sorted(run.ledger.choice())
    assert expected == [2, 3, 5, 7]
    run.resume()
    assert [*run.ledger.ready] == expected
    assert [(g.id, reason.kind) for g, reason in run.ledger.filtered] == [(1, "no diversity")]
    run.form()
    assert [g.id for g in run.formed[0].groups] == expected
    assert [v.reward for v in run.formed[0].groups[0].verdicts] == [1.0, 0.0]


def test_a_resumed_run_is_in_its_stage_and_draws_the_problems_that_follow(forty: Path) -> None:
    def after_a_stage(resumed: bool) -> list[str]:
        stages = [{"name": "a", "until": {"updates": 1}}, {"name": "b", "l_max": 30}]
        run = DrivenLedger(config(forty, stages=stages))
        run.hand_out()
        for group in range(4):
            run.generate(group, [True, False])
        run.form()
        run.train()
        run.hand_out()
        if resumed:
            run.resume()
        assert run.ledger.stages.name == "b" and run.ledger.sizes.l_max == 30
        return [group.problem.id for group in run.ledger.open(20)]

    assert after_a_stage(resumed=True) == after_a_stage(resumed=False)


def test_environments_are_lost_with_the_process_if_they_had_begun(forty: Path) -> None:
    run = DrivenLedger(config(forty, data={"tools": ["calculator"]}))
    _, begun = run.ledger.open(1)[0].requests
    begun.prompt_ids = [5]
    begun.move(Status.SAMPLED)
    run.resume()
    states = [r.status for r in run.ledger.outstanding[0].requests]
    assert states == [Status.OPENING, Status.LOST]


def test_a_batch_that_was_not_trained_on_is_formed_again(forty: Path) -> None:
    run = DrivenLedger(config(forty))
    run.hand_out()
    for group in (0, 1, 2, 3):
        run.generate(group, [True, False])
    run.form()
    (batch,) = run.formed
    run.resume()
    assert run.ledger.next_version == 0
    run.form()
    assert [g.id for g in run.formed[0].groups] == [g.id for g in batch.groups] == [0, 1, 2, 3]


def test_groups_that_were_whole_but_not_graded_are_graded_after_a_restore(forty: Path) -> None:
    run = DrivenLedger(config(forty))
    run.hand_out()
    run.complete(4)
    run.generate(5, [True, False])
    assert [*run.ledger.groups.of(GroupStatus.GRADED)] == [4]
    run.resume()
    assert [*run.ledger.groups.of(GroupStatus.GRADED)] == [4]
    assert len(run.ledger.groups.of(GroupStatus.GRADED)[4].completions) == 2


def test_a_snapshot_in_the_middle_of_a_synchronous_round_is_the_state_before_it(
    forty: Path,
) -> None:
    run = DrivenLedger(config(forty, pipeline={"max_staleness": 0}))
    before = run.ledger.snapshot()
    run.hand_out()
    problems = [g.problem.id for g in run.ledger.outstanding.values()]
    run.generate(2, [True, False])
    assert run.ledger.snapshot() == before
    run.resume()
    assert not run.ledger.outstanding
    run.hand_out()
    assert [g.problem.id for g in run.ledger.outstanding.values()] == problems
    for group in list(run.ledger.outstanding):
        run.generate(group, [True, False])
    assert len(run.ledger.snapshot().groups) == 4  # a whole round is kept


def test_a_group_may_be_trained_up_to_max_staleness_versions_after_its_weights(
    forty: Path,
) -> None:
    run = DrivenLedger(config(forty, pipeline={"max_staleness": 3}))
    run.hand_out()
    assert {g.deadline for g in run.ledger.outstanding.values()} == {3}
    for group in (0, 1, 2, 3):
        run.generate(group, [True, False])
    run.form()
    run.train()
    run.hand_out()
    assert {g.deadline for i, g in run.ledger.outstanding.items() if i >= 8} == {4}


def test_a_batch_waits_for_the_groups_that_only_it_may_still_take(forty: Path) -> None:
    run = DrivenLedger(config(forty, pipeline={"max_staleness": 1}))
    run.hand_out()
    for group in (0, 1, 2, 3):
        run.generate(group, [True, False])
    run.form()
    run.train()
    run.hand_out()
    assert {i: g.deadline for i, g in run.ledger.outstanding.items()} == dict.fromkeys(
        range(4, 8), 1
    ) | dict.fromkeys(range(8, 12), 2)
    for group in (4, 8, 9, 10, 5, 6, 11):
        run.generate(group, [True, False])
    assert not run.ledger.batch_is_complete
    run.resume()
    assert not run.ledger.batch_is_complete
    run.generate(7, [True, False])
    assert run.ledger.choice() == [4, 5, 6, 7]


def test_room_is_whole_groups_under_n_async(forty: Path) -> None:
    ledger, rooms = DrivenLedger(config(forty, pipeline={"n_async": 13})).ledger, []
    for unfinished in (0, 3, 10, 11, 12, 13):
        ledger.unfinished = unfinished
        rooms.append(ledger.room())
    assert rooms == [6, 5, 1, 1, 0, 0]


def test_no_group_is_handed_out_that_the_last_updates_cannot_use(forty: Path) -> None:
    run = DrivenLedger(config(forty, pipeline={"updates": 2, "max_staleness": 8, "n_async": 40}))
    run.hand_out()
    assert len(run.ledger.outstanding) == 2 * 4
    run.generate(0, [True, True])  # filtered, so another is needed
    assert run.ledger.room() == 1


def test_an_update_reports_what_was_filtered_since_the_one_before(forty: Path) -> None:
    run = DrivenLedger(config(forty))
    run.hand_out()
    for group in (0, 1, 2, 3):
        run.generate(group, [True, False])
    run.generate(4, [False, False])
    run.form()
    run.train()
    assert run.filtered == {"no diversity": 1}
    assert not run.ledger.filtered and not run.ledger.groups.of(GroupStatus.BATCHED)


@pytest.mark.parametrize("left", [2, 6])
def test_a_run_without_problems_is_over_once_no_batch_can_be_formed(forty: Path, left: int) -> None:
    """All problems but `left` are solved, and retired; four groups make a batch."""
    file = forty.with_name(f"{left}.jsonl")
    file.write_text("".join(line + "\n" for line in forty.read_text().splitlines()[:8]))
    run = DrivenLedger(config(file, data={"curriculum": {"retire_after": 1}}))
    run.hand_out()
    groups = list(run.ledger.outstanding)
    assert len(groups) == 8
    for group in groups[left:]:
        run.generate(group, [True, True])
        assert not run.ledger.exhausted
    for group in groups[:left]:
        run.generate(group, [True, False])
    problems = run.ledger.problems
    while problem := problems.next(0, 0):  # solved elsewhere
        problems.note(problem, [RIGHT, RIGHT], 0, 0)
    run.hand_out()
    assert run.ledger.exhausted == run.ledger.stage_is_over == (left < 4)


def test_a_group_moves_only_as_the_table_says() -> None:
    def group_in(state: GroupStatus) -> tuple[Groups, Group]:
        groups, group = Groups(), Group(3, PROBLEM, [], [], deadline=7)
        groups.add(group)
        for step in ways[state]:
            groups.move(group, step)
        return groups, group

    PROBLEM = Problem("p", "math", "1 + 1?", "2")
    ways: dict[GroupStatus, list[GroupStatus]] = {
        GroupStatus.GENERATED: [],
        GroupStatus.GRADED: [GroupStatus.GRADED],
        GroupStatus.READY: [GroupStatus.GRADED, GroupStatus.READY],
        GroupStatus.BATCHED: [GroupStatus.GRADED, GroupStatus.READY, GroupStatus.BATCHED],
        GroupStatus.TRAINED: [
            GroupStatus.GRADED,
            GroupStatus.READY,
            GroupStatus.BATCHED,
            GroupStatus.TRAINED,
        ],
        GroupStatus.FILTERED: [GroupStatus.GRADED, GroupStatus.FILTERED],
    }
    for state in GroupStatus:
        for to in GroupStatus:
            groups, group = group_in(state)
            if to not in MOVES[state]:
                with pytest.raises(RuntimeError, match="group 3 .* cannot become"):
                    groups.move(group, to)
                to = state
            else:
                groups.move(group, to)
            assert [s for s in GroupStatus if MOVES[s] and groups.of(s)] == [to] * bool(MOVES[to])
            out = to in (GroupStatus.GENERATED, GroupStatus.GRADED, GroupStatus.READY)
            assert (3 in groups.outstanding) == out
            assert groups.unready == ({7: 1} if to in UNREADY else {})


def test_unready_groups_are_counted_by_deadline_and_groups_that_left_are_not_held() -> None:
    problem = Problem("p", "math", "1 + 1?", "2")
    waiting, groups = [Group(n, problem, [], [], deadline=5 + n // 3) for n in range(6)], Groups()
    for group in waiting:
        groups.add(group)
    assert groups.unready == {5: 3, 6: 3}
    left = []
    for ways in (
        [GroupStatus.READY, GroupStatus.BATCHED, GroupStatus.TRAINED],
        [GroupStatus.FILTERED],
    ):
        group = waiting.pop(0)
        for step in (GroupStatus.GRADED, *ways):
            groups.move(group, step)
        left.append(weakref.ref(group))
        assert groups.unready == {5: len(waiting) - 3, 6: 3}
    del group
    gc.collect()
    assert [each() for each in left] == [None, None]
