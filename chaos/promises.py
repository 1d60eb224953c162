"""What was promised, what was found, and where both are written."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Promise(NamedTuple):
    """What the project is held to: `found` is the figure, `kept` the verdict."""

    promise: str
    found: str
    kept: bool


def machine() -> dict[str, Any]:
    """Where it ran."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line for line in info.splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count()}


def finish(path: Path, report: dict[str, Any], promises: Sequence[Promise]) -> None:
    """Write the report, print what became of the promises, and exit: with 1 where one is broken."""
    report = report | {"promises": [p._asdict() for p in promises]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for promise, found, kept in promises:
        print(f"{'kept  ' if kept else 'BROKEN'}  {promise}: {found}")
    sys.exit(not all(p.kept for p in promises))
