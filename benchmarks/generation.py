"""The slot engine against transformers' `generate`, its continuous batching, and vLLM: one CPU
thread.

    python -m benchmarks.generation [--sizes 1M 5M 25M] [--slots 16 64 256] [--repeats 3]
                                    [--dtypes float32 bfloat16] [--lengths fixed variable]
                                    [--device cpu] [--eager] [--without-vllm]

Random Llamas, prompts of 25 to 60 tokens in groups of 16, sampling at temperature 1. Completions
have 24 tokens each (`fixed`), or lengths drawn from an exponential distribution cut at five times
its mean (`variable`: mean 24, longest 120, present in every cell). All systems get the same
requests, one system after the other: 64 more than there are slots. `generate` runs in batches of
`slots`, left-padded, each to its longest completion; continuous batching runs as `paged|sdpa`, with
at most `slots` requests per batch. Only requested tokens count. vLLM, in its own environment
(`make vllm`; without one its column is missing), runs as `generator.kind: vllm` runs it: one step
after another, with a log-prob and a version of each token, and a seed for each request. On a CPU,
seconds are CPU time, of vLLM's process too, so that other load on the machine has little effect.
Each repeat measures all systems; medians and ranges are printed.

Utilization is the engine's, measured while requests wait: the tail after the last admission does
not count, since a pipeline has none. `GEMM peak` is the share that the engine reaches of the rate
of a large square matrix product, measured in the same run and dtype: two operations per parameter
and token, and four per layer, channel and attended position. On a GPU the engine replays CUDA
graphs (unless `--eager`), and its share of the bandwidth of a large copy is printed too: each step
reads all weights, and the keys and values that each token attends to.

Prints a table, writes generation.json next to this file, and exits non-zero if the engine is not
faster than both of transformers' in every cell, or has under 85 % utilization on variable lengths.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # also for the background thread of transformers

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from benchmarks import vllm_side
from benchmarks.measure import (
    SIZES,
    VOCAB,
    Promise,
    bandwidth,
    finish,
    gemm_peak,
    machine,
    make_clock,
    make_llama,
    spread,
)
from tramontane.generator import SlotEngine
from tramontane.generator.graphs import CudaGraphs
from tramontane.types import Completion, SamplingParams

GROUP = 16
MEAN, LONGEST = 24, 120
MORE = 64
PROMPT = (25, 60)
TIMEOUT = 600.0  # seconds without any completion from continuous batching

Run = Callable[[list[Completion]], None]


def make_requests(n: int, kind: str, seed: int) -> list[Completion]:
    rng = random.Random(seed)
    lengths = [MEAN] * n
    if kind == "variable":
        lengths = [min(LONGEST, 1 + int(rng.expovariate(1 / (MEAN + 0.5)))) for _ in range(n)]
        lengths[rng.randrange(n)] = LONGEST
    requests: list[Completion] = []
    while len(requests) < n:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT))]
        group = len(requests)
        for i in range(min(GROUP, n - group)):
            params = SamplingParams(lengths[len(requests)])
            requests.append(Completion.requested(group, i, prompt, rng.getrandbits(63), params))
    return requests


class Engine:
    """The slot engine, and its utilization while requests wait."""

    def __init__(self, model: PreTrainedModel, slots: int, graphs: bool) -> None:
        record = CudaGraphs(model.device) if graphs else None
        self.engine = SlotEngine(model, slots, max_len=PROMPT[1] + LONGEST, record=record)
        self.live = self.held = 0

    def __call__(self, requests: list[Completion]) -> None:
        engine, stats = self.engine, self.engine.stats
        engine.submit(requests)
        while engine.unfinished:
            live, held = stats.live_slot_steps, stats.slot_steps
            engine.step()
            if engine.unfinished > engine.decoding:
                self.live += stats.live_slot_steps - live
                self.held += stats.slot_steps - held


@torch.inference_mode()
def run_generate(model: PreTrainedModel, slots: int, requests: list[Completion]) -> None:
    for start in range(0, len(requests), slots):
        batch = requests[start : start + slots]
        longest = max(len(r.prompt_ids) for r in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, r in enumerate(batch):
            ids[row, longest - len(r.prompt_ids) :] = torch.tensor(r.prompt_ids)
            mask[row, longest - len(r.prompt_ids) :] = 1
        steps = max(r.sampling.max_tokens for r in batch)
        model.generate(  # type: ignore[operator]
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=steps,
            do_sample=True,
            top_k=0,
        )


def start_batching(model: PreTrainedModel, slots: int) -> Any:
    """Continuous batching, with room for every slot at its maximum length."""
    page = 32
    pages = slots * -(-(PROMPT[1] + LONGEST) // page)
    manager = model.init_continuous_batching(  # type: ignore[operator]
        generation_config=GenerationConfig(
            do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONGEST
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages,
            max_requests_per_batch=slots,
            max_batch_tokens=max(slots, 512),
        ),
    )
    manager.start()
    return manager


def run_batching(manager: Any, requests: list[Completion]) -> None:
    for r in requests:
        manager.add_request(r.prompt_ids, max_new_tokens=r.sampling.max_tokens, eos_token_id=-1)
    tokens = 0
    for _ in requests:
        result = manager.get_result(timeout=TIMEOUT)
        if result is None or result.error:
            raise RuntimeError(f"continuous batching failed: {result and result.error}")
        tokens += len(result.generated_tokens)
    assert tokens == sum(r.sampling.max_tokens for r in requests)


def bytes_read(size: str, requests: list[Completion], steps: int, dtype: str) -> float:
    """Least number of bytes that `steps` decode steps read to generate the tokens of `requests`."""
    hidden, layers, intermediate, _ = SIZES[size]
    weights = layers * (4 * hidden**2 + 3 * hidden * intermediate) + VOCAB * hidden
    cached = 2 * layers * hidden * sum(map(attended, requests))
    return (weights * steps + cached) * getattr(torch, dtype).itemsize


def attended(request: Completion) -> float:
    """Positions that a request's tokens attend to, summed over the tokens."""
    n = request.sampling.max_tokens
    return n * len(request.prompt_ids) + n * (n - 1) / 2


