"""The rows measured so far, and with which transformers: benchmarks/architectures.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

FILE = Path(__file__).parent.with_suffix(".json")
SAME = 5e-4  # nats; rounding is below it, and faults seen are above 0.1
COLUMNS = ("decode", "packed", "LoRA", "export", "text half", "replay")


class Report:
    """Attributes:
    rows: of each row, by its name, its `cells` by column, or why transformers makes no small config
        of it (`unbuilt`), or how its process ended (`crashed`).
    newer: the same of architectures that only a newer transformers has, which each row names.
    """

    def __init__(
        self,
        versions: Mapping[str, str],
        rows: dict[str, dict[str, Any]],
        newer: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.versions, self.rows, self.newer = versions, rows, newer or {}

    @classmethod
    def load(cls) -> Report:
        """What is known of the installed transformers."""
        installed = {"transformers": transformers.__version__, "torch": torch.__version__}
        report = cls.committed() if FILE.is_file() else cls(installed, {})
        known = report.versions["transformers"] == installed["transformers"]
        return cls(installed, report.rows if known else {}, report.newer)

    @classmethod
    def committed(cls) -> Report:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        versions = {k: content[k] for k in ("transformers", "torch")}
        return cls(versions, content["rows"], content["newer"])

    def missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.rows]

    def save(self, names: Sequence[str]) -> None:
        """Write rows in the order of `names`, one a line."""
        head = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in self.versions.items())
        rows = _lines({name: self.rows[name] for name in names if name in self.rows})
        text = f'{{\n{head} "rows": {rows},\n "newer": {_lines(self.newer)}\n}}\n'
        FILE.write_text(text, encoding="utf-8")


def _lines(rows: Mapping[str, Any]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n }"


def outcome(cell: float | str) -> str:
    """`yes` for a figure that is rounding, `no` for a larger one, else the first word of what was
    said."""
    if isinstance(cell, str):
        return cell.partition(":")[0]
    return "yes" if cell <= SAME else "no"


def outcomes(row: Mapping[str, Any]) -> dict[str, str]:
    """What stands in a row, without its figures and words."""
    cells = {column: outcome(cell) for column, cell in row.get("cells", {}).items()}
    return cells or {key: key for key in row}
