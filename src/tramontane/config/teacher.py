"""`teacher`: the models that the policy is distilled from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import Field, model_validator

from tramontane.config.device import Device, Dtype, Model, resolve_dtype
from tramontane.config.objective_choice import ObjectiveConfig
from tramontane.config.section import Section, key_error
from tramontane.config.stages import StageConfig


class TeacherConfig(Section):
    """Models that score the policy's completions token by token, for the objective `distill`. They
    must have the policy's tokenizer; see docs/distillation.md."""

    model: Model
    """The teacher, named like `model`: e.g. a larger model, or a run, for its newest weights."""
    domains: dict[str, Model] = Field(default_factory=dict)
    """Other teachers for single domains, by the domain's name."""
    workers: int = Field(1, ge=1)
    """Number of copies of each teacher; the groups of a batch are divided among them."""
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


def check_teacher(
    teacher: TeacherConfig | None,
    objective: ObjectiveConfig,
    stages: Sequence[StageConfig],
    domains: Collection[str],
) -> None:
    """Check that a run has a teacher where its objective needs one, and nowhere else.

    Args:
        teacher: the run's; None for none.
        objective: what the run trains with.
        stages: the run's, which may replace the teacher.
        domains: names in `verifier.domains`.

    Raises:
        ValidationError: the first key that does not fit the others.
    """
    learns = objective.needs & {"teacher", "teacher_top"}
    if learns and teacher is None:
        raise key_error(
            "null, but the objective distills from a teacher: set teacher: {model: PATH}",
            "teacher",
            "trainer.objective.name"
            if objective.name == "distill"
            else "trainer.objective.add.distill",
        )
    if teacher and not learns:
        raise key_error(
            f"objective {objective.name!r} has no use for a teacher: write name: distill, or add: "
            f"{{distill: 1.0}}; or leave it out",
            "teacher",
            "trainer.objective.name",
        )
    for number, stage in enumerate(stages):
        if stage.teacher and teacher is None:
            raise key_error(
                "the run has no teacher to replace: give `teacher` for all stages, or leave it out",
                f"stages.{number}.teacher",
                "teacher",
            )
    for domain in teacher.domains if teacher else ():
        if domain not in domains:
            raise key_error(
                f"no such domain; choose from {', '.join(domains)}",
                f"teacher.domains.{domain}",
            )
