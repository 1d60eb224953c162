"""`checkpoint`: how often a run is saved, and how much is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tramontane.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes. The last checkpoint is always written at the end of
    the run."""

    every: int = Field(20, ge=1)
    """Updates between two checkpoints."""
    weights_dtype: Literal["float32", "bfloat16"] | None = None
    """Number type of the saved weights; a run resumes from the trainer's state, which is always
    float32. null: that of the generator, so that the saved model is the one that was sampled."""
    grace: float = Field(30.0, gt=0)
    """Seconds from SIGTERM to SIGKILL, by default those of Slurm and Kubernetes. A run that gets
    SIGTERM ends the update under way and takes a checkpoint, if 0.8 of them are enough for both."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints that are kept; older ones are deleted."""
