"""This pipeline against TRL's GRPOTrainer: trained completion tokens per second, end to end.

    python benchmarks/vs_trl.py [--models 1.8M 25M smollm2] [--rounds 3] [--updates 8]
                                [--trl-updates 2] [--trl-python PATH] [--device cpu|cuda]
                                [--trl JSON] [--ours JSON] [--eight-bits] [--warm-up 3] [--no-bound]

Both sides train the same Llama on the same prompts in groups of 16, with the same reward, at most
128 new tokens and the same learning rate. An update has 512 completions at 1.8 M parameters and 128
at 25 M. The vocabulary has 83 tokens, mostly single characters. The model is first taught the
format of an answer, so that it earns rewards; its completions then end by themselves, after some 80
tokens on average. `smollm2` is SmolLM2-135M-Instruct as it comes, with its own vocabulary of 49,152
tokens and chat template, 128 completions per update and a reward without a format; TRL's turn takes
minutes.

Both sides compute in the number type that `dtype: auto` chooses on the machine; on one with more
than AVX2, `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before the command emulates an
ordinary processor.

TRL has both cores (two threads) and the settings that were fastest for it (`TRL`). Our side has one
process with one thread for each worker, on Ray. Both compile their training. The sides take turns
in one run; each waits while the other works. TRL runs in a virtual environment of its own, which is
made on first use. Imports, loading and the first updates of each side are not counted. Our runs are
stopped after the counted updates, since a run that ends by itself needs no further completions for
its last updates. Our trained tokens count only up to the number generated in the same time.

`of bound` is our share of the two-core bound 2 / (1/g + 1/t): g and t are the completion tokens per
second of processor time of the generator and of the trainer, each alone on one core with the work
of the run. They are measured by `core_rates.py` after each of our turns.

`--eight-bits` adds a turn of ours with `generator.weights: int8` to each round, where the machine
computes in float32; its target is 1.3 times the speed of the same in full.

Each turn is printed as it ends and kept in build/vs_trl.jsonl, so that the same command resumes
after one that was cut off. The script prints a table and writes vs_trl.json next to this file. It
fails if our side is not 3 times as fast; the aims are 6 times, and 0.85 of the bound.
"""

from __future__ import annotations

import argparse
import importlib
import os

os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "512"  # kernels; the default saves memory

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers
from measure import Promise, finish, machine, spread
from trl_process import TRL_VERSION, TrlSide, Turn, missing_for_trl, trl_python
from vs_trl_task import GROUP, MAX_TOKENS, SEED, TAUGHT, prepare

from tramontane import train
from tramontane.config import Config, parse, parse_settings
from tramontane.config.device import number_type
from tramontane.errors import InputError
from tramontane.models import loading
from tramontane.models.fetch import cache_dir, fetch
from tramontane.placement.place import check as check_placement
from tramontane.trainer import forwards

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
THREADS = 2
COMPLETIONS = {"1.8M": 512, "25M": 128, "smollm2": 128}  # per update
LEARNING_RATE = 1e-6  # so small that lengths do not change
PROMISED, AIM = 3, 6
# Updates of either side that are not counted: blocks are compiled, and kernels are built for
# recurring shapes. TRL's process lasts for all rounds, a run of ours for one.
WARM_UP = 3
# The gate measures the policy in eight bits, and refuses none.
EIGHT_BITS = {
    "generator.weights": "int8",
    "trainer.parity_kl": 1.0,
    "trainer.parity_sample_size": 0.0,
}
EIGHT_BITS_AIM = 1.3

# The fastest settings for TRL; docs/performance.md lists what was tried.
FASTEST = {"autocast": False, "continuous": False, "compile": True}
TRL: dict[str, dict[str, Any]] = {
    "1.8M": FASTEST | {"microbatch": 512},
    "25M": FASTEST | {"microbatch": 128},
    # Logits of 128 completions would take 1.6 GB, several times over.
    "smollm2": FASTEST | {"microbatch": 32},
}
# The fastest for us: processes are a quarter faster than threads. n_async is at most twice n_batch,
# as in the paper, and max_staleness what configs/medium.yaml has.
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "1.8M": {
        "pipeline": {"n_async": 1024, "max_staleness": 3},
        "trainer": {"microbatch_tokens": 4096, "compile": True},
        "generator": {"steps_per_call": 8},
        "placement": {"kind": "ray"},
    },
    # The second trainer thread has the core that the generator leaves free while it is held.
    "25M": {
        "pipeline": {"n_async": 256, "max_staleness": 3},
        "trainer": {"microbatch_tokens": 2048, "compile": True, "threads": THREADS},
        "generator": {"steps_per_call": 8},
        "placement": {"kind": "ray"},
    },
    "smollm2": {
        "pipeline": {"n_async": 256, "max_staleness": 3},
        "trainer": {"microbatch_tokens": 1024, "threads": THREADS},
        "generator": {"steps_per_call": 8},
        "placement": {"kind": "ray"},
    },
}


