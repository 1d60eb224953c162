"""The simulation of the pipeline against the pipeline: predicted and measured time per update.

    python benchmarks/scaling.py [--repeats 1] [--updates 14]

Calibration: a decode step of the engine alone, by live sequences and cached tokens, and an update
of the trainer alone, by tokens, then each while the other works in a thread beside it; and two
short runs of the pipeline, one synchronous, whose records say how much longer both take there
(texts, verdicts, records and the controller have no cores of their own) and what else an update
waits for. Then other settings are run and simulated: synchronous and asynchronous, with another
n_async, n_batch, group size, bound on staleness and spread of lengths. None of them is the
calibration's. Models and lengths are those of `workload.py`. Prints a table, and writes
scaling.json beside this file.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import Promise, finish, machine, spread
from workload import FIVEFOLD, FIXED, TWICE, VOCAB, Lengths, make_model, run, settings

from tramontane.config import Config
from tramontane.data.prompts import encode_prompt
from tramontane.generator import Generator
from tramontane.models import load_tokenizer
from tramontane.planning.costs import Costs, DecodeCurve, Line, TrainCurve, geometric
from tramontane.planning.simulate import Outcome, simulate
from tramontane.trainer import Trainer
from tramontane.types import Batch, Completion, Group, Problem, Request, SamplingParams, Verdict

CALIBRATION: dict[str, int] = {"n_async": 48, "n_batch": 48, "group_size": 8, "max_staleness": 3}
# Lengths, and the sizes that a run is to have.
CHECKS: list[tuple[Lengths, dict[str, int]]] = [
    (TWICE, {"n_async": 64, "n_batch": 64, "group_size": 8, "max_staleness": 0}),
    (FIVEFOLD, {"n_async": 64, "n_batch": 64, "group_size": 8, "max_staleness": 0}),
    (FIXED, {"n_async": 32, "n_batch": 64, "group_size": 8, "max_staleness": 4}),
    (TWICE, {"n_async": 64, "n_batch": 64, "group_size": 16, "max_staleness": 1}),
    (TWICE, {"n_async": 128, "n_batch": 32, "group_size": 4, "max_staleness": 8}),
    (FIVEFOLD, {"n_async": 128, "n_batch": 64, "group_size": 8, "max_staleness": 2}),
    (FIVEFOLD, {"n_async": 16, "n_batch": 32, "group_size": 8, "max_staleness": 2}),
]
LIVE = (1, 8, 16, 32, 64, 128)


def decode_times(generator: Generator, contexts: list[int], steps: int = 24) -> float:
    """Median seconds of a decode step with sequences that begin with so many tokens cached."""
    sampling, live = SamplingParams(4 * steps), len(contexts)
    generator.submit([Request(i, 0, [5] * n, i, sampling) for i, n in enumerate(contexts)])
    generator.step(2)
    times = []
    for _ in range(steps):
        # Another group's end may come early: what is measured is a step of those still live.
        alive = generator.stats()["in_flight"]
        began = time.perf_counter()
        generator.step(1)
        times.append((time.perf_counter() - began) * live / max(1, alive))
    generator.cancel_all()
    return median(times)


def prefill_time(generator: Generator, prompts: int, length: int) -> float:
    """Seconds of admitting so many prompts, less the decode step that follows."""
    sampling = SamplingParams(8)
    requests = [Request(i, 0, [6 + i] * length, i, sampling) for i in range(prompts)]
    began = time.perf_counter()
    generator.submit(requests)
    generator.step(1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    generator.step(1)
    second = time.perf_counter() - began
    generator.cancel_all()
    return first - second


def make_batch(lengths: list[int], prompt: int) -> Batch:
    made, size = [], CALIBRATION["group_size"]
    for g in range(len(lengths) // size):
        completions = [
            Completion(g, i, [5] * prompt, [7] * n, [-7.6] * n, [0] * n, "length", "")
            for i, n in enumerate(lengths[g * size : (g + 1) * size])
        ]
        verdicts = [Verdict(float(i % 2), {}, "right") for i in range(size)]
        made.append(Group(g, Problem(str(g), "math", ""), completions, verdicts))
    return Batch(0, made)


def ages(lengths: Lengths, count: int) -> list[int]:
    """Tokens that `count` live sequences have by now: they are met while they are not ended."""
    left = (1 - lengths.eos / VOCAB) ** np.arange(lengths.longest)
    shares = np.cumsum(left) / left.sum()
    return [int(np.searchsorted(shares, (i + 0.5) / count)) for i in range(count)]


def ends(lengths: Lengths, count: int) -> list[int]:
    """Tokens of `count` completions, evenly over their distribution."""
    keep = math.log(1 - lengths.eos / VOCAB)
    drawn = [1 + int(math.log((i + 0.5) / count) / keep) for i in range(count)]
    drawn = [min(lengths.longest, n) for n in drawn]
    random.Random(0).shuffle(drawn)
    return drawn


def train_curve(trainer: Trainer, prompt: int, repeats: int = 3) -> TrainCurve:
    """Seconds of an update: two batches, completions all alike and of lengths that are spread."""
    points = []
    for lengths in (FIXED, FIVEFOLD):
        tokens = ends(lengths, CALIBRATION["n_batch"])
        batch = make_batch(tokens, prompt)
        trainer.step(batch)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - began)
        total = sum(tokens) + prompt * len(batch.groups)
        points.append((total, sum(n * n for n in tokens), median(seconds)))
    (a, b, y), (c, d, z) = points
    pair = max(0.0, (z * a - y * c) / (d * a - b * c))
    return TrainCurve((y - pair * b) / a, pair)


class Beside:
    """Something that goes on in a thread of its own meanwhile."""

    def __init__(self, work: Any) -> None:
        self._work, self._over = work, False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._over:
            self._work()

    def __enter__(self) -> None:
        self._thread.start()
        time.sleep(0.5)

    def __exit__(self, *error: Any) -> None:
        self._over = True
        self._thread.join()


def measure_workers(model: Path, config: Config, prompt: int) -> tuple[Costs, float, float]:
    """Costs of the engine and of the trainer alone; how much longer each takes by the other."""
    generator = Generator.load(str(model), config.generator, max(LIVE), 500)
    trainer = Trainer.load(str(model), config.trainer, config.pipeline, 1.0, 1000, 0)
    seconds, per_cached = [], []
    for live in LIVE:
        near, far = ([prompt + n for n in ages(s, live)] for s in (FIXED, FIVEFOLD))
        low, high = decode_times(generator, near), decode_times(generator, far)
        each = max(0.0, (high - low) / (sum(far) - sum(near)))
        per_cached.append(each)
        seconds.append(low - each * (sum(near) + 13 * live))  # 13: half of the steps measured
    prefill = median(prefill_time(generator, 4, prompt) for _ in range(5)) / (4 * prompt)
    train = train_curve(trainer, prompt)
    lengths = ends(TWICE, CALIBRATION["n_batch"])
    batch = make_batch(lengths, prompt)
    near = [prompt + n for n in ages(FIXED, 64)]
    alone = decode_times(generator, near, 40)
    with Beside(lambda: trainer.step(batch)):
        generator_beside = decode_times(generator, near, 40) / alone
    with Beside(lambda: decode_times(generator, near)):
        both = train_curve(trainer, prompt)
    costs = Costs(DecodeCurve(LIVE, seconds, per_cached), Line(0.0, max(0.0, prefill)), train)
    return costs, generator_beside, both(lengths, prompt) / train(lengths, prompt)


def calibrate(
    folder: Path, models: dict[str, Path], updates: int
) -> tuple[Costs, int, dict[str, Any]]:
    """Costs on this machine, the tokens of a prompt, and what they were taken from."""
    model = models[TWICE.name]
    config = config_of(folder, model, TWICE, CALIBRATION)
    prompt = len(encode_prompt(load_tokenizer("tiny"), "500 + 1"))
    alone, generator_beside, trainer_beside = measure_workers(models[FIXED.name], config, prompt)
    decode, prefill, train = alone.decode, alone.prefill, alone.train
    assert isinstance(decode, DecodeCurve)
    assert isinstance(prefill, Line)
    assert isinstance(train, TrainCurve)

    # In turn: what the pipeline's calls take beside those steps, and what an update waits for.
    sizes = CALIBRATION | {"updates": updates, "max_staleness": 0}
    seen = run(folder, model, TWICE, pipeline=sizes)
    update = seen["seconds_per_update"]
    costs = replace(
        alone,
        receive=seen["pause_ms"] / 1000,
        verify=update * (1 - seen["verifier_idle"]) / CALIBRATION["n_batch"],
    )
    told = predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt)
    generating, training = _longer(seen, told)
    costs = replace(
        costs,
        decode=decode.times(generating),
        prefill=Line(0.0, prefill.each * generating),
        train=train.times(training),
    )
    told = predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt)
    costs = replace(costs, record=max(0.0, update - told.seconds_per_update))

    # Side by side: starting from what was measured alone, what the pipeline's workers take longer.
    sizes = CALIBRATION | {"updates": updates}
    seen = run(folder, model, TWICE, pipeline=sizes)
    beside = (max(1.0, generator_beside), max(1.0, trainer_beside))
    for _ in range(3):
        costs = replace(
            costs, generator_beside_trainer=beside[0], trainer_beside_generator=beside[1]
        )
        more = _longer(seen, predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt))
        beside = (beside[0] * more[0], beside[1] * more[1])
    figures = {
        "decode_ms_by_live": {
            n: round(1000 * s, 2) for n, s in zip(LIVE, decode.seconds, strict=True)
        },
        "decode_ns_per_cached_token": [round(1e9 * each) for each in decode.per_cached],
        "prefill_us_per_token": round(1e6 * prefill.each, 1),
        "train_us_per_token": round(1e6 * train.each, 1),
        "train_ns_per_pair": round(1e9 * train.pair, 1),
        "in_the_pipeline": [round(generating, 3), round(training, 3)],
        "beside_each_other": [round(generator_beside, 3), round(trainer_beside, 3)],
        "beside_each_other_in_the_pipeline": [round(b, 3) for b in beside],
        "verify_ms": round(1000 * costs.verify, 3),
        "other_ms_an_update": round(1000 * costs.record, 1),
        "pause_ms": round(1000 * costs.receive, 2),
    }
    return costs, prompt, figures


def _longer(seen: dict[str, Any], told: Outcome) -> tuple[float, float]:
    """How much longer than told the generator and the trainer worked for an update."""
    generating, training = (
        (1 - seen[key])
        * seen["seconds_per_update"]
        / ((1 - getattr(told, key)) * told.seconds_per_update)
        for key in ("generator_idle", "trainer_idle")
    )
    return generating, training


def config_of(folder: Path, model: Path, lengths: Lengths, sizes: dict[str, int]) -> Config:
    return Config.model_validate(settings(folder, model, lengths, pipeline=sizes))


def predict(config: Config, costs: Costs, lengths: Lengths, prompt: int) -> Outcome:
    return simulate(config, costs, geometric(lengths.eos / VOCAB, lengths.longest), prompt)


def check(
    folder: Path, costs: Costs, prompt: int, models: dict[str, Path], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Each setting run and simulated."""
    rows = []
    print(
        f"{'lengths':>7} {'n_async':>7} {'n_batch':>7} {'G':>3} {'S':>3} {'s/update, seen':>22} "
        f"{'pred.':>6} {'error':>6} {'tokens/s':>9} {'pred.':>6} {'idle g/t':>10} {'pred.':>10} "
        f"{'stale':>6} {'pred.':>6}"
    )
    for lengths, sizes in CHECKS:
        model, sizes = models[lengths.name], sizes | {"updates": args.updates}
        seen = [run(folder, model, lengths, pipeline=sizes) for _ in range(args.repeats)]
        told = predict(config_of(folder, model, lengths, sizes), costs, lengths, prompt)
        each = {key: median(s[key] for s in seen) for key in seen[0]}
        seconds = spread([s["seconds_per_update"] for s in seen], 3)
        error = told.seconds_per_update / each["seconds_per_update"] - 1
        rate_error = told.tokens_per_second / each["tokens_per_second"] - 1
        rows.append(
            {
                "lengths": lengths.name,
                **sizes,
                "seconds_per_update": seconds,
                "predicted": round(told.seconds_per_update, 3),
                "error": round(error, 3),
                "tokens_per_second_error": round(rate_error, 3),
                "measured": {key: round(value, 3) for key, value in each.items()},
                "simulated": {k: round(v, 3) for k, v in vars(told).items()},
            }
        )
        span = f"{seconds['median']:.2f} ({seconds['lowest']:.2f}–{seconds['highest']:.2f})"
        idle = f"{each['generator_idle']:.0%}/{each['trainer_idle']:.0%}"
        told_idle = f"{told.generator_idle:.0%}/{told.trainer_idle:.0%}"
        print(
            f"{lengths.name:>7} {sizes['n_async']:>7} {sizes['n_batch']:>7} "
            f"{sizes['group_size']:>3} {sizes['max_staleness']:>3} {span:>22} "
            f"{told.seconds_per_update:>6.2f} {error:>+6.0%} {each['tokens_per_second']:>9,.0f} "
            f"{told.tokens_per_second:>6,.0f} {idle:>10} {told_idle:>10} "
            f"{each['staleness_mean']:>6.2f} {told.staleness_mean:>6.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--updates", type=int, default=14)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = {each.name: make_model(folder, each) for each in (FIXED, TWICE, FIVEFOLD)}
        costs, prompt, figures = calibrate(folder, models, args.updates)
        print("calibration:", ", ".join(f"{name} {value}" for name, value in figures.items()))
        rows = check(folder, costs, prompt, models, args)
    worst = max(max(abs(r["error"]), abs(r["tokens_per_second_error"])) for r in rows)
    finish(
        __file__,
        {"machine": machine(), **vars(args), "calibration": figures, "rows": rows},
        [
            Promise(
                "error of the prediction under 15 % in every setting", f"{worst:.1%}", worst < 0.15
            )
        ],
    )


if __name__ == "__main__":
    main()
