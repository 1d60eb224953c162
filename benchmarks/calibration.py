"""What the pipeline's pieces cost on this machine, for `scaling.py`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from workload import FIVEFOLD, FIXED, TWICE, VOCAB, Lengths

from tramontane.config import Config
from tramontane.generator import Generator
from tramontane.planning.costs import Costs, DecodeCurve, Line, TrainCurve
from tramontane.planning.simulate import Outcome
from tramontane.trainer import Trainer
from tramontane.types import Batch, Completion, Group, Problem, Request, SamplingParams, Verdict

GROUP = 8
COMPLETIONS = 48  # of a trained batch
FLOWS = 2  # of each count, whose median counts


class Alone(NamedTuple):
    """What the engine and the trainer cost by themselves, in CPU time: a decode step by the name of
    the lengths (how long completions may get decides how the engine lays out keys and values), the
    seconds of a prompt's token, and an update."""

    decode: dict[str, DecodeCurve]
    prefill: float
    train: TrainCurve


def measure(models: dict[str, Path], config: Config, prompt: int, counts: tuple[int, ...]) -> Alone:
    """Of an engine that has room for the largest of `counts`, by flows of so many sequences."""
    flows, prefills = {}, []
    # Longer prompts tell what cached tokens cost, apart from what sequences do.
    prompts = prompt, 3 * prompt
    for lengths in (FIXED, TWICE, FIVEFOLD):
        model = str(models[lengths.name])
        engines = []
        for asked in prompts:
            longest = asked + lengths.longest
            engines.append(Generator.load(model, config.generator, max(counts), longest))
            seconds = [prefill_time(engines[-1], 4, asked) / (4 * asked) for _ in range(5)]
            prefills.append(max(0.0, median(seconds)))
            flow(engines[-1], lengths, asked, max(counts), 0.0)  # warms up
        found = [
            [
                [flow(engine, lengths, asked, n, median(prefills)) for n in counts]
                for engine, asked in zip(engines, prompts, strict=True)
            ]
            for _ in range(FLOWS)
        ]
        flows[lengths.name] = np.median(found, axis=0)
    # A cached token's cost is the median over all: single flows scatter by more than it makes.
    short, long = np.concatenate(list(flows.values()), axis=1)
    per_cached = max(0.0, float(np.median((long - short)[:, 2] / (long - short)[:, 1])))
    curves = {name: decode_curve(each[0], per_cached, max(counts)) for name, each in flows.items()}
    trainer = Trainer.load(str(model), config.trainer, config.pipeline, 1.0, 1000, 0)
    return Alone(curves, median(prefills), train_curve(trainer, prompt))


def decode_curve(flows: np.ndarray, per_cached: float, most: int) -> DecodeCurve:
    """Lines through what `flow` returned, float array [counts, 3], and on to 0 and `most` live."""
    live, cached, seconds = flows.T
    bare = seconds - per_cached * cached
    slopes = np.diff(bare) / np.diff(live)
    first, last = bare[0] - slopes[0] * live[0], bare[-1] + slopes[-1] * (most - live[-1])
    at = [0.0, *live.tolist(), float(most)]
    return DecodeCurve(at, [float(first), *bare.tolist(), float(last)], [per_cached] * len(at))


def flow(
    generator: Generator, lengths: Lengths, prompt: int, n_async: int, prefill: float
) -> list[float]:
    """Groups through a generator by polls, as many at once as `n_async` has room for, to the end.

    Returns:
        Sequences, cached tokens and CPU seconds of a decode step, in the mean: all that polls take,
        less prefill (`prefill` seconds a token of a prompt).
    """
    size, sampling = GROUP, SamplingParams(lengths.longest)
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
    steps += generator.stats()["decode_steps"]
    return [sequences / steps, cached / steps, seconds / steps]


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
    made, size = [], GROUP
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
        tokens = ends(lengths, COMPLETIONS)
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


def calibrate(
    alone: Alone,
    publish: float,
    in_turn: dict[str, Any],
    beside: dict[str, Any],
    configs: tuple[Config, Config],
    predict: Callable[[Config, Costs], Outcome],
) -> tuple[dict[str, Costs], dict[str, Any]]:
    """Costs in the pipeline, by the name of the lengths, and what they came from.

    Args:
        alone: of the workers by themselves.
        publish: seconds for giving out weights.
        in_turn: figures of a synchronous run, of lengths `TWICE`: how much longer work takes in the
            pipeline, and how long a batch is on its way.
        beside: of an asynchronous one: how much longer work takes while the other works, and how
            long a generator then stands still between two polls.
        configs: of these two runs.
        predict: simulates them.
    """
    sizes = configs[0].pipeline
    update = in_turn["seconds_per_update"]
    decode, prefill, train = alone.decode[TWICE.name], alone.prefill, alone.train
    costs = Costs(
        decode,
        Line(0.0, prefill),
        train,
        publish=publish,
        receive=in_turn["pause_ms"] / 1000,
        verify=update * (1 - in_turn["verifier_idle"]) / sizes.n_batch,
    )
    generating, training = _longer(in_turn, predict(configs[0], costs))
    costs = replace(
        costs,
        decode=decode.times(generating),
        prefill=Line(0.0, prefill * generating),
        train=train.times(training),
    )
    told = predict(configs[0], costs)
    costs = replace(costs, latency=max(0.0, update - told.seconds_per_update))
    slower = (1.0, 1.0)
    for _ in range(5):
        costs = replace(
            costs, generator_beside_trainer=slower[0], trainer_beside_generator=slower[1]
        )
        told = predict(configs[1], costs)
        more = _longer(beside, told)
        slower = (slower[0] * more[0], slower[1] * more[1])
        idle = (beside["generator_idle"] - told.generator_idle) * beside["seconds_per_update"]
        live = told.utilisation * configs[1].pipeline.n_async
        tokens = told.tokens_per_second * told.seconds_per_update
        polls = tokens / (live * configs[1].generator.steps_per_call)
        costs = replace(costs, poll=max(0.0, costs.poll + idle / polls))
    figures = {
        "decode_ms_a_step": {
            name: {
                round(n, 1): round(1000 * s, 2)
                for n, s in zip(curve.live, curve.seconds, strict=True)
            }
            for name, curve in alone.decode.items()
        },
        "decode_ns_per_cached_token": {
            name: round(1e9 * curve.per_cached[0]) for name, curve in alone.decode.items()
        },
        "prefill_us_per_token": round(1e6 * prefill, 1),
        "train_us_per_token": round(1e6 * train.each, 1),
        "train_ns_per_pair": round(1e9 * train.pair, 1),
        "in_the_pipeline": [round(generating, 3), round(training, 3)],
        "beside_each_other": [round(b, 3) for b in slower],
        "verify_ms": round(1000 * costs.verify, 3),
        "latency_ms": round(1000 * costs.latency, 1),
        "poll_ms": round(1000 * costs.poll, 2),
        "pause_ms": round(1000 * costs.receive, 2),
    }
    by_lengths = {
        name: replace(costs, decode=curve.times(generating)) for name, curve in alone.decode.items()
    }
    return by_lengths, figures


def _longer(seen: dict[str, Any], told: Outcome) -> tuple[float, float]:
    """How much longer than told the generator and the trainer worked for an update."""
    generating, training = (
        (1 - seen[key])
        * seen["seconds_per_update"]
        / ((1 - getattr(told, key)) * told.seconds_per_update)
        for key in ("generator_idle", "trainer_idle")
    )
    return generating, training
