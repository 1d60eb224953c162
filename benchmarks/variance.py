"""What pass@1 at the end of a study's run varies with: seeds, updates, problems and samples.

    python -m benchmarks.variance [--seeds 4] [--runs FOLDER]

Trains the base of the studies with several seeds, measures each run at its last updates on the same
problems, and splits the variance of such a figure. This shows what a smaller interval costs: more
seeds, the mean over several updates, more problems, or more samples of each. Runs already in FOLDER
are not repeated.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np

from benchmarks.measure import finish, machine
from tramontane.journals import read_log

LATE = 4.5  # updates; the last quarter of 18


def outcomes(folder: Path, seed: int) -> np.ndarray:
    """One run's successes on held-out problems, as (late updates, problems, samples) of 0 and 1."""
    run = folder / f"seed_{seed}"
    base = resources.files("tramontane.studies").joinpath("base.yaml")
    if not (run / "summary.json").is_file():
        keys = [f"run_dir={run}", f"seed={seed}", "evaluation.every=2", "evaluation.before=false"]
        subprocess.run([sys.executable, "-m", "tramontane", "train", str(base), *keys], check=True)
    updates = len([*read_log(run / "metrics.jsonl")])
    late = [f"update_{n}" for n in range(2, updates, 2) if n > updates - LATE] + ["after"]
    return np.array([_grid(run / f"evaluation_{when}.jsonl") for when in late])


def _grid(file: Path) -> list[list[float]]:
    problems: dict[int, list[float]] = {}
    for row in read_log(file):
        problems.setdefault(row["group"], []).append(float(row["parts"]["correctness"] > 0))
    return [problems[number] for number in sorted(problems)]


def components(found: np.ndarray) -> dict[str, float]:
    """The variance of one run's pass@1 at one update, in parts that add up to it.

    Args:
        found: of 0 and 1, by seed, update, problem and sample, all of the same problems.

    Returns:
        `samples`: of the completions drawn; `problems`: of a run's ability from problem to problem,
        since other problems give another mean (what all runs find easy cancels between arms);
        `updates`: of a run's ability from one late update to another; `seeds`: between runs.
    """
    seeds, updates, problems, samples = found.shape
    shares = found.mean(3)
    drawn = found.var(3, ddof=1).mean() / (problems * samples)
    relative = shares[:, -1] - shares[:, -1].mean(0)  # by seed and problem
    problem = relative.var(1, ddof=1).mean() * seeds / (seeds - 1) / problems - drawn
    figures = shares.mean(2)
    update = figures.var(1, ddof=1).mean() - drawn
    seed = figures.mean(1).var(ddof=1) - problem - (update + drawn) / updates
    parts = {"seeds": seed, "updates": update, "problems": problem, "samples": drawn}
    return {name: max(0.0, float(part)) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=Path("runs/variance"))
    options = parser.parse_args()
    found = np.array([outcomes(options.runs, seed) for seed in range(options.seeds)])
    parts, updates = components(found), found.shape[1]
    print(f"pass@1 {found.mean():.3f}; (seeds, updates, problems, samples) {found.shape}")
    for name, part in parts.items():
        print(f"{name:9} {math.sqrt(part):.4f} (standard deviation of a run's figure)")
    # By how much each part is divided.
    kinds: dict[str, dict[str, float]] = {
        "as it is": {},
        f"mean of {updates} late updates": {"updates": updates, "samples": updates},
        "four times the problems": {"problems": 4, "samples": 4},
        "both": {"updates": updates, "problems": 4, "samples": 4 * updates},
        "four times the samples": {"samples": 4},
    }
    errors = {
        kind: math.sqrt(sum(part / by.get(name, 1) for name, part in parts.items()))
        for kind, by in kinds.items()
    }
    for kind, error in errors.items():
        print(f"{kind:24} {error:.4f} ({error / errors['as it is']:.2f} of it)")
    finish(__file__, {"machine": machine(), "components": parts, "errors": errors})


if __name__ == "__main__":
    main()
