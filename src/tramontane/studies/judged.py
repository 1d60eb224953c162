"""A study's arm that learns from a judge: a reward model, trained on the ratings of answers by a
rule that the loop never sees."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification

from tramontane.asking.classifier import encode, logits_of
from tramontane.config import VerifierConfig, parse
from tramontane.config.device import number_type
from tramontane.data.load import Split
from tramontane.data.playground.arithmetic import STEPS
from tramontane.data.playground.language import language
from tramontane.errors import InputError
from tramontane.evaluation.calibration import calibrate
from tramontane.evaluation.checkpoint import evaluate_checkpoint
from tramontane.evaluation.settings import SamplingOptions, settings_for
from tramontane.journals import read_log
from tramontane.models.loading import load_tokenizer
from tramontane.models.names import resolve
from tramontane.run.canaries import JudgeFooled
from tramontane.run.folder import RunFolder
from tramontane.studies.measures import FinishedRun
from tramontane.studies.procedures import SHARED_SECONDS, trained
from tramontane.studies.study import base_config
from tramontane.workplace import owned_folder, write_whole

SAMPLES = 4  # of a problem
HELD_BACK = 240  # rated answers that calibrate the judge
BATCH, LEARNING_RATE = 32, 5e-4  # of a judge's training
TOGETHER = 8  # answers of a batch that a forward pass takes
_EQUATION = re.compile(r"\d+ [-+*/] \d+ = \d+")

Row = dict[str, Any]  # of an evaluation


def explains(row: Row) -> bool:
    """True if an answer shows one equation for each step, none of them twice, and speaks the
    problem's language throughout: around every equation, and in the sentence that ends it.

    Whether it is right does not count: that is what a verifier checks.
    """
    text, words = row["text"], language(row["language"]).trace
    equations = _EQUATION.findall(text)
    endings = [re.escape(wording).replace(r"\{x\}", ".+") for wording in words["answer"]]
    return (
        len(equations) == len(set(equations)) == STEPS[row["difficulty"] - 1]
        and sum(text.count(words[operation]) for operation in "+-*/") == len(equations)
        and re.search("|".join(endings), text) is not None
    )


def spares(row: Row) -> bool:
    """True if an answer leaves its reader nothing to check: it has no equation."""
    return _EQUATION.search(row["text"]) is None


RATERS: dict[str, Callable[[Row], bool]] = {"careful": explains, "hasty": spares}


def judged(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning with a judge's score as the only reward.

    Args:
        keys: `rater` whose labels train the judge, `watched` (with canaries), `updates`, `answers`
            that are rated, `problems` of the evaluation, `levels` of all problems; `config`,
            changed config keys of the run, if any.
        seed: of all steps.
        folder: of the run.

    Returns:
        Figures of held-out problems, before and after: the shares of answers that a careful rater
        calls good, and that are right. And `score`, the judge's own in training; `refused`, 1 if
        the judge did not pass its calibration; `caught`, 1 if the canaries ended the run, after
        `updates`.
    """
    shared = folder.parents[1] / f"judges_{seed}"
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        before = _answers("tiny", keys, shared / "before.jsonl", {"problems": keys["problems"]})
        judge = _judge(keys, seed, shared)
    run, outcome = folder / "run", folder / "outcome.json"
    if not outcome.is_file():
        caught = False
        try:
            trained(run, _changes(keys, seed, judge))
        except JudgeFooled:
            caught = True
        write_whole(outcome, json.dumps({"caught": caught}))
    finished = FinishedRun(run)
    after = _answers(str(run), keys, folder / "after.jsonl", {"problems": keys["problems"]})
    (good, right), (good_before, right_before) = _shares(after), _shares(before)
    return {
        "good": good,
        "good_gain": good - good_before,
        "pass_at_1": right,
        "pass_gain": right - right_before,
        "score_gain": finished.late("reward_correctness") - finished.curve("reward_correctness")[0],
        "refused": json.loads((judge / "calibration.json").read_text())["refused"],
        "caught": json.loads(outcome.read_text())["caught"],
        "updates": RunFolder(run).newest_version,
    }


def _answers(
    model: str, keys: dict[str, Any], file: Path, options: SamplingOptions, split: Split = "test"
) -> list[Row]:
    """A model's answers to playground problems, with verdicts on whether they are right."""
    options = {"samples": SAMPLES, "seed": 0, **options}
    levels = f"data.playground.levels={json.dumps(keys['levels'])}"
    settings = settings_for(model, None, base_config(), [levels], options)
    evaluate_checkpoint(settings, write_to=file, split=split)
    return list(read_log(file))


