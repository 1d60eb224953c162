"""`checkpoint`: how often a run is saved, and how much is kept."""

from __future__ import annotations

from pydantic import Field

from tramontane.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes. The last checkpoint is always written at the end of
    the run."""

    every: int = Field(20, ge=1)
    """Updates between two checkpoints."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints that are kept; older ones are deleted."""
