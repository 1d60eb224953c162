"""Groups on their way: handed out, not yet trained on; and how a checkpoint keeps them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tramontane.types import Completion, Group, Problem, Request, SamplingParams, Verdict


@dataclass
class OpenGroup:
    """A problem handed out, until its group is trained on or filtered.

    `deadline` is the last version at which it may be trained (see `staleness`).
    """

    id: int
    problem: Problem
    deadline: int
    requests: list[Request]
    completions: dict[int, Completion] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def group(self) -> Group:
        ordered = [self.completions[i] for i in sorted(self.completions)]
        return Group(self.id, self.problem, ordered, self.verdicts)


def pack(group: OpenGroup) -> dict[str, Any]:
    return asdict(group) | {"completions": [asdict(c) for c in group.completions.values()]}


def unpack(row: dict[str, Any]) -> OpenGroup:
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
