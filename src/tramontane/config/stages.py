"""`stages`: a curriculum of stages, each with its own sizes and data."""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from tramontane.config.data import EffortNames, Language, ProblemKind
from tramontane.config.device import Model
from tramontane.config.resume import MayChange
from tramontane.config.section import Section, key_error, keys_in_error


class Until(Section):
    """The end of a stage: exactly one of `updates`, `solved` and `at_ceiling`."""

    updates: int | None = Field(None, ge=1)
    """Number of updates in the stage."""
    solved: float | None = Field(None, gt=0, le=1)
    """Share of correct completions at which the stage ends, over `window` updates, including
    filtered groups. The paper does not say when a stage ends."""
    at_ceiling: float | None = Field(None, gt=0, le=1)
    """Share of completions with at least l_max − l_cache tokens at which the stage ends, over
    `window` updates, including filtered groups. The paper does not say when a stage ends."""
    window: int = Field(10, ge=1)
    """Number of newest updates of the stage over which `solved` and `at_ceiling` are measured."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Until:
        if sum(x is not None for x in (self.updates, self.solved, self.at_ceiling)) != 1:
            raise ValueError("give exactly one of updates, solved and at_ceiling")
        return self


class StagePlayground(Section):
    """Problems that `playground:` generates in a stage, where they differ from
    `data.playground`."""

    levels: tuple[int, int] | None = None
    """Replaces `data.playground.levels` in this stage."""
    languages: tuple[Language, ...] | None = None
    """Replaces `data.playground.languages` in this stage."""
    kinds: tuple[ProblemKind, ...] | None = None
    """Replaces `data.playground.kinds` in this stage."""


class StageData(Section):
    """Data of a stage, where it differs from `data`."""

    train: str | None = None
    """Replaces `data.train` in this stage."""
    train_effort: EffortNames | None = None
    """Replaces `data.train_effort` in this stage."""
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    """Replaces `data.min_pass_rate` in this stage."""
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    """Replaces `data.max_pass_rate` in this stage."""
    pass_rate: Literal["recorded", "running"] | None = None
    """Replaces `data.pass_rate` in this stage."""
    pass_rates: str | None = None
    """Replaces `data.pass_rates` in this stage."""
    playground: StagePlayground = Field(default_factory=StagePlayground)
    """Generated problems of the stage. Evaluation draws from `data.playground` in all stages."""


class StageConfig(Section):
    """One stage of the curriculum; see docs/curriculum.md. A null key keeps the config's value."""

    name: str = Field(min_length=1)
    """Name of the stage in metrics and events; must be unique."""
    until: Until | None = None
    """The end of the stage. Required for all stages but the last, which lasts until
    `pipeline.updates`."""
    data: StageData = Field(default_factory=StageData)
    """Data of the stage."""
    l_max: int | None = Field(None, ge=2)
    """Replaces `pipeline.l_max`. The paper's Medium: l_max − l_cache of 16k, 24k, 32k by stage."""
    l_cache: int | None = Field(None, ge=0)
    """Replaces `pipeline.l_cache`."""
    n_async: MayChange[int | None] = Field(None, ge=1)
    """Replaces `pipeline.n_async`. The paper reduces it along with n_batch, so that keys and values
    fit in memory."""
    n_batch: int | None = Field(None, ge=1)
    """Replaces `pipeline.n_batch`. The paper's Medium: 8k, 4k, 2k by stage."""
    n_minibatch: MayChange[int | None] = Field(None, ge=1)
    """Replaces `pipeline.n_minibatch`."""
    teacher: MayChange[Model | None] = None
    """Replaces `teacher.model` in this stage."""
    temperature: float | None = Field(None, gt=0)
    """Replaces `generator.temperature`."""
    eps_high: MayChange[float | None] = Field(None, ge=0)
    """Replaces `trainer.objective.magistral.eps_high`. The paper adjusts it by hand between 0.26
    and 0.28."""

    def overrides(self) -> dict[str, Any]:
        """Values that the stage sets, by the stage's own key (see `REPLACES`)."""
        values = {key: reduce(getattr, key.split("."), self) for key in REPLACES}
        return {key: value for key, value in values.items() if value is not None}

    def applied_to(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Apply this stage to a config's `model_dump`, in place; returns the same dictionary."""
        for key, value in self.overrides().items():
            *parents, last = REPLACES[key].split(".")
            reduce(dict.__getitem__, parents, raw)[last] = value
        return raw

    def located(self, error: ValidationError, path: str) -> ValidationError:
        """An error of a config with this stage applied, reported at the stage's key if that sets
        one of the keys at fault, else at the stage; `path` is the stage's place in the config."""
        first = error.errors()[0]
        at_fault = keys_in_error(dict(first))
        keys = [key for key in self.overrides() if REPLACES[key] in at_fault]
        keys.sort(key=lambda key: at_fault.index(REPLACES[key]))
        message = first["msg"].removeprefix("Value error, ")
        return key_error(message, ".".join([path, *keys[:1]]))


# The key of the config that each key of a stage replaces.
REPLACES = {
    **{key: f"pipeline.{key}" for key in ("l_max", "l_cache", "n_async", "n_batch", "n_minibatch")},
    "teacher": "teacher.model",
    "temperature": "generator.temperature",
    "eps_high": "trainer.objective.magistral.eps_high",
    **{f"data.{key}": f"data.{key}" for key in StageData.model_fields if key != "playground"},
    **{f"data.playground.{key}": f"data.playground.{key}" for key in StagePlayground.model_fields},
}
