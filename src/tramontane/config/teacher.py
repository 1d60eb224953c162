"""`teacher`: the models that the policy is distilled from."""

from __future__ import annotations

from pydantic import Field, model_validator

from tramontane.config.device import Device, Dtype, Model, resolve_dtype
from tramontane.config.section import Section


class TeacherConfig(Section):
    """Models that score the policy's completions token by token, for the objective `distill`. They
    must have the policy's tokenizer; see docs/distillation.md."""

    model: Model
    """The teacher, named like `model`: e.g. a larger model, or a run, for its newest weights."""
    domains: dict[str, Model] = Field(default_factory=dict)
    """Other teachers for single domains, by the domain's name."""
    workers: int = Field(1, ge=1)
    """Workers of each teacher, which share its batches."""
    ranks: int = Field(1, ge=1)
    """Processes of each worker, which share its weights (FSDP2) and its sequences: for a teacher
    that does not fit one GPU."""
    device: Device = "auto"
    """Device of the teachers: auto, cpu, cuda, cuda:N or mps; the ranks of a worker use this GPU
    and the next ones. On Ray each process has its own, see `placement.teacher`."""
    dtype: Dtype = "auto"
    """Number type of the teachers; auto: as for `trainer.dtype`."""

    @model_validator(mode="after")
    def _resolve_dtype(self) -> TeacherConfig:
        self.dtype = resolve_dtype(self.dtype, self.device)
        return self
