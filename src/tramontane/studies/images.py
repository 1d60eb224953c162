"""Reinforcement learning on text and on pictures, measured on both: the "free lunch" of the paper
(arXiv 2506.10910, section 7)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tramontane.data.playground import problems
from tramontane.evaluation.measure import evaluate
from tramontane.models.images import data_uri, pillow
from tramontane.studies.measures import FinishedRun
from tramontane.studies.procedures import trained
from tramontane.studies.study import base_config
from tramontane.types import Problem


def seeing(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning of a model that takes images, its tower frozen or trained.

    What is measured is the text half with its tower, its parent's where that was frozen, as
    `tramontane transplant` puts them together.

    Args:
        keys: `model`; `kinds` of problems to train on, none to measure the model; `drawn` and
            `told`, the kinds measured in pictures and in words, `levels` and `languages`; `updates`
            of the training, `config`, its config keys, and `changes` to these; `problems` of each
            evaluation.
        seed: of the training.
        folder: of the run.

    Returns:
        pass@1 on held-out problems: `images`, in pictures; `text`, in words; `blank`, those of
        `images` with an empty picture. `trained_tokens` of all updates.
    """
    model, tokens = keys["model"], 0
    if keys["kinds"]:
        changes = {"model": model, "pipeline.updates": keys["updates"], "seed": seed}
        named = {name: keys[name] for name in ("levels", "languages", "kinds")}
        changes["data.playground"] = named
        model = str(trained(folder / "run", keys["config"] | keys["changes"] | changes))
        tokens = FinishedRun(folder / "run").summary["trained_completion_tokens"]
    world = (tuple(keys["levels"]), keys["languages"])
    images = [_row(p) for p in problems("test", 0, *world, keys["drawn"], keys["problems"])]
    sets = {
        "images": images,
        "text": [_row(p) for p in problems("test", 0, *world, keys["told"], keys["problems"])],
        "blank": [given | {"images": [_blank()]} for given in images],
    }
    figures = {
        name: evaluate(model, rows, base_config(), problems=len(rows), seed=0)
        for name, rows in sets.items()
    }
    return {"trained_tokens": tokens} | {n: result.pass_at_1.value for n, result in figures.items()}


def _row(problem: Problem) -> dict[str, Any]:
    """A problem as a row of data."""
    keys = ("id", "problem", "answer", "language", "images")
    return {key: value for key in keys if (value := getattr(problem, key))}


def _blank() -> str:
    """A white picture."""
    Image, _, _ = pillow()
    file = io.BytesIO()
    Image.new("RGB", (112, 112), "white").save(file, "PNG")
    return data_uri(file.getvalue())
