"""`evaluation`: measurements before, during and after the run."""

from __future__ import annotations

from pydantic import Field

from tramontane.config.section import Section


class EvaluationConfig(Section):
    """Measurements of pass@1, pass@k and maj@k on `data.eval`; see docs/evaluation.md."""

    problems: int = Field(256, ge=1)
    """Maximum number of problems."""
    samples: int = Field(4, ge=1)
    """Completions per problem. The paper: 64 for AIME, 16 for LiveCodeBench."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature; 0 is greedy. The paper: 0.7."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass that is sampled from. The paper: 1.0 for maths and GPQA, 0.95 for code."""
    every: int = Field(0, ge=0)
    """Updates between two measurements. 0: only before and after the run."""
