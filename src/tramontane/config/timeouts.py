"""`timeouts`: limits of every wait."""

from __future__ import annotations

from pydantic import Field

from tramontane.config.section import Section


class TimeoutsConfig(Section):
    """Time limits of the controller's waits. A wait that exceeds its limit ends the run with an
    error that names the limit, or replaces the worker where workers are replaceable."""

    generation: float = Field(600.0, gt=0)
    """Limit of one poll of a generator (`generator.steps_per_call` decode steps), in seconds."""
    verification: float = Field(600.0, gt=0)
    """Limit of the wait for the next verdict, in seconds."""
    training: float = Field(3600.0, gt=0)
    """Limit of one update of the trainer, and of saving its state, in seconds."""
    weight_update: float = Field(600.0, gt=0)
    """Limit of publishing new weights, of fetching them in a generator, and of swapping them in, in
    seconds."""
    batch: float = Field(7200.0, gt=0)
    """Limit of the wait for a full batch, or for room in a queue, in seconds."""
    start: float = Field(600.0, gt=0)
    """Limit of starting a worker, of the parity check, and of restoring the trainer's state, in
    seconds."""
    heartbeat: float = Field(30.0, gt=0)
    """Longest silence of a Ray worker's or vLLM's process before the worker counts as hung, in
    seconds."""
