"""The state of a run between two awaits, taken without copying tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tramontane.types import FilterReason, Group


class FrozenGroup:
    """A group as it is now, at no cost: its sequences are copied only by `thaw`, which any thread
    may call while the group's requests keep growing."""

    def __init__(self, group: Group) -> None:
        self._group = replace(group, completions=[*group.completions])
        # The arrays themselves: a lost worker's requests may restart with new ones.
        self._known = [(len(r.token_ids), replace(r)) for r in group.requests]

    def thaw(self) -> Group:
        """The group at the moment of the freeze."""
        group, requests = self._group, [r.copy(n) for n, r in self._known]
        return replace(group, requests=requests, completions=[*group.completions])


@dataclass(frozen=True)
class Snapshot:
    """Everything that a resumed run needs besides the trainer's state. Taking one is cheap, since
    no tokens are copied.

    Args:
        version: updates done.
        next_group: number of the next group to hand out.
        stage: the state of `Stages`, JSON-able.
        problems: the state of the source of problems, JSON-able.
        groups: groups handed out, neither trained on nor filtered.
        filtered: groups filtered since the last update, each with its reason.
        replay: the state of the source of trajectories, JSON-able.
    """

    version: int
    next_group: int
    stage: dict[str, Any]
    problems: dict[str, Any]
    groups: list[FrozenGroup]
    filtered: list[tuple[FrozenGroup, FilterReason]]
    replay: dict[str, Any] = field(default_factory=dict)

    def all_groups(self) -> list[tuple[FrozenGroup, FilterReason | None]]:
        """`groups`, with None as the reason, then `filtered`."""
        return [*((group, None) for group in self.groups), *self.filtered]
