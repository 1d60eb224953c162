"""Padding and the trainer's time: batches of a fixed size, unsorted and sorted, and collation.

    python benchmarks/collation.py [--device cuda] [--model 1.8M] [--sequences 256]
                                   [--budget 4096] [--repeats 3]

The same sequences are computed in microbatches that hold at most `budget` tokens:

- `unsorted`: a fixed number of sequences, as many as always fit (budget / longest), in their
  original order, each batch padded to its longest;
- `sorted`: the same number, by length;
- `collated`: the paper's greedy collation (arXiv 2506.10910, section 3.3), in packed rows.

Lengths are uniform from 1 to 5 times the shortest; lognormal, with the longest 5 times the mean; or
the lengths of completions by the tiny base, at most 512 tokens. `padding` is the share of padding
in the batches of the first two. For collation, it is the unfilled share of the budgets, as the
paper counts; packed rows do not compute unfilled places, so `computed` counts real tokens only.
Seconds are one thread's CPU time (wall time on a GPU) for forward and backward of all microbatches,
in the machine's number type; the three take turns. Writes collation.json next to this file.

The paper says that its collation lowers padding by 19 %, but names neither its baseline nor its
lengths. Here the promise is that collation has at least 19 % less padding than `unsorted` for each
of these lengths.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from measure import SIZES, VOCAB, Promise, finish, machine, make_llama, spread
from transformers import PreTrainedModel

from tramontane.config import PlaygroundConfig
from tramontane.config.device import number_type
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import SlotEngine
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.trainer.collate import collate, padding_fraction
from tramontane.trainer.head import token_logprobs
from tramontane.trainer.replicas import to_bfloat16
from tramontane.types import Completion, SamplingParams

PAPER = 0.19


def uniform(count: int, rng: random.Random) -> list[int]:
    return [rng.randint(40, 200) for _ in range(count)]


def lognormal(count: int, rng: random.Random) -> list[int]:
    drawn = [rng.lognormvariate(0.0, 0.7) for _ in range(count)]
    unit = 80 / (sum(drawn) / count)
    return [max(1, min(400, round(x * unit))) for x in drawn]


def rollouts(count: int, rng: random.Random) -> list[int]:
    """Lengths of the tiny base's completions, in the order in which they finish; without
    prompts."""
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    eos = tokenizer.eos_token_id
    engine = SlotEngine(model, slots=64, max_len=768, eos_ids=[eos])
    world = PlaygroundConfig()
    problems = playground.problems(
        "train", 0, world.levels, world.languages, world.kinds, count=-(-count // 16)
    )
    prompts = PromptEncoder(tokenizer).encode_all([p.problem for p in problems])
    engine.submit(
        [
            Completion.requested(
                i // 16, i % 16, prompts[i // 16], rng.getrandbits(63), SamplingParams(512)
            )
            for i in range(count)
        ]
    )
    lengths: list[int] = []
    while engine.unfinished:
        lengths += [len(c.token_ids) for c in engine.step()]
    return lengths


LENGTHS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "rollouts": rollouts,
}


def microbatches(way: str, lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of sequences."""
    if way == "collated":
        return collate(lengths, budget)
    order = list(range(len(lengths)))
    if way == "sorted":
        order.sort(key=lambda i: lengths[i])
    size = max(1, budget // max(lengths))
    return [order[start : start + size] for start in range(0, len(order), size)]


def padding(way: str, lengths: Sequence[int], batches: list[list[int]], budget: int) -> float:
    if way == "collated":
        return padding_fraction([sum(lengths[i] for i in m) for m in batches], budget)
    return 1 - sum(lengths) / computed(way, lengths, batches)


def computed(way: str, lengths: Sequence[int], batches: list[list[int]]) -> int:
    """Tokens that pass through the model."""
    if way == "collated":
        return sum(lengths)
    return sum(len(m) * max(lengths[i] for i in m) for m in batches)


def train(model: PreTrainedModel, way: str, sequences: list[list[int]], device: str) -> None:
    """Forward and backward of one microbatch."""
    if way == "collated":
        inputs = pack(sequences, device)
    else:
        longest = max(map(len, sequences))
        padded = [s + [0] * (longest - len(s)) for s in sequences]
        inputs = {"input_ids": torch.tensor(padded, device=device), "use_cache": False}
    logits = model(**inputs).logits.flatten(0, 1)
    logprobs, _ = token_logprobs(logits, inputs["input_ids"].flatten())
    logprobs.sum().backward()  # padding included: same cost, and nothing learns here


def clock(device: str) -> float:
    if device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def compare(name: str, model: PreTrainedModel, args: argparse.Namespace) -> list[dict]:
    rng = random.Random(0)
    lengths = LENGTHS[name](args.sequences, rng)
    sequences = [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]
    ways = ("unsorted", "sorted", "collated")
    batches = {way: microbatches(way, lengths, args.budget) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 1):
        for way in ways:
            started = clock(args.device)
            for micro in batches[way]:
                train(model, way, [sequences[i] for i in micro], args.device)
            model.zero_grad()
            if repeat:  # the first round warms up
                seconds[way].append(clock(args.device) - started)
    return [
        {
            "lengths": name,
            "mean": round(sum(lengths) / len(lengths), 1),
            "longest": max(lengths),
            "way": way,
            "microbatches": len(batches[way]),
            "padding": round(padding(way, lengths, batches[way], args.budget), 4),
            "computed": computed(way, lengths, batches[way]),
            "seconds": spread(seconds[way], 3),
            "speedup": round(median(seconds["unsorted"]) / median(seconds[way]), 2),
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=SIZES, default="1.8M")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--budget", type=int, default=4096, help="tokens a microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_llama(args.model).train().to(args.device)
    model.set_attn_implementation("packed")
    if (dtype := number_type(args.device).dtype) == "bfloat16":
        to_bfloat16(model)

    print(f"{args.model}, {args.sequences} sequences, {args.budget} tokens a microbatch, {dtype}")
    print(
        f"{'lengths':>9} {'mean':>6} {'longest':>7} {'way':>9} {'padding':>8} {'computed':>9} "
        f"{'seconds: median (range)':>24} {'speedup':>8}"
    )
    rows, promises = [], []
    for name in LENGTHS:
        found = compare(name, model, args)
        for r in found:
            s = r["seconds"]
            cell = f"{s['median']:.2f} ({s['lowest']:.2f}–{s['highest']:.2f})"
            print(
                f"{name:>9} {r['mean']:>6} {r['longest']:>7} {r['way']:>9} {r['padding']:>8.1%} "
                f"{r['computed']:>9} {cell:>24} {r['speedup']:>8}",
                flush=True,
            )
        unsorted, _, collated = (r["padding"] for r in found)
        less = 1 - collated / unsorted
        promise = f"{name} lengths: at least {PAPER:.0%} less padding than unsorted batches"
        promises.append(Promise(promise, f"{less:.0%} less", less >= PAPER))
        rows += found
    finish(__file__, {"machine": machine(args.device), **vars(args), "rows": rows}, promises)


if __name__ == "__main__":
    main()
