"""`evaluation`: measurements before, during and after the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tramontane.config.data import EffortNames, PlaygroundConfig
from tramontane.config.resume import Fixed
from tramontane.config.section import PathPart, Section, key_error

_COMPARABLE = Fixed("measurements before and after the run must be comparable")
HELD_OUT = "held_out"  # name of the problems of `data.eval`


class EvaluationSetConfig(Section):
    """A further set of problems to measure before and after the run."""

    source: str
    """Source of the problems, as in `data.eval`."""
    split: str = "test"
    """Split of a Hugging Face dataset."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, as in `data.fields`."""
    playground: PlaygroundConfig = Field(default_factory=PlaygroundConfig)
    """Problems that `playground:` generates for this set."""
    problems: int | None = Field(None, ge=1)
    """Maximum number of problems, evenly spaced over the source. null: all."""
    samples: int = Field(1, ge=1)
    """Completions per problem."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature; 0 is greedy. The paper: 0.7."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass to sample from. The paper: 1.0 for math and GPQA, 0.95 for code."""
    effort: EffortNames | None = None
    """Levels of `data.effort` to measure, on the same problems. null: all."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum length of a completion, in tokens. null: the last stage's `l_max`."""


class EvaluationConfig(Section):
    """Measurements of pass@1, pass@k and maj@k on `data.eval`; see docs/evaluation.md."""

    problems: int = Field(256, ge=1)
    """Maximum number of problems."""
    samples: int = Field(4, ge=1)
    """Completions per problem. The paper: 64 for AIME, 16 for LiveCodeBench."""
    temperature: Annotated[float, _COMPARABLE] = Field(0.7, ge=0)
    """Sampling temperature; 0 is greedy. The paper: 0.7."""
    top_p: Annotated[float, _COMPARABLE] = Field(1.0, gt=0, le=1)
    """Probability mass to sample from. The paper: 1.0 for math and GPQA, 0.95 for code."""
    effort: Annotated[EffortNames | None, _COMPARABLE] = None
    """Levels of `data.effort` to measure, on the same problems. null: all."""
    problems_seed: Annotated[int | None, _COMPARABLE] = Field(0, ge=0)
    """Seed of a generated source's evaluation problems, apart from `seed`, so that runs with
    different seeds are measured on the same problems. null: `seed`."""
    before: bool = True
    """Also measure before training. Runs that start from the same model need this only once."""
    every: int = Field(0, ge=0)
    """Updates between two measurements. 0: only before and after the run."""
    also: Annotated[dict[PathPart, EvaluationSetConfig], _COMPARABLE] = Field(default_factory=dict)
    """Further sets by name, measured before and after the run only, e.g. a public benchmark."""

    @model_validator(mode="after")
    def _names(self) -> EvaluationConfig:
        if HELD_OUT in self.also:
            raise key_error(
                f"{HELD_OUT!r} names the problems of data.eval: take another name", "also"
            )
        return self
