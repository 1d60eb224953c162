"""The interface through which the run folder and the display follow a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tramontane.batches import Batch
from tramontane.types import FilterReason, Group

if TYPE_CHECKING:
    from tramontane.controller.pipeline import Pipeline

Activity = Literal[
    "step",
    "wait for a batch",
    "wait for the generators",
    "wait for the record",
    "wait for requests",
    "evaluation",
    "checkpoint",
]
"""What a worker did. The trainer waits for a batch (from the generators and verifiers), for the
generators to take the previous update's weights, or for the record of an update (a checkpoint or a
measurement). A generator waits for requests while the staleness bound allows none."""


@dataclass
class Update:
    """One finished update.

    Args:
        number: updates done, this one included.
        batch: the completions that it trained on.
        filtered: groups filtered since the previous update, each with its reason.
        metrics: the trainer's metrics, and counts of problems.
        busy_seconds: seconds that the trainer has worked since it was started.
        pause_seconds: the longest pause of a generator to take the new weights.
    """

    number: int
    batch: Batch
    filtered: list[tuple[Group, FilterReason]]
    metrics: dict[str, Any]
    busy_seconds: float
    pause_seconds: float


class Observer(Protocol):
    """Receives the events of one run; `run.recorder.Recorder` is one."""

    def graded(self, group: Group, filtered: FilterReason | None, ready: int) -> None:
        """A group was graded; gets the reason if it was filtered, and the number of groups now
        ready for a batch. An error raised here ends the run."""
        ...

    def holds(self, update: int) -> bool:
        """True if the trainer must not begin its next step before `trained` has returned."""
        ...

    async def trained(self, update: Update, pipeline: Pipeline) -> None:
        """An update is done. The trainer is already computing the next one, unless the observer
        `holds` this one: only then may it take a checkpoint."""
        ...

    async def ended(self, pipeline: Pipeline) -> None:
        """The last update is done and recorded; no more training follows."""
        ...

    def spent(self, worker: str, activity: Activity, began: float) -> None:
        """A worker has ended an activity; `began` is the `time.time()` of its start."""
        ...

    def happened(self, event: str) -> None:
        """An event worth telling the user, in words."""
        ...
