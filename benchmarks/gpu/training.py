"""Part C: the trainer beside the rate of matrix products, weights on the way to the generator, and
both workers on one GPU."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.attention import restore_flash_attention_impl

from benchmarks.gpu.bench import APART, Bench, requests
from benchmarks.gpu.bounds import train_flops
from benchmarks.gpu.decode import best_mode
from benchmarks.measure import random_groups, train_batch
from tramontane.batches import TrainBatch
from tramontane.config import Config
from tramontane.config.trainer import LoraConfig
from tramontane.placement.handle import ConcurrentHandle, Handle
from tramontane.placement.place import Placement, place
from tramontane.trainer import Trainer
from tramontane.trainer.lora import parameters

LORA = {"rank": 16, "alpha": 32.0}


class Setting(NamedTuple):
    """What is trained: `count` sequences of `length` tokens an optimizer step, packed into
    microbatches of `microbatch` tokens.

    Args:
        name: of the model's shape.
        kind: `full` (all weights), `lora`, or `sft` (all weights, on given responses).
        published: tokens/s that prime-rl publishes for one H100, or None.
        recomputed: blocks are recomputed in the backward pass.
        kernel: `trainer.attention_kernel`.
    """

    name: str
    kind: str
    length: int
    count: int
    microbatch: int
    published: int | None = None
    recomputed: bool = True
    kernel: str = "default"

    @property
    def label(self) -> str:
        kept = "" if self.recomputed else " kept"
        kernel = "" if self.kernel == "default" else f" {self.kernel}"
        return f"train {self.name} {self.kind} {self.length}{kept}{kernel}"

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
    Setting("Qwen2.5-1.5B", "full", 1024, 64, K16, recomputed=False),
    Setting("Qwen3-0.6B", "full", K16, 2, K16, 11896),
    Setting("Qwen3-0.6B", "full", K64, 2, K64, 10147),
    Setting("Qwen3-0.6B", "lora", K16, 2, K16, 13342),
    Setting("Qwen3-0.6B", "lora", K64, 2, K64, 9967),
    Setting("Qwen3-4B", "lora", K16, 2, K16, 6229),
    Setting("Qwen3-4B", "lora", K64, 2, K64, 4164),
    Setting("Qwen3-0.6B", "sft", 8192, 4, 8192, 26005),
    Setting("Qwen2.5-1.5B", "full", 32768, 2, 32768),
    Setting("Qwen3-0.6B", "full", K64, 2, K64, 10147, kernel="fa3"),
    Setting("Qwen3-0.6B", "lora", K64, 2, K64, 9967, kernel="fa3"),
    Setting("Qwen3-4B", "lora", K64, 2, K64, 4164, kernel="fa3"),
)
TIMED = 3, 15.0  # steps at most, and the seconds after which none is begun
# Weights of these shapes, by these placements.
TRANSFERS = ("Qwen3-0.6B", "thread"), ("Qwen3-0.6B", APART), ("Qwen2.5-1.5B", "thread")
TOGETHER = Setting("Qwen2.5-1.5B", "full", 1024, 16, K16)
ROWS, CONTEXT = 128, 1000  # sequences that are decoded beside the trainer, and tokens of a prompt
UPDATES = 4
CACHE_MIB = 20480  # keys and values, beside the trainer's memory
CALL_SECONDS = 240.0


def make_batch(bench: Bench, setting: Setting) -> TrainBatch:
    """A batch that trains on every token except the first of each sequence."""
    vocabulary = bench.shape(setting.name).vocabulary
    length, count = bench.pick((setting.length, setting.count), (setting.length // 256, 2))
    groups = random_groups(vocabulary, groups=1, size=count, prompt=1, tokens=length - 1)
    if setting.kind == "sft":  # each response is a group
        groups = [[sequence] for sequence in groups[0]]
    return train_batch(0, groups)


def make_trainer(bench: Bench, setting: Setting) -> Trainer:
    keys: dict[str, Any] = {"microbatch_tokens": bench.pick(setting.microbatch, 256)}
    keys["gradient_checkpointing"] = setting.recomputed
    keys["attention_kernel"] = setting.kernel
    if setting.kind == "lora":
        keys["lora"] = LORA
    if setting.kind == "sft":
        keys["objective"] = {"name": "sft"}
    return bench.make_trainer(setting.name, **keys)


def train(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Optimizer steps, without the first, which compiles and chooses kernels."""
    if setting.kernel == "fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return {"lacks": "FlashAttention 3, the module flash_attn_interface"}
    trainer, batch = make_trainer(bench, setting), make_batch(bench, setting)
    computed = trainer.step(batch)["computed_tokens"]
    if not bench.tiny:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    steps, enough = bench.pick(TIMED, (1, 0.0))
    while len(seconds) < steps and sum(seconds) <= enough:
        seconds.append(bench.seconds(lambda: trainer.step(batch)))
    peak = 0 if bench.tiny else torch.cuda.max_memory_allocated()
    restore_flash_attention_impl(_raise_warn=False)  # torch's own, for what this process does next
    return {
        "tokens_per_second": computed / min(seconds),
        "seconds": seconds,
        "peak_gib": peak / 2**30,
    }


