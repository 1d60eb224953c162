"""The examples of Magistral Small's fine-tuning: harvested traces, the teacher's answers to
additional prompts, and general instruction data (arXiv 2506.10910, section 5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tramontane.data.files import shuffled
from tramontane.data.objects import override_texts
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import evaluate_checkpoint
from tramontane.evaluation.settings import Settings, settings_for
from tramontane.journals import read_log
from tramontane.recipes.config import AnswersConfig, GeneralConfig, flat
from tramontane.recipes.harvest import retagged, write_rows
from tramontane.recipes.steps import Facts
from tramontane.sft.examples import generated_chats, pairs_of_rows
from tramontane.types import ThinkingTags

COMPLETIONS = "completions.jsonl"
OPEN = "open"  # domain of prompts without a reference answer

Row = dict[str, Any]


def answer_settings(config: AnswersConfig, teacher: str) -> Settings:
    """The settings for answers by a checkpoint of the teacher's run: the run's, with changed keys.

    Raises:
        InputError: an invalid key.
    """
    keys = flat(config.set)
    if config.keep == "well_formed":
        keys[f"verifier.domains.{OPEN}"] = {"format": {"thinking": "required"}}
        keys["data.domain"] = OPEN
    options: Any = config.model_dump(exclude={"source", "set", "keep"}, exclude_none=True)
    return settings_for(teacher, config.source, None, override_texts(keys), options)


def answer(
    settings: Settings,
    keep: str,
    folder: Path,
    tags: ThinkingTags,
    on_progress: Callable[[int, int], None],
) -> Facts:
    """Have the teacher answer all prompts; prompts completed by an earlier process are kept.

    `completions.jsonl` gets every answer with its verdict, `examples.jsonl` those to learn from.

    Args:
        settings: those of `answer_settings`.
        keep: answers to learn from, as in `AnswersConfig`.
        folder: folder of the two files.
        tags: thinking tags of the model to train.
        on_progress: called with (answers graded, answers in all).
    """
    file = folder / COMPLETIONS
    evaluate_checkpoint(settings, write_to=file, split="train", on_progress=on_progress)
    rows = list(read_log(file))
    # A truncated answer would teach the model not to stop.
    old = ThinkingTags.of(settings.config.verifier.thinking_tags)  # resolved when the run began
    learned = [
        {"prompt": row["problem"], "response": retagged(row["text"], old, tags)}
        for row in rows
        if row["finish_reason"] == "stop"
        and (row["verdict"] == "right" if keep == "right" else row["verdict"] != "malformed")
    ]
    write_rows(folder / "examples.jsonl", learned)
    prompts = len({row["group"] for row in rows})
    return {"prompts": prompts, "answers": len(rows), "kept": len(learned)}


def general_pairs(config: GeneralConfig, count: int, seed: int) -> list[Row]:
    """`count` prompts and responses of general instruction data; a file with fewer is repeated.

    Raises:
        InputError: rows without the fields.
    """
    if config.train == "playground:":
        if any(part.effort for part in config.playground):
            raise InputError("general.playground: a recipe's examples cannot have levels of effort")
        chats = [chat for chat, _ in generated_chats(config, seed, count)[:count]]
        if any(len(chat) > 2 for chat in chats):
            raise InputError("general.playground: kinds for tools and games are conversations")
        pairs = [(asked["content"], answer["content"]) for asked, answer in chats]
    else:
        rows = pairs_of_rows(config)
        if shown := next((pair.where for pair in rows if pair.images), None):
            raise InputError(f"{shown}: has an image, and this mixture is of text; remove the row")
        found = [(row.prompt, row.response) for row in rows]
        rounds = -(-count // len(found))
        pairs = [pair for i in range(rounds) for pair in shuffled(found, seed + i)][:count]
    return [{"prompt": prompt, "response": response} for prompt, response in pairs]


def mix(sources: list[Path], general: GeneralConfig | None, seed: int, out: Path) -> Facts:
    """Write the mixture in random order; returns the number of examples by source.

    Raises:
        InputError: no examples at all.
    """
    rows: list[Row] = []
    facts: Facts = {}
    for source in sources:
        part = list(read_log(source))
        facts[source.parent.name] = len(part)
        rows += [{"prompt": r["prompt"], "response": r["response"]} for r in part]
    if not rows:
        raise InputError(f"{out.parent}: no traces and no answers to learn from")
    if general is not None:
        count = round(general.share / (1 - general.share) * len(rows))
        part = general_pairs(general, count, seed)
        facts["general"] = len(part)
        rows += part
    random.Random(seed).shuffle(rows)
    write_rows(out, rows)
    return facts | {"examples": len(rows)}
