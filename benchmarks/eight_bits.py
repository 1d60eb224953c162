"""Generators with weights of eight bits (`generator.weights: int8`) beside the same in full: tokens
a second of processor time, memory of the weights, and the distance of the quantized policy.

    python benchmarks/eight_bits.py [--model tiny | 25M | models/smollm2] [--slots 64] [--tokens 60]

Each round runs all kinds one after another, on one thread. Seconds are the processor's, since other
work on the machine would otherwise decide; ratios are to float32 in the same round. `25M` is a
random model, as in the other benchmarks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import SIZES
from transformers import PreTrainedModel
from workload import FIXED, make_model

from tramontane.batches import TrainSequence
from tramontane.config import DataConfig, PlaygroundConfig, TrainerConfig
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.generator.engine import SlotEngine
from tramontane.models import int8
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.quantized import SAMPLE, named_weights
from tramontane.trainer.parity import distance
from tramontane.trainer.trainer import Trainer
from tramontane.types import Completion, Request, SamplingParams

KINDS = "float32", "bfloat16", "int8"


@dataclass
class Side:
    """A kind of generator, and what was measured of it."""

    model: PreTrainedModel
    rates: list[float] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def megabytes(self) -> float:
        weights = {id(x): x for x in named_weights(self.model).values()}
        return sum(x.nbytes for x in weights.values()) / 2**20


def load(path: str, kind: str) -> PreTrainedModel:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = load_model(path, dtype, "cpu").requires_grad_(False)
    if kind == "int8":
        int8.quantize(model, load_tokenizer(path).encode(SAMPLE))
    return model


def run(side: Side, requests: list[Completion], longest: int) -> None:
    """Sample all requests at once; the step that admits them is not counted."""
    engine = SlotEngine(side.model, len(requests), longest)
    engine.submit(requests)
    side.completions += engine.step()
    known, began = engine.stats.generated_tokens, time.process_time()
    while engine.unfinished:
        side.completions += engine.step()
    seconds = time.process_time() - began
    side.rates.append((engine.stats.generated_tokens - known) / seconds)


def prompts_of(path: str, count: int) -> list[list[int]]:
    world = PlaygroundConfig()
    problems = playground.problems(
        "train", 0, world.levels, world.languages, world.kinds, count=count
    )
    return PromptEncoder(load_tokenizer(path), DataConfig()).encode_all(
        [problem.problem for problem in problems]
    )


def compare(path: str, slots: int, tokens: int, rounds: int) -> None:
    """Print a table with a row for each kind."""
    sides = {kind: Side(load(path, kind)) for kind in KINDS}
    prompts = prompts_of(path, 8)
    longest = max(map(len, prompts)) + tokens
    sampling = SamplingParams(tokens)
    for number in range(rounds):
        for side in sides.values():
            requests = [
                Request(i % 8, i // 8, prompts[i % 8], number * slots + i, sampling)
                for i in range(slots)
            ]
            run(side, requests, longest)
        newest = ", ".join(f"{kind} {side.rates[-1]:,.0f}" for kind, side in sides.items())
        print(f"round {number + 1}: tokens a second of {newest}", flush=True)
    config = TrainerConfig(dtype="float32", device="cpu")
    trainer = Trainer(load(path, "float32"), config, 1)
    print("| weights | MiB | tokens a second | times float32 | spread | policy |")
    print("|---|---|---|---|---|---|")
    for kind, side in sides.items():
        ratios = [a / b for a, b in zip(side.rates, sides["float32"].rates, strict=True)]
        sequences = [TrainSequence.of(c) for c in side.completions]
        far = distance([s.logprobs for s in sequences], trainer.logprobs(sequences, 1.0))
        print(
            f"| {kind} | {side.megabytes:.1f} | {statistics.median(side.rates):,.0f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f}–{max(ratios):.2f} | {far} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path in SIZES:
            path = str(make_model(Path(folder), FIXED, path))
        compare(path, options.slots, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
