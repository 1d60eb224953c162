"""Cost of a sandboxed program with 20 quick tests, on every rung that works here.

    python benchmarks/sandbox.py [REPEATS]

Prints the median and range of milliseconds, of processor time (all processes) and of the clock, for
Python, for C++, and for C++ without its compilation; a program is one of a group of 8, and the
start of the process that forks their sandboxes is divided among them. Writes sandbox.json next to
this file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from descendants import processor_seconds

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import draw_tests, stdio_job

CASES = [{"input": f"{n} 1\n", "output": f"{n + 1}\n"} for n in range(20)]
SUM = Problem("sum", "code", "Add.", tests={"type": "stdio", "cases": CASES})
GROUP = 8
PYTHON = "print(sum(map(int, input().split())))"
CPP = "#include <bits/stdc++.h>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


def measure(program: str, language: str, rung: sandbox.Rung, tests: int) -> tuple[float, float]:
    """Run a group of programs; returns milliseconds of the processor and of the clock for each."""
    config = VerifierConfig(allow_unsandboxed=True)
    inputs = [case["input"] for _, case in draw_tests(SUM, 20)[:tests]]

    def judge_group() -> None:
        for _ in range(GROUP):
            job = stdio_job(program, language, inputs, config)
            with sandbox.Sandbox(job, rung) as running:
                if language == "cpp":
                    assert not next(running.results).failure
                outputs = [result.output.split() for result in running.results]
                assert outputs == [[str(n + 1).encode()] for n in range(tests)]

    started = time.perf_counter()
    used = processor_seconds(judge_group)
    return 1000 * used / GROUP, 1000 * (time.perf_counter() - started) / GROUP


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    results = {}
    print("milliseconds, median (minimum to maximum), 20 tests")
    for rung in sandbox.RUNGS:
        if rung != "rlimits" and (why := sandbox.why_not(rung)):
            print(f"{rung}: does not work here: {why}")
            continue
        measure(CPP, "cpp", rung, 0)  # warm-up: compiles the header
        runs = {
            "Python": [measure(PYTHON, "python", rung, 20) for _ in range(repeats)],
            "C++": [measure(CPP, "cpp", rung, 20) for _ in range(repeats)],
        }
        compiling = [measure(CPP, "cpp", rung, 0) for _ in range(repeats)]
        base = [statistics.median(column) for column in zip(*compiling, strict=True)]
        runs["C++, compiled"] = [(p - base[0], c - base[1]) for p, c in runs["C++"]]
        for name, pairs in runs.items():
            row = {}
            for column, values in zip(
                ("processor", "clock"), zip(*pairs, strict=True), strict=True
            ):
                spread = (statistics.median(values), min(values), max(values))
                row[column] = [round(x, 1) for x in spread]
            results[f"{rung}, {name}"] = row
            cells = (f"{c} {m:4.0f} ({a:.0f} to {b:.0f})" for c, (m, a, b) in row.items())
            print(f"{rung:10}  {name:13} ", "   ".join(cells))
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
