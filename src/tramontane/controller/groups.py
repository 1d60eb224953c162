"""Groups handed out and not yet trained on, and their form in a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tramontane.types import Completion, Group, Problem, Request, Verdict


@dataclass
class OpenGroup:
    """A group from the moment its problem is handed out until it is trained on or filtered.

    Args:
        id: number of the group in the run.
        problem: the problem that all its completions answer.
        deadline: the last version at which it may be trained (see `staleness`).
        requests: unfinished completions, with their tokens so far.
        completions: finished completions by their index in the group.
        verdicts: verdicts of the completions, by index; empty until all are graded.
    """

    id: int
    problem: Problem
    deadline: int
    requests: list[Request]
    completions: dict[int, Completion] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def group(self) -> Group:
        """The finished completions in order of their index, with the verdicts."""
        ordered = [self.completions[i] for i in sorted(self.completions)]
        return Group(self.id, self.problem, ordered, self.verdicts)


class FrozenGroup:
    """A group as it is now, at no cost: its sequences are copied only by `thaw`, which any thread
    may call while the group's requests keep growing."""

    def __init__(self, group: OpenGroup) -> None:
        self.id = group.id
        self._group = replace(group, completions=dict(group.completions))
        # The arrays themselves: a lost worker's requests may restart with new ones.
        self._known = [(len(r.token_ids), replace(r)) for r in group.requests]

    def thaw(self) -> OpenGroup:
        """The group at the moment of the freeze."""
        requests = [
            replace(r, token_ids=r.token_ids[:n], logprobs=r.logprobs[:n], versions=r.versions[:n])
            for n, r in self._known
        ]
        return replace(self._group, requests=requests, completions=dict(self._group.completions))
