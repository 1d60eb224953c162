"""A study's function: a random walk, which stops midway if told to."""

import json
import os
from pathlib import Path

import numpy as np


def run_arm(keys: dict, seed: int, folder: Path) -> dict[str, float]:
    """A walk of `steps` steps with a drift, continued where an earlier call was killed."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.open()] if file.is_file() else []
    for step in range(len(rows) + 1, keys["steps"] + 1):
        if step == 4 and (stop := folder.parents[1] / "stop").exists():
            stop.unlink()
            os.kill(os.getpid(), 9)
        noise = np.random.default_rng([seed, step]).normal(scale=0.1)
        before = rows[-1]["place"] if rows else 0.0
        rows.append({"step": step, "place": before + keys["drift"] + noise, "process": os.getpid()})
        with file.open("a") as log:
            log.write(json.dumps(rows[-1]) + "\n")
    return {"end": rows[-1]["place"], "undefined": float("nan")}
