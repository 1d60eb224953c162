"""What a curation finds of planted faults: precision and recall, fault by fault.

    python benchmarks/curation_truth.py [ROWS [CONFIG]]

Plants faults in a playground set (`data/playground/faults.py`) and curates it by the stages of
CONFIG, or without one by deduplicate, filter and code. `wrong_label`, `impossible` and `trivial`
take stages that ask a model. Prints a table and writes curation_truth.json beside this file.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import finish, machine

from tramontane.config import load_section
from tramontane.data.curate.config import CurateConfig
from tramontane.data.curate.pipeline import curate
from tramontane.data.playground.faults import RAW, TRUTH, Truth, compare, read_truth, write

SEED = 0
STAGES = ("deduplicate", "filter", "code")


def processor_seconds() -> float:
    """Of this process and those that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def labels(
    raw: list[dict[str, Any]], kept: list[dict[str, Any]], truth: dict[str, Truth]
) -> dict[str, int]:
    """Of programs with broken tests: the labels, and how many are right, before and after."""
    right = {
        (row["id"], case["input"]): output
        for row in raw
        if truth[row["id"]].fault == "broken_tests"
        for case, output in zip(row["tests"]["cases"], truth[row["id"]].right, strict=True)
    }
    counts = {}
    for when, rows in (("before", raw), ("after", kept)):
        correct = [
            case["output"].split() == right[row["id"], case["input"]].split()
            for row in rows
            for case in row.get("tests", {}).get("cases", [])
            if (row["id"], case["input"]) in right
        ]
        counts |= {f"labels {when}": len(correct), f"right {when}": sum(correct)}
    return counts


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    config = load_section(CurateConfig, sys.argv[2]) if len(sys.argv) > 2 else CurateConfig()
    stages = config.stages if len(sys.argv) > 2 else STAGES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, count, SEED)
        started, cpu = time.monotonic(), processor_seconds()
        update = {"inputs": (str(folder / RAW),), "out": str(folder / "out"), "stages": stages}
        curate(config.model_copy(update=update))
        seconds, cpu = time.monotonic() - started, processor_seconds() - cpu
        truth = read_truth(folder / TRUTH)
        scores = compare(truth, lines(folder / "out/decisions.jsonl"))
        mended = labels(lines(folder / RAW), lines(folder / "out/kept.jsonl"), truth)
    print(f"{count:,} rows through {', '.join(stages)}: {seconds:.0f} s, {cpu:.0f} s of processors")
    print(f"{'fault':14} planted  flagged  found  recall  precision   kept")
    for fault, s in scores.items():
        recall, precision = ("-" if x is None else f"{x:.3f}" for x in (s.recall, s.precision))
        print(
            f"{fault or '(sound: kept)':14}{s.planted:7,}{s.flagged:9,}{s.found:7,}"
            f"{recall:>8}{precision:>11}{s.left:7,}"
        )
    print("broken tests:", ", ".join(f"{value:,} {what}" for what, value in mended.items()))
    report = {
        "rows": count,
        "seed": SEED,
        "stages": list(stages),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "scores": {
            fault or "sound": s._asdict() | {"recall": s.recall, "precision": s.precision}
            for fault, s in scores.items()
        },
        "broken_tests": mended,
        "machine": machine(),
    }
    finish(__file__, report)


if __name__ == "__main__":
    main()
