"""Part D: whole runs on one GPU, and TRL's beside them where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import APART, Bench
from tramontane import train
from tramontane.config import Config, parse
from tramontane.models.loading import load_tokenizer

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "models/smollm2"
NAME = "Qwen2.5-1.5B"
COMPLETIONS, GROUP, LENGTH = 256, 16, 128
WARM_UP, UPDATES = 3, 5
TRL_SECONDS = 300.0
# Where the trainer works: beside the generator in one process, or in its own; or they take turns.
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "threads": {"placement": {"kind": "thread"}},
    "processes": {"placement": {"kind": APART}},
    "turns": {"placement": {"kind": "thread"}, "pipeline": {"max_staleness": 0}},
}


class Loop(NamedTuple):
    """A run: the model's shape, sequences in flight, and tokens that are attended to on average."""

    name: str
    rows: int
    context: int


LOOPS = {
    "quickstart": Loop("tiny", 384, 112),
    "SmolLM2": Loop("SmolLM2-135M", 192, 80),
    **{
        f"1.5B {place}": Loop(NAME, COMPLETIONS * (1 if place == "turns" else 2), LENGTH // 2)
        for place in PLACES
    },
    "1.5B TRL": Loop(NAME, COMPLETIONS, LENGTH // 2),
}


def shipped(bench: Bench, path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A shipped config, as a user runs it."""
    devices = [f"{worker}.device={bench.device}" for worker in ("generator", "trainer")]
    small = ["model=tiny", "pipeline.updates=1", "evaluation.problems=2", "verifier.workers=1"]
    small += ["evaluation.samples=1", "pipeline.n_async=16", "pipeline.n_batch=16"]
    small += ["pipeline.l_max=64", "pipeline.l_cache=16", "pipeline.diversity=none"]
    with tempfile.TemporaryDirectory() as folder:
        texts = [*devices, *overrides, *bench.pick([], small), f"run_dir={folder}/run"]
        summary = train(ROOT / path, texts, quiet=True, report=False).summary
    return {
        "tokens_per_second": summary["trained_tokens_per_second"],
        "generator_idle": summary["generator_idle_fraction"],
        "trainer_idle": summary["trainer_idle_fraction"],
        "pass_at_1": {when: p["value"] for when, p in summary["pass_at_1"].items()},
        "minutes": summary["minutes"],
    }


def smollm2(bench: Bench) -> dict[str, Any]:
    if not SMOLLM2.is_dir() and not bench.tiny:
        return {"lacks": "models/smollm2; with a network: tramontane fetch smollm2"}
    # GSM8K would be fetched; the other two keys are for two cores.
    settings = ["evaluation.also={}", "trainer.threads=1", "generator.workers=1"]
    return shipped(bench, "configs/real.yaml", settings + bench.pick([], ["cold_start=null"]))


@contextmanager
def task(bench: Bench) -> Iterator[Path]:
    """A folder with a checkpoint of random weights, whose completions all have the full length, and
    with problems and prompts as `vs_trl` has them."""
    import vs_trl_task

    from tramontane.data.prompts import PromptEncoder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench.make_model(NAME, torch.bfloat16).save_pretrained(folder / "model")
        tokenizer = load_tokenizer("tiny")
        tokenizer.save_pretrained(folder / "model")
        rows = vs_trl_task.problems(bench.pick(4096, 256))
        encoder = PromptEncoder(tokenizer)
        prompts = [encoder.render(row["problem"]) for row in rows]
        for file, values in (("problems", rows), ("prompts", prompts)):
            lines = "".join(json.dumps(value) + "\n" for value in values)
            (folder / f"{file}.jsonl").write_text(lines, encoding="utf-8")
        yield folder


class _Enough(Exception):
    """All updates are counted; no checkpoint is needed."""


def run_config(bench: Bench, folder: Path, place: str) -> Config:
    completions, length = bench.pick((COMPLETIONS, LENGTH), (32, 16))
    sections = PLACES[place]
    pipeline = {
        "n_batch": completions,
        "n_async": bench.pick(LOOPS[f"1.5B {place}"].rows, completions),
        "updates": 10**6,
        "group_size": GROUP,
        "max_staleness": 3,
        "l_max": length,
        "l_cache": 0,
        "diversity": "none",
        "unscorable": "wrong",
    } | sections.get("pipeline", {})
    share = {} if bench.tiny else {"gpus": 0.45}
    reward = {"function": "vs_trl_reward.plain_custom", "weight": 1, "malformed": True}
    axes = dict.fromkeys(("format", "correctness", "length", "language"), 0)
    raw = {
        "name": "gpu",
        "model": str(folder / "model"),
        "run_dir": str(folder / f"run-{place}"),
        "data": {"train": str(folder / "problems.jsonl"), "eval": None},
        "pipeline": pipeline,
        "placement": {"generator": share, "trainer": share, **sections["placement"]},
        "generator": {"device": bench.device},
        "trainer": {
            "device": bench.device,
            "learning_rate": 1e-6,
            "gradient_checkpointing": True,
            "microbatch_tokens": 16384,
        },
        "verifier": {
            "workers": bench.pick(4, 1),
            "reward": axes | {"custom": [{"name": "vowels", **reward}]},
        },
        "checkpoint": {"every": 10**6},
    }
    return parse(Config, raw, "benchmarks.gpu")


def ours(bench: Bench, place: str) -> dict[str, Any]:
    """Updates without the first ones, which compile kernels and fill the pipeline."""
    rows: list[Mapping[str, Any]] = []
    warm_up, updates = bench.pick((WARM_UP, UPDATES), (1, 1))

    def count(metrics: Mapping[str, Any]) -> None:
        rows.append(metrics)
        if len(rows) == warm_up + updates:
            raise _Enough

    with task(bench) as folder, suppress(_Enough):
        train(run_config(bench, folder, place), quiet=True, report=False, on_update=count)
    seconds = rows[-1]["wall_seconds"] - rows[warm_up - 1]["wall_seconds"]
    counted = rows[warm_up:]
    trained = sum(sum(row["staleness_histogram"].values()) for row in counted)
    return {
        "tokens_per_second": trained / seconds,
        "generator_idle": mean(row["generator_idle_fraction"] for row in counted),
        "trainer_idle": mean(row["trainer_idle_fraction"] for row in counted),
    }


def trl(bench: Bench) -> dict[str, Any]:
    """The same task by TRL's GRPOTrainer, in the environment of `benchmarks/vs_trl.py`."""
    import vs_trl

    python = ROOT / "benchmarks/.trl-venv/bin/python"
    if importlib.util.find_spec("trl"):
        python = Path(sys.executable)
    elif not python.is_file():
        return {"lacks": "TRL; with a network, benchmarks/vs_trl.py installs it"}
    if absent := vs_trl.missing_for_trl(python, bench.device):
        return {"lacks": "; ".join(absent)}
    vs_trl.TRL[NAME] = {"autocast": False, "continuous": False, "compile": False, "microbatch": 32}
    vs_trl.COMPLETIONS[NAME] = COMPLETIONS
    with (
        task(bench) as folder,
        vs_trl.TrlSide(python, NAME, folder, 2, bench.device, TRL_SECONDS) as side,
    ):
        return {"tokens_per_second": side.turn().tokens_per_second}


ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "quickstart": partial(shipped, path="configs/quickstart.yaml"),
    **{f"1.5B {place}": partial(ours, place=place) for place in PLACES},
    "SmolLM2": smollm2,
    "1.5B TRL": trl,
}
