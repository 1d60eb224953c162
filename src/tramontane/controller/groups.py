"""Groups that are handed out and not yet trained on, and their form in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tramontane.types import Completion, Group, Problem, Request, SamplingParams, Verdict


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


def pack(group: OpenGroup) -> dict[str, Any]:
    """Convert a group to a JSON-able dictionary."""
    return asdict(group) | {"completions": [asdict(c) for c in group.completions.values()]}


def unpack(row: dict[str, Any]) -> OpenGroup:
    """Rebuild a group from the result of `pack`."""
    requests = [
        Request(**r | {"sampling": SamplingParams(**r["sampling"])}) for r in row["requests"]
    ]
    return OpenGroup(
        id=row["id"],
        problem=Problem(**row["problem"]),
        deadline=row["deadline"],
        requests=requests,
        completions={c["index"]: Completion(**c) for c in row["completions"]},
        verdicts=[Verdict(**v) for v in row["verdicts"]],
    )
