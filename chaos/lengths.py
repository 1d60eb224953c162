"""Tests that an interruption does not change the length of a completion.

Two runs have the same problems, the same seed and constant weights (a learning rate close to zero);
in one of them generators are killed. No group is filtered, so both train on the same completions,
which are compared one by one. Their lengths are equal up to rounding, since random numbers
belong to requests. With vLLM, an interrupted completion continues with different random numbers,
and lengths are equal on average. If long completions were lost, cut or restarted more often than
short ones, lengths would differ in one direction.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Promise
from chaos.kill import Killer
from chaos.runs import Run, lines, quickstart
from tramontane.run.rollouts import read_run

KILLS = 12
KILL_SECONDS = (1.5, 4.0)  # range of the time between two kills
DRAWS = 20_000
SECONDS = 900.0


def compare(build: Path, seed: int, generator: str) -> tuple[dict[str, Any], list[Promise]]:
    """Make both runs; returns figures for the report, and the promises about them."""
    found = {}
    for name, kills in (("calm", 0), ("killed", KILLS)):
        with Run(config(seed, generator), build / name) as run:
            killer = Killer(run.folder, seed, build / name / "kills.jsonl")
            deadline = time.monotonic() + SECONDS
            while not run.finished and time.monotonic() < deadline:
                if run.ended:  # Ray may fail to start on a very busy machine
                    run.gone()
                    run.resume()
                if len(killer.kills) < kills and (run.folder / "workers.jsonl").is_file():
                    killer.strike(["generator 0", "generator 1"], stop_share=0.0)
                time.sleep(killer.random.uniform(*KILL_SECONDS) if kills else 1.0)
            columns = ["group", "index", "token_ids"]
            found[name] = {
                (r["group"], r["index"]): len(r["token_ids"]) for r in read_run(run.folder, columns)
            }
    begun = {
        (group, index)
        for row in lines(build / "killed/run/workers.jsonl")
        for group, index, _ in row.get("continues", [])
    }
    calm, killed = found["calm"], found["killed"]
    both = sorted(calm.keys() & killed.keys())
    interrupted = [key for key in both if key in begun]
    different = [killed[key] - calm[key] for key in interrupted]
    same = different.count(0) / max(1, len(different))
    p = sign_flips(different, seed)
    mean = sum(different) / max(1, len(different))
    interrupted_length = sum(calm[key] for key in interrupted) / max(1, len(interrupted))
    mean_length = sum(calm[key] for key in both) / max(1, len(both))
    report = {"completions": len(both), "interrupted": len(interrupted), "same_length": same,
              "mean_difference": mean, "p": p}  # fmt: skip
    return report, [
        Promise(
            "a run with its generators killed trains on the same completions as one without",
            f"{len(both):,} in both, {len(calm.keys() ^ killed.keys())} in one only",
            calm.keys() == killed.keys() and len(both) > 0,
        ),
        Promise(
            "an interruption leaves lengths unchanged (paired signs flipped: p > 0.001)",
            f"p = {p:.3f}; {len(interrupted):,} interrupted, {same:.1%} of them of the same "
            f"length, {mean:+.2f} tokens on average (mean length {interrupted_length:.1f}, of all "
            f"completions {mean_length:.1f})",
            p > 0.001 and len(interrupted) >= 100,
        ),
    ]


def config(seed: int, generator: str) -> dict[str, Any]:
    raw = quickstart()
    raw["data"]["eval"] = None
    raw["pipeline"] |= {"updates": 8, "diversity": "none", "unscorable": "wrong"}
    raw["trainer"] |= {"learning_rate": 1e-12}
    return raw | {
        "seed": seed,
        "placement": {"kind": "ray"},
        "generator": {"workers": 2, "kind": generator},
    }


def sign_flips(differences: Sequence[int], seed: int) -> float:
    """The p-value of the hypothesis that the differences are symmetric about 0: the share of random
    choices of their signs whose sum is at least as far from 0."""
    draw, moved = random.Random(seed), [d for d in differences if d]
    found = abs(sum(moved))
    hits = sum(
        abs(sum(d if draw.random() < 0.5 else -d for d in moved)) >= found for _ in range(DRAWS)
    )
    return (hits + 1) / (DRAWS + 1)
