"""How a run is carried out: checkpoints, the placement of workers, and time limits."""

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


class Resources(Section):
    """Resources that one worker reserves in a Ray cluster."""

    cpus: int = Field(1, ge=1)
    """Number of CPUs, and of the worker's torch threads."""
    gpus: float | None = Field(None, ge=0)
    """Number of GPUs; may be a fraction. null: 1 if the worker's device is cuda, else 0."""


class PlacementConfig(Section):
    """Where workers run, and how weights travel between them; see docs/placement.md."""

    kind: Literal["thread", "process", "ray"] = "thread"
    """`thread`: workers are threads of the controller's process; `process`: generators are too, but
    the trainer has its own process; `ray`: workers are Ray actors."""
    address: str | None = Field(None, pattern=r"^(auto|[^:/]+:\d+)$")
    """Ray cluster to join: HOST:PORT, or auto for the one that Ray finds. null: start a cluster for
    the run."""
    weights: Literal["store", "differences", "nixl"] = "store"
    """Transport of weights between actors: Ray's object `store`; `differences`: the same, and other
    machines than the trainer's fetch only what changed; or `nixl`, from GPU to GPU."""
    lost_sequences: Literal["continue", "restart"] = "continue"
    """What to do with sequences in flight in a generator that died: `continue` from the tokens
    known to the controller, or `restart` from the prompt."""
    generator: Resources = Field(default_factory=Resources)
    """Resources of each generator."""
    verifier: Resources = Field(default_factory=Resources)
    """Resources of each verifier, and of each process of environments."""
    trainer: Resources = Field(default_factory=Resources)
    """Resources of each rank of the trainer."""
    teacher: Resources = Field(default_factory=Resources)
    """Resources of each process of a teacher."""

    @property
    def replaces_workers(self) -> bool:
        """True if workers can die independently of the controller, and are replaced."""
        return self.kind == "ray"


class TimeoutsConfig(Section):
    """Time limits of the controller's waits. A wait that exceeds its limit ends the run with an
    error that names the limit, or replaces the worker where workers are replaceable."""

    generation: float = Field(600.0, gt=0)
    """Limit of one poll of a generator (`generator.steps_per_call` decode steps), in seconds."""
    verification: float = Field(600.0, gt=0)
    """Limit of the wait for the next verdict, in seconds."""
    training: float = Field(3600.0, gt=0)
    """Limit of one update of the trainer, and of saving its state, in seconds."""
    scoring: float = Field(3600.0, gt=0)
    """Limit of a teacher's scores of one batch, in seconds."""
    weight_update: float = Field(600.0, gt=0)
    """Limit of publishing new weights, of fetching them in a generator, and of swapping them in, in
    seconds."""
    batch: float = Field(7200.0, gt=0)
    """Limit of the wait for a full batch, or for room in a queue, in seconds."""
    start: float = Field(600.0, gt=0)
    """Limit of starting a worker, and of each exchange with an environment's process (the first one
    starts it), in seconds."""
    control: float = Field(600.0, gt=0)
    """Limit of every other call: the parity check, resizing a generator's cache, cancelling its
    requests, restoring the trainer's state, in seconds."""
    heartbeat: float = Field(30.0, gt=0)
    """Longest silence of a Ray worker's or vLLM's process before the worker counts as hung, in
    seconds."""
