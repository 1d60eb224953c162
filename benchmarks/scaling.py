"""The simulation of the pipeline against the pipeline: predicted and measured time per update.

    python benchmarks/scaling.py [--repeats 2] [--updates 50]

Calibration: one run of the pipeline on Ray that runs far ahead of its trainer, whose idle time is
taken for what it waits for to give out weights (an upper bound, where batches come late after all).
For few slots and for many: a decode step of the engine alone, by live sequences and cached tokens,
from groups that come and go at several sizes (a step in which nobody comes or goes costs up to a
third less); an update of the trainer alone, by tokens and their pairs, all in CPU time; and two
runs, one synchronous, whose records say how much longer both take there and beside each other
(texts, verdicts, records and the controller have no cores of their own), and how long a batch is on
its way. Then other settings are run and simulated: synchronous and asynchronous, with another
n_async, n_batch, group size, bound on staleness and spread of lengths. None of them is the
calibration's. Models and lengths are those of `workload.py`. Prints a table,
and writes scaling.json beside this file.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
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

Calibration = tuple[tuple[int, ...], dict[str, int]]
SIZES: dict[str, int] = {"n_batch": 48, "group_size": 8, "max_staleness": 3}
# Sequences in flight to measure with, by the slots: below 48, the engine lays out keys and values
# otherwise. And the sizes of the runs that tell what the pipeline adds.
FEW: Calibration = ((8, 24, 40), SIZES | {"n_async": 40})
MANY: Calibration = ((8, 24, 56, 96, 160), SIZES | {"n_async": 56})
# Far ahead of the trainer, though a generator that shares its cores may still be the slower one.
SATURATED = {"n_async": 112, "n_batch": 24, "group_size": 4, "max_staleness": 10}
# Updates left out: one whose bound on staleness is 8 takes some more than 8 to be filled.
SKIP = 12
# Processes: threads of one slow each other down, the more the fewer sequences there are.
PLACEMENT = {"kind": "ray"}
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


def flow(
    generator: Generator, lengths: Lengths, prompt: int, n_async: int, prefill: float
) -> list[float]:
    """Groups through a generator by polls, as many at once as `n_async` has room for, to the end.

    Returns:
        Decode steps, sequences and cached tokens of all of them together, and their CPU seconds:
        all that polls take, less prefill (`prefill` seconds a token of a prompt).
    """
    size, sampling = SIZES["group_size"], SamplingParams(lengths.longest)
    groups = [
        [Request(g, i, [5 + g % 100] * prompt, 1000 * g + i, sampling) for i in range(size)]
        for g in range(max(16, 4 * n_async // size))
    ]
    seconds = -prefill * prompt * len(groups)
    steps, sequences, cached, unfinished = -generator.stats()["decode_steps"], 0, 0.0, 0
    while groups or unfinished:
        n = min(len(groups), (n_async - unfinished) // size)
        new, groups = [r for group in groups[:n] for r in group], groups[n:]
        began = time.process_time()
        ended = generator.poll(new).completions
        seconds += time.process_time() - began
        unfinished += len(new) - len(ended)
        for n in (len(c.token_ids) for c in ended):
            sequences += n
            cached += n * prompt + n * (n - 1) / 2
    return [steps + generator.stats()["decode_steps"], sequences, cached, seconds]


def prefill_time(generator: Generator, prompts: int, length: int) -> float:
    """Seconds of admitting so many prompts, less the decode step that follows."""
    sampling = SamplingParams(8)
    requests = [Request(i, 0, [6 + i] * length, i, sampling) for i in range(prompts)]
    began = time.process_time()
    generator.submit(requests)
    generator.step(1)
    first = time.process_time() - began
    began = time.process_time()
    generator.step(1)
    second = time.process_time() - began
    generator.cancel_all()
    return first - second


def make_batch(lengths: list[int], prompt: int) -> Batch:
    made, size = [], SIZES["group_size"]
    for g in range(len(lengths) // size):
        completions = [
            Completion(g, i, [5] * prompt, [7] * n, [-7.6] * n, [0] * n, "length", "")
            for i, n in enumerate(lengths[g * size : (g + 1) * size])
        ]
        verdicts = [Verdict(float(i % 2), {}, "right") for i in range(size)]
        made.append(Group(g, Problem(str(g), "math", ""), completions, verdicts))
    return Batch(0, made)


def ends(lengths: Lengths, count: int) -> list[int]:
    """Tokens of `count` completions, evenly over their distribution."""
    keep = math.log(1 - lengths.eos / VOCAB)
    drawn = [1 + int(math.log((i + 0.5) / count) / keep) for i in range(count)]
    drawn = [min(lengths.longest, n) for n in drawn]
    random.Random(0).shuffle(drawn)
    return drawn


def train_curve(trainer: Trainer, prompt: int, repeats: int = 5) -> TrainCurve:
    """Seconds of an update: two batches, completions all alike and of lengths that are spread."""
    points = []
    for lengths in (FIXED, FIVEFOLD):
        tokens = ends(lengths, SIZES["n_batch"])
        batch = make_batch(tokens, prompt)
        trainer.step(batch)
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            trainer.step(batch)
            seconds.append(time.process_time() - began)
        total = sum(tokens) + prompt * len(batch.groups)
        points.append((total, sum(n * n for n in tokens), min(seconds)))
    (a, b, y), (c, d, z) = points
    pair = max(0.0, (z * a - y * c) / (d * a - b * c))
    return TrainCurve((y - pair * b) / a, pair)


def decode_curve(
    models: dict[str, Path], config: Config, prompt: int, counts: tuple[int, ...]
) -> tuple[DecodeCurve, float]:
    """Of the engine alone, in CPU time: a decode step, and the seconds of a prompt token."""
    flows = []
    for lengths in (FIXED, FIVEFOLD):
        model = str(models[lengths.name])
        generator = Generator.load(model, config.generator, max(counts), prompt + lengths.longest)
        prefill = median(prefill_time(generator, 4, prompt) for _ in range(5)) / (4 * prompt)
        prefill = max(0.0, prefill)
        flow(generator, lengths, prompt, max(counts), prefill)  # warms up
        flows += [flow(generator, lengths, prompt, n, prefill) for n in counts]
    # One plane through all, by relative errors: single ones are too noisy for a curve.
    found = np.array(flows)
    weighted = found[:, :3] / found[:, 3:]
    plane = np.linalg.lstsq(weighted, np.ones(len(flows)), rcond=None)[0]
    step, sequence, cached = map(float, plane)
    span = 0, max(counts)
    return DecodeCurve(span, [step + n * sequence for n in span], [cached, cached]), prefill


def publishing(folder: Path, model: Path, updates: int) -> float:
    """Seconds between an update's end and the next one's beginning, waits for a batch included."""
    sizes = SATURATED | {"updates": updates}
    seen = run(folder, model, TWICE, SKIP, pipeline=sizes, placement=PLACEMENT)
    idle: float = seen["trainer_idle"] * seen["seconds_per_update"]
    return idle


def calibrate(
    folder: Path, models: dict[str, Path], updates: int, publish: float, calibration: Calibration
) -> tuple[Costs, int, dict[str, Any]]:
    """Costs on this machine, the tokens of a prompt, and what they were taken from."""
    counts, sizes = calibration
    model = models[TWICE.name]
    config = config_of(folder, model, TWICE, sizes)
    prompt = len(encode_prompt(load_tokenizer("tiny"), "500 + 1"))
    decode, prefill = decode_curve(models, config, prompt, counts)
    trainer = Trainer.load(str(model), config.trainer, config.pipeline, 1.0, 1000, 0)
    train = train_curve(trainer, prompt)
    alone = Costs(decode, Line(0.0, prefill), train)

    # In turn: what the pipeline's calls take beside those steps, and what an update waits for.
    together, sizes = sizes, sizes | {"updates": updates, "max_staleness": 0}
    seen = run(folder, model, TWICE, SKIP, pipeline=sizes, placement=PLACEMENT)
    update = seen["seconds_per_update"]
    costs = replace(
        alone,
        publish=publish,
        receive=seen["pause_ms"] / 1000,
        verify=update * (1 - seen["verifier_idle"]) / sizes["n_batch"],
    )
    told = predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt)
    generating, training = _longer(seen, told)
    costs = replace(
        costs,
        decode=decode.times(generating),
        prefill=Line(0.0, prefill * generating),
        train=train.times(training),
    )
    told = predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt)
    costs = replace(costs, latency=max(0.0, update - told.seconds_per_update))

    # Side by side: how much longer each takes while the other works.
    sizes = together | {"updates": updates}
    seen = run(folder, model, TWICE, SKIP, pipeline=sizes, placement=PLACEMENT)
    beside = (1.0, 1.0)
    for _ in range(5):
        costs = replace(
            costs, generator_beside_trainer=beside[0], trainer_beside_generator=beside[1]
        )
        more = _longer(seen, predict(config_of(folder, model, TWICE, sizes), costs, TWICE, prompt))
        beside = (beside[0] * more[0], beside[1] * more[1])
    figures = {
        "decode_ms_a_step": [round(1000 * each, 2) for each in decode.seconds],
        "decode_ns_per_cached_token": round(1e9 * decode.per_cached[0]),
        "prefill_us_per_token": round(1e6 * prefill, 1),
        "train_us_per_token": round(1e6 * train.each, 1),
        "train_ns_per_pair": round(1e9 * train.pair, 1),
        "in_the_pipeline": [round(generating, 3), round(training, 3)],
        "beside_each_other": [round(b, 3) for b in beside],
        "verify_ms": round(1000 * costs.verify, 3),
        "latency_ms": round(1000 * costs.latency, 1),
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
    drawn = geometric(lengths.eos / VOCAB, lengths.longest)
    return simulate(config, costs, drawn, prompt, SKIP)


def check(
    folder: Path,
    costs: tuple[Costs, Costs],
    prompt: int,
    models: dict[str, Path],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Each setting run and simulated; `costs` are those of `FEW` and of `MANY`."""
    rows = []
    print(
        f"{'lengths':>7} {'n_async':>7} {'n_batch':>7} {'G':>3} {'S':>3} {'s/update, seen':>22} "
        f"{'pred.':>6} {'error':>6} {'tokens/s':>9} {'pred.':>6} {'idle g/t':>10} {'pred.':>10} "
        f"{'stale':>6} {'pred.':>6}"
    )
    for lengths, sizes in CHECKS:
        model, sizes = models[lengths.name], sizes | {"updates": args.updates}
        seen = [
            run(folder, model, lengths, SKIP, pipeline=sizes, placement=PLACEMENT)
            for _ in range(args.repeats)
        ]
        own = costs[sizes["n_async"] > FEW[0][-1]]
        told = predict(config_of(folder, model, lengths, sizes), own, lengths, prompt)
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
    parser.add_argument("--updates", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = {each.name: make_model(folder, each) for each in (FIXED, TWICE, FIVEFOLD)}
        publish = publishing(folder, models[TWICE.name], args.updates)
        few, prompt, of_few = calibrate(folder, models, args.updates, publish, FEW)
        many, prompt, of_many = calibrate(folder, models, args.updates, publish, MANY)
        print(f"publish: {1000 * publish:.1f} ms")
        for name, found in (("few", of_few), ("many", of_many)):
            print(f"{name} slots:", ", ".join(f"{key} {value}" for key, value in found.items()))
        figures = {"publish_ms": round(1000 * publish, 1), "few": of_few, "many": of_many}
        rows = check(folder, (few, many), prompt, models, args)
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
