"""An arm of the study `oversight`: one protocol among the same models, on questions of one seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tramontane.config import SFTConfig, parse
from tramontane.errors import InputError
from tramontane.sft.sft import is_unfinished, sft
from tramontane.workplace import owned_file, write_whole
from tramontane_oversight.compare import compare_protocols
from tramontane_oversight.config import ExtractiveConfig, OversightConfig
from tramontane_oversight.figures import ArmFigures
from tramontane_oversight.studies.lessons import Pair, drills, lessons, write_lessons

# Fine-tuning of the tiny base, as in configs/tiny_drills.yaml and configs/tiny_lessons.yaml.
SFT: dict[str, Any] = {
    "batch_tokens": 8192,
    "microbatch_tokens": 4096,
    "learning_rate": 1e-3,
    "threads": 2,
    "save_dtype": "bfloat16",
    "checkpoint_every": 100,
}
SHARED_SECONDS = 24 * 3600.0  # time limit for the run that trains the shared model
# Keys that determine the model.
TAUGHT = ("extractive", "lessons", "drills", "drill_steps", "lesson_steps", "wording")


def run_arm(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Play an arm and return its results; NaN for those that do not apply to the protocol.

    Args:
        keys: `protocol`, `rounds`, `best_of`, `questions` (their number), `extractive` (their
            kind), `wording`; `judge` and `agent` (sections of a model); `model`, the path of their
            checkpoints where the sections name none. Without `model`, the tiny base is fine-tuned
            for `drill_steps` steps on `drills` and for `lesson_steps` on the lessons of `lessons`
            questions, once for all runs of the study.
        seed: of questions, sides and sampling; arms with equal seeds have the same questions.
        folder: of the comparison, which continues there.

    Raises:
        InputError: invalid keys, or no checkpoint of the models.
    """
    arm = {name: keys[name] for name in ("protocol", "rounds", "best_of")}
    participants = {role: dict(keys[role]) for role in ("judge", "agent")}
    for participant in participants.values():
        checkpoint = participant.get("checkpoint")
        if checkpoint is not None and "path" not in checkpoint:
            path = keys["model"] or taught_model(folder.parents[1], keys)
            participant["checkpoint"] = {**checkpoint, "path": str(path)}
    config = parse(
        OversightConfig,
        {
            "out": str(folder / "discussions"),
            "seed": seed,
            "questions": {
                "limit": keys["questions"],
                "seed": seed,
                "extractive": keys["extractive"],
            },
            "wording": keys["wording"],
            "models": participants,
            "arms": {"arm": arm},
        },
        "study oversight",
    )
    return measures_of(compare_protocols(config).figures["arm"])


def taught_model(folder: Path, keys: dict[str, Any]) -> Path:
    """The tiny base after its lessons, made by the first run of a study that needs it.

    Other runs wait for it; a run resumed after a kill resumes the fine-tuning too.

    Args:
        folder: of the study.
        keys: those of `TAUGHT` are used.

    Raises:
        InputError: the folder holds a model with different lessons.
    """
    model, record = folder / "model", folder / "model.json"
    taught = {name: keys[name] for name in TAUGHT}
    folder.mkdir(parents=True, exist_ok=True)
    with owned_file(record, "taught", wait=SHARED_SECONDS):
        made = json.loads(record.read_text()) if record.is_file() else None
        begun = any((folder / name).exists() for name in ("drilled", "model"))
        if begun and made != taught:
            raise InputError(
                f"{model}: a model with different lessons ({made}, not {taught}); remove {folder}, "
                f"or name another folder"
            )
        write_whole(record, json.dumps(taught))
        kind = parse(ExtractiveConfig, keys["extractive"], "study oversight")
        # A constant rate, since the tiny base learns to look up words late and abruptly.
        settings = {"model": "tiny", "output": str(folder / "drilled"), "schedule": "constant"}
        pairs = drills(0, keys["drills"], kind.languages)
        _fine_tune(settings | {"steps": keys["drill_steps"]}, pairs)
        settings = {"model": settings["output"], "output": str(model)}
        drawn = kind.model_dump(exclude={"split"})
        pairs = lessons(0, keys["lessons"], wording=keys["wording"], **drawn)
        _fine_tune(settings | {"steps": keys["lesson_steps"]}, pairs)
    return model


def _fine_tune(settings: dict[str, Any], pairs: Iterator[Pair]) -> None:
    """Make or resume the checkpoint `output`; does nothing if it is finished."""
    output = Path(settings["output"])
    unfinished = is_unfinished(output)
    if (output / "config.json").is_file() and not unfinished:
        return
    examples = output.with_suffix(".jsonl")
    write_lessons(examples, pairs)
    warmup = min(100, settings["steps"] // 10)
    settings = {**SFT, "data": {"train": str(examples)}, "warmup_steps": warmup, **settings}
    sft(parse(SFTConfig, settings, "study oversight"), resume=unfinished)


def measures_of(figures: ArmFigures) -> dict[str, float]:
    """The figures of an arm as the study's measures."""
    found: Mapping[str, Any] = {
        "accuracy": figures.accuracy,
        "win_rate": figures.win_rate,
        "win_rate_right": figures.win_rate_right,
        "win_rate_wrong": figures.win_rate_wrong,
        "own_accuracy": figures.own_accuracy,
    }
    measures = {name: math.nan if e is None else float(e.value) for name, e in found.items()}
    quotes, calibration = figures.verified_quotes, figures.calibration
    return measures | {
        "verdicts": figures.verdicts,
        "verified_quotes": math.nan if quotes is None else quotes,
        "brier": math.nan if calibration is None else calibration.brier,
    }
