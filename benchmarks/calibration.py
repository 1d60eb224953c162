"""Measured costs of the pipeline's workers on this machine, for `scaling.py`."""

from __future__ import annotations

import itertools
import math
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from costs import DecodeCurve, TrainCurve
from workload import FIVEFOLD, FIXED, TWICE, VOCAB, Lengths

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import Config
from tramontane.generator import Generator
from tramontane.planning.simulate import Costs, Outcome
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams

GROUP = 8
COMPLETIONS = 48  # completions in a trained batch
REPEATS = 2  # runs of each flow and drain
SEEDS = itertools.count(1)
BINS = 8  # maximum points of a curve of drains


class Alone(NamedTuple):
    """Costs of the engine and of the trainer when each works alone, in CPU seconds.

    Args:
        mixed: decode steps of sequences that come and go, by the name of their lengths; reading
            the cache is included.
        alike: decode steps of sequences that began together, which cost less if many sequences of
            spread lengths are live.
        prefill: seconds per prompt token.
        train: cost of an update.
    """

    mixed: dict[str, DecodeCurve]
    alike: dict[str, DecodeCurve]
    prefill: float
    train: TrainCurve


def measure(models: dict[str, Path], config: Config, prompt: int, counts: tuple[int, ...]) -> Alone:
    """Measure an engine at each number of sequences in flight in `counts`, and the trainer."""
    mixed, alike, prefills = {}, {}, []
    for lengths in (FIXED, TWICE, FIVEFOLD):
        model, longest = str(models[lengths.name]), prompt + lengths.longest
        generator = Generator.load(model, config.generator, max(counts), longest)
        seconds = [prefill_time(generator, 4, prompt) / (4 * prompt) for _ in range(5)]
        prefills.append(max(0.0, median(seconds)))
        prefill = median(prefills)
        flow(generator, lengths, prompt, max(counts), 0.0)  # warms up
        flows, polls = [], []
        for _ in range(REPEATS):
            flows.append([flow(generator, lengths, prompt, n, prefill) for n in counts])
            polls += [row for n in counts for row in drain(generator, lengths, prompt, n, prefill)]
        mixed[lengths.name] = curve(np.median(flows, axis=0), max(counts))
        alike[lengths.name] = curve(binned(np.array(polls)), max(counts))
    trainer = Trainer.load(model, config.trainer, 1000)
    return Alone(mixed, alike, median(prefills), train_curve(trainer, prompt))


def curve(points: np.ndarray, most: int) -> DecodeCurve:
    """Lines through measured steps (float array [points, 2] of live sequences and seconds),
    extended to 0 and to `most` live sequences."""
    live, seconds = points.T
    slopes = np.diff(seconds) / np.diff(live)
    first, last = seconds[0] - slopes[0] * live[0], seconds[-1] + slopes[-1] * (most - live[-1])
    at = [0.0, *live.tolist(), float(most)]
    return DecodeCurve(at, [float(first), *seconds.tolist(), float(last)], [0.0] * len(at))


def binned(polls: np.ndarray) -> np.ndarray:
    """Merge polls into points of about equal numbers of decode steps.

    Args:
        polls: float array [polls, 3] of steps, mean live sequences, and seconds.

    Returns:
        Float array [points, 2] of live sequences and seconds of a step.
    """
    polls = polls[np.argsort(polls[:, 1])]
    steps = np.cumsum(polls[:, 0])
    points = []
    for part in np.split(polls, np.searchsorted(steps, steps[-1] * np.arange(1, BINS) / BINS)):
        if len(part):
            live = float(np.average(part[:, 1], weights=part[:, 0]))
            seconds = float(part[:, 2].sum() / part[:, 0].sum())
            if not points or live > points[-1][0] + 1:
                points.append((live, seconds))
    return np.array(points)


