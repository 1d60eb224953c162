"""What the differences between two versions of the weights weigh, and what they cost.

    python -m benchmarks.differences [--models tiny models/smollm2] [--rates 1e-6 2e-5]
                                     [--updates 16]

Each model is trained on random completions with AdamW at each learning rate; after every update,
its weights are compared in bfloat16, as for `placement.weights: differences`. `changed`: values
that differ from the version before. `smaller`: bytes of a whole version, of those of the
differences. `make` and `apply`: milliseconds of one thread for each million weights. The first six
updates, whose steps are larger, are left out. Prints a table, writes differences.json next to this
file, and exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.measure import Promise, finish, machine, random_groups, spread, train_batch
from tramontane.config import TrainerConfig
from tramontane.models.differences import Difference
from tramontane.trainer.trainer import Trainer

LEFT_OUT = 6


def measure(name: str, rate: float, updates: int) -> dict[str, Any]:
    trainer = Trainer.load(name, TrainerConfig(learning_rate=rate, warmup_updates=0), updates)
    vocabulary = trainer.model.config.get_text_config().vocab_size
    shares, smaller, make, apply = (list[float]() for _ in range(4))
    old = trainer.weights(torch.bfloat16)
    for update in range(updates):
        groups = random_groups(vocabulary, groups=1, size=16, prompt=16, tokens=32)
        trainer.step(train_batch(update, groups))
        new = trainer.weights(torch.bfloat16)
        count = sum(tensor.numel() for tensor in new.values())
        began = time.perf_counter()
        differences = {key: Difference.between(old[key], new[key]) for key in new}
        made = time.perf_counter()
        for key, difference in differences.items():
            difference.apply(old[key])
        applied = time.perf_counter()
        assert all(torch.equal(old[key], new[key]) for key in new)
        if update >= LEFT_OUT:
            shares.append(sum(len(d.values) for d in differences.values()) / count)
            smaller.append(2 * count / sum(d.nbytes for d in differences.values()))
            make.append(1e9 * (made - began) / count)
            apply.append(1e9 * (applied - made) / count)
    figures = {"changed": shares, "smaller": smaller, "make_ms": make, "apply_ms": apply}
    return {"model": Path(name).name, "rate": rate} | {k: spread(v, 4) for k, v in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 2e-5])
    parser.add_argument("--updates", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    print(f"{'model':>10} {'rate':>7} {'changed':>9} {'smaller':>15} {'make':>6} {'apply':>6}")
    rows, promises = list[dict[str, Any]](), list[Promise]()
    for name in args.models:
        for rate in args.rates:
            row = measure(name, rate, args.updates)
            rows.append(row)
            times = row["smaller"]
            print(
                f"{row['model']:>10} {rate:>7.0e} {100 * row['changed']['median']:>7.2f} % "
                f"{times['median']:>5.1f} ({times['lowest']:.1f}–{times['highest']:.1f}) "
                f"{row['make_ms']['median']:>6.1f} {row['apply_ms']['median']:>6.1f}",
                flush=True,
            )
            found = f"{times['median']:.1f}"
            what = f"{row['model']}, {rate:.0e}: a version takes at least 5 times as many bytes"
            promises.append(Promise(what, found, times["median"] >= 5))
    finish(__file__, {"machine": machine("cpu"), "updates": args.updates, "rows": rows}, promises)


if __name__ == "__main__":
    main()
