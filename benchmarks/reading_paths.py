"""How many lines one reads before a change, by the table in docs/architecture.md.

    python -m benchmarks.reading_paths

Prints a row for each of its rows: the change, the lines of the files that it names, the most that
the page allows, and each file with its lines. Exits with 1 if a row has more than it allows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HEADING = "## What to read before a change"
ROW = re.compile(r"^\|([^|]+)\|([^|]*\.py[^|]*)\| ([\d,]+) \|$", re.M)


class ReadingPath(NamedTuple):
    """What one reads before a change: lines by file, and their most in all."""

    change: str
    lines: dict[str, int]
    most: int

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def reading_paths() -> list[ReadingPath]:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split(HEADING)[1].split("\n## ")[0]
    return [
        ReadingPath(change.strip(), _lines(files), int(most.replace(",", "")))
        for change, files, most in ROW.findall(section)
    ]


def _lines(files: str) -> dict[str, int]:
    names = [name for name in re.findall(r"`([^`]+)`", files) if name.endswith(".py")]
    return {name: _count(ROOT / "src/tramontane" / name) for name in names}


def _count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def main() -> None:
    paths = reading_paths()
    for path in paths:
        files = ", ".join(f"{name} {lines}" for name, lines in path.lines.items())
        sign = "<=" if path.total <= path.most else "> "
        print(f"{path.change:<40} {path.total:>5,} {sign} {path.most:>5,}   {files}")
    broken = [path.change for path in paths if path.total > path.most]
    print(f"too long: {', '.join(broken)}" if broken else f"all {len(paths)} rows hold")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
