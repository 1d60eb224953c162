"""The stages of a run's curriculum (arXiv 2506.10910: length grows, batches shrink).

A stage ends *drained*: every group handed out in it is trained on in it, or filtered. So nothing is
trained on with another stage's temperature, clipping or sizes, and the staleness bound holds within
each stage as if it were a separate run. The version at which a stage ends is either known at its
start (`until.updates`) or fixed when its metric reaches the limit: after as many whole batches as
the groups handed out by then can fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tramontane.batches import BatchSettings
from tramontane.config import Config, Until
from tramontane.types import Group


class Stages:
    """The stages of a run, and which is current; a run without stages has a single one.

    Attributes:
        configs: the run's config as it stands in each stage.
        number: the current stage, from 0.
    """

    def __init__(self, config: Config) -> None:
        self.configs = config.by_stage()
        self._sections = config.stages
        self._updates = config.pipeline.updates
        self._begin(0, 0)

    def _begin(self, number: int, version: int) -> None:
        self.number = number
        self._end: int | None = None  # the version at which the stage ends, once known
        self._end_reason = ""
        self._recent: list[list[int]] = []  # per update: completions right, at the ceiling, judged
        if self._until and self._until.updates:
            self._end = version + self._until.updates
            self._end_reason = f"{self._until.updates} update{'s' * (self._until.updates != 1)}"

    @property
    def config(self) -> Config:
        """The run's config as it stands in the current stage."""
        return self.configs[self.number]

    @property
    def name(self) -> str:
        """Name of the current stage; empty in a run without stages."""
        return self._sections[self.number].name if self._sections else ""

    @property
    def last(self) -> bool:
        return self.number == len(self.configs) - 1

    @property
    def batch_settings(self) -> BatchSettings:
        """Settings sent to the trainer with each batch of the current stage."""
        sizes, generator = self.config.pipeline, self.config.generator
        return BatchSettings(
            stage=self.name,
            temperature=generator.temperature,
            l_max=sizes.l_max,
            n_minibatch=sizes.minibatch,
            options=self.config.trainer.objective.options,
            repeatable=sizes.max_staleness == 0,
        )

    @property
    def end(self) -> int:
        """The version at which the next stage's first batch is trained; until known, the run's last
        version."""
        return self._updates if self._end is None else min(self._end, self._updates)

    def trained(self, groups: Sequence[Group], next_version: int, outstanding: int) -> None:
        """Add an update to the stage's metric, and fix the stage's end if the limit is reached.

        Args:
            groups: the groups that the update trained on, and those filtered since the previous
                update.
            next_version: the version that the next batch will be trained at.
            outstanding: number of groups handed out, neither batched nor filtered.
        """
        until = self._until
        if until is None or self._end is not None:
            return
        sizes = self.config.pipeline
        verdicts = [v for group in groups for v in group.verdicts]
        full = []  # for each completion that could be judged, True if it is at the ceiling
        for group in groups:
            l_max, l_cache = group.problem.lengths(sizes.l_max, sizes.l_cache)
            full += [
                c.n_tokens >= l_max - l_cache
                for c, v in zip(group.completions, group.verdicts, strict=True)
                if v.verdict != "unscorable"
            ]
        right = sum(v.verdict == "right" for v in verdicts)
        self._recent = [*self._recent, [right, sum(full), len(full)]][-until.window :]
        right, at_ceiling, total = (sum(column) for column in zip(*self._recent, strict=True))
        name, count, limit = "solved", right, until.solved
        if until.at_ceiling is not None:
            name, count, limit = "at the ceiling", at_ceiling, until.at_ceiling
        reached = limit is not None and total > 0 and count >= limit * total
        if len(self._recent) == until.window and reached:
            self._end = next_version + math.ceil(outstanding / self.config.sampled_groups)
            self._end_reason = f"{name}: {count / total:.3f} of {total:,} completions"

    def begin_next(self, version: int) -> str:
        """Enter the next stage at `version`; returns a readable description of the event."""
        reason = self._end_reason if self._end == version else "no problem is left in it"
        ended = f"stage {self.name!r} ended after update {version} ({reason})"
        self._begin(self.number + 1, version)
        return f"{ended}; stage {self.name!r} begins"

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load_state`."""
        return {
            "number": self.number,
            "end": self._end,
            "end_reason": self._end_reason,
            "recent": self._recent,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.number, self._end = state["number"], state["end"]
        self._end_reason, self._recent = state["end_reason"], state["recent"]

    @property
    def _until(self) -> Until | None:
        """The end condition of the current stage; the last stage has none."""
        return self._sections[self.number].until if self._sections else None
