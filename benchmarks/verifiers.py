"""Accuracy and speed of the math verifier beside math-verify and, with --against, another checkout.

    python benchmarks/verifiers.py [--against CHECKOUT] [--rounds 3] [--only programs]

First the core cases of math_verify_cases.jsonl: accuracy and latency. Then verdicts per second of
processor time on the pairs of verdict_pairs.py, programs in groups, and how long a worker of a
pool takes to start: each grader in a process of its own, in turn, --rounds times. Ratios are of
the runs of one round. Writes verifiers.json next to this file; with --only programs, which takes
these alone, programs.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import verdict_pairs
from descendants import processor_seconds

HERE = Path(__file__).parent
CASES = verdict_pairs.DATA / "math_verify_cases.jsonl"
GRADERS = ("math-verify", "tramontane")
RUN_SECONDS = 600.0  # limit of one grader's run
Judge = Callable[[str, str], bool]  # of (reference, answer)


# ---------------------------------------------------------------------------------- one grader


def math_verify_alone() -> Judge:
    from math_verify import parse, verify

    def judge(gold: str, prediction: str) -> bool:
        sides = [parse(rf"\boxed{{{side}}}", parsing_timeout=None) for side in (gold, prediction)]
        return bool(verify(*sides, timeout_seconds=None))

    return judge


def tramontane_verifier() -> Judge:
    from tramontane.verifier import math

    return lambda gold, prediction: math.judge_answer(prediction, gold).outcome == "right"


def timed(judge: Judge, pairs: Iterable[verdict_pairs.Pair]) -> list[float]:
    """Milliseconds of processor time of each verdict."""
    spent = []
    for gold, prediction in pairs:
        started = time.process_time()  # excludes other processes on the machine
        judge(gold, prediction)
        spent.append(1000 * (time.process_time() - started))
    return spent


def in_groups() -> list[verdict_pairs.Pair]:
    return [(gold, answer) for gold, answers in verdict_pairs.groups() for answer in answers]


SETS = {"mixed": verdict_pairs.mixed, "rows": verdict_pairs.rows, "groups of 16": in_groups}


def rates(grader: str) -> dict[str, Any]:
    """What a run of one grader measures: by set, verdicts per second and the 99th percentile in
    milliseconds, and for a pool also programs and a worker's start."""
    logging.disable(logging.WARNING)
    judge = math_verify_alone() if grader == "math-verify" else tramontane_verifier()
    judge("x+1", "1+x")  # imports and tables
    found: dict[str, Any] = {}
    for name, pairs in SETS.items():
        spent = sorted(timed(judge, pairs()))
        found[name] = 1000 * len(spent) / sum(spent)
        found[f"{name}, p99"] = spent[int(0.99 * len(spent))]
    if grader != "math-verify":
        found |= {**programs(), "start": start()}
    return found


def start() -> float:
    """Processor seconds of a worker of a pool until its first verdict, the mean of four that a
    second pool starts."""
    from tramontane.config import VerifierConfig
    from tramontane.types import Problem
    from tramontane.verifier.pool import VerifierPool

    problem = Problem("sum", "math", "What is it?", "x+1", language="en")
    for workers in (1, 4):
        with VerifierPool(VerifierConfig(workers=workers), l_max=256, l_cache=32) as pool:
            group = [("<think>I add.</think>\n\\boxed{1+x}", 9)]
            for future in [pool.score(problem, group) for _ in range(8 * workers)]:
                future.result()
            pids = [w.child.process.pid for w in pool._workers if w.child.process]
            spent = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids]
    return sum(spent) / len(spent) / 1e9


def programs() -> dict[str, float]:
    """Verdicts per second of processor time on groups of 16 programs, by kind of tests."""
    from tramontane.config import VerifierConfig
    from tramontane.types import Problem
    from tramontane.verifier.code import grade

    config = VerifierConfig()
    found: dict[str, float] = {}
    for kind, file in (("function", "mbpp_python.jsonl.gz"), ("stdio", "mbpp_stdio.jsonl.gz")):
        tasks: Any = verdict_pairs._read(file)[:2]

        def judge(tasks: Any = tasks) -> None:
            for row in tasks:
                problem = Problem(row["id"], "code", row["problem"], tests=row["tests"])
                for number in range(verdict_pairs.GROUP):
                    program = f"```python\n{row['solution']}\n# {number}\n```"
                    assert grade.judge(program, problem, config).outcome == "right"

        seconds = processor_seconds(judge)
        found[f"programs, {kind} tests"] = len(tasks) * verdict_pairs.GROUP / seconds
    return found


