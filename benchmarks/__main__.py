"""Run the benchmarks one after another, and print at the end which promises were kept.

    python -m benchmarks [NAME ...]

Each benchmark is a script with options of its own; here all run with their defaults. The exit code
is 1 if a script fails or a promise is broken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The quick ones first, so that a broken promise is known soon.
NAMES = (
    "weight_update",
    "collation",
    "overlap",
    "scaling",
    "vs_trl",
    "vs_trl_images",
    "generation",
)


def run(name: str) -> list[tuple[str, str, bool]]:
    """Run one script; returns its promises as (promise, figure, True if kept)."""
    print(f"\n--- benchmarks/{name}.py", flush=True)
    report = HERE / f"{name}.json"
    report.unlink(missing_ok=True)
    # Some import `benchmarks`, others their neighbors.
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / f"{name}.py")]
    code = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode
    if not report.is_file():
        return [("ran to its end", f"exit code {code}", False)]
    promises = json.loads(report.read_text(encoding="utf-8"))["promises"]
    return [(p["promise"], p["found"], p["kept"]) for p in promises]


def main() -> None:
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"no benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}")
    found = {name: run(name) for name in names}
    print("\n--- promises")
    for name, promises in found.items():
        for promise, figure, kept in promises:
            print(f"{'kept  ' if kept else 'BROKEN'}  {name}: {promise}: {figure}")
    sys.exit(not all(kept for promises in found.values() for *_, kept in promises))


if __name__ == "__main__":
    main()
