"""`pipeline`: sizes of the asynchronous loop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tramontane.config.resume import MayChange
from tramontane.config.section import Section, key_error


class PipelineConfig(Section):
    """Sizes of the asynchronous loop, under the paper's names (arXiv 2506.10910, section 3)."""

    updates: MayChange[int] = Field(100, ge=1)
    """Number of weight updates in the run."""
    n_async: MayChange[int] = Field(512, ge=1)
    """Completions generated at once, over all generators. A typical completion spans about
    n_async / n_batch weight versions; the paper keeps that ratio at 2 or below."""
    n_batch: int = Field(256, ge=1)
    """Completions between two weight updates, in whole groups. The paper: 8k, then 4k and 2k by
    stage (Medium); 2,048 (Small)."""
    n_minibatch: MayChange[int | None] = Field(None, ge=1)
    """Completions per optimizer step; divides n_batch. null: n_batch, the paper's rule."""
    group_size: int = Field(16, ge=1)
    """Completions per problem (G). The paper does not give it. 1 is for objectives that do not
    compare a problem's completions; `diversity` must then be `none`."""
    max_staleness: int = Field(2, ge=0)
    """Maximum age of a trained token, in weight versions. 0: the run is synchronous, and repeats
    bit for bit on a CPU. The paper bounds staleness by a queue and gives no number."""
    l_max: int = Field(256, ge=2)
    """Maximum length of a completion, in tokens. The paper gives l_max − l_cache: 16k, 24k and 32k
    by stage (Medium); 32k (Small)."""
    l_cache: int = Field(32, ge=0)
    """Number of tokens below l_max over which the length penalty grows from 0 to its maximum. The
    paper does not give it."""
    diversity: Literal["rewards", "correctness", "none"] = "rewards"
    """Groups to drop: those with equal `rewards` (the paper's formula), or with equal `correctness`
    parts (the paper's prose). `none`: keep all."""
    unscorable: Literal["drop", "wrong"] = "drop"
    """What to do with a completion that the verifier cannot judge: `drop` its whole group, or train
    on it as `wrong`, with reward 0. The paper does not mention such completions."""

    max_groups_without_signal: MayChange[int | None] = Field(None, ge=1)
    """Number of groups from the start after which a run ends with a diagnosis if all were dropped.
    Once a group has been kept, the limit is four times as many consecutive dropped groups. null:
    four batches of groups, at least 32."""
    min_kept_share: MayChange[float] = Field(0.1, ge=0, le=1)
    """Share of kept groups, over that many groups, below which a warning with the same diagnosis is
    shown. 0: no warning."""

    @property
    def groups_without_signal(self) -> int:
        """`max_groups_without_signal` with its default resolved."""
        return self.max_groups_without_signal or max(32, 4 * self.groups_per_batch)

    @property
    def minibatch(self) -> int:
        """Completions per optimizer step: `n_minibatch`, by default `n_batch`."""
        return self.n_minibatch or self.n_batch

    @property
    def in_flight(self) -> int:
        """Maximum number of unfinished completions: `n_async`, or what the staleness bound admits
        (`controller.staleness`)."""
        return min(self.n_async, self.n_batch * (self.max_staleness + 1))

    @property
    def groups_per_batch(self) -> int:
        """Groups between two weight updates."""
        return self.n_batch // self.group_size

    @model_validator(mode="after")
    def _arithmetic(self) -> PipelineConfig:
        if self.n_batch % self.group_size:
            raise key_error(
                f"group_size {self.group_size} does not divide n_batch {self.n_batch}: a batch "
                f"holds whole groups; try n_batch "
                f"{nearest_multiple(self.n_batch, self.group_size)}",
                "n_batch",
                "group_size",
            )
        if self.n_batch % self.minibatch:
            raise key_error(
                f"n_minibatch {self.minibatch} does not divide n_batch {self.n_batch}; "
                f"leave it out to take one optimizer step per update",
                "n_minibatch",
                "n_batch",
            )
        if self.n_async < self.group_size:
            raise key_error(
                f"n_async {self.n_async} is below group_size {self.group_size}: "
                f"no group could ever be generated; raise n_async",
                "n_async",
                "group_size",
            )
        if self.group_size == 1 and self.diversity != "none":
            raise key_error(
                f"group_size 1: the rewards of a single completion are all equal, so diversity "
                f"{self.diversity!r} would drop every group; write diversity: none",
                "group_size",
                "diversity",
            )
        if self.l_cache > self.l_max:
            raise key_error(
                f"l_cache {self.l_cache} is above l_max {self.l_max}: the length penalty would "
                f"start before the first token; lower l_cache",
                "l_cache",
                "l_max",
            )
        return self


def nearest_multiple(n: int, divisor: int) -> int:
    """The positive multiple of `divisor` nearest to `n`."""
    return max(divisor, round(n / divisor) * divisor)
