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
    rows: of each row, by its name, its `cells` by column, or why transformers cannot build it
        (`unbuilt`), or how its process ended (`crashed`).
    """

    def __init__(self, versions: Mapping[str, str], rows: dict[str, dict[str, Any]]) -> None:
        self.versions, self.rows = versions, rows

    @classmethod
    def load(cls) -> Report:
        """What is known of the installed transformers."""
        installed = {"transformers": transformers.__version__, "torch": torch.__version__}
        report = cls.committed() if FILE.is_file() else cls(installed, {})
        known = report.versions["transformers"] == installed["transformers"]
        return cls(installed, report.rows if known else {})

    @classmethod
    def committed(cls) -> Report:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        return cls({k: content[k] for k in ("transformers", "torch")}, content["rows"])

    def missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.rows]

    def save(self, names: Sequence[str]) -> None:
        """Write rows in the order of `names`, one a line."""
        lines = [f"  {json.dumps(n)}: {json.dumps(self.rows[n])}" for n in names if n in self.rows]
        head = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in self.versions.items())
        FILE.write_text(
            "{\n" + head + ' "rows": {\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8"
        )


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
