"""The states of a completion, which is a whole conversation where there is an environment, and of
its group, and what may become of each.

completion = Completion.requested(0, 0, [], seed=1, sampling=SamplingParams(256))  # OPENING
completion.move(Status.SAMPLED)   # its environment has written the prompt
completion.move(Status.STEPPING)  # the model has ended its turn
completion.move(Status.SAMPLED)   # the environment's messages are put in
completion.move(Status.STEPPING)
completion.move(Status.ENDED)     # the environment is done

Without an environment a completion is `SAMPLED` until it has `ENDED`.

groups = Groups()
groups.add(group)                         # GENERATED: its completions are with the generators
groups.move(group, GroupStatus.GRADED)    # all have ended
groups.move(group, GroupStatus.READY)     # its rewards differ
groups.move(group, GroupStatus.BATCHED)
groups.move(group, GroupStatus.TRAINED)   # and forgotten
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import TypeVar


class Status(Enum):
    """Where a completion is, and so who acts next."""

    OPENING = "its environment is to write the first prompt"
    SAMPLED = "generators sample it"
    STEPPING = "its environment is to answer the model's turn"
    REFUSED = "its harness was told of a limit, and may send a request within it"
    LOST = "its environment is gone, and another is to take its place"
    ENDED = "nothing follows"


class GroupStatus(Enum):
    """Where a group is."""

    GENERATED = "with generators or environments"
    GRADED = "with verifiers"
    READY = "graded and kept"
    BATCHED = "in a batch that is not trained yet"
    TRAINED = "trained on"
    FILTERED = "left out of training, with a reason"


MOVES: dict[Status | GroupStatus, Set[Status | GroupStatus]] = {
    Status.OPENING: {Status.SAMPLED, Status.REFUSED, Status.LOST, Status.ENDED},
    # An interrupted completion is sampled further.
    Status.SAMPLED: {Status.SAMPLED, Status.STEPPING, Status.LOST, Status.ENDED},
    # A first turn that nobody reads begins again.
    Status.STEPPING: {*Status} - {Status.STEPPING},
    Status.REFUSED: {Status.REFUSED, Status.SAMPLED, Status.ENDED},
    # An environment that is not replayed begins again.
    Status.LOST: {*Status} - {Status.REFUSED},
    Status.ENDED: set(),
    # All completions of a group have `ENDED` before it is graded.
    GroupStatus.GENERATED: {GroupStatus.GRADED},
    GroupStatus.GRADED: {GroupStatus.READY, GroupStatus.FILTERED},
    GroupStatus.READY: {GroupStatus.BATCHED, GroupStatus.FILTERED},
    GroupStatus.BATCHED: {GroupStatus.TRAINED},
    GroupStatus.TRAINED: set(),
    GroupStatus.FILTERED: set(),
}
_S = TypeVar("_S", Status, GroupStatus)


def moved(status: _S, to: _S, what: str) -> _S:
    """`to`, if `MOVES` has it after `status`.

    Raises:
        RuntimeError: it has not; the message begins with `what`.
    """
    if to not in MOVES[status]:
        raise RuntimeError(f"{what} is {status}, and cannot become {to}")
    return to
