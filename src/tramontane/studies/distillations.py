"""Arms of several steps, which may share some of them: two specialists distilled into one model, a
model's earlier weights into what fine-tuning made of it, and levels of effort.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.evaluation.measure import evaluate
from tramontane.run.folder import RunFolder
from tramontane.studies.procedures import (
    SHARED_SECONDS,
    distillation,
    shared_run,
    supervised,
    trained,
)
from tramontane.studies.study import base_config
from tramontane.workplace import owned_folder, write_whole

FLAWS = ("guess", "ramble", "no_box", "unclosed", "unopened", "switch")  # of generated traces
KEEP_ALL = {"checkpoint.every": 1, "checkpoint.keep": 1000}


def combined(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Distillation from a teacher of maths and one of code, or reinforcement learning on both kinds
    of problems for as many trained tokens.

    The arms of a seed share all runs. The reinforcement learning is one long run: an arm measures
    the checkpoint whose trained tokens are nearest to those that it may spend.

    Args:
        keys: `distill`; without it `teachers`, true to spend the teachers' tokens as well as the
            student's; `updates` of the student and `student`, config keys of its run alone;
            `teacher_updates` of each teacher, `mixed_updates` of the reinforcement learning; and
            the keys of `_problems` and `_measured`.
        seed: of all runs.
        folder: of the arm.

    Returns:
        `maths` and `code`, pass@1 on each, `of_maths` and `of_code`, the same as shares of that
        teacher's, and their mean `of_teachers`; `tokens` (millions) that the arm's weights were
        trained on, and with those of its teachers, `tokens_in_all`.
    """

    def run(name: str, domains: Sequence[str], updates: int, changes: dict[str, Any]) -> Path:
        common = _problems(keys, domains) | {"pipeline.updates": updates, "seed": seed}
        return shared_run(folder, f"{name}_{seed}", common | changes)

    domains = ("maths", "code")
    # First, while another arm trains the teachers.
    rl = None if keys["distill"] else run("mixed", domains, keys["mixed_updates"], KEEP_ALL)
    teachers = {name: run(name, [name], keys["teacher_updates"], {}) for name in domains}
    of_both = distillation(teachers["maths"], teachers["code"])
    student = run("student", domains, keys["updates"], of_both | keys["student"])
    tokens = _tokens(student)[-1]
    in_all = tokens + sum(_tokens(teacher)[-1] for teacher in teachers.values())
    model = student
    if rl is not None:
        spent = _tokens(rl)
        update = np.abs(spent - (in_all if keys["teachers"] else tokens)).argmin()
        model = RunFolder(rl.parents[2]).checkpoint(int(update) + 1) / "weights"
        tokens = in_all = spent[update]
    figures = {name: _measured(model, name, keys)["all"] for name in domains}
    best = {name: _measured(teachers[name], name, keys)["all"] for name in domains}
    shares = {f"of_{name}": share(figures[name], best[name]) for name in domains}
    return {
        **figures,
        **shares,
        "of_teachers": float(np.mean([*shares.values()])),
        "tokens": tokens / 1e6,
        "tokens_in_all": in_all / 1e6,
    }


def share(figure: float, whole: float) -> float:
    """A pass@1 as a share of another; NaN of one that solves nothing."""
    return figure / whole if whole else math.nan


