"""The cost of a weight update: its duration, the pause of generation, and the memory.

    python benchmarks/weight_update.py [--models 1.8M 25M] [--placements thread ray] [--ranks 1]
                                       [--slots 128] [--dtype bfloat16] [--updates 10]
                                       [--completions 128] [--device cuda]

A model is a size of `measure.SIZES` or a checkpoint's folder. For each model and placement, one
trainer and two generators, with `kv_cache: keep` and `recompute`; each generator has 128 sequences
in flight, with prompts of 100 tokens in groups of 16. In an update, the generators decode, the
trainer publishes, and both generators fetch the weights while they keep decoding; then they swap
them in, one after the other.

`publish`: milliseconds until the controller has the published weights. `arrive`: milliseconds from
the start of publishing until both generators have all weights, checked. `pause`: milliseconds that
generation stands still, by the generator's clock; its share is relative to the training of an
update, one step on 128 completions of 100 + 100 tokens (measured on `--completions`). `memory`: the
rise of the trainer's process while it publishes (the controller's, with several ranks), and of the
generator's (`keep`) in its first update, without pages shared between processes; the trainer's is
measured in further updates. Prints a table, writes weight_update.json next to this file, and exits
with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import VOCAB, Memory, Promise, finish, machine, make_llama, spread
from transformers import PreTrainedModel
from transformers.utils import logging

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import Config
from tramontane.generator import Generator
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.weights import BUCKET_BYTES
from tramontane.placement import Handle
from tramontane.placement.place import place
from tramontane.trainer.trainer import Trainer
from tramontane.types import Completion, SamplingParams

GROUP, PROMPT, CONTEXT = 16, 100, 1024
SLACK = 8 << 20  # bytes: Python's own memory, and freed memory that the C library keeps
KINDS = ("keep", "recompute")


class Measured:
    """A worker, and the memory that its last weighed call took."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.worker = make()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def weigh(self, method: str, *args: Any) -> Any:
        with Memory() as self.memory:
            return self.call(method, *args)

    def rise(self) -> int:
        return self.memory.rise


