"""Accuracy, false positives and latency of the math verifier and of math-verify; the pool's rate.

    python benchmarks/verifiers.py [CASES.jsonl]

CASES are rows of `gold_answer`, `pred_answer`, `expected` and `core` (default: the shared cases).
Prints a table and writes verifiers.json next to this file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import math
from tramontane.verifier.pool import VerifierPool

HERE = Path(__file__).parent


def math_verify_alone(gold: str, prediction: str) -> bool:
    sides = [parse(rf"\boxed{{{side}}}", parsing_timeout=None) for side in (gold, prediction)]
    return bool(verify(*sides, timeout_seconds=None))


def tramontane_verifier(gold: str, prediction: str) -> bool:
    return math.judge_answer(prediction, gold).outcome == "right"


def measure(judge: Callable[[str, str], bool], rows: list[dict[str, Any]]) -> dict[str, Any]:
    judge("x+1", "1+x")  # warm-up: imports and tables
    false_positives: list[str] = []
    false_negatives: list[str] = []
    milliseconds: list[float] = []
    wall = time.perf_counter()
    for row in rows:
        started = time.process_time()  # excludes other processes on the machine
        right = judge(row["gold_answer"], row["pred_answer"])
        milliseconds.append(1000 * (time.process_time() - started))
        if right != bool(row["expected"]):
            (false_positives if right else false_negatives).append(row["id"])
    wall = time.perf_counter() - wall
    milliseconds.sort()
    return {
        "accuracy": round(1 - (len(false_positives) + len(false_negatives)) / len(rows), 4),
        "false_positives": false_positives,
        "false_negatives": false_negatives,
        "p50_ms": round(milliseconds[len(rows) // 2], 2),
        "p99_ms": round(milliseconds[int(0.99 * len(rows))], 1),
        "max_ms": round(milliseconds[-1], 1),
        "cpu_s": round(sum(milliseconds) / 1000, 2),
        "wall_s": round(wall, 2),
        "verdicts_per_second": round(1000 * len(rows) / sum(milliseconds)),
    }


def measure_pool(rows: list[dict[str, Any]], repetitions: int = 5) -> dict[str, Any]:
    """Rate and latency of a pool of two workers on the core cases, each answer four times."""
    text = "<think>I look at what is asked and work it out.</think>\nThe answer is \\boxed{{{}}}."
    problems = [
        (
            Problem(row["id"], "math", "What is it?", row["gold_answer"], language="en"),
            [(text.format(row["pred_answer"]), 60)] * 4,
        )
        for row in rows
    ]
    rates, seconds, loads = [], [], [os.getloadavg()[0]]
    with VerifierPool(VerifierConfig(workers=2), l_max=256, l_cache=32) as pool:
        for problem, group in problems[:8]:
            pool.score(problem, group).result()
        for _ in range(repetitions):
            started = time.perf_counter()
            verdicts = [f.result() for f in [pool.score(p, g) for p, g in problems]]
            rates.append(sum(map(len, verdicts)) / (time.perf_counter() - started))
            seconds += [verdict.seconds for group in verdicts for verdict in group]
            loads.append(os.getloadavg()[0])
    seconds.sort()
    return {
        "workers": 2,
        "cores": os.cpu_count(),
        "load_average": [round(min(loads), 1), round(max(loads), 1)],
        "verdicts_per_second": [
            round(min(rates)),
            round(sorted(rates)[len(rates) // 2]),
            round(max(rates)),
        ],
        "p50_ms": round(1000 * seconds[len(seconds) // 2], 2),
        "p99_ms": round(1000 * seconds[int(0.99 * len(seconds))], 1),
        "max_ms": round(1000 * seconds[-1], 1),
    }


def main() -> None:
    logging.disable(logging.WARNING)
    default = HERE.parents[1] / "shared/data/math_verify_cases.jsonl"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    core = [row for row in rows if row["core"]]
    results = {
        "math-verify": measure(math_verify_alone, core),
        "tramontane": measure(tramontane_verifier, core),
    }
    print(f"{len(core)} core cases of {path.name}")
    print(f"{'':12} accuracy  false +  false −   p50 ms   p99 ms   max ms    cpu s   wall s")
    for name, r in results.items():
        print(
            f"{name:12} {r['accuracy']:8.3f} {len(r['false_positives']):8} "
            f"{len(r['false_negatives']):8} {r['p50_ms']:8} {r['p99_ms']:8} "
            f"{r['max_ms']:8} {r['cpu_s']:8} {r['wall_s']:8}"
        )
    pool = measure_pool(core)
    low, middle, high = pool["verdicts_per_second"]
    least, most = pool["load_average"]
    print(
        f"pool, two workers: {middle} verdicts/s ({low} to {high}), p50 {pool['p50_ms']} ms, "
        f"p99 {pool['p99_ms']} ms, max {pool['max_ms']} ms; "
        f"load average {least} to {most} on {pool['cores']} cores, this benchmark included"
    )
    report = {"cases": path.name, "core_cases": len(core), **results, "pool": pool}
    (HERE / "verifiers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