def restored(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """An ability after fine-tuning on something else, and after distillation from the weights that
    had it.

    The weights at the start come from reinforcement learning on maths, and are fine-tuned on
    flawless traces of programs. The arms of a seed share both.

    Args:
        keys: `sft`, false to measure the start; `distill`, the kinds of prompts of a distillation
            after the fine-tuning, if any: on those of `maths` the start is the teacher, on those of
            `code` the fine-tuned weights; `updates` of it, and `student`, config keys of it alone;
            `model`, and `start`, changed config keys of the run that makes the start (with a
            `seed`, all arms share it), of `start_updates`; `sft_steps` and `sft_settings` of the
            fine-tuning; and the keys of `_problems` and `_measured`.
        seed: of all steps.
        folder: of the arm.

    Returns:
        `maths` and `code`, pass@1 on each; of maths, `english` and `others`, the mean of all other
        languages; `of_start`, maths as a share of the start's, and `of_sft`, code as a share of the
        fine-tuned weights'.
    """
    changes = _problems(keys, ["maths"]) | {"model": keys["model"], "seed": seed} | keys["start"]
    changes["pipeline.updates"] = keys["start_updates"]
    start = shared_run(folder, f"start_{changes['seed']}", changes)
    settings = {
        "model": str(start),
        "seed": seed,
        "data": {
            "playground": [keys["code"]],
            "mixture": {"work": 1, **dict.fromkeys(FLAWS, 0)},
        },
        "steps": keys["sft_steps"],
        **keys["sft_settings"],
    }
    shared = folder.parents[1] / f"sft_{seed}"
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        narrow = supervised(shared / "sft", settings)
    model = narrow if keys["sft"] else start
    if prompts := keys["distill"]:
        teachers = distillation(start, narrow if "code" in prompts else None)
        common = {"model": str(narrow), "pipeline.updates": keys["updates"], "seed": seed}
        changes = _problems(keys, prompts) | teachers | common | keys["student"]
        model = trained(folder / "run", changes)
    languages, code = _measured(model, "maths", keys), _measured(model, "code", keys)["all"]
    maths = languages.pop("all")
    return {
        "maths": maths,
        "code": code,
        "english": languages.pop("en", math.nan),
        "others": float(np.mean([*languages.values()])) if languages else math.nan,
        "of_start": share(maths, _measured(start, "maths", keys)["all"]),
        "of_sft": share(code, _measured(narrow, "code", keys)["all"]),
    }


def at_levels(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning at levels of effort, after fine-tuning on traces for each of them.

    The arms of a seed share the fine-tuning, where the model first reads the levels' phrases.

    Args:
        keys: `model`, the tiny base where there is none; `effort`, the levels `low` and `high` as
            in `data.effort`; `train_effort`, those that the arm trains, null for both; `traces`,
            the parts of the playground that the fine-tuning reads, and `sft_steps` of it; `levels`
            of the problems; `updates`; `problems` of the evaluation; `config`, further config keys
            of the runs, if any.
        seed: of both steps.
        folder: of the arm.

    Returns:
        Of held-out problems at each level: pass@1 and tokens a completion, `pass_at_1_low` and so
        on; `effort_tokens`, those of low effort over those of high effort; `effort_obeyed`, the
        share of completions at low effort that end by themselves within its `l_max`.
    """
    shared = folder.parents[1] / f"sft_{seed}"
    data = {"playground": keys["traces"], "effort": keys["effort"]}
    settings = {"model": keys.get("model", "tiny"), "seed": seed, "data": data}
    settings |= {"steps": keys["sft_steps"], "batch_tokens": 4096}
    settings |= {"learning_rate": 2e-3, "warmup_steps": 10}
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        start = supervised(shared / "sft", settings)
    asked = {"data.effort": keys["effort"], "data.playground.levels": keys["levels"]}
    asked |= keys.get("config", {})
    own = {"data.train_effort": keys["train_effort"], "pipeline.updates": keys["updates"]}
    model = trained(folder / "run", asked | own | {"model": str(start), "seed": seed})
    low, high = (
        evaluate(
            model, None, base_config(), asked, problems=keys["problems"], seed=0, effort=[level]
        )
        for level in ("low", "high")
    )
    return {
        "pass_at_1_low": low.pass_at_1.value,
        "pass_at_1_high": high.pass_at_1.value,
        "tokens_low": low.mean_completion_tokens,
        "tokens_high": high.mean_completion_tokens,
        "effort_tokens": low.mean_completion_tokens / high.mean_completion_tokens,
        "effort_obeyed": 1 - low.length_limited_rate,
    }


def _problems(keys: dict[str, Any], domains: Sequence[str]) -> dict[str, Any]:
    """The config keys of a run on some kinds of problems: `config`, which all runs change, and the
    playground of `keys[domain]`, at the levels `levels`."""
    kinds = [kind for domain in domains for kind in keys[domain]["kinds"]]
    playground = {**keys[domains[0]], "levels": keys["levels"], "kinds": kinds}
    return keys["config"] | {"data.playground": playground}


def _tokens(weights: Path) -> np.ndarray:
    """Trained completion tokens of a run up to each update, from its weights' path."""
    rows = RunFolder(weights.parents[2]).metrics()
    return np.cumsum([sum(row["staleness_histogram"].values()) for row in rows])


def _measured(model: Path, domain: str, keys: dict[str, Any]) -> dict[str, float]:
    """pass@1 of a model, in `all` and by language, on `problems` held-out problems of the
    playground `keys[domain]`, the same for all arms and seeds. Weights that arms share are measured
    once: the figures stand beside them."""
    changes = keys["config"] | {"data.playground": keys[domain]}
    asked = json.dumps([str(model), changes, keys["problems"]], sort_keys=True)
    folder = model.parents[2] if model.name == "weights" else model.parent
    file = folder / f"pass_at_1_{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        found = evaluate(model, None, base_config(), changes, problems=keys["problems"], seed=0)
        figures = {name: each.pass_at_1.value for name, each in found.by_language.items()}
        write_whole(file, json.dumps(figures | {"all": found.pass_at_1.value}))
    measured: dict[str, float] = json.loads(file.read_text())
    return measured