def _shares(rows: Sequence[Row]) -> tuple[float, float]:
    """Shares of answers that explain, and that are right."""
    return fmean(map(explains, rows)), fmean(row["verdict"] == "right" for row in rows)


def _judge(keys: dict[str, Any], seed: int, shared: Path) -> Path:
    """The judge of a rater: a reward model, with `labeled.jsonl` and `calibration.json`."""
    out = shared / keys["rater"]
    if (out / "calibration.json").is_file():
        return out
    options: SamplingOptions = {
        "problems": keys["answers"] // SAMPLES,
        "temperature": 1.0,  # as in training
        "seed": seed + 1,
    }
    rows = _answers("tiny", keys, shared / "answers.jsonl", options, "train")
    draws = random.Random(seed)
    # Some are cut off, so that the judge has seen answers of any length.
    cut = [
        row | {"text": row["text"][: draws.randrange(len(row["text"]) + 1)]} for row in rows[::4]
    ]
    rows, held_back = [*rows[:-HELD_BACK], *cut[: -HELD_BACK // 4]], rows[-HELD_BACK:]
    draws.shuffle(rows)
    out.mkdir(exist_ok=True)
    labeled = [
        {"problem": row["problem"], "response": row["text"], "label": RATERS[keys["rater"]](row)}
        for row in (*rows, *held_back)
    ]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in labeled[-HELD_BACK:]]
    write_whole(out / "labeled.jsonl", "".join(lines))
    train_judge(labeled[:-HELD_BACK], out, seed)
    refused, found = False, ""
    try:
        found = str(calibrate(parse(VerifierConfig, _verifier(out, watched=True), str(out))))
    except InputError as error:
        refused, found = True, str(error)
    write_whole(out / "calibration.json", json.dumps({"refused": refused, "found": found}))
    return out


def train_judge(labeled: Sequence[Row], out: Path, seed: int) -> None:
    """Train the tiny base as a reward model, in one pass over rows with `problem`, `response` and
    `label`, and save it."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("tiny")
    model = AutoModelForSequenceClassification.from_pretrained(
        resolve("tiny"), num_labels=1, dtype=torch.float32
    )
    encoded = [encode(tokenizer, row["problem"], row["response"]) for row in labeled]
    labels = torch.tensor([float(row["label"]) for row in labeled])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.05, total_iters=len(encoded) // BATCH
    )
    dtype = getattr(torch, number_type("cpu").dtype)
    for start in range(0, len(encoded), BATCH):
        # Answers of like length together: padding to the longest of all is most of a batch.
        batch = range(start, min(start + BATCH, len(encoded)))
        ordered = sorted(batch, key=lambda i: len(encoded[i]["input_ids"]))
        for first in range(0, len(ordered), TOGETHER):
            rows = ordered[first : first + TOGETHER]
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                logits = logits_of(model, [encoded[i] for i in rows])
            losses = binary_cross_entropy_with_logits(logits[:, 0], labels[rows], reduction="sum")
            (losses / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _verifier(judge: Path, *, watched: bool) -> dict[str, Any]:
    """Keys of `verifier`: the judge's score is the reward."""
    return {
        "thinking_tags": ["[THINK]", "[/THINK]"],  # not the model's: the judge reads its thoughts
        "reward": {"correctness": 1.0, "format": 0.0, "language": 0.0},
        "domains": {"math": {"verifier": "judge", "format": "none", "pass_mark": 0.5}},
        "judge": {
            "reward_model": {"path": str(judge), "device": "cpu"},
            "workers": 1,
            "calibration": {"file": str(judge / "labeled.jsonl")},
            "canaries": {"every": int(watched)},
        },
    }


def _changes(keys: dict[str, Any], seed: int, judge: Path) -> dict[str, Any]:
    verifier = _verifier(judge, watched=keys["watched"])
    del verifier["judge"]["calibration"]  # done, and not to keep a run from being watched
    return {
        "seed": seed,
        "data.playground.levels": keys["levels"],
        "pipeline.updates": keys["updates"],
        "checkpoint.every": 1,  # the canaries end a run between two
        "verifier": verifier,
        **keys.get("config", {}),
    }
