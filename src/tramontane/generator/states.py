"""States of decoding sequences, for models with layers that carry state from token to token.

They have one size, whatever a sequence's length. A step reads and writes the states of its whole
batch, so they are stored row by row, in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tramontane.models.states import States


class SlotStates:
    """The states of all slots in use.

    Args:
        fresh: states before a sequence's first token, [1, ...] each; none for a model without.

    Attributes:
        rows: [B, ...] each, in the order of the last `arrange`. A step replaces or overwrites them.
    """

    def __init__(self, fresh: States) -> None:
        self.rows: States = {key: x[:0] for key, x in fresh.items()}
        self._fresh = fresh
        self._slots: list[int] = []  # of each row
        self._added: list[tuple[list[int], States]] = []  # since the last `arrange`

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.rows.values())

    def add(self, slots: Sequence[int], states: States) -> None:
        """Give slots a copy each of `states` [1, ...], in place of what they have; none: those
        before a first token."""
        if self._fresh:
            self._added.append((list(slots), states or self._fresh))

    def arrange(self, slots: list[int]) -> None:
        """Put the rows into the order of `slots`, and drop those of all other slots."""
        if not self._fresh or (slots == self._slots and not self._added):
            return
        stored = [*self._slots, *(slot for added, _ in self._added for slot in added)]
        place = {slot: i for i, slot in enumerate(stored)}  # what was added last counts
        for key, rows in self.rows.items():
            added = [x[key].expand(len(n), *x[key].shape[1:]) for n, x in self._added]
            index = torch.tensor([place[slot] for slot in slots], device=rows.device)
            self.rows[key] = torch.cat([rows, *added]).index_select(0, index)
        self._slots, self._added = list(slots), []

    def copy(self, slot: int) -> States:
        """A copy of a slot's states, [1, ...] each."""
        row = self._slots.index(slot) if self._fresh else 0
        return {key: rows[row : row + 1].clone() for key, rows in self.rows.items()}
