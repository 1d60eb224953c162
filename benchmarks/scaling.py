"""The simulation of the pipeline against the pipeline: predicted and measured time per update.

    python benchmarks/scaling.py [--repeats 2] [--updates 50]

The calibration is made for few slots and for many (`calibration.py`). The engine and the trainer
alone are measured in CPU time: a decode step, for groups that come and go and for groups that begin
together, and an update. Two runs of the pipeline on Ray, one of them synchronous, show how much
longer both take there and next to each other (texts, verdicts, records and the controller have no
cores of their own), and what they wait for. In a run that goes far ahead of its trainer, the
trainer's idle time shows how long publishing weights takes; this is an upper bound if batches come
late after all. The check uses different settings from the calibration: synchronous and asynchronous
runs with a different n_async, n_batch, group size, staleness bound and spread of lengths.

All runs take turns, `--repeats` times, since the speed of the machine varies; medians count. Models
and lengths come from `workload.py`. The script prints a table and writes scaling.json next to this
file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from calibration import GROUP, calibrate, measure
from costs import geometric
from measure import Promise, finish, machine, spread
from workload import FIVEFOLD, FIXED, TWICE, VOCAB, Lengths, make_model, run, settings

from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.models.loading import load_tokenizer
from tramontane.planning.simulate import Costs, Outcome, simulate

# Sequences in flight with which the engine is measured; below 48 slots the layout of keys and
# values is different.
FEW, MANY = (8, 16, 24, 40), (8, 24, 56, 96, 160)
# First updates skipped: with a staleness bound of 8 the pipeline needs a few more than 8 to fill.
SKIP = 12
# Processes, since threads of one process slow each other down, most with few sequences.
PLACEMENT = {"kind": "ray"}

Sizes = dict[str, int]
BESIDE = {"n_batch": 48, "group_size": GROUP, "max_staleness": 3}
IN_TURN = BESIDE | {"max_staleness": 0}
# Far ahead of the trainer, although a generator that shares its cores may still be slower.
SATURATED = {"n_async": 112, "n_batch": 24, "group_size": 4, "max_staleness": 10}
CALIBRATION: dict[str, tuple[Lengths, Sizes]] = {
    "saturated": (TWICE, SATURATED),
    "few in turn": (TWICE, IN_TURN | {"n_async": 40}),
    "few": (TWICE, BESIDE | {"n_async": 40}),
    "many in turn": (TWICE, IN_TURN | {"n_async": 56}),
    "many": (TWICE, BESIDE | {"n_async": 56}),
}
CHECKS: dict[str, tuple[Lengths, Sizes]] = {
    f"check {number}": each
    for number, each in enumerate([
        (TWICE, {"n_async": 64, "n_batch": 64, "group_size": 8, "max_staleness": 0}),
        (FIVEFOLD, {"n_async": 64, "n_batch": 64, "group_size": 8, "max_staleness": 0}),
        (FIXED, {"n_async": 32, "n_batch": 64, "group_size": 8, "max_staleness": 4}),
        (TWICE, {"n_async": 64, "n_batch": 64, "group_size": 16, "max_staleness": 1}),
        (TWICE, {"n_async": 128, "n_batch": 32, "group_size": 4, "max_staleness": 8}),
        (FIVEFOLD, {"n_async": 128, "n_batch": 64, "group_size": 8, "max_staleness": 2}),
        (FIVEFOLD, {"n_async": 16, "n_batch": 32, "group_size": 8, "max_staleness": 2}),
    ])
}  # fmt: skip


def runs(folder: Path, models: dict[str, Path], args: argparse.Namespace) -> dict[str, list[Any]]:
    """Make all runs in turn, `args.repeats` times; returns the figures of each by name."""
    seen: dict[str, list[Any]] = {}
    for turn in range(args.repeats):
        for name, (lengths, sizes) in (CALIBRATION | CHECKS).items():
            sizes = sizes | {"updates": args.updates}
            model = models[lengths.name]
            found = run(folder, model, lengths, SKIP, pipeline=sizes, placement=PLACEMENT)
            seen.setdefault(name, []).append(found)
            print(
                f"turn {turn + 1}, {name}: {found['seconds_per_update']:.2f} s an update",
                flush=True,
            )
    return seen


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(each[key] for each in found) for key in found[0]}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in figures.items()}


def config_of(folder: Path, lengths: Lengths, sizes: Sizes) -> Config:
    return Config.model_validate(settings(folder, folder, lengths, pipeline=sizes))


def predict(config: Config, costs: Costs, lengths: Lengths, prompt: int) -> Outcome:
    drawn = geometric(lengths.eos / VOCAB, lengths.longest)
    return simulate(config, costs, drawn, prompt, SKIP)


def check(lengths: Lengths, sizes: Sizes, seen: list[Any], forecast: Outcome) -> dict[str, Any]:
    """Compare a setting's runs with its prediction, and print a line."""
    each = middle(seen)
    seconds = spread([s["seconds_per_update"] for s in seen], 3)
    error = forecast.seconds_per_update / each["seconds_per_update"] - 1
    rate_error = forecast.tokens_per_second / each["tokens_per_second"] - 1
    span = f"{seconds['median']:.2f} ({seconds['lowest']:.2f}–{seconds['highest']:.2f})"
    idle = f"{each['generator_idle']:.0%}/{each['trainer_idle']:.0%}"
    forecast_idle = f"{forecast.generator_idle:.0%}/{forecast.trainer_idle:.0%}"
    print(
        f"{lengths.name:>7} {sizes['n_async']:>7} {sizes['n_batch']:>7} {sizes['group_size']:>3} "
        f"{sizes['max_staleness']:>3} {span:>22} {forecast.seconds_per_update:>6.2f} "
        f"{error:>+6.0%} {each['tokens_per_second']:>9,.0f} "
        f"{forecast.tokens_per_second:>6,.0f} {rate_error:>+6.0%} "
        f"{idle:>10} {forecast_idle:>10} {each['staleness_mean']:>6.2f} "
        f"{forecast.staleness_mean:>6.2f}"
    )
    return {
        "lengths": lengths.name,
        **sizes,
        "seconds_per_update": seconds,
        "predicted": round(forecast.seconds_per_update, 3),
        "error": round(error, 3),
        "tokens_per_second_error": round(rate_error, 3),
        "measured": rounded(each),
        "simulated": rounded(vars(forecast)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--updates", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompt = len(PromptEncoder(load_tokenizer("tiny")).encode("500 + 1"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = {each.name: make_model(folder, each) for each in (FIXED, TWICE, FIVEFOLD)}
        configs = {
            name: config_of(folder, lengths, sizes | {"updates": args.updates})
            for name, (lengths, sizes) in (CALIBRATION | CHECKS).items()
        }
        alone = {
            name: measure(models, configs[name], prompt, counts)
            for name, counts in (("few", FEW), ("many", MANY))
        }
        seen = runs(folder, models, args)
    saturated = middle(seen["saturated"])
    publish = saturated["trainer_idle"] * saturated["seconds_per_update"]
    costs: dict[str, dict[tuple[str, bool], Costs]] = {}
    figures: dict[str, Any] = {"publish_ms": round(1000 * publish, 1)}
    print(f"publish: {1000 * publish:.1f} ms")
    for name in alone:
        costs[name], figures[name] = calibrate(
            alone[name],
            publish,
            middle(seen[f"{name} in turn"]),
            middle(seen[name]),
            (configs[f"{name} in turn"], configs[name]),
            lambda config, costs: predict(config, costs, TWICE, prompt),
        )
        print(f"{name} slots:", ", ".join(f"{key} {value}" for key, value in figures[name].items()))
    print(
        f"{'lengths':>7} {'n_async':>7} {'n_batch':>7} {'G':>3} {'S':>3} {'s/update, seen':>22} "
        f"{'pred.':>6} {'error':>6} {'tokens/s':>9} {'pred.':>6} {'error':>6} {'idle g/t':>10} "
        f"{'pred.':>10} {'stale':>6} {'pred.':>6}"
    )
    rows = []
    for name, (lengths, sizes) in CHECKS.items():
        slots = "few" if sizes["n_async"] <= FEW[-1] else "many"
        setting_costs = costs[slots][lengths.name, not sizes["max_staleness"]]
        predicted = predict(configs[name], setting_costs, lengths, prompt)
        rows.append(check(lengths, sizes, seen[name], predicted))
    worst = max(max(abs(r["error"]), abs(r["tokens_per_second_error"])) for r in rows)
    finish(
        __file__,
        {
            "machine": machine(),
            **vars(args),
            "calibration": figures,
            "calibration_runs": {name: rounded(middle(seen[name])) for name in CALIBRATION},
            "rows": rows,
        },
        [
            Promise(
                "error of the prediction under 15 % in every setting", f"{worst:.1%}", worst < 0.15
            )
        ],
    )


if __name__ == "__main__":
    main()