def make_model(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    if Path(name).is_dir():
        return load_model(name, dtype, device)
    model = make_llama(name, CONTEXT).to(device, dtype)
    model.set_attn_implementation("packed")
    return model


def make_trainer(config: Config, name: str) -> Measured:
    model = make_model(name, torch.float32, config.trainer.device)
    return Measured(lambda: Trainer(model, config.trainer, 100))


def make_generator(config: Config, name: str, kv_cache: str, slots: int) -> Measured:
    dtype = getattr(torch, config.generator.dtype)
    model = make_model(name, dtype, config.generator.device)
    settings = config.generator.model_copy(update={"kv_cache": kv_cache})
    return Measured(lambda: Generator(model, load_tokenizer("tiny"), settings, slots, CONTEXT))


def make_requests(count: int) -> list[Completion]:
    rng = random.Random(0)
    requests: list[Completion] = []
    for group in range(count // GROUP):
        prompt = [rng.randrange(2, VOCAB) for _ in range(PROMPT)]
        for i in range(GROUP):
            params = SamplingParams(CONTEXT - PROMPT)
            requests.append(Completion.requested(group, i, prompt, rng.getrandbits(63), params))
    return requests


def make_batch(completions: int) -> TrainBatch:
    rng = random.Random(1)
    groups = []
    for _ in range(completions // GROUP):
        prompt_ids = array("i", [rng.randrange(VOCAB) for _ in range(PROMPT)])
        groups.append(
            [
                TrainSequence(
                    prompt_ids=prompt_ids,
                    token_ids=array("i", [rng.randrange(VOCAB) for _ in range(100)]),
                    logprobs=array("f", [-4.4] * 100),
                    versions=array("i", [0] * 100),
                    reward=float(index % 2),
                )
                for index in range(GROUP)
            ]
        )
    settings = BatchSettings("", 1.0, l_max=256, n_minibatch=completions)
    return TrainBatch(0, groups, settings)


def measure(name: str, kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one placement: a generator with `kv_cache: keep`, and one with `recompute`."""
    share = {"gpus": 0.3} if args.device.startswith("cuda") else {}
    config = Config.model_validate(
        {
            "placement": {"kind": kind, "generator": share, "trainer": share},
            "trainer": {"device": args.device, "dtype": args.dtype, "ranks": args.ranks},
            "generator": {"device": args.device, "dtype": args.dtype, "workers": 2},
            "pipeline": {"n_batch": 128, "n_async": 256, "group_size": GROUP},
        }
    )
    placement = place(config, note=lambda name, **what: None)
    trainer = placement.trainer(partial(make_trainer, config, name))
    generators = {
        kv_cache: placement.generator(
            number, partial(make_generator, config, name, kv_cache, args.slots)
        )
        for number, kv_cache in enumerate(KINDS)
    }
    workers: list[Handle] = [trainer, *generators.values()]
    for worker in workers:
        worker.started.result()

    def ask(worker: Handle, method: str, *rest: Any, how: str = "call") -> Any:
        return worker.submit(how, method, *rest).result()

    began = time.perf_counter()
    ask(trainer, "step", make_batch(args.completions))
    training = (time.perf_counter() - began) * config.pipeline.n_batch / args.completions
    for generator in generators.values():
        ask(generator, "submit", make_requests(16 * args.slots))
        ask(generator, "step", 8)
    weights = ask(trainer, "publish", placement.weights())
    # Alone, since threads share the memory of one process. All tensors are touched here.
    ask(generators["keep"], "fetch", 1, weights, how="weigh")
    generator_rise = generators["keep"].submit("rise").result()
    ask(generators["recompute"], "fetch", 1, weights)
    trainer_rise, publish, arrive = 0, list[float](), list[float]()
    pauses: dict[str, list[float]] = {kv_cache: [] for kv_cache in KINDS}
    for update in range(2, args.updates + 4):
        decoding = [g.submit("call", "step", 8) for g in generators.values()]
        began = time.perf_counter()
        if update > args.updates + 1:  # two further updates
            wait(decoding)
            weights = ask(trainer, "publish", placement.weights(), how="weigh")
            trainer_rise = max(trainer_rise, trainer.submit("rise").result())
            continue
        weights = ask(trainer, "publish", placement.weights())
        publish.append(1e3 * (time.perf_counter() - began))
        fetches = [
            g.submit_background("call", "fetch", update, weights) for g in generators.values()
        ]
        for fetched in fetches:
            fetched.result()
        arrive.append(1e3 * (time.perf_counter() - began))
        wait(decoding)
        for kv_cache, generator in generators.items():
            pauses[kv_cache].append(1e3 * ask(generator, "swap", update))
    flight = ask(generators["keep"], "stats")["decoding"]
    for worker in [*workers, placement]:
        worker.close()
    parameters = sum(p.numel() for p in make_model(name, torch.float32, "cpu").parameters())
    version_bytes = parameters * getattr(torch, args.dtype).itemsize
    return [
        {
            "model": Path(name).name,
            "placement": kind,
            "kv_cache": kv_cache,
            "in_flight": flight,
            "publish_ms": spread(publish, 2),
            "arrive_ms": spread(arrive, 2),
            "pause_ms": spread(pauses[kv_cache], 3),
            "training_seconds": round(training, 2),
            "pause_share": round(median(pauses[kv_cache]) / 1e3 / training, 5),
            "version_mb": round(version_bytes / 2**20, 1),
            "trainer_rise_mb": round(trainer_rise / 2**20, 1),
            "generator_rise_mb": round(generator_rise / 2**20, 1),
        }
        for kv_cache in KINDS
    ]


def promises(rows: list[dict[str, Any]]) -> list[Promise]:
    found = []
    limit = (BUCKET_BYTES + SLACK) / 2**20
    for keep, recompute in zip(rows[::2], rows[1::2], strict=True):
        where = f"{keep['model']}, {keep['placement']}"
        kept, rebuilt = keep["pause_ms"]["median"], recompute["pause_ms"]["median"]
        found.append(
            Promise(
                f"{where}: keeping cached keys and values pauses for less than recomputing them",
                f"{kept:.1f} ms against {rebuilt:.1f}",
                kept < rebuilt,
            )
        )
        found.append(
            Promise(
                f"{where}: the pause is under 1 % of the training of an update",
                f"{100 * keep['pause_share']:.2f} %",
                keep["pause_share"] < 0.01,
            )
        )
        trainer, generator = keep["trainer_rise_mb"], keep["generator_rise_mb"]
        staged = keep["version_mb"] + SLACK / 2**20
        found += [
            Promise(
                f"{where}: the trainer holds no more than a bucket besides its weights",
                f"{trainer:.0f} MB; a bucket and slack are {limit:.0f}",
                trainer <= limit,
            ),
            Promise(
                f"{where}: a generator holds no more than one further version of the weights",
                f"{generator:.0f} MB; a version and slack are {staged:.0f}",
                generator <= staged,
            ),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["1.8M", "25M"])
    parser.add_argument("--placements", nargs="+", default=["thread", "ray"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()

    print(f"{args.slots} sequences in flight, {args.dtype}; milliseconds: median (range)")
    print(
        f"{'model':>8} {'placement':>9} {'kv_cache':>9} {'publish':>20} {'arrive':>22} "
        f"{'pause':>24} {'of training':>11} {'memory over weights, MB':>24}"
    )
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for kind in args.placements:
            for row in measure(name, kind, args):
                rows.append(row)
                publish, arrive, pause = (
                    f"{r['median']:.1f} ({r['lowest']:.1f}–{r['highest']:.1f})"
                    for r in (row["publish_ms"], row["arrive_ms"], row["pause_ms"])
                )
                memory = f"{row['trainer_rise_mb']} + {row['generator_rise_mb']}"
                print(
                    f"{row['model']:>8} {row['placement']:>9} {row['kv_cache']:>9} {publish:>20} "
                    f"{arrive:>22} {pause:>24} {100 * row['pause_share']:>10.3f}% {memory:>24}",
                    flush=True,
                )
    report = {"machine": machine(args.device), **vars(args), "rows": rows}
    finish(__file__, report, promises(rows))


if __name__ == "__main__":
    main()
