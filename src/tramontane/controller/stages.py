"""Where a run is among its stages (arXiv 2506.10910: length grows, batches shrink).

A stage ends *drained*: all that was handed out in it is trained on in it, or filtered. So nothing
is trained on under another stage's temperature, clipping or sizes, and the bound on staleness holds
within each stage as if it were a run of its own. The version at which a stage ends is either known
when it begins (`until.updates`) or fixed once its metric fires: as many whole batches later as take
up what is handed out by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tramontane.config import Config, Until
from tramontane.types import BatchSettings, Group


class Stages:
    """The stage that a run is in; a run without stages has one, to its end.

    Attributes:
        number: of the stage, from 0.
        end: the version at which the next stage's first batch is trained, as far as that is known;
            the run's last version otherwise.
    """

    def __init__(self, config: Config) -> None:
        self.configs = config.by_stage()
        self._of = config.stages
        self._total = config.pipeline.updates
        self._end: int | None = None
        self._why = ""
        self._seen: list[list[int]] = []  # of the newest updates: right, at the ceiling, all
        self._enter(0, 0)

    @property
    def config(self) -> Config:
        """The run's config as it stands in this stage."""
        return self.configs[self.number]

    @property
    def name(self) -> str:
        """Of this stage; empty where there are none."""
        return self._of[self.number].name if self._of else ""

    @property
    def last(self) -> bool:
        return self.number == len(self.configs) - 1

    @property
    def batch_settings(self) -> BatchSettings:
        """Settings that every batch of this stage is trained with."""
        sizes, generator = self.config.pipeline, self.config.generator
        return BatchSettings(
            stage=self.name,
            temperature=generator.temperature,
            eps_high=self.config.trainer.objective.eps_high,
            l_max=sizes.l_max,
            n_minibatch=sizes.minibatch,
        )

    @property
    def end(self) -> int:
        return self._total if self._end is None else min(self._end, self._total)

    def trained(self, groups: Sequence[Group], next_version: int, outstanding: int) -> None:
        """Look at what an update trained on, and what was filtered since the one before.

        Args:
            groups: these.
            next_version: that the next batch will be trained at.
            outstanding: groups handed out, neither batched nor filtered.
        """
        until = self._until
        if until is None or self._end is not None:
            return
        sizes = self.config.pipeline
        shares = [0, 0, 0]  # right, at the ceiling, all
        for group in groups:
            shares[0] += sum(v.verdict == "right" for v in group.verdicts)
            ceiling = sizes.l_max - sizes.l_cache
            shares[1] += sum(len(c.token_ids) >= ceiling for c in group.completions)
            shares[2] += len(group.completions)
        self._seen = [*self._seen, shares][-until.window :]
        right, long, every = (sum(column) for column in zip(*self._seen, strict=True))
        name, share, limit = "solved", right, until.solved
        if until.at_ceiling is not None:
            name, share, limit = "at the ceiling", long, until.at_ceiling
        if len(self._seen) == until.window and limit is not None and share >= limit * every:
            self._end = next_version + math.ceil(outstanding / sizes.groups_per_batch)
            self._why = f"{name}: {share / every:.3f} of {every:,} completions"

    def begin_next(self, version: int) -> str:
        """Enter the next stage at `version`; returns what happened, for people."""
        left, why = self.name, self._why if self._end == version else "no problem is left in it"
        self._enter(self.number + 1, version)
        return f"stage {left!r} ended after update {version} ({why}); stage {self.name!r} begins"

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "number": self.number,
            "end": self._end,
            "why": self._why,
            "seen": self._seen,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.number, self._end = state["number"], state["end"]
        self._why, self._seen = state["why"], state["seen"]

    @property
    def _until(self) -> Until | None:
        return self._of[self.number].until if self._of else None

    def _enter(self, number: int, version: int) -> None:
        self.number, self._end, self._why, self._seen = number, None, "", []
        if self._until and self._until.updates:
            self._end = version + self._until.updates
            self._why = f"{self._until.updates} updates"
