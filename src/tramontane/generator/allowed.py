"""Sampling masks: the tokens that top-p and top-k allowed, of the sequences that decode now."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tramontane.tokens import AllowedTokens
from tramontane.types import Completion


class SamplingMasks:
    """The allowed tokens of each sequence whose request records them, on the host, by its slot: a
    sequence of sets of any size would take a slot's length · top-k on the device."""

    def __init__(self) -> None:
        self._of: dict[int, AllowedTokens] = {}

    def admit(self, slot: int, request: Completion) -> None:
        """Begin with the sets that a request already has."""
        if request.sampling.record_allowed:
            known = AllowedTokens() if request.allowed is None else request.allowed[:]
            known.extend(AllowedTokens(), place=len(request.token_ids))
            self._of[slot] = known

    def note(self, slots: Sequence[int], newest: torch.Tensor) -> None:
        """Append the sets of a step.

        Args:
            slots: the live slots.
            newest: [all slots, top-k] int32, as in `SlotState.allowed`.
        """
        recording = [slot for slot in slots if slot in self._of]
        if not recording:
            return
        sets = newest[torch.tensor(recording, device=newest.device)].cpu().numpy()
        for slot, row in zip(recording, sets, strict=True):
            ids = row[row >= 0]
            self._of[slot].counts.append(len(ids))
            self._of[slot].ids.frombytes(ids.tobytes())

    def read(self, slot: int, start: int = 0) -> AllowedTokens | None:
        """A copy of the sets in a slot, from token number `start` on; None if none are recorded."""
        return self._of[slot][start:] if slot in self._of else None

    def free(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        self._of.pop(slot, None)