# ---------------------------------------------------------------------------------- side by side


def run(grader: str, checkout: Path, only: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", grader, *(["--only", only] if only else [])]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=RUN_SECONDS
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spread(values: Iterable[float], digits: int = 0) -> str:
    ordered = sorted(values)
    return f"{median(ordered):,.{digits}f} ({ordered[0]:,.{digits}f} to {ordered[-1]:,.{digits}f})"


def side_by_side(arguments: argparse.Namespace) -> dict[str, Any]:
    against, n_rounds, only = arguments.against, arguments.rounds, arguments.only
    checkouts = {"tramontane": HERE.parent} if only else dict.fromkeys(GRADERS, HERE.parent)
    if against:
        checkouts["before"] = against
    rounds = [
        {name: run(name, at, only) for name, at in checkouts.items()} for _ in range(n_rounds)
    ]
    print(f"\nmedian (least to most) of {n_rounds} rounds; verdicts per second of processor time")
    for key in rounds[0]["tramontane"]:
        digits = 3 if key == "start" else 1 if "p99" in key else 0
        print(f"{key}")
        for name in checkouts:
            if key in rounds[0][name]:
                print(f"  {name:12} {spread((r[name][key] for r in rounds), digits)}")
        for other in checkouts.keys() - {"tramontane"}:
            if key in rounds[0][other] and "p99" not in key:
                ratio = spread((r["tramontane"][key] / r[other][key] for r in rounds), 2)
                print(f"  of {other:9} {ratio}")
    return {"rounds": rounds}


def accuracy(judge: Judge, rows: list[dict[str, Any]]) -> dict[str, Any]:
    judge("x+1", "1+x")
    given: list[tuple[str, bool, bool]] = []
    spent = []
    for row in rows:
        started = time.process_time()
        right = judge(row["gold_answer"], row["pred_answer"])
        spent.append(1000 * (time.process_time() - started))
        given.append((row["id"], right, bool(row["expected"])))
    spent.sort()
    return {
        "accuracy": round(sum(right == wanted for _, right, wanted in given) / len(rows), 4),
        "false_positives": [name for name, right, wanted in given if right > wanted],
        "false_negatives": [name for name, right, wanted in given if right < wanted],
        "p50_ms": round(spent[len(rows) // 2], 2),
        "p99_ms": round(spent[int(0.99 * len(rows))], 1),
        "max_ms": round(spent[-1], 1),
        "cpu_s": round(sum(spent) / 1000, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["programs"])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured = programs() if arguments.only else rates(arguments.measure)
        print(json.dumps(measured))
        return
    if arguments.only:
        write("programs.json", side_by_side(arguments))
        return
    logging.disable(logging.WARNING)
    rows = [json.loads(line) for line in CASES.read_bytes().splitlines()]
    core = [row for row in rows if row["core"]]
    judges = {"math-verify": math_verify_alone(), "tramontane": tramontane_verifier()}
    results = {name: accuracy(judge, core) for name, judge in judges.items()}
    print(f"{len(core)} core cases of {CASES.name}")
    print(f"{'':12} accuracy  false +  false −   p50 ms   p99 ms   max ms    cpu s")
    for name, r in results.items():
        print(
            f"{name:12} {r['accuracy']:8.3f} {len(r['false_positives']):8} "
            f"{len(r['false_negatives']):8} {r['p50_ms']:8} {r['p99_ms']:8} "
            f"{r['max_ms']:8} {r['cpu_s']:8}"
        )
    report = {
        "core_cases": len(core),
        **results,
        **side_by_side(arguments),
    }
    write("verifiers.json", report)


def write(name: str, report: dict[str, Any]) -> None:
    (HERE / name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