def flow(
    generator: Generator, lengths: Lengths, prompt: int, n_async: int, prefill: float
) -> tuple[float, float]:
    """Run groups through a generator to the end, by polls, as many at once as `n_async` allows.

    Returns:
        Mean number of live sequences, and CPU seconds of a decode step: the time of all polls less
        prefill (`prefill` seconds per prompt token).
    """
    groups = make_groups(lengths, prompt, max(16, 4 * n_async // GROUP))
    seconds = -prefill * prompt * len(groups)
    before, unfinished = generator.stats(), 0
    while groups or unfinished:
        n = min(len(groups), (n_async - unfinished) // GROUP)
        new, groups = [r for group in groups[:n] for r in group], groups[n:]
        began = time.process_time()
        ended = generator.poll(new).completions
        seconds += time.process_time() - began
        unfinished += len(new) - len(ended)
    after = generator.stats()
    steps, tokens = (after[k] - before[k] for k in ("decode_steps", "generated_tokens"))
    return tokens / steps, seconds / steps


def drain(
    generator: Generator, lengths: Lengths, prompt: int, n_async: int, prefill: float
) -> list[tuple[float, float, float]]:
    """Run `n_async` sequences that begin together until the last ends. Returns, for each poll, its
    decode steps, mean live sequences, and CPU seconds less prefill as in `flow`."""
    groups = make_groups(lengths, prompt, n_async // GROUP)
    new = [r for group in groups for r in group]
    spent, unfinished, polls = prefill * prompt * len(groups), len(new), []
    while unfinished:
        before = generator.stats()
        began = time.process_time()
        unfinished -= len(generator.poll(new).completions)
        seconds = time.process_time() - began - spent
        after = generator.stats()
        steps, tokens = (after[k] - before[k] for k in ("decode_steps", "generated_tokens"))
        polls.append((steps, tokens / steps, seconds))
        new, spent = [], 0.0
    return polls


def make_groups(lengths: Lengths, prompt: int, count: int) -> list[list[Completion]]:
    """Requests with seeds that were never used before."""
    sampling = SamplingParams(lengths.longest)
    return [
        [
            Completion.requested(g, i, [5 + g % 100] * prompt, next(SEEDS), sampling)
            for i in range(GROUP)
        ]
        for g in range(count)
    ]


def prefill_time(generator: Generator, prompts: int, length: int) -> float:
    """Seconds to admit the prompts, less the decode step that follows."""
    sampling = SamplingParams(8)
    requests = [Completion.requested(i, 0, [6 + i] * length, i, sampling) for i in range(prompts)]
    began = time.process_time()
    generator.submit(requests)
    generator.step(1)
    first = time.process_time() - began
    began = time.process_time()
    generator.step(1)
    second = time.process_time() - began
    generator.cancel_all()
    return first - second


def make_batch(lengths: list[int], prompt: int) -> TrainBatch:
    prompt_ids, made = array("i", [5] * prompt), []
    for start in range(0, len(lengths), GROUP):
        made.append(
            [
                TrainSequence(
                    prompt_ids=prompt_ids,
                    token_ids=array("i", [7] * n),
                    logprobs=array("f", [-7.6] * n),
                    versions=array("i", [0] * n),
                    reward=float(i % 2),
                )
                for i, n in enumerate(lengths[start : start + GROUP])
            ]
        )
    settings = BatchSettings("", 1.0, l_max=max(lengths), n_minibatch=len(lengths))
    return TrainBatch(0, made, settings)


def ends(lengths: Lengths, count: int) -> list[int]:
    """Tokens of `count` completions, evenly over their distribution."""
    keep = math.log(1 - lengths.eos / VOCAB)
    drawn = [1 + int(math.log((i + 0.5) / count) / keep) for i in range(count)]
    drawn = [min(lengths.longest, n) for n in drawn]
    random.Random(0).shuffle(drawn)
    return drawn


def train_curve(trainer: Trainer, prompt: int, repeats: int = 5) -> TrainCurve:
    """Seconds of an update, for a batch of equal lengths and a batch of spread lengths."""
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
    synchronous: dict[str, Any],
    asynchronous: dict[str, Any],
    configs: tuple[Config, Config],
    predict: Callable[[Config, Costs], Outcome],
) -> tuple[dict[tuple[str, bool], Costs], dict[str, Any]]:
    """Costs in the pipeline, by the name of the lengths and whether it is synchronous (each batch
    then begins together), and what they came from.

    Args:
        alone: costs of the workers by themselves.
        publish: seconds to publish weights.
        synchronous: figures of a synchronous run of lengths `TWICE`. They give the time of a poll
            on top of its steps, the slowdown of an update in the pipeline, and a batch's latency.
        asynchronous: figures of an asynchronous run. They give the slowdown of each side while the
            other works, and the time that a generator then stands still between two polls.
        configs: configs of these two runs.
        predict: simulates a run.
    """
    sizes = configs[0].pipeline
    update = synchronous["seconds_per_update"]
    costs = Costs(
        alone.alike[TWICE.name],
        lambda tokens: alone.prefill * tokens,
        alone.train,
        publish=publish,
        swap=synchronous["pause_ms"] / 1000,
        verify=update * (1 - synchronous["verifier_idle"]) / sizes.n_batch,
    )
    predicted = predict(configs[0], costs)
    generating = (1 - synchronous["generator_idle"]) * update
    generating -= (1 - predicted.generator_idle) * predicted.seconds_per_update
    training = _longer(synchronous, predicted)[1]
    costs = replace(
        costs,
        call=max(0.0, generating / _polls(predicted, configs[0])),
        train=alone.train.times(training),
    )
    predicted = predict(configs[0], costs)
    costs = replace(
        costs,
        decode=alone.mixed[TWICE.name],
        latency=max(0.0, update - predicted.seconds_per_update),
    )
    slower = (1.0, 1.0)
    for _ in range(5):
        costs = replace(costs, generator_slowdown=slower[0], trainer_slowdown=slower[1])
        predicted = predict(configs[1], costs)
        more = _longer(asynchronous, predicted)
        slower = (slower[0] * more[0], slower[1] * more[1])
        idle = (asynchronous["generator_idle"] - predicted.generator_idle) * asynchronous[
            "seconds_per_update"
        ]
        costs = replace(costs, poll=max(0.0, costs.poll + idle / _polls(predicted, configs[1])))
    by_lengths = {
        (name, together): replace(costs, decode=steps)
        for together, curves in ((False, alone.mixed), (True, alone.alike))
        for name, steps in curves.items()
    }
    return by_lengths, _figures(alone, costs, training)


def _figures(alone: Alone, costs: Costs, training: float) -> dict[str, Any]:
    """The calibration as printed; `training` is the slowdown of an update in the pipeline."""
    slower = costs.generator_slowdown, costs.trainer_slowdown
    return {
        "decode_ms_a_step": points(alone.mixed),
        "decode_ms_a_step_alike": points(alone.alike),
        "prefill_us_per_token": round(1e6 * alone.prefill, 1),
        "train_us_per_token": round(1e6 * alone.train.each, 1),
        "train_ns_per_pair": round(1e9 * alone.train.pair, 1),
        "training_in_the_pipeline": round(training, 3),
        "call_ms": round(1000 * costs.call, 2),
        "beside_each_other": [round(factor, 3) for factor in slower],
        "verify_ms": round(1000 * costs.verify, 3),
        "latency_ms": round(1000 * costs.latency, 1),
        "poll_ms": round(1000 * costs.poll, 2),
        "pause_ms": round(1000 * costs.swap, 2),
    }


def points(curves: dict[str, DecodeCurve]) -> dict[str, dict[float, float]]:
    """Milliseconds of a decode step by number of live sequences, by the name of the lengths."""
    return {
        name: {
            round(n, 1): round(1000 * s, 2) for n, s in zip(each.live, each.seconds, strict=True)
        }
        for name, each in curves.items()
    }


def _polls(predicted: Outcome, config: Config) -> float:
    """A generator's polls for an update."""
    live = predicted.utilization * config.pipeline.n_async
    steps = predicted.tokens_per_second * predicted.seconds_per_update / live
    return steps / config.generator.steps_per_call


def _longer(seen: dict[str, Any], predicted: Outcome) -> tuple[float, float]:
    """Seconds that the generator and the trainer worked for an update, over the predicted ones."""
    generating, training = (
        (1 - seen[key])
        * seen["seconds_per_update"]
        / ((1 - getattr(predicted, key)) * predicted.seconds_per_update)
        for key in ("generator_idle", "trainer_idle")
    )
    return generating, training
