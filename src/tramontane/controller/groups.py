"""The groups of a run by their states; see `status` for these and their moves."""

from __future__ import annotations

from collections import Counter

from tramontane.status import MOVES, GroupStatus, moved
from tramontane.types import Group

UNREADY = frozenset({GroupStatus.GENERATED, GroupStatus.GRADED})


class Groups:
    """Keeps each group that is neither trained nor filtered under its state, the only record of it.

    Attributes:
        outstanding: groups handed out and neither batched nor filtered, in that order, by number.
        unready: number of outstanding groups that are not `READY`, by deadline.
    """

    def __init__(self) -> None:
        self.outstanding: dict[int, Group] = {}
        self.unready: Counter[int] = Counter()
        self._by_status = {s: dict[int, Group]() for s in GroupStatus if MOVES[s]}

    def of(self, status: GroupStatus) -> dict[int, Group]:
        """The groups in a state by number, in the order in which they reached it."""
        return self._by_status[status]

    def add(self, group: Group, status: GroupStatus = GroupStatus.GENERATED) -> None:
        """Hand out a group."""
        self.outstanding[group.id] = self._by_status[status][group.id] = group
        self.unready[group.deadline] += status in UNREADY

    def move(self, group: Group, to: GroupStatus) -> None:
        """Change the state of a group.

        Raises:
            RuntimeError: `MOVES` has no such change.
        """
        found = (s for s, members in self._by_status.items() if group.id in members)
        status = next(found, GroupStatus.TRAINED)  # or filtered: nothing follows either
        moved(status, to, f"group {group.id}")
        del self._by_status[status][group.id]
        if to in self._by_status:
            self._by_status[to][group.id] = group
        if status in UNREADY and to not in UNREADY:
            self.unready[group.deadline] -= 1
            self.unready = +self.unready  # without zeros
        if to in (GroupStatus.BATCHED, GroupStatus.FILTERED):
            del self.outstanding[group.id]
