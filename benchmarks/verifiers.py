"""This verifier against math-verify alone: accuracy, false positives, latency; then the pool.

    python benchmarks/verifiers.py [CASES.jsonl]

CASES are rows of `gold_answer`, `pred_answer`, `expected` and `core` (default: the shared cases).
Prints a table and writes verifiers.json beside this file.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import VerifierPool, math

HERE = Path(__file__).parent


def math_verify_alone(gold: str, prediction: str) -> bool:
    sides = [parse(rf"\boxed{{{side}}}", parsing_timeout=None) for side in (gold, prediction)]
    return bool(verify(*sides, timeout_seconds=None))


def ours(gold: str, prediction: str) -> bool:
    return math.judge_answer(prediction, gold).outcome == "right"


def measure(judge: Callable[[str, str], bool], rows: list[dict[str, Any]]) -> dict[str, Any]:
    judge("x+1", "1+x")  # imports and tables
    false_positives: list[str] = []
    false_negatives: list[str] = []
    milliseconds: list[float] = []
    for row in rows:
        started = time.process_time()  # of this process: others on the machine do not count
        right = judge(row["gold_answer"], row["pred_answer"])
        milliseconds.append(1000 * (time.process_time() - started))
        if right != bool(row["expected"]):
            (false_positives if right else false_negatives).append(row["id"])
    milliseconds.sort()
    return {
        "accuracy": round(1 - (len(false_positives) + len(false_negatives)) / len(rows), 4),
        "false_positives": false_positives,
        "false_negatives": false_negatives,
        "p50_ms": round(milliseconds[len(rows) // 2], 2),
        "p99_ms": round(milliseconds[int(0.99 * len(rows))], 1),
        "verdicts_per_second": round(1000 * len(rows) / sum(milliseconds)),
    }


def measure_pool(groups: int = 200, size: int = 16) -> dict[str, Any]:
    """Easy verdicts, as in the playground, on one worker."""
    problem = Problem("p", "math", "What is $3 + 4 \\cdot 2$?", "11", language="en")
    thoughts = "First I multiply 4 * 2 = 8. Then I add 3 + 8 = 11. So the result is {}."
    text = f"<think>{thoughts}</think>\nThe answer is \\boxed{{{{{{}}}}}}."
    group = [(text.format(n, n), 60) for n in range(size)]
    with VerifierPool(VerifierConfig(), l_max=256, l_cache=32) as pool:
        pool.score(problem, group).result()
        milliseconds = []
        for _ in range(groups):
            started = time.perf_counter()
            pool.score(problem, group).result()
            milliseconds.append(1000 * (time.perf_counter() - started))
        started = time.perf_counter()
        for future in [pool.score(problem, group) for _ in range(groups)]:
            future.result()
        seconds = time.perf_counter() - started
    return {
        "group_p50_ms": round(sorted(milliseconds)[groups // 2], 2),
        "group_p99_ms": round(sorted(milliseconds)[int(0.99 * groups)], 2),
        "verdicts_per_second": round(groups * size / seconds),
    }


def main() -> None:
    logging.disable(logging.WARNING)
    default = HERE.parents[1] / "shared/data/math_verify_cases.jsonl"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    core = [row for row in rows if row["core"]]
    results = {"math-verify": measure(math_verify_alone, core), "tramontane": measure(ours, core)}
    print(f"{len(core)} core cases of {path.name}")
    print(f"{'':12} accuracy  false +  false −   p50 ms   p99 ms  verdicts/s")
    for name, r in results.items():
        print(
            f"{name:12} {r['accuracy']:8.3f} {len(r['false_positives']):8} "
            f"{len(r['false_negatives']):8} {r['p50_ms']:8} {r['p99_ms']:8} "
            f"{r['verdicts_per_second']:11}"
        )
    pool = measure_pool()
    print(
        f"pool, one worker, groups of 16: p50 {pool['group_p50_ms']} ms, "
        f"p99 {pool['group_p99_ms']} ms, {pool['verdicts_per_second']} verdicts/s"
    )
    report = {"cases": path.name, "core_cases": len(core), **results, "pool": pool}
    (HERE / "verifiers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
