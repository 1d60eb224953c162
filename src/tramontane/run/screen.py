"""The interface that shows a run's progress, and the implementation that shows nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tramontane.types import Outcome


class Screen(Protocol):
    """Shows the progress of a run; `display.LiveDisplay` is the default.

    Methods are called from the pipeline's thread and from the caller's. Metrics are an update's
    line in `metrics.jsonl`, `summary` is the content of `summary.json`; a sample's `response` is
    its thoughts and the rest.
    """

    def start(self, config_title: str, resolved: Mapping[str, str], total_updates: int) -> None: ...

    def phase(self, name: str, done: int, total: int) -> None: ...

    def status(self, values: Mapping[str, Any]) -> None: ...

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...

    def sample(self, problem: str, response: tuple[str, str], verdict: Outcome) -> None: ...

    def summary(self, summary: Mapping[str, Any], report_path: str | Path | None) -> None: ...

    def close(self) -> None: ...


class QuietScreen:
    """Shows nothing; the run's folder has everything that a screen would show."""

    def close(self, *_: Any, **__: Any) -> None:
        """Do nothing, like every method here."""

    start = phase = status = update = warn = sample = summary = close
