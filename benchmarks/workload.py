"""Real runs of the whole pipeline with a chosen distribution of completion lengths.

The model is a random Llama (1.8M of `measure.SIZES`, the tiny base's vocabulary) with `eos` EOS
tokens. All tokens are about equally likely, so lengths are geometric, cut at the longest. The
learning rate is close to zero, so the distribution does not change. No group is filtered.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import SIZES
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tramontane.config import Config
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

VOCAB = 2048


@dataclass(frozen=True)
class Lengths:
    """A completion ends with any of `eos` tokens of the vocabulary, or after `longest` tokens."""

    name: str
    longest: int
    eos: int

    @property
    def mean(self) -> float:
        p = self.eos / VOCAB
        return (1 - (1 - p) ** self.longest) / p


# Means are equal up to whole tokens; the longest is 1, 2 and 5 times the mean.
FIXED, TWICE, FIVEFOLD = Lengths("fixed", 62, 1), Lengths("2x", 124, 26), Lengths("5x", 310, 33)


def make_model(folder: Path, lengths: Lengths, size: str = "1.8M") -> Path:
    """A checkpoint whose completions have the given distribution of lengths."""
    hidden, layers, intermediate, heads = SIZES[size]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    ends = [1, *random.Random(0).sample(range(100, VOCAB), lengths.eos - 1)]
    model.generation_config = GenerationConfig(eos_token_id=ends)
    path = folder / f"model_{lengths.name}"
    model.save_pretrained(path)
    load_tokenizer("tiny").save_pretrained(path)
    return path


def settings(
    folder: Path, model: Path, lengths: Lengths, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A configuration with some `sections` updated; the run folder is made in `folder`."""
    path = folder / f"run_{len(list(folder.iterdir()))}"
    problems = folder / "problems.jsonl"
    rows = [{"problem": f"{n} + 1", "answer": str(n + 1)} for n in range(1000)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "name": path.name,
        "run_dir": str(path),
        "model": str(model),
        "data": {"train": str(problems), "eval": None},
        "pipeline": {"l_max": lengths.longest, "l_cache": 0, "diversity": "none"},
        "trainer": {"learning_rate": 1e-12, "microbatch_tokens": 4096},
        "checkpoint": {"every": 10_000},
    }
    return raw | {name: {**raw.get(name, {}), **values} for name, values in sections.items()}


def run(
    folder: Path, model: Path, lengths: Lengths, skip: int = 3, **sections: dict[str, Any]
) -> dict[str, Any]:
    """Run `settings` to the end; returns the figures of `measured`."""
    raw = settings(folder, model, lengths, **sections)
    train(Config.model_validate(raw), QuietScreen())
    return measured(RunFolder(raw["run_dir"]).metrics(), skip)


def measured(metrics: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """Figures of a run, without its first `skip` updates, in which the pipeline fills."""
    walls = [m["wall_seconds"] for m in metrics]
    rows, seconds = metrics[skip:], walls[-1] - walls[skip - 1]
    weights = np.diff(walls)[skip - 1 :]
    ages = [(int(age), n) for m in rows for age, n in m["staleness_histogram"].items()]
    tokens = sum(n for _, n in ages)

    def mean(key: str) -> float:
        return float(np.average([m[key] for m in rows], weights=weights))

    return {
        "seconds_per_update": seconds / len(rows),
        "tokens_per_second": tokens / seconds,
        "generated_tokens_per_second": mean("generator_tokens_per_second"),
        "generator_idle": mean("generator_idle_fraction"),
        "generator_held": mean("generator_held_fraction"),
        "trainer_idle": mean("trainer_idle_fraction"),
        "verifier_idle": mean("verifier_idle_fraction"),
        "staleness_mean": sum(age * n for age, n in ages) / tokens,
        "staleness_max": max(age for age, _ in ages),
        "pause_ms": mean("weight_update_pause_ms"),
        "filtered_groups": sum(m["groups_filtered"] for m in metrics),
    }