def operations(size: str, requests: list[Completion]) -> float:
    """Minimum number of floating-point operations for the tokens of `requests`."""
    hidden, layers, intermediate, _ = SIZES[size]
    weights = layers * (4 * hidden**2 + 3 * hidden * intermediate) + VOCAB * hidden
    total = 0.0
    for r in requests:
        total += 2 * weights * r.sampling.max_tokens + 4 * layers * hidden * attended(r)
    return total


class Cell(NamedTuple):
    """One row of the table."""

    size: str
    slots: int
    dtype: str
    lengths: str


def compare(
    cell: Cell, peak: float, copied: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one cell; `peak` in operations per second, `copied` in bytes per second."""
    size, slots, dtype, kind = cell

    def model(attention: str) -> PreTrainedModel:
        llama = make_llama(size).to(args.device, getattr(torch, dtype)).eval()
        llama.requires_grad_(False)
        llama.config.eos_token_id = None
        assert llama.generation_config is not None
        llama.generation_config.eos_token_id = None
        llama.set_attn_implementation(attention)
        return llama

    graphs = args.device != "cpu" and not args.eager
    engine, plain = Engine(model("packed"), slots, graphs), model("sdpa")
    manager = start_batching(model("paged|sdpa"), slots)
    runs: dict[str, Run] = {
        "engine": engine,
        "generate": lambda requests: run_generate(plain, slots, requests),
        "batching": lambda requests: run_batching(manager, requests),
    }
    folder = tempfile.TemporaryDirectory(prefix="tramontane-vllm-")
    clocks = dict.fromkeys(runs, make_clock(args.device))
    if args.vllm:
        vllm = vllm_side.Vllm(plain, Path(folder.name), slots, PROMPT[1] + LONGEST)
        runs["vllm"], clocks["vllm"] = vllm, vllm.clock
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run([r for r in make_requests(slots, "fixed", seed=-1) if r.index < 4])
    if graphs:  # all steps are recorded before the measurement
        engine(make_requests(slots + MORE, kind, seed=-1))
    engine.live = engine.held = 0
    peaks, shares, ratios = [], [], []
    for repeat in range(args.repeats):
        requests = make_requests(slots + MORE, kind, seed=repeat)
        tokens = sum(r.sampling.max_tokens for r in requests)
        for name, run in runs.items():
            steps = engine.engine.stats.decode_steps
            start = clocks[name]()
            run(requests)
            seconds = clocks[name]() - start
            rates[name].append(tokens / seconds)
            if name == "engine":
                peaks.append(operations(size, requests) / seconds / peak)
                steps = engine.engine.stats.decode_steps - steps
                read = bytes_read(size, requests, steps, dtype)
                shares += [] if copied is None else [read / seconds / copied]
        ratios.append(rates["engine"][-1] / max(rates["generate"][-1], rates["batching"][-1]))
    manager.stop(block=True, timeout=TIMEOUT)
    folder.cleanup()
    return {
        "model": size,
        "slots": slots,
        "dtype": dtype,
        "lengths": kind,
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "ratio": spread(ratios, 2),
        "utilization": round(engine.live / engine.held, 3),
        "gemm_peak": round(median(peaks), 3),
    } | ({"bandwidth": round(median(shares), 3)} if shares else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "5M", "25M"])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    kinds, dtypes = ["fixed", "variable"], ["float32", "bfloat16"]
    parser.add_argument("--lengths", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--without-vllm", action="store_true")
    args = parser.parse_args()
    args.vllm = vllm_side.available() and not args.without_vllm
    torch.set_num_threads(1)
    logging.set_verbosity_error()

    peaks = {dtype: gemm_peak(getattr(torch, dtype), args.device) for dtype in args.dtypes}
    print("GEMM peak: " + ", ".join(f"{d} {p / 1e9:,.0f} GFLOP/s" for d, p in peaks.items()))
    copied = bandwidth(args.device) if args.device.startswith("cuda") else None
    if copied is not None:
        print(f"bandwidth of a copy: {copied / 1e9:,.0f} GB/s")
    print("tokens/s: median (range)")
    print(
        f"{'model':>5} {'slots':>5} {'dtype':>8} {'lengths':>8} {'engine':>23} {'generate':>23} "
        f"{'batching':>23} "
        + (f"{'vllm':>23} " if args.vllm else "")
        + f"{'ratio':>17} {'used':>5} {'peak':>5}"
        + (" bandwidth" if copied else "")
    )
    rows = []
    cells = [
        Cell(size, slots, dtype, kind)
        for size in args.sizes
        for slots in args.slots
        for dtype in args.dtypes
        for kind in args.lengths
    ]
    for cell in cells:
        row = compare(cell, peaks[cell.dtype], copied, args)
        rows.append(row)
        rates = [
            f"{s['median']:,.0f} ({s['lowest']:,.0f}–{s['highest']:,.0f})"
            for s in row["tokens_per_second"].values()
        ]
        r = row["ratio"]
        ratio = f"{r['median']} ({r['lowest']}–{r['highest']})"
        print(
            f"{cell.size:>5} {cell.slots:>5} {cell.dtype:>8} {cell.lengths:>8} "
            + "".join(f"{rate:>23} " for rate in rates)
            + f"{ratio:>17} {row['utilization']:>5.0%} {row['gemm_peak']:>5.0%}"
            + (f" {row['bandwidth']:>9.0%}" if copied else ""),
            flush=True,
        )
    slowest = min(row["ratio"]["median"] for row in rows)
    promises = [
        Promise("faster than both of transformers' in every cell", f"{slowest}×", slowest > 1)
    ]
    if used := [row["utilization"] for row in rows if row["lengths"] == "variable"]:
        promises.append(
            Promise(
                "utilization of at least 85 % on variable lengths",
                f"{min(used):.1%}",
                min(used) >= 0.85,
            )
        )
    peak_rates = {f"gemm_{d}": round(p / 1e9) for d, p in peaks.items()}
    if copied:
        peak_rates["bandwidth"] = round(copied / 1e9)
    report = machine(args.device) | {"threads": 1, **vars(args), **peak_rates, "results": rows}
    if args.vllm:
        report["vllm"] = vllm_side.describe()
    finish(__file__, report, promises)


if __name__ == "__main__":
    main()