class Workers(NamedTuple):
    """A trainer and a generator on one GPU, where a run's placement puts them."""

    placement: Placement
    trainer: Handle
    generator: ConcurrentHandle

    @staticmethod
    def call(worker: Handle, method: str, *args: Any) -> Any:
        return worker.submit(method, *args).result(CALL_SECONDS)


@contextmanager
def workers(
    bench: Bench, setting: Setting, kind: str, rows: int, max_len: int
) -> Iterator[Workers]:
    """The workers of `placement.kind`; the generator has `rows` slots of `max_len` tokens."""
    share = bench.pick({"gpus": 0.45}, {})
    config = Config.model_validate(
        {
            "placement": {"kind": kind, "generator": share, "trainer": share},
            "generator": {"device": bench.device},
            "trainer": {"device": bench.device},
        }
    )
    placement = place(config, note=lambda name, **what: None)
    trainer = placement.trainer(partial(make_trainer, bench, setting))
    trainer.started.result(CALL_SECONDS)  # transformers sets the dtype of new tensors globally
    limit = bench.pick(CACHE_MIB, 64)
    make = partial(bench.make_generator, setting.name, rows, max_len, best_mode())
    generator = placement.generator(0, partial(make, kv_cache_mib=limit))
    generator.started.result(CALL_SECONDS)
    yield Workers(placement, trainer, generator)
    for worker in (trainer, generator, placement):
        worker.close()


def transfer(bench: Bench, name: str, kind: str) -> dict[str, Any]:
    """Weight updates of a generator that decodes until they have arrived; milliseconds."""
    rows, prompt, room = 32, 64, 256
    setting = TOGETHER._replace(name=name)
    times: dict[str, list[float]] = {"publish_ms": [], "arrive_ms": [], "pause_ms": []}
    with workers(bench, setting, kind, rows, prompt + room) as w:
        w.call(w.generator, "submit", requests(0, rows, prompt, room))
        w.call(w.generator, "step", 8)
        w.call(w.trainer, "step", make_batch(bench, setting))
        for version in range(1, 5):
            decoding, began = w.generator.submit("step", 8), time.perf_counter()
            weights = w.call(w.trainer, "publish", w.placement.weights())
            times["publish_ms"].append(1e3 * (time.perf_counter() - began))
            w.generator.submit_background("fetch", version, weights).result(CALL_SECONDS)
            times["arrive_ms"].append(1e3 * (time.perf_counter() - began))
            decoding.result(CALL_SECONDS)
            times["pause_ms"].append(1e3 * w.call(w.generator, "swap", version))
    # Memory for the next version is taken in the first one.
    return {key: median(values[1:]) for key, values in times.items()}


def together(bench: Bench, kind: str) -> dict[str, Any]:
    """Decode steps and updates at the same time, and each worker alone before and after. `work` is
    what both do in a second, in seconds that they take alone: 1 if they took turns."""
    rows, prompt = bench.pick((ROWS, CONTEXT), (8, 20))
    room, updates = bench.pick((4000, UPDATES), (4000, 1))
    batch = make_batch(bench, TOGETHER)
    with workers(bench, TOGETHER, kind, rows, prompt + room) as w:

        def decode(steps: int) -> float:
            return bench.seconds(lambda: w.call(w.generator, "step", steps)) / steps

        w.call(w.generator, "submit", requests(0, rows, prompt, room))
        decode(8)
        w.call(w.trainer, "step", batch)
        update = bench.seconds(lambda: w.call(w.trainer, "step", batch))
        before, began, steps = decode(bench.pick(100, 4)), time.perf_counter(), 0
        for _ in range(updates):
            running = w.trainer.submit("step", batch)
            while not running.done():
                w.call(w.generator, "step", 8)
                steps += 8
            running.result()
        elapsed = time.perf_counter() - began
        alone = (before + decode(bench.pick(100, 4))) / 2
    return {
        "decode_ms": 1e3 * alone,
        "decode_beside_ms": 1e3 * elapsed / steps,
        "update_seconds": update,
        "update_beside_seconds": elapsed / updates,
        "work": (alone * steps + update * updates) / elapsed,
    }


ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    **{setting.label: partial(train, setting=setting) for setting in SETTINGS},
    **{
        f"weights {name} {kind}": partial(transfer, name=name, kind=kind)
        for name, kind in TRANSFERS
    },
    **{f"together {kind}": partial(together, kind=kind) for kind in ("thread", APART)},
}