# --- the two sides


def trl_settings(size: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's settings; `folder` holds the model and the prompts."""
    return TRL[size] | {
        "dtype": number_type(args.device).dtype,
        "checkpoint": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "model": {},
        "warm_up": args.warm_up,
        "updates": args.trl_updates,
        "threads": THREADS,
        "taught": size in TAUGHT,
        "device": args.device,
        "seed": SEED,
        "completions": COMPLETIONS[size],
        "group_size": GROUP,
        "max_tokens": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
    }


def vowels(taught: bool) -> dict[str, Any]:
    """The same single reward as TRL's; one without a format for a model that was not `taught`."""
    reward = {"name": "vowels", "function": "vs_trl_reward.custom", "weight": 1}
    if not taught:
        reward |= {"function": "vs_trl_reward.plain_custom", "malformed": True}
    return dict.fromkeys(("format", "correctness", "length", "language"), 0) | {"custom": [reward]}


def our_config(size: str, folder: Path, device: str, run: Path) -> Config:
    """Our side's config; `folder` holds the model and the problems."""
    raw: dict[str, dict[str, Any]] = {
        "placement": {},
        "data": {"train": str(folder / "problems.jsonl"), "eval": None},
        "pipeline": {
            "n_batch": COMPLETIONS[size],
            "updates": 10**6,
            "group_size": GROUP,
            "l_max": MAX_TOKENS,
            "l_cache": 0,
            "diversity": "none",
            "unscorable": "wrong",
        },
        "generator": {"device": device},
        "trainer": {"device": device, "learning_rate": LEARNING_RATE},
        "verifier": {"reward": vowels(size in TAUGHT)},
        "checkpoint": {"every": 10**6},
    }
    for section, values in OURS[size].items():
        raw[section] |= values
    # In float32 the generator is held at 1.8M too, since the trainer is what takes the time.
    if number_type(device).dtype == "float32":
        raw["trainer"] = {"threads": THREADS} | raw["trainer"]
    return parse(
        Config,
        {"name": "vs_trl", "model": str(folder / "model"), "run_dir": str(run)} | raw,
        "vs_trl.py",
    )


def our_turn(config: Config, updates: int, warm_up: int = WARM_UP) -> Turn:
    """Run our side; the first `warm_up` updates are not counted."""

    def stop_when_done(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == warm_up + updates:
            signal.raise_signal(signal.SIGINT)  # like Ctrl-C

    train(config, quiet=True, report=False, on_update=stop_when_done)
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()[: warm_up + updates]
    before, *rows = (json.loads(line) for line in lines[warm_up - 1 :])
    walls = [before["wall_seconds"], *(r["wall_seconds"] for r in rows)]
    seconds = walls[-1] - walls[0]
    trained = sum(sum(r["staleness_histogram"].values()) for r in rows)
    generated = sum(
        r["generator_tokens_per_second"] * (now - then)
        for r, then, now in zip(rows, walls[:-1], walls[1:], strict=True)
    )
    length = trained / (updates * config.pipeline.n_batch)
    return Turn(min(trained, generated) / seconds, length, seconds)


def two_core_bound(folder: Path, number: int) -> float:
    """Completion tokens per second of two cores that are never idle, for the run `number`."""
    command = [
        sys.executable,
        str(HERE / "core_rates.py"),
        str(folder / f"run-{number}/config.yaml"),
    ]
    done = subprocess.run(
        [*command, str(folder / "prompts.jsonl")], stdout=subprocess.PIPE, text=True, check=True
    )
    rates = json.loads(done.stdout.splitlines()[-1])
    return THREADS / (1 / rates["generator"] + 1 / rates["trainer"])


# --- the comparison


def missing(sizes: Sequence[str], device: str) -> list[str]:
    """Everything that our side needs and this machine lacks, before anything is trained."""
    found = []
    for size in sizes:
        try:
            if size not in TAUGHT:
                fetch(size, cache_dir() / size)
            config = our_config(size, HERE, device, HERE)
            check_placement(config)
            loading.check_device(device, "--device")
            forwards.compilation(config.trainer)
            for reward in config.verifier.reward.custom:
                importlib.import_module(reward.function.rpartition(".")[0])
        except (InputError, ImportError) as error:
            found.append(f"{size}: {error}")
    return found


class Ended:
    """The turns that have ended. They are kept in a file until the comparison is complete, so that
    the same command goes on after the last of them."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self._path, self._command = path, list(command)
        self._path.parent.mkdir(exist_ok=True)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [row for row in map(json.loads, lines) if row["command"] == self._command]
        self.turns = {(r["model"], r["round"], r["side"]): r["figures"] for r in rows}

    def get(self, place: tuple[str, int, str], take: Callable[[], list[float]]) -> list[float]:
        """The figures of a turn, taken now unless it has ended before; printed."""
        model, number, side = place
        again = " (taken before)" * (place in self.turns)
        if place not in self.turns:
            self.turns[place] = take()
            row = {"command": self._command, "model": model, "round": number, "side": side}
            with self._path.open("a") as file:
                file.write(json.dumps(row | {"figures": self.turns[place]}) + "\n")
        figures = [round(figure, 1) for figure in self.turns[place]]
        print(f"  {model} round {number + 1}, {side}: {figures}{again}", flush=True)
        return self.turns[place]

    def forget(self) -> None:
        self._path.unlink()


def compare(size: str, python: Path, args: argparse.Namespace, ended: Ended) -> dict[str, Any]:
    ours, theirs, eight, bounds = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as name:
        folder = Path(name)
        prepare(size, folder)
        settings = trl_settings(size, folder, args)
        with TrlSide(python, settings, folder, args.timeout) as trl:

            def ours_of(number: int) -> list[float]:
                config = our_config(size, folder, args.device, folder / f"run-{number}")
                turn = our_turn(config, args.updates, args.warm_up)
                return [*turn, two_core_bound(folder, number) if args.bound else math.nan]

            def eight_bits_of(number: int) -> list[float]:
                config = our_config(size, folder, args.device, folder / f"int8-{number}")
                texts = [f"{key}={value}" for key, value in EIGHT_BITS.items()]
                config = parse_settings(Config, config.model_dump(mode="json"), texts, "int8")
                return [*our_turn(config, args.updates, args.warm_up)]

            for number in range(args.rounds):
                *turn, bound = ended.get((size, number, "ours"), partial(ours_of, number))
                ours.append(Turn(*turn))
                bounds.append(bound)
                if args.eight_bits:
                    turn = ended.get((size, number, "int8"), partial(eight_bits_of, number))
                    eight.append(Turn(*turn))
                theirs.append(Turn(*ended.get((size, number, "TRL"), lambda: [*trl.turn()])))
    found = result(size, ours, theirs) | shares(ours, bounds)
    return found | {"eight_bits": eight_bits(ours, theirs, eight)} if eight else found


def shares(ours: Sequence[Turn], bounds: Sequence[float]) -> dict[str, Any]:
    """The two-core bound, and the share of it that was reached; empty if it was not measured."""
    if math.isnan(bounds[0]):
        return {}
    reached = [turn.tokens_per_second / bound for turn, bound in zip(ours, bounds, strict=True)]
    return {"bound": round(median(bounds)), "share_of_bound": spread(reached, 2)}


def eight_bits(
    ours: Sequence[Turn], theirs: Sequence[Turn], eight: Sequence[Turn]
) -> dict[str, dict[str, float]]:
    """Our speed with weights of eight bits: tokens a second, and ratios in the same round."""
    rates = {
        name: [turn.tokens_per_second for turn in turns]
        for name, turns in {"full": ours, "trl": theirs, "int8": eight}.items()
    }
    of = {
        f"times_{name}": spread([a / b for a, b in zip(rates["int8"], rates[name], strict=True)], 2)
        for name in ("full", "trl")
    }
    return {"spread": spread(rates["int8"])} | of


def result(size: str, ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, Any]:
    rates = {"trl": [t.tokens_per_second for t in theirs], "ours": [t[0] for t in ours]}
    ratios = [a / b for a, b in zip(rates["ours"], rates["trl"], strict=True)]
    return {
        "model": size,
        "trl_tokens_per_second": round(median(rates["trl"])),
        "tokens_per_second": round(median(rates["ours"])),
        "ratio": round(median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "trl_spread": spread(rates["trl"]),
        "spread": spread(rates["ours"]),
        "trl_mean_completion_tokens": round(mean(t.mean_tokens for t in theirs), 1),
        "mean_completion_tokens": round(mean(t.mean_tokens for t in ours), 1),
        "completions_an_update": COMPLETIONS[size],
        "trl_settings": TRL[size],
        "settings": OURS[size],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(COMPLETIONS), default=list(TAUGHT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="our updates in a turn")
    parser.add_argument("--trl-updates", type=int, default=2, help="TRL's updates in a turn")
    parser.add_argument("--trl-python", type=Path, help="an interpreter with TRL installed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--trl", type=json.loads, default={}, help="settings for TRL, as JSON")
    parser.add_argument(
        "--ours", type=json.loads, default={}, help="our config's sections, as JSON"
    )
    parser.add_argument("--eight-bits", action="store_true", help="our generator in int8 too")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="updates not counted")
    parser.add_argument(
        "--no-bound", dest="bound", action="store_false", help="do not measure the two-core bound"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds of TRL's turn, at most")
    args = parser.parse_args()
    for size in args.models:
        TRL[size] |= args.trl
        for section, values in args.ours.items():
            OURS[size][section] |= values
    # Ray's workers import our reward from here.
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    absent = missing(args.models, args.device)
    if not absent:
        python = args.trl_python or trl_python(HERE / ".trl-venv")
        absent = missing_for_trl(python, args.device)
    if absent:
        raise SystemExit("\n".join(["vs_trl.py cannot run here:", *absent]))
    torch.set_num_threads(THREADS)
    began = time.perf_counter()
    chosen = number_type(args.device)
    print(f"{chosen.dtype} on both sides: {chosen.reason}")
    print("trained completion tokens/s: median (range)")
    print("  each turn: tokens/s, tokens a completion, seconds; of ours also the bound")
    ended = Ended(BUILD / "vs_trl.jsonl", sys.argv[1:])
    results = [compare(size, python, args, ended) for size in args.models]
    print(
        f"{'model':>7} {'TRL':>20} {'ours':>22} {'ratio':>18} {'bound':>6} {'of bound':>17}"
        f" {'mean completion':>16}"
    )
    for r in results:
        low, high = r["trl_spread"], r["spread"]
        share = r.get("share_of_bound", dict.fromkeys(("median", "lowest", "highest"), "–"))
        print(
            f"{r['model']:>7}"
            f" {low['median']:>8.0f} ({low['lowest']:.0f}–{low['highest']:.0f})"
            f" {high['median']:>8.0f} ({high['lowest']:.0f}–{high['highest']:.0f})"
            f" {r['ratio']:>6} ({r['ratio_min']}–{r['ratio_max']})"
            f" {r.get('bound', '–'):>6} {share['median']:>5} ({share['lowest']}–{share['highest']})"
            f" {r['trl_mean_completion_tokens']:>7} / {r['mean_completion_tokens']}"
        )
    promises = [
        Promise(
            f"{r['model']}: at least {PROMISED} times TRL's speed (the aim: {AIM})",
            f"{r['ratio']} times ({r['ratio_min']}–{r['ratio_max']})",
            r["ratio"] >= PROMISED,
        )
        for r in results
    ]
    promises += [
        Promise(
            f"{r['model']}: at least {EIGHT_BITS_AIM} times the speed in full with int8",
            f"{of_full['median']} times ({of_full['lowest']}–{of_full['highest']}), "
            f"{r['eight_bits']['times_trl']['median']} times TRL",
            of_full["median"] >= EIGHT_BITS_AIM,
        )
        for r in results
        if "eight_bits" in r
        for of_full in [r["eight_bits"]["times_full"]]
    ]
    versions = {
        "number_type": chosen.dtype,
        "trl": TRL_VERSION,
        "transformers": transformers.__version__,
        "seconds": round(time.perf_counter() - began),
    }
    ended.forget()
    finish(__file__, {"results": results} | machine(args.device) | versions, promises)


if __name__ == "__main__":
    main()
