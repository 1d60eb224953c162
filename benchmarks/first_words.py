"""What a run has taken when it says its first word, and its facts.

    python -m benchmarks.first_words [--config configs/quickstart.yaml] [--rounds 3]

Starts `tramontane train` and notes, for some of its lines, the processor time of its processes so
far and the seconds since the command; then ends it. Processes that have ended count where their
parent waited for them. The header must come within 4 seconds of processor time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.descendants import used_so_far
from benchmarks.measure import Promise, finish, machine, spread

AIM = 4.0
LINES = {"first word": r"\S", "header": r"^\s*batch: "}


def one(config: str, folder: Path) -> dict[str, tuple[float, float]]:
    """(processor seconds, seconds) at each of LINES."""
    command = [sys.executable, "-m", "tramontane", "train", config, f"run_dir={folder}"]
    found: dict[str, tuple[float, float]] = {}
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for name, pattern in LINES.items():
                if name not in found and re.search(pattern, line):
                    found[name] = used_so_far(process.pid), time.perf_counter() - began
            if len(found) == len(LINES):
                break
        process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [one(args.config, Path(folder) / str(n)) for n in range(args.rounds)]
    rows = {}
    for name in LINES:
        seen = [found[name] for found in rounds if name in found]
        if not seen:
            raise SystemExit(f"no run printed its {name} ({LINES[name]})")
        processor, seconds = zip(*seen, strict=True)
        rows[name] = {"processor": spread(processor, 2), "seconds": spread(seconds, 2)}
        print(
            f"{name}: {median(processor):.2f} s of processor time ({min(processor):.2f}–"
            f"{max(processor):.2f}), {median(seconds):.2f} s on the clock"
        )
    most = rows["header"]["processor"]["highest"]
    promise = Promise(f"header within {AIM:g} s of processor time", f"{most} s", most <= AIM)
    finish(__file__, {"lines": rows} | machine(), [promise])


if __name__ == "__main__":
    main()
