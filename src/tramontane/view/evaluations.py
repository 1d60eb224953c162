"""The completions of a run's evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tramontane.errors import reading
from tramontane.workplace import read_log

Row = dict[str, Any]


class Evaluations:
    """The rows of a run's `evaluation_*.jsonl`, read when a comparison first needs them."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._kept: dict[Path, tuple[int, list[Row]]] = {}

    def by_name(self) -> dict[str, list[Row]]:
        """Rows by the name of the measurement, such as `before` or `update_20`, oldest first."""
        found = {}
        for file in sorted(self.run.glob("evaluation_*.jsonl"), key=_order):
            with reading(file):
                modified = file.stat().st_mtime_ns
                if self._kept.get(file, (0, []))[0] != modified:
                    rows = [row | {"problem_id": str(row["problem_id"])} for row in read_log(file)]
                    self._kept[file] = (modified, rows)
            found[file.stem.removeprefix("evaluation_")] = self._kept[file][1]
        return found


def _order(file: Path) -> tuple[float, str]:
    """Place of a measurement in its run."""
    name = file.stem.removeprefix("evaluation_")
    number = name.removeprefix("update_").partition("_")[0]
    ends = {"base": -2.0, "before": -1.0, "after": math.inf}
    place = float(number) if number.isdigit() else ends.get(name.partition("_")[0], -1.0)
    return place, name
