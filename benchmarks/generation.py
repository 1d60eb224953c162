"""The slot engine against transformers' `generate`: tokens a second of one thread.

    python benchmarks/generation.py [--slots 32 128] [--dtype float32] [--kv-heads 5]
                                    [--repeats 3] [--rounds 3]

A random Llama of 1.5 M parameters (hidden 160, 4 layers, 5 heads, vocabulary 1500), prompts of 50
to 70 tokens in groups of 16, sampling at temperature 1. Per round, both generate three times as
many completions as there are slots: of 60 tokens each (`fixed`), or of 20 to 100 (`variable`).
`generate` takes them in batches of `slots`, left-padded, each batch to its longest; only tokens
that were asked for count. Seconds are of this process's CPU time, so that others on the machine
count little. The two take turns. Prints a table and writes generation.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from tramontane.generator import SlotEngine
from tramontane.types import Request, SamplingParams

VOCAB = 1500
GROUP = 16


def make_model(dtype: torch.dtype, kv_heads: int, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=kv_heads,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def make_requests(n: int, lengths: tuple[int, int], seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests: list[Request] = []
    while len(requests) < n:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(50, 70))]
        group = len(requests)
        for i in range(min(GROUP, n - group)):
            params = SamplingParams(rng.randint(*lengths))
            requests.append(Request(group, i, prompt, rng.getrandbits(63), params))
    return requests


def run_engine(model: PreTrainedModel, slots: int) -> Callable[[list[Request]], float]:
    engine = SlotEngine(model, slots, max_len=170)

    def run(requests: list[Request]) -> float:
        engine.submit(requests)
        while engine.unfinished:
            engine.step()
        return engine.stats.live_slot_steps / engine.stats.slot_steps

    return run


@torch.inference_mode()
def run_generate(model: PreTrainedModel, slots: int) -> Callable[[list[Request]], float]:
    def run(requests: list[Request]) -> float:
        asked = done = 0
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
                ids, attention_mask=mask, max_new_tokens=steps, do_sample=True, top_k=0
            )
            done += steps * len(batch)
            asked += sum(r.sampling.max_tokens for r in batch)
        return asked / done

    return run


def compare(slots: int, dtype: torch.dtype, kv_heads: int, lengths: tuple[int, int], args) -> dict:
    runs = {
        "engine": run_engine(make_model(dtype, kv_heads, "packed"), slots),
        "generate": run_generate(make_model(dtype, kv_heads, "sdpa"), slots),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    used = {}
    for run in runs.values():
        run(make_requests(slots, (5, 5), seed=0))
    for repeat in range(args.repeats):
        requests = make_requests(args.rounds * slots, lengths, seed=repeat)
        tokens = sum(r.sampling.max_tokens for r in requests)
        for name, run in runs.items():
            started = time.process_time()
            used[name] = run(requests)
            rates[name].append(tokens / (time.process_time() - started))
    row = {"slots": slots, "lengths": "fixed" if lengths[0] == lengths[1] else "variable"}
    for name, values in rates.items():
        row[name] = {
            "tokens_per_second": round(median(values)),
            "lowest": round(min(values)),
            "highest": round(max(values)),
            "useful_share_of_slots": round(used[name], 3),
        }
    row["ratio"] = round(median(rates["engine"]) / median(rates["generate"]), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kv-heads", type=int, choices=[1, 5], default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)

    print(f"one thread, {args.dtype}, {args.kv_heads} key-value heads; tokens/s: median (range)")
    print(f"{'slots':>5} {'lengths':>9} {'engine':>24} {'generate':>24} {'ratio':>6}")
    rows = []
    for slots in args.slots:
        for lengths in ((60, 60), (20, 100)):
            row = compare(slots, dtype, args.kv_heads, lengths, args)
            rows.append(row)
            cells = [
                f"{r['tokens_per_second']} ({r['lowest']}–{r['highest']})"
                for r in (row["engine"], row["generate"])
            ]
            print(
                f"{slots:>5} {row['lengths']:>9} {cells[0]:>24} {cells[1]:>24} {row['ratio']:>6}",
                flush=True,
            )
    report = {"torch": torch.__version__, "threads": 1, **vars(args), "rows": rows}
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
