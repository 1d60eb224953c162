"""Whether being interrupted changes how long a completion becomes.

Two runs of the same problems under the same seed, on weights that stay as they are (a learning
rate of next to nothing), one of them with its generators killed. No group is filtered, so both
train on the same completions, which can be compared one by one: of the same length but for what
rounding does, since a request's random numbers are its own. Were long completions lost, cut or
begun again more often than short ones, lengths would differ to one side.
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

KILLS = 12
EVERY = (1.5, 4.0)  # seconds between two kills
DRAWS = 20_000
SECONDS = 900.0


def compare(build: Path, seed: int) -> tuple[dict[str, Any], list[Promise]]:
    found = {}
    for name, kills in (("calm", 0), ("killed", KILLS)):
        with Run(config(seed), build / name) as run:
            killer = Killer(run.folder, seed, build / name / "kills.jsonl")
            deadline = time.monotonic() + SECONDS
            while not run.finished and time.monotonic() < deadline:
                if run.ended:  # Ray may not come up on a machine that is very busy
                    run.gone()
                    run.resume()
                if len(killer.kills) < kills and (run.folder / "workers.jsonl").is_file():
                    killer.strike(["generator 0", "generator 1"], hang=0.0)
                time.sleep(killer.random.uniform(*EVERY) if kills else 1.0)
            files = (run.folder / "rollouts").glob("update_*.jsonl")
            found[name] = {
                (r["group"], r["index"]): len(r["tokens"]) for f in files for r in lines(f)
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
    long = sum(calm[key] for key in interrupted) / max(1, len(interrupted))
    every = sum(calm[key] for key in both) / max(1, len(both))
    report = {"completions": len(both), "interrupted": len(interrupted), "same_length": same,
              "mean_difference": mean, "p": p}  # fmt: skip
    return report, [
        Promise(
            "a run with its generators killed trains on the same completions as one without",
            f"{len(both):,} in both, {len(calm.keys() ^ killed.keys())} in one only",
            calm.keys() == killed.keys() and len(both) > 0,
        ),
        Promise(
            "being interrupted leaves lengths as they are (paired signs flipped: p > 0.001)",
            f"p = {p:.3f}; {len(interrupted):,} interrupted, {same:.1%} of them of the same "
            f"length, {mean:+.2f} tokens on average (these had {long:.1f}, all {every:.1f})",
            p > 0.001 and len(interrupted) >= 100,
        ),
    ]


def config(seed: int) -> dict[str, Any]:
    raw = quickstart()
    raw["data"]["eval"] = None
    raw["pipeline"] |= {"updates": 8, "diversity": "none", "unscorable": "wrong"}
    raw["trainer"] |= {"learning_rate": 1e-12}
    return raw | {
        "seed": seed,
        "placement": {"kind": "ray"},
        "generator": {"workers": 2},
    }


def sign_flips(differences: Sequence[int], seed: int) -> float:
    """How often a sum at least as far from 0 comes about when each difference has its sign by
    chance: the p-value of the hypothesis that they are symmetric about 0."""
    draw, moved = random.Random(seed), [d for d in differences if d]
    found = abs(sum(moved))
    hits = sum(
        abs(sum(d if draw.random() < 0.5 else -d for d in moved)) >= found for _ in range(DRAWS)
    )
    return (hits + 1) / (DRAWS + 1)
