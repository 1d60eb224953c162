"""Tokens per second of the generator and the trainer on a checkpoint, next to their bounds.

    python -m benchmarks.bounds MODEL [--slots 96 192] [--tokens 1024 2048]
                                [--dtype auto|bfloat16|float32] [--device cpu|cuda] [--repeats 3]

Each works alone, on a CPU with one thread. A decode step does two operations per parameter and live
sequence, at most at the rate of a large matrix product, and reads all weights, at most at the
bandwidth of a large copy: the slower of the two is its bound. A trained token costs six operations
per parameter; its bound is the rate of matrix products. Parameters are those of the linear layers
and the output head. Attention is not part of the bounds, so long sequences stay further below them.

Rates are measured in the same run, in the same dtype, on a CPU in processor time. The script prints
a table and writes bounds.json next to this file, from which `tramontane plan gpu=FILE` can plan.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.measure import (
    bandwidth,
    finish,
    gemm_peak,
    machine,
    make_clock,
    random_groups,
    spread,
    train_batch,
)
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.config.device import resolve_dtype
from tramontane.generator import Generator
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams

GROUP, PROMPT, LENGTH = 16, 64, 64  # completions per group, and tokens


def parameters(model: PreTrainedModel) -> int:
    """Parameters that are factors of a matrix product for every token."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(m.weight.numel() for m in [*linear, head])


def generated(
    generator: Generator, slots: int, turn: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Tokens per second in decode steps, and mean live sequences."""
    generator.resize(slots, PROMPT + LENGTH)
    sampling = SamplingParams(LENGTH)
    requests = [
        Completion.requested(
            i // GROUP, i % GROUP, [100 + i // GROUP] * PROMPT, turn * slots + i, sampling
        )
        for i in range(slots)
    ]
    generator.submit(requests)
    generator.step(1)  # prefill
    before, began = generator.stats(), clock()
    while generator.pending():
        generator.step(8)
    seconds, after = clock() - began, generator.stats()
    tokens, steps = (after[k] - before[k] for k in ("generated_tokens", "decode_steps"))
    return tokens / seconds, tokens / steps


def trained(trainer: Trainer, vocabulary: int, tokens: int, clock: Callable[[], float]) -> float:
    """Computed tokens per second in an update."""
    count = max(1, (tokens - PROMPT) // LENGTH)
    batch = train_batch(
        trainer.version,
        random_groups(vocabulary, groups=1, size=count, prompt=PROMPT, tokens=LENGTH),
    )
    began = clock()
    computed = trainer.step(batch)["computed_tokens"]
    return computed / (clock() - began)


def row(name: str, rates: list[float], bound: float) -> dict[str, Any]:
    shares = [rate / bound for rate in rates]
    return {
        "worker": name,
        "tokens_per_second": spread(rates),
        "bound": round(bound),
        "share": spread(shares, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, nargs="+", default=[96, 192])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.dtype = resolve_dtype(args.dtype, args.device)
    dtype = getattr(torch, args.dtype)
    device, clock = args.device, make_clock(args.device)
    peak, copied = gemm_peak(dtype, device), bandwidth(device)
    print(f"matrix products {peak / 1e9:,.0f} GFLOP/s, copies {copied / 1e9:,.1f} GB/s")

    rows = []
    engine = GeneratorConfig(dtype=args.dtype, device=device)
    generator = Generator.load(args.model, engine, max(args.slots), PROMPT + LENGTH)
    count = parameters(generator.model)
    print(f"{count / 1e6:,.1f} M parameters in matrix products")
    for slots in args.slots:
        found = [generated(generator, slots, turn, clock) for turn in range(args.repeats + 1)][1:]
        live = found[-1][1]
        step = max(2 * count * live / peak, count * dtype.itemsize / copied)
        rows.append(row(f"generator, {slots} slots", [rate for rate, _ in found], live / step))
    vocabulary = int(generator.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    del generator
    for tokens in args.tokens:
        config = TrainerConfig(
            dtype=args.dtype, device=device, microbatch_tokens=tokens, learning_rate=1e-6
        )
        trainer = Trainer.load(args.model, config, 1000)
        rates = [trained(trainer, vocabulary, tokens, clock) for _ in range(args.repeats + 1)][1:]
        rows.append(row(f"trainer, microbatches of {tokens}", rates, peak / (6 * count)))
        del trainer
    for r in rows:
        rate, share = (
            f"{values['median']:{form}} ({values['lowest']:{form}}–{values['highest']:{form}})"
            for values, form in ((r["tokens_per_second"], ",.0f"), (r["share"], ".0%"))
        )
        print(f"{r['worker']:>32} {rate} tokens/s of {r['bound']:,}: {share}")
    rates = {"gemm": round(peak), "copy": round(copied), "parameters": count}
    settings = {"model": args.model, "dtype": args.dtype}
    finish(__file__, {"rows": rows} | rates | settings | machine(device))


if __name__ == "__main__":
    main()
