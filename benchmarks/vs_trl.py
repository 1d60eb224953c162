"""This pipeline against TRL's GRPOTrainer: trained completion tokens per second, end to end.

    python benchmarks/vs_trl.py [--models 1.8M 25M smollm2] [--rounds 3] [--updates 8]
                                [--trl-updates 2] [--trl-python PATH] [--device cpu|cuda]
                                [--trl JSON] [--ours JSON]

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
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from threading import Timer
from types import TracebackType
from typing import Any, NamedTuple

import torch
from measure import Promise, finish, machine, spread
from vs_trl_task import GROUP, MAX_TOKENS, SEED, TAUGHT, prepare

from tramontane import train
from tramontane.config import Config, parse
from tramontane.config.device import number_type
from tramontane.errors import InputError
from tramontane.generator.vllm.environment import CPU_INDEX
from tramontane.models import loading
from tramontane.models.fetch import cache_dir, fetch
from tramontane.placement.place import check as check_placement
from tramontane.trainer import forwards

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
# Not inherited by TRL's process, which keeps torch's own settings.
KERNELS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
TRL_VERSION = "1.16.0"
THREADS = 2
COMPLETIONS = {"1.8M": 512, "25M": 128, "smollm2": 128}  # per update
LEARNING_RATE = 1e-6  # so small that lengths do not change
PROMISED, AIM = 3, 6
# Updates of either side that are not counted: blocks are compiled, and kernels are built for
# recurring shapes. TRL's process lasts for all rounds, a run of ours for one.
WARM_UP = 3

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


class Turn(NamedTuple):
    """Figures of one side's turn."""

    tokens_per_second: float
    mean_tokens: float  # per completion
    seconds: float


# --- the two sides


class TrlSide:
    """TRL in a separate process, which works only in its turn."""

    def __init__(
        self, python: Path, settings: Mapping[str, Any], folder: Path, timeout: float
    ) -> None:
        self.timeout, self.folder = timeout, folder / "trl"
        self.folder.mkdir()
        settings = {**settings, "folder": str(self.folder)}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        self.errors = self.folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [python, HERE / "trl_side.py", self.folder / "settings.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={k: v for k, v in os.environ.items() if k not in KERNELS},
            )

    def __enter__(self) -> TrlSide:
        self._read()  # the line `ready`
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()

    def turn(self) -> Turn:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = json.loads(self._read())
        lengths, seconds = answer["lengths"], answer["seconds"]
        return Turn(sum(lengths) / seconds, mean(lengths), seconds)

    def _read(self) -> str:
        """The next line of the process."""
        assert self.process.stdout is not None
        timer = Timer(self.timeout, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            tail = self.errors.read_text(errors="replace")[-3000:]
            raise SystemExit(
                f"{tail}\nTRL's side ended, or was silent for {self.timeout:g} s (--timeout): the "
                f"end of its stderr is above"
            )
        return line


def trl_settings(size: str, folder: Path, updates: int, device: str) -> dict[str, Any]:
    """TRL's settings; `folder` holds the model and the prompts."""
    return TRL[size] | {
        "dtype": number_type(device).dtype,
        "checkpoint": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "model": {},
        "warm_up": WARM_UP,
        "updates": updates,
        "threads": THREADS,
        "taught": size in TAUGHT,
        "device": device,
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


def our_turn(config: Config, updates: int) -> Turn:
    """Run our side; the first WARM_UP updates are not counted."""

    def stop_when_done(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == WARM_UP + updates:
            signal.raise_signal(signal.SIGINT)  # like Ctrl-C

    train(config, quiet=True, report=False, on_update=stop_when_done)
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()[: WARM_UP + updates]
    before, *rows = (json.loads(line) for line in lines[WARM_UP - 1 :])
    walls = [before["wall_seconds"], *(r["wall_seconds"] for r in rows)]
    seconds = walls[-1] - walls[0]
    trained = sum(sum(r["staleness_histogram"].values()) for r in rows)
    generated = sum(
        r["generator_tokens_per_second"] * (now - then)
        for r, then, now in zip(rows, walls[:-1], walls[1:], strict=True)
    )
    length = trained / (updates * config.pipeline.n_batch)
    return Turn(min(trained, generated) / seconds, length, seconds)


def trl_python(folder: Path) -> Path:
    """The interpreter of TRL's virtual environment, which is made if there is none."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.is_file():
        print(f"making {folder} with TRL {TRL_VERSION}, once", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-c", HERE.parent / "constraints.txt"]
        # torch first, so that no other package chooses its build: the one that Tramontane has.
        build = [f"torch=={torch.__version__}", "--no-deps", "--extra-index-url", CPU_INDEX]
        for packages in (build, [f"trl=={TRL_VERSION}"]):
            subprocess.run([*pip, *packages], check=True)
        ready.touch()
    return python


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


def missing_for_trl(python: Path, device: str) -> list[str]:
    """Everything that TRL's side needs and its interpreter lacks."""
    script = (
        "import datasets, torch, transformers, trl\n"
        f"assert trl.__version__ == {TRL_VERSION!r}, f'TRL {{trl.__version__}} is installed'\n"
        f"assert {device!r} != 'cuda' or torch.cuda.is_available(), 'torch sees no GPU'\n"
    )
    if not python.is_file():
        return [f"{python}: no such interpreter (--trl-python)"]
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if done.returncode == 0:
        return []
    reason = done.stderr.strip().splitlines()[-1]
    return [f"{python}: {reason}; TRL's side needs datasets, transformers and trl {TRL_VERSION}"]


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
    ours, theirs, bounds = [], [], []
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as name:
        folder = Path(name)
        prepare(size, folder)
        settings = trl_settings(size, folder, args.trl_updates, args.device)
        with TrlSide(python, settings, folder, args.timeout) as trl:

            def ours_of(number: int) -> list[float]:
                config = our_config(size, folder, args.device, folder / f"run-{number}")
                turn = our_turn(config, args.updates)
                return [*turn, two_core_bound(folder, number)]

            for number in range(args.rounds):
                *turn, bound = ended.get((size, number, "ours"), partial(ours_of, number))
                ours.append(Turn(*turn))
                bounds.append(bound)
                theirs.append(Turn(*ended.get((size, number, "TRL"), lambda: [*trl.turn()])))
    return result(size, ours, theirs) | shares(ours, bounds)


def shares(ours: Sequence[Turn], bounds: Sequence[float]) -> dict[str, Any]:
    reached = [turn.tokens_per_second / bound for turn, bound in zip(ours, bounds, strict=True)]
    return {"bound": round(median(bounds)), "share_of_bound": spread(reached, 2)}


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
        low, high, share = r["trl_spread"], r["spread"], r["share_of_bound"]
        print(
            f"{r['model']:>7}"
            f" {low['median']:>8.0f} ({low['lowest']:.0f}–{low['highest']:.0f})"
            f" {high['median']:>8.0f} ({high['lowest']:.0f}–{high['highest']:.0f})"
            f" {r['ratio']:>6} ({r['ratio_min']}–{r['ratio_max']})"
            f" {r['bound']:>6} {share['median']:>5} ({share['lowest']}–{share['highest']})"
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
    versions = {
        "number_type": chosen.dtype,
        "trl": TRL_VERSION,
        "seconds": round(time.perf_counter() - began),
    }
    ended.forget()
    finish(__file__, {"results": results} | machine(args.device) | versions, promises)


if __name__ == "__main__":
    main()
