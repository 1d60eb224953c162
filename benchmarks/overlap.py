"""Asynchronous against synchronous at equal work: tokens per second, and who waits for whom.

    python benchmarks/overlap.py [--lengths fixed 2x 5x] [--async-ratios 1 2 4 8] [--repeats 1]
                                 [--updates 14] [--n-batch 32]

The whole pipeline is run (`workload.py`: a 1.8M Llama whose completions have 62 tokens on average,
and at most 1, 2 or 5 times that) at several ratios n_async / n_batch. Each
ratio is run with a staleness bound of 1, and with one of twice the ratio, which holds nothing back.
A synchronous run (bound 0) is the baseline.

`idle` is the share of time in which the generator did nothing. `held` is the part in which it had
no requests, because the bound, or the end of the run, let no group be handed out. `waits` is the
difference: time spent waiting for others. `dropped` counts groups that were generated and thrown
away. The first three updates, in which the pipeline fills, are skipped. The script prints a table
and writes overlap.json next to this file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Promise, finish, machine, spread
from workload import FIVEFOLD, FIXED, TWICE, make_model, run

LENGTHS = {each.name: each for each in (FIXED, TWICE, FIVEFOLD)}
GROUP = 8
COLUMNS = ("generator_idle", "generator_held", "waits", "trainer_idle", "verifier_idle")


def measure(
    folder: Path, name: str, model: Path, ratio: int, bound: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run one setting `repeats` times."""
    sizes = {
        "updates": args.updates,
        "n_async": ratio * args.n_batch,
        "n_batch": args.n_batch,
        "group_size": GROUP,
        "max_staleness": bound,
    }
    runs = [run(folder, model, LENGTHS[name], pipeline=sizes) for _ in range(args.repeats)]
    for figures in runs:
        figures["waits"] = figures["generator_idle"] - figures["generator_held"]
    each = {key: median(figures[key] for figures in runs) for key in runs[0]}
    return {
        "lengths": name,
        "n_async_by_n_batch": ratio,
        "max_staleness": bound,
        "tokens_per_second": spread([figures["tokens_per_second"] for figures in runs]),
        **{key: round(each[key], 4) for key in COLUMNS},
        "staleness_mean": round(each["staleness_mean"], 2),
        "staleness_max": each["staleness_max"],
        "dropped_groups": each["filtered_groups"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--async-ratios", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--updates", type=int, default=14)
    parser.add_argument("--n-batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    print(
        f"{'lengths':>7} {'n_async/n_batch':>15} {'bound':>5} {'tokens/s':>20} {'gain':>5} "
        f"{'idle':>6} {'held':>6} {'waits':>6} {'trainer':>7} {'verifier':>8} {'stale':>11} "
        f"{'dropped':>7}"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in args.lengths:
            model = make_model(folder, LENGTHS[name])
            base = 0.0
            settings = [(1, 0)]
            settings += [(ratio, bound) for ratio in args.async_ratios for bound in (1, 2 * ratio)]
            for ratio, bound in settings:
                row = measure(folder, name, model, ratio, bound, args)
                rate = row["tokens_per_second"]
                base = base or rate["median"]
                row["gain"] = round(rate["median"] / base, 2)
                rows.append(row)
                speed = f"{rate['median']:,.0f} ({rate['lowest']:,.0f}–{rate['highest']:,.0f})"
                shares = " ".join(f"{row[key]:>6.1%}" for key in COLUMNS)
                print(
                    f"{name:>7} {ratio:>15} {bound:>5} {speed:>20} {row['gain']:>5} {shares} "
                    f"{row['staleness_mean']:>5} ≤ {row['staleness_max']:>3} "
                    f"{row['dropped_groups']:>7}",
                    flush=True,
                )
    waits = median(row["waits"] for row in rows if row["max_staleness"])
    worst = max(row["waits"] for row in rows if row["max_staleness"])
    dropped = sum(row["dropped_groups"] for row in rows)
    finish(
        __file__,
        {"machine": machine(), **vars(args), "group_size": GROUP, "rows": rows},
        [
            Promise(
                "generators idle under 1 % when not held by the staleness bound",
                f"{waits:.2%} (median over the asynchronous settings; the most {worst:.2%})",
                worst < 0.01,
            ),
            Promise("no token generated is thrown away", f"{dropped} dropped", not dropped),
        ],
    )


if __name__ == "__main__":
    main()
