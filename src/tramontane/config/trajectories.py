"""`data.trajectories`: completions that the run did not sample."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tramontane.config.section import Section, key_error


class TrajectoriesConfig(Section):
    """Recorded completions to fill batches with: rollouts of earlier runs, responses of other
    models or of humans. See docs/trajectories.md."""

    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    """Folders of earlier runs, and JSONL (also gzip) or Parquet files with a prompt, a response and
    a reward in each row."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of each batch's completions that are trajectories, rounded to whole groups. The rest is
    sampled by the run. 1: nothing is sampled for training."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields in files, if different, e.g. `{response: text, reward: thumbs}`.
    """
    behavior: Literal["recorded", "refreshed"] = "recorded"
    """Behaviour log-probs log μ: as `recorded` with a trajectory, or `refreshed`: computed with the
    trained weights. A trajectory without recorded ones is always refreshed. None are computed for
    an objective that does not use μ."""
    refresh_every: int | None = Field(10, ge=1)
    """Updates after which refreshed log-probs are computed again. null: only once, when a
    trajectory is first used."""
    min_version: int | None = Field(None, ge=0)
    """Oldest weights version of a run's rollouts to use, by a completion's newest token. null: no
    bound."""
    max_version: int | None = Field(None, ge=0)
    """Newest weights version of a run's rollouts to use, by a completion's newest token. 0: only
    samples of the run's initial weights. null: no bound."""
    min_reward: float | None = None
    """Lowest reward of trajectories to use, inclusive. null: no bound."""
    max_reward: float | None = None
    """Highest reward of trajectories to use, inclusive. null: no bound."""
    regrade: bool = False
    """Replace the recorded rewards by the verdicts of this run's verifiers, at the start."""
    standardize: bool = False
    """Shift and scale the rewards of all trajectories to mean 0 and standard deviation 1, as DRO
    does."""

    @model_validator(mode="after")
    def _bounds(self) -> TrajectoriesConfig:
        for name in ("version", "reward"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise key_error(
                    f"min_{name} {low:g} is above max_{name} {high:g}: swap them", f"min_{name}"
                )
        return self
