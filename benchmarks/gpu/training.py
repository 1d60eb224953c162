"""Part C: the trainer beside the rate of matrix products, weights on the way to the generator, and
both workers on one GPU."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench, requests
from benchmarks.gpu.bounds import train_flops
from benchmarks.gpu.decode import best_mode
from benchmarks.measure import random_groups, train_batch
from tramontane.config.trainer import LoraConfig
from tramontane.placement.handle import TRAINER, Handle
from tramontane.placement.ranks import ProcessRanks
from tramontane.placement.thread import ThreadHandle
from tramontane.trainer import Trainer
from tramontane.trainer.lora import parameters
from tramontane.types import TrainBatch

LORA = {"rank": 16, "alpha": 32.0}


class Setting(NamedTuple):
    """What is trained: `count` sequences of `length` tokens an optimizer step, packed into
    microbatches of `microbatch` tokens.

    Args:
        name: of the model's shape.
        kind: `full` (all weights), `lora`, or `sft` (all weights, on given responses).
        published: tokens/s that prime-rl publishes for one H100, or None.
    """

    name: str
    kind: str
    length: int
    count: int
    microbatch: int
    published: int | None = None

    @property
    def label(self) -> str:
        return f"train {self.name} {self.kind} {self.length}"

    def adapters(self, bench: Bench) -> int | None:
        """Parameters of the adapters; None if all weights are trained."""
        if self.kind != "lora":
            return None
        return parameters(bench.shape(self.name).linear_layers, LoraConfig.model_validate(LORA))

    def flops(self, bench: Bench) -> float:
        """Operations of a trained token."""
        return train_flops(bench.shape(self.name), self.length, self.adapters(bench))


K16, K64 = 16384, 65536
SETTINGS = (
    Setting("Qwen2.5-1.5B", "full", 1024, 64, K16),
    Setting("Qwen3-0.6B", "full", K16, 2, K16, 11896),
    Setting("Qwen3-0.6B", "full", K64, 2, K64, 10147),
    Setting("Qwen3-0.6B", "lora", K16, 2, K16, 13342),
    Setting("Qwen3-0.6B", "lora", K64, 2, K64, 9967),
    Setting("Qwen3-4B", "lora", K16, 2, K16, 6229),
    Setting("Qwen3-4B", "lora", K64, 2, K64, 4164),
    Setting("Qwen3-0.6B", "sft", 8192, 4, 8192, 26005),
    Setting("Qwen2.5-1.5B", "full", 32768, 2, 32768),
)
TIMED = 3, 15.0  # at most so many steps, fewer after so many seconds
# Weights of these shapes, by these placements.
TRANSFERS = ("Qwen3-0.6B", "thread"), ("Qwen3-0.6B", "ray"), ("Qwen2.5-1.5B", "thread")
TOGETHER = Setting("Qwen2.5-1.5B", "full", 1024, 16, K16)
ROWS, CONTEXT = 128, 1000  # sequences that are decoded beside the trainer, and tokens of a prompt
UPDATES = 4
START_SECONDS = 240.0


def make_batch(bench: Bench, setting: Setting) -> TrainBatch:
    """A batch in which every token but the first of a sequence is trained on."""
    vocabulary = bench.shape(setting.name).vocabulary
    length, count = bench.pick((setting.length, setting.count), (setting.length // 256, 2))
    groups = random_groups(vocabulary, groups=1, size=count, prompt=1, tokens=length - 1)
    if setting.kind == "sft":  # each response is a group
        groups = [[sequence] for sequence in groups[0]]
    return train_batch(0, groups)


def make_trainer(bench: Bench, setting: Setting) -> Trainer:
    keys: dict[str, Any] = {"microbatch_tokens": bench.pick(setting.microbatch, 256)}
    if setting.kind == "lora":
        keys["lora"] = LORA
    if setting.kind == "sft":
        keys["objective"] = {"name": "sft"}
    return bench.make_trainer(setting.name, **keys)


def train(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Optimizer steps, after one in which kernels are compiled and chosen."""
    trainer, batch = make_trainer(bench, setting), make_batch(bench, setting)
    computed = trainer.step(batch)["computed_tokens"]
    if not bench.tiny:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    steps, enough = bench.pick(TIMED, (1, 0.0))
    while len(seconds) < steps and sum(seconds) <= enough:
        seconds.append(bench.seconds(lambda: trainer.step(batch)))
    peak = 0 if bench.tiny else torch.cuda.max_memory_allocated()
    return {
        "tokens_per_second": computed / min(seconds),
        "seconds": seconds,
        "peak_gib": peak / 2**30,
    }


