"""Arms other than single runs, as functions for a study's `runner`: fine-tuning or curation before
reinforcement learning, a real checkpoint's cold start, distillation from other runs, the landscape
of a run, and collation alone.

Every step keeps its result in the arm's folder, so that a killed call can be resumed.
"""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.config import Config, parse, parse_settings, read_settings
from tramontane.config.sft import SFTConfig
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate
from tramontane.data.files import read_rows
from tramontane.data.playground import problems
from tramontane.evaluation.measure import evaluate
from tramontane.recipes.config import HarvestConfig
from tramontane.recipes.harvest import harvest
from tramontane.run.folder import RunFolder
from tramontane.sft.sft import is_unfinished
from tramontane.start import sft, train_or_resume
from tramontane.studies.measures import FinishedRun
from tramontane.studies.study import base_config
from tramontane.sweeps.settings import check_same, write_settings
from tramontane.trainer.collate import collate, padding_fraction
from tramontane.workplace import owned_folder, write_whole

SHARED_SECONDS = 24 * 3600.0  # limit for the run that trains the teacher of all arms
PROMPT_TOKENS = 40  # of a playground problem, about


def fine_tuned(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning, or distillation in its place, fine-tuning on a teacher's traces, or
    both.

    The teacher is a separate run, shared by the arms of a seed. Its traces are those of `tramontane
    harvest`.

    Args:
        keys: `sft`, `rl` and `distill` (bool, false without it), `updates` of the reinforcement
            learning, and `minibatch`, the completions of an optimizer step, if not the whole batch;
            `teacher_updates`, `epochs` and `batch_tokens` of the fine-tuning, `problems` of the
            evaluation.
        seed: of all steps.
        folder: of the run.
    """
    model = "tiny"
    if keys["sft"]:
        run = _teacher(keys, seed, folder).parents[2]
        traces = folder / "traces.jsonl"
        found = harvest(run, traces, HarvestConfig(seed=seed))
        tokens = found.rows * (found.mean_tokens + PROMPT_TOKENS) * keys["epochs"]
        settings = {
            "model": "tiny",
            "seed": seed,
            "data": {"train": str(traces)},
            "steps": max(1, round(tokens / keys["batch_tokens"])),
            "batch_tokens": keys["batch_tokens"],
            "learning_rate": 3e-4,
            "warmup_steps": 5,
        }
        model = str(supervised(folder / "sft", settings))
    if keys["rl"]:
        changes = {"model": model, "pipeline.updates": keys["updates"], "seed": seed}
        if minibatch := keys.get("minibatch"):
            changes["pipeline.n_minibatch"] = minibatch
        if keys.get("distill"):
            changes |= distillation(_teacher(keys, seed, folder))
        model = str(trained(folder / "run", changes))
    return _figures(model, keys["problems"])


def distilled(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """`fine_tuned`, with `of_teacher`: its pass@1 as a share of the teacher's."""
    figures = fine_tuned(keys, seed, folder)
    best = _figures(str(_teacher(keys, seed, folder)), keys["problems"])["pass_at_1"]
    return figures | {"of_teacher": figures["pass_at_1"] / best}


def _teacher(keys: dict[str, Any], seed: int, folder: Path) -> Path:
    changes = {"pipeline.updates": keys["teacher_updates"], "seed": seed}
    return shared_run(folder, f"teacher_{seed}", changes)


def shared_run(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """The weights of a run that arms share, which the first to ask trains."""
    shared = folder.parents[1] / name
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        return trained(shared / "run", changes)


def supervised(output: Path, settings: dict[str, Any]) -> Path:
    """Fine-tune by the keys of an `SFTConfig`, or continue; returns the weights."""
    unfinished = is_unfinished(output)
    if unfinished or not (output / "config.json").is_file():
        sft(parse(SFTConfig, settings | {"output": str(output)}, str(output)), resume=unfinished)
    return output


def distillation(teacher: Path, of_code: Path | None = None) -> dict[str, Any]:
    """The config keys that make a run distillation; `of_code`: a separate teacher for programs."""
    domains = {"code": str(of_code)} if of_code else {}
    return {
        "teacher": {"model": str(teacher), "domains": domains},
        "trainer.objective": {"name": "distill", "distill": {"top_k": 16}},
        "pipeline.diversity": "none",
    }


def curated(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Training on problems selected by one or two difficulty passes.

    The first pass measures the problems with the tiny base. The second measures all of them again,
    with a model trained on the result of the first.

    Args:
        keys: `passes` (0, 1 or 2), `pool` (number of problems), `levels` of the problems, `samples`
            of each pass, `updates` of each training, `problems` of the evaluation.
        seed: of all steps.
        folder: of the run.

    Returns:
        The measures, among them `kept`, the share of the pool that is trained on, and `recovered`:
        of the problems that the first pass never solved, the share that the second keeps.
    """
    pool = folder / "pool.jsonl"
    if not pool.is_file():  # a resumed curation needs its original file
        found = problems("train", seed, tuple(keys["levels"]))
        rows = [
            {"id": p.id, "problem": p.problem, "answer": p.answer, "language": p.language}
            for p in islice(found, keys["pool"])
        ]
        write_whole(pool, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    train, model = pool, "tiny"
    for number in range(1, keys["passes"] + 1):
        stage = "difficulty" if number == 1 else "regrade"
        if number == 2:
            model = str(trained(folder / "first", _on(train, keys, seed)))
        settings = {
            "out": str(folder / f"pass_{number}"),
            "inputs": [str(pool)],
            "stages": [stage],
            stage: {
                "samples": keys["samples"],
                "verifier": {"workers": 1},
                "model": {
                    "checkpoint": {"path": model, "slots": 128, "device": "cpu"},
                    "max_tokens": 224,
                },
            },
        }
        train = curate(parse(CurateConfig, settings, f"pass {number}")).problems
    model = str(trained(folder / "run", _on(train, keys, seed)))
    selected = {
        "kept": sum(1 for _ in read_rows(str(train))) / keys["pool"],
        "recovered": _recovered(folder, train) if keys["passes"] == 2 else math.nan,
    }
    return selected | _figures(model, keys["problems"])


def _recovered(folder: Path, train: Path) -> float:
    """The share of problems unsolved in the first pass that are trained on; NaN if all were
    solved."""
    decisions = read_rows(str(folder / "pass_1/decisions.jsonl"))
    unsolved = {row["id"] for _, row in decisions if row["reason"] == "unsolved"}
    kept = {row["id"] for _, row in read_rows(str(train))}
    return len(kept & unsolved) / len(unsolved) if unsolved else math.nan


def explored(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """The landscape around a run's final checkpoint.

    Args:
        keys: `updates` of the run, `points` along each axis, `problems` and `samples` of a point.
        seed: of the run.
        folder: of the run.
    """
    from tramontane.studies.landscape import study_landscape

    changes = {
        "pipeline.updates": max(2, keys["updates"]),  # with the start, three checkpoints
        "seed": seed,
        "checkpoint.every": 1,
        "checkpoint.keep": 1000,
        "checkpoint.weights_dtype": "float32",
    }
    trained(folder / "run", changes)
    landscape = study_landscape(
        folder / "run",
        points=keys["points"],
        sampling={"problems": keys["problems"], "samples": keys["samples"]},
        out=folder / "landscape",
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for update, (first, second) in zip(
            landscape.updates, landscape.plane.coordinates, strict=True
        ):
            row = {"update": update, "alpha_1": first, "alpha_2": second}
            file.write(json.dumps(row) + "\n")
    return {
        "plane_share": float(landscape.plane.explained[:2].sum()),
        "slope": landscape.law.slope,
        "correlation": landscape.correlation,
        "r_squared": landscape.law.r_squared,
    }


def collated(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Padding of greedy collation, and of batches of as many sequences as always fit.

    Args:
        keys: `lengths` of the sequences: `uniform`, from the shortest to `spread` times as much, or
            `lognormal`, where the longest has `spread` times the mean; the number of `sequences`;
            the `budget` of tokens of a microbatch.
        seed: of the lengths.
        folder: of the run.
    """
    random, mean = np.random.default_rng(seed), keys["budget"] / 40
    if keys["lengths"] == "uniform":
        shortest = 2 * mean / (1 + keys["spread"])
        drawn = random.uniform(shortest, keys["spread"] * shortest, keys["sequences"])
    else:
        drawn = random.lognormal(0.0, 0.7, keys["sequences"])
        drawn = np.minimum(drawn / drawn.mean(), keys["spread"]) * mean
    lengths = [max(1, round(length)) for length in drawn]
    size = keys["budget"] // max(lengths)
    batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    fixed = 1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches)
    microbatches = collate(lengths, keys["budget"])
    greedy = padding_fraction([sum(lengths[i] for i in m) for m in microbatches], keys["budget"])
    return {"saved": fixed - greedy, "fixed": fixed, "collated": greedy}


def started(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning of a checkpoint, after a cold start that all arms and seeds share.

    Args:
        keys: `model`; `playground`, the problems of all steps; `cold_start`, settings of the
            fine-tuning, and `mixture` of its traces; `rl`, false to measure the cold start;
            `updates` of the reinforcement learning; `config`, config keys of all arms, and
            `changes`, those of one; `problems` of the evaluation.
        seed: of the reinforcement learning.
        folder: of the arm.

    Returns:
        Of held-out problems, pass@1, the share of completions in one language, and the tokens of a
        completion; and `late_entropy` (nats), a mean over the last quarter of the updates, NaN
        without any.
    """
    shared = folder.parents[1] / "start"
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        data = {"playground": [keys["playground"]], "mixture": keys["mixture"]}
        settings = {"model": keys["model"], "data": data, **keys["cold_start"]}
        model = supervised(shared / "sft", settings)
    config = keys["config"] | {"data.playground": keys["playground"]}
    entropy = math.nan
    if keys["rl"]:
        changes = {"model": str(model), "pipeline.updates": keys["updates"], "seed": seed}
        model = trained(folder / "run", config | changes | keys["changes"])
        entropy = FinishedRun(folder / "run").late("entropy")
    result = evaluate(model, None, base_config(), config, problems=keys["problems"], seed=0)
    return {
        "pass_at_1": result.pass_at_1.value,
        "language_rate": result.language_rate,
        "completion_tokens": result.mean_completion_tokens,
        "late_entropy": entropy,
    }


def _on(train: Path, keys: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"data.train": str(train), "pipeline.updates": keys["updates"], "seed": seed}


def trained(folder: Path, changes: dict[str, Any]) -> Path:
    """Train on the studies' base with changed keys, or continue a run; returns its weights.

    Raises:
        InputError: the folder has a run with different settings.
    """
    run = RunFolder(folder)
    # `_figures` measures the result; the run's own measurement is a formality.
    changes = changes | {"run_dir": str(folder), "evaluation.problems": 8}
    texts = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    config = parse_settings(Config, read_settings(base_config()), texts, str(folder))
    settings = config.model_dump(mode="json")
    check_same(folder, settings)
    write_settings(folder, settings)
    if not run.finished:
        train_or_resume(config, report=False)
    return run.checkpoint(run.newest_version) / "weights"


def _figures(model: str, count: int) -> dict[str, float]:
    """Figures of a model on the base's held-out problems, the same for all arms and seeds."""
    result = evaluate(model, None, base_config(), problems=count, seed=0)
    return {
        "pass_at_1": result.pass_at_1.value,
        "format_rate": result.format_rate,
        "completion_tokens": result.mean_completion_tokens,
    }
