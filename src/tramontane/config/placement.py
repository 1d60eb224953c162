"""`placement`: where workers run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tramontane.config.section import Section


class Resources(Section):
    """Resources that one worker reserves in a Ray cluster."""

    cpus: int = Field(1, ge=1)
    """Number of CPUs, and of the worker's torch threads."""
    gpus: float | None = Field(None, ge=0)
    """Number of GPUs; may be a fraction. null: 1 if the worker's device is cuda, else 0."""


class PlacementConfig(Section):
    """Where workers run, and how weights travel between them; see docs/placement.md."""

    kind: Literal["thread", "ray"] = "thread"
    """`thread`: workers are threads of the controller's process; `ray`: workers are Ray actors."""
    address: str | None = Field(None, pattern=r"^(auto|[^:/]+:\d+)$")
    """Ray cluster to join: HOST:PORT, or auto for the one that Ray finds. null: start a cluster for
    the run."""
    weights: Literal["store", "nixl"] = "store"
    """Transport of weights between actors: Ray's object `store`, or `nixl`, from GPU to GPU."""
    lost_sequences: Literal["continue", "restart"] = "continue"
    """What to do with sequences in flight in a generator that died: `continue` from the tokens
    known to the controller, or `restart` from the prompt."""
    generator: Resources = Field(default_factory=Resources)
    """Resources of each generator."""
    verifier: Resources = Field(default_factory=Resources)
    """Resources of each verifier."""
    trainer: Resources = Field(default_factory=Resources)
    """Resources of each rank of the trainer."""

    @property
    def replaces_workers(self) -> bool:
        """True if workers can die independently of the controller, and are replaced."""
        return self.kind == "ray"
