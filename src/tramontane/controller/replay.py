"""Recorded trajectories as a source of groups for batches.

The ledger takes groups from here for the share of each batch that the run does not sample. They are
never outstanding, so the staleness bound does not apply to them; their tokens have the version
`ELSEWHERE`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from tramontane.batches import Batch, TrainSequence
from tramontane.placement import Handle, Limit, call
from tramontane.types import Completion, Group


@dataclass(frozen=True)
class ReplayRules:
    """Order of trajectories, and treatment of their behavior log-probs.

    Args:
        seed: decides the order of each epoch.
        shuffle: False keeps the order of the source.
        behavior: the objective uses behavior log-probs; otherwise none are computed.
        refresh_all: compute them even for a trajectory with recorded ones.
        refresh_every: updates after which computed log-probs are computed again; None: never.
    """

    seed: int = 0
    shuffle: bool = True
    behavior: bool = True
    refresh_all: bool = False
    refresh_every: int | None = None


class Replay:
    """Endless groups of trajectories, epoch after epoch.

    Args:
        groups: their log-probs are NaN where nothing is recorded. May be empty if none is ever
            taken.
        rules: see `ReplayRules`.
    """

    def __init__(self, groups: Sequence[Group] = (), rules: ReplayRules | None = None) -> None:
        self._groups, self._rules = groups, rules or ReplayRules()
        self._total = sum(len(group.completions) for group in groups)  # completions in an epoch
        self._position = 0  # completions taken
        self._starts: dict[int, int] = {}  # position before each batch, by the batch's version
        self._order: tuple[int, list[Group], list[int]] = (-1, [], [])  # epoch, groups, their ends
        # Version whose weights computed a completion's log-probs, by group and index.
        self._refreshed: dict[tuple[int, int], int] = {}

    def take(self, version: int, completions: int, minibatch: int) -> list[Group]:
        """The next groups, with exactly `completions` completions in total, for the batch trained
        at `version`.

        A group is split where a minibatch of `minibatch` completions ends, so that groups of any
        size fill the minibatches. These completions come last in the batch.
        """
        self._starts[version] = self._position
        taken, end = [], self._position + completions
        while self._position < end:
            epoch, offset = divmod(self._position, self._total)
            group, start = self._at(epoch, offset)
            room = (end - self._position - 1) % minibatch + 1
            stop = min(len(group.completions), start + room)
            part = slice(start, stop)
            taken.append(
                replace(group, completions=group.completions[part], verdicts=group.verdicts[part])
            )
            self._position += stop - start
        return taken

    async def refresh(self, batch: Batch, trainer: Handle, limit: Limit) -> None:
        """Compute the behavior log-probs that the batch's trajectories lack, or that are due,
        under the trainer's weights; in place, since the sequences of its `TrainBatch` share the
        arrays."""
        due = [c for g in batch.groups if not g.sampled for c in g.completions]
        due = [c for c in due if self._is_due(c, batch.version)]
        if not due:
            return
        parts = [part for completion in due for part in completion.sequences]
        sequences = [TrainSequence.of(part) for part in parts]
        temperature = batch.settings.temperature
        found = await call(trainer, "logprobs", sequences, temperature, limit=limit)
        for part, logprobs in zip(parts, found, strict=True):
            part.logprobs[:] = array("f", logprobs)
        for completion in due:
            self._refreshed[completion.group, completion.index] = batch.version

    def state(self, version: int) -> dict[str, Any]:
        """JSON-able state for `load_state`, as if no batch from `version` on had been formed."""
        return {"position": self._starts.get(version, self._position), "completions": self._total}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`; computed log-probs are computed again. If the trajectories have
        changed, start at the first of them."""
        if state.get("completions") == self._total:
            self._position = state["position"]

    def _is_due(self, completion: Completion, version: int) -> bool:
        rules = self._rules
        if not rules.behavior:
            return False
        refreshed = self._refreshed.get((completion.group, completion.index))
        if refreshed is None:
            return rules.refresh_all or any(map(math.isnan, completion.logprobs))
        return rules.refresh_every is not None and version - refreshed >= rules.refresh_every

    def _at(self, epoch: int, offset: int) -> tuple[Group, int]:
        """The group that holds a completion of an epoch, and the completion's place in it."""
        if self._order[0] != epoch:
            groups = list(self._groups)
            if self._rules.shuffle:
                Random(f"{self._rules.seed}/{epoch}").shuffle(groups)
            ends = list(accumulate(len(group.completions) for group in groups))
            self._order = epoch, groups, ends
        _, groups, ends = self._order
        number = bisect_right(ends, offset)
        return groups[number], offset - (ends[number] - len(groups[number].completions))
