"""`checkpoint`: how often a run is saved, and how much is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tramontane.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints to resume a run from. One is always written at the end of the run."""

    every: int = Field(20, ge=1)
    """Updates between two checkpoints."""
    weights_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type of the saved weights. Resuming does not depend on it, since the trainer's state
    is always float32. null: the generator's, so that the saved model is the one that was
    sampled."""
    grace: float = Field(30.0, gt=0)
    """Seconds from SIGTERM to SIGKILL; the default is that of Slurm and Kubernetes. On SIGTERM a
    run finishes the current update and takes a checkpoint, if both fit into 0.8 of this time."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""
