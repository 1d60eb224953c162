"""The states of a completion, which is a whole conversation where there is an environment, and what
may become of it in each.

completion = Completion.requested(0, 0, [], seed=1, sampling=SamplingParams(256))  # OPENING
completion.move(Status.SAMPLED)   # its environment has written the prompt
completion.move(Status.STEPPING)  # the model has ended its turn
completion.move(Status.SAMPLED)   # the environment's messages are put in
completion.move(Status.STEPPING)
completion.move(Status.ENDED)     # the environment is done

Without an environment a completion is `SAMPLED` until it has `ENDED`.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """Where a completion is, and so who acts next."""

    OPENING = "its environment is to write the first prompt"
    SAMPLED = "generators sample it"
    STEPPING = "its environment is to answer the model's turn"
    REFUSED = "its harness was told of a limit, and may send a request within it"
    LOST = "its environment is gone, and another is to take its place"
    ENDED = "nothing follows"


MOVES = {
    Status.OPENING: {Status.SAMPLED, Status.REFUSED, Status.LOST, Status.ENDED},
    # An interrupted completion is sampled further.
    Status.SAMPLED: {Status.SAMPLED, Status.STEPPING, Status.LOST, Status.ENDED},
    # A first turn that nobody reads begins again.
    Status.STEPPING: set(Status) - {Status.STEPPING},
    Status.REFUSED: {Status.REFUSED, Status.SAMPLED, Status.ENDED},
    # An environment that is not replayed begins again.
    Status.LOST: set(Status) - {Status.REFUSED},
    Status.ENDED: set[Status](),
}


def moved(status: Status, to: Status, what: str) -> Status:
    """`to`, if `MOVES` has it after `status`.

    Raises:
        RuntimeError: it has not; the message begins with `what`.
    """
    if to not in MOVES[status]:
        raise RuntimeError(f"{what} is {status}, and cannot become {to}")
    return to