def transfer(bench: Bench, name: str, placement: str) -> dict[str, Any]:
    """The weights' way to two generators, by `benchmarks/weight_update.py`."""
    import weight_update  # which is a script, and so are its imports

    with tempfile.TemporaryDirectory() as folder:
        bench.make_model(name, torch.bfloat16).save_pretrained(folder)
        if not bench.tiny:
            torch.cuda.empty_cache()
        settings = Namespace(
            device=bench.device, dtype="bfloat16", ranks=1, slots=32, completions=32, updates=3
        )
        keep, recompute = weight_update.measure(folder, placement, settings)
    return {
        "publish_ms": keep["publish_ms"]["median"],
        "arrive_ms": keep["arrive_ms"]["median"],
        "pause_ms": keep["pause_ms"]["median"],
        "recompute_ms": recompute["pause_ms"]["median"],
    }


def together(bench: Bench, place: str) -> dict[str, Any]:
    """Decode steps and updates at the same time, and each worker alone before: the trainer in a
    `thread` or a `process` beside the generator's thread. `work` is what both do in a second, in
    seconds that they take alone: 1 if they took turns."""
    rows, prompt = bench.pick((ROWS, CONTEXT), (8, 20))
    room, updates = bench.pick((4000, UPDATES), (4000, 1))
    make = partial(make_trainer, bench, TOGETHER)
    trainer: Handle
    if place == "thread":
        trainer = ThreadHandle(TRAINER, make, bench.device)
    else:
        trainer = ProcessRanks(TRAINER, make, 1, bench.device, START_SECONDS)
    trainer.started.result(START_SECONDS)  # transformers sets the dtype of new tensors globally
    mode, limit = best_mode(), bench.pick(20480, 64)
    generator = ThreadHandle(
        "generator",
        lambda: bench.make_generator(TOGETHER.name, rows, prompt + room, mode, kv_cache_mib=limit),
        bench.device,
    )
    batch = make_batch(bench, TOGETHER)

    def call(worker: Handle, method: str, *args: Any) -> Any:
        return worker.submit(method, *args).result(START_SECONDS)

    def decode(steps: int) -> float:
        return bench.seconds(lambda: call(generator, "step", steps)) / steps

    call(generator, "submit", requests(0, rows, prompt, room))
    decode(8)
    call(trainer, "step", batch)
    update = bench.seconds(lambda: call(trainer, "step", batch))
    before, began, steps = decode(bench.pick(100, 4)), time.perf_counter(), 0
    for _ in range(updates):
        running = trainer.submit("step", batch)
        while not running.done():
            call(generator, "step", 8)
            steps += 8
        running.result(START_SECONDS)
    elapsed = time.perf_counter() - began
    alone = (before + decode(bench.pick(100, 4))) / 2
    for worker in (trainer, generator):
        worker.close()
    found = {
        "decode_ms": 1e3 * alone,
        "decode_beside_ms": 1e3 * elapsed / steps,
        "update_seconds": update,
        "update_beside_seconds": elapsed / updates,
    }
    return found | {"work": alone * steps / elapsed + update * updates / elapsed}


ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    **{setting.label: partial(train, setting=setting) for setting in SETTINGS},
    **{
        f"weights {name} {placement}": partial(transfer, name=name, placement=placement)
        for name, placement in TRANSFERS
    },
    **{f"together {place}": partial(together, place=place) for place in ("thread", "process")},
}
