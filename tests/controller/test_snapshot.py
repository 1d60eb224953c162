"""A frozen group is the group at the moment of the freeze, whatever becomes of it."""

from tests.controller.driven import verdict
from tramontane.controller.snapshot import FrozenGroup
from tramontane.types import Completion, Group, Problem, SamplingParams


def test_a_frozen_group_does_not_change_with_the_group_nor_with_what_was_thawed() -> None:
    done = Completion(3, 0, [1], [5], [-1.0], [0], "stop")
    request = Completion.requested(3, 1, [1], 7, SamplingParams(8))
    request.token_ids.append(6)
    problem = Problem("p", "math", "1 + 1?", "2")
    group = Group(3, problem, [done], [verdict(True)], deadline=4, requests=[request])
    frozen = FrozenGroup(group)
    request.token_ids.append(9)
    group.completions.append(request)
    group.requests = []
    for _ in range(2):
        thawed = frozen.thaw()
        assert (thawed.id, thawed.deadline, thawed.problem) == (3, 4, problem)
        assert thawed.completions == [done] and thawed.verdicts == [verdict(True)]
        assert [(r.index, r.token_ids.tolist()) for r in thawed.requests] == [(1, [6])]
        thawed.completions.clear()
        thawed.requests[0].token_ids.append(9)
