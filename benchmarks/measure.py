"""Shared by the benchmarks: models of known sizes, spreads, and promises kept or broken."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config.device import processor

# Hidden size, layers, intermediate size, heads. 1.8M is the Llama of `vs_trl.py`.
SIZES = {
    "1M": (128, 5, 344, 4),
    "1.8M": (192, 4, 512, 6),
    "5M": (256, 6, 688, 8),
    "25M": (512, 8, 1376, 8),
}
VOCAB = 83


class Promise(NamedTuple):
    """A figure that the project promises: `found` was measured, `kept` is the verdict."""

    promise: str
    found: str
    kept: bool


def make_llama(size: str, context: int = 1024, seed: int = 0) -> LlamaForCausalLM:
    """A randomly initialized Llama in float32: no BOS token, EOS 1, padding 0, tied embeddings."""
    hidden, layers, intermediate, heads = SIZES[size]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def random_groups(
    vocabulary: int, *, groups: int, size: int, prompt: int, tokens: int
) -> list[list[TrainSequence]]:
    """Groups of `size` completions of `tokens` tokens each, with prompts of `prompt` tokens."""
    rng = random.Random(0)

    def ids(count: int) -> array[int]:
        return array("i", [rng.randrange(vocabulary) for _ in range(count)])

    made = []
    for _ in range(groups):
        prompt_ids = ids(prompt)
        made.append(
            [
                TrainSequence(
                    prompt_ids=prompt_ids,
                    token_ids=ids(tokens),
                    logprobs=array("f", [-10.0] * tokens),
                    versions=array("i", [0] * tokens),
                    reward=float(i % 2),
                )
                for i in range(size)
            ]
        )
    return made


def train_batch(version: int, groups: list[list[TrainSequence]]) -> TrainBatch:
    """A batch for one optimizer step."""
    count, longest = len(groups) * len(groups[0]), len(groups[0][0].token_ids)
    return TrainBatch(version, groups, batch_settings(longest, count))


def batch_settings(l_max: int, n_minibatch: int) -> BatchSettings:
    """Settings of a batch. Older versions, which some benchmarks compare with, need the upper clip
    bound too."""
    older = {"eps_high": 0.28} if "eps_high" in BatchSettings.__dataclass_fields__ else {}
    return BatchSettings("", 1.0, l_max=l_max, n_minibatch=n_minibatch, **older)


def spread(values: Sequence[float], digits: int = 0) -> dict[str, float]:
    """Median and range of repeated measurements."""
    figures = {"median": median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


def gemm_peak(dtype: torch.dtype, device: str, n: int = 2048) -> float:
    """Operations per second of a square matrix product; the best of five."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    clock = make_clock(device)
    seconds = []
    for _ in range(5):
        start = clock()
        _ = a @ b
        seconds.append(clock() - start)
    return 2 * n**3 / min(seconds)


def make_clock(device: str) -> Callable[[], float]:
    if device == "cpu":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def bandwidth(device: str, n: int = 2**30) -> float:
    """Bytes per second that a large copy reads and writes; the best of five."""
    a, b = (torch.ones(n, dtype=torch.uint8, device=device) for _ in range(2))
    clock = make_clock(device)
    seconds = []
    for _ in range(5):
        start = clock()
        b.copy_(a)
        seconds.append(clock() - start)
    return 2 * n / min(seconds)


class Memory:
    """Context manager that measures how far this process's own memory rises, in bytes (`rise`).

    Mapped pages that are shared with other processes do not count. Linux only.
    """

    def __enter__(self) -> Memory:
        self.rise, self._before, self._done = 0, _own_memory(), threading.Event()
        self._watch = threading.Thread(target=self._sample)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.rise = max(self.rise, _own_memory() - self._before)


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def machine(device: str = "cpu") -> dict[str, Any]:
    """Description of the machine that a benchmark ran on."""
    gpu = {"gpu": torch.cuda.get_device_name()} if device.startswith("cuda") else {}
    return {"cpu": processor(), "cores": os.cpu_count(), "torch": torch.__version__} | gpu


def finish(script: str | Path, report: dict[str, Any], promises: Sequence[Promise] = ()) -> None:
    """Write the report next to the script, print each promise with its figure, and exit; the exit
    code is 1 if a promise is broken."""
    report = report | {"promises": [p._asdict() for p in promises]}
    path = Path(script).with_suffix(".json")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for promise, found, kept in promises:
        print(f"{'kept  ' if kept else 'BROKEN'}  {promise}: {found}")
    sys.exit(not all(p.kept for p in promises))
