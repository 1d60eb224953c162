"""Runs the benchmarks one after another, and says at the end which promises were kept.

    python -m benchmarks [NAME ...]

Each is a script of its own, with options of its own; here all run with their defaults. Exits with
1 where a script fails or a promise is broken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The quick ones first: a broken promise is then soon known.
NAMES = ("weight_update", "collation", "overlap", "scaling", "vs_trl", "generation")


def run(name: str) -> list[tuple[str, str, bool]]:
    """One script's promises: what, the figure, and whether it was kept."""
    print(f"\n--- benchmarks/{name}.py", flush=True)
    report = HERE / f"{name}.json"
    report.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode
    if not report.is_file():
        return [("ran to its end", f"exit code {code}", False)]
    promises = json.loads(report.read_text(encoding="utf-8"))["promises"]
    return [(p["promise"], p["found"], p["kept"]) for p in promises]


def main() -> None:
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    found = {name: run(name) for name in names}
    print("\n--- promises")
    for name, promises in found.items():
        for promise, figure, kept in promises:
            print(f"{'kept  ' if kept else 'BROKEN'}  {name}: {promise}: {figure}")
    sys.exit(not all(kept for promises in found.values() for *_, kept in promises))


if __name__ == "__main__":
    main()
