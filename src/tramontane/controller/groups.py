"""The groups of a run by their states, and what may become of each.

groups = Groups()
groups.add(group)                   # GENERATED: its completions are with the generators
groups.move(group, State.GRADED)    # all have ended
groups.move(group, State.READY)     # its rewards differ
groups.move(group, State.BATCHED)
groups.move(group, State.TRAINED)   # and forgotten
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from tramontane.types import Group


class State(Enum):
    """Where a group is."""

    GENERATED = "with generators or environments"
    GRADED = "with verifiers"
    READY = "graded and kept"
    BATCHED = "in a batch that is not trained yet"
    TRAINED = "trained on"
    FILTERED = "left out of training, with a reason"


MOVES = {
    State.GENERATED: {State.GRADED},
    State.GRADED: {State.READY, State.FILTERED},
    State.READY: {State.BATCHED, State.FILTERED},
    State.BATCHED: {State.TRAINED},
}
UNREADY = frozenset({State.GENERATED, State.GRADED})


class Groups:
    """Keeps each group that is neither trained nor filtered under its state, the only record of it.

    Attributes:
        outstanding: groups handed out and neither batched nor filtered, in that order, by number.
        unready: number of outstanding groups that are not `READY`, by deadline.
    """

    def __init__(self) -> None:
        self.outstanding: dict[int, Group] = {}
        self.unready: Counter[int] = Counter()
        self._by_state: dict[State, dict[int, Group]] = {state: {} for state in MOVES}

    def of(self, state: State) -> dict[int, Group]:
        """The groups in a state by number, in the order in which they reached it."""
        return self._by_state[state]

    def add(self, group: Group, state: State = State.GENERATED) -> None:
        """Hand out a group."""
        self.outstanding[group.id] = self._by_state[state][group.id] = group
        self.unready[group.deadline] += state in UNREADY

    def move(self, group: Group, to: State) -> None:
        """Change the state of a group.

        Raises:
            RuntimeError: `MOVES` has no such change.
        """
        state = next((s for s, members in self._by_state.items() if group.id in members), None)
        if state is None or to not in MOVES[state]:
            raise RuntimeError(f"group {group.id} is {state}, and cannot become {to}")
        del self._by_state[state][group.id]
        if to in MOVES:
            self._by_state[to][group.id] = group
        if state in UNREADY and to not in UNREADY:
            self.unready[group.deadline] -= 1
            self.unready += Counter()  # without zeros
        if to in (State.BATCHED, State.FILTERED):
            del self.outstanding[group.id]
