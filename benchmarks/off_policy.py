"""How far a generator is from the trainer's policy, cause by cause, on the tiny base model;
docs/off-policy.md has the results.

    python benchmarks/off_policy.py [--groups 24] [--tokens 60]

Completions of the same prompts are sampled by a generator that differs from a float32 trainer in
one thing, and scored by the trainer as in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.config.data import PlaygroundConfig
from tramontane.config.device import multiplies_int8
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import Generator
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.trainer.ratios import effective_sample_size
from tramontane.trainer.trainer import Trainer
from tramontane.types import Completion, SamplingParams

GROUP = 8
OUTSIDE = 0.5, 5.0  # IcePop's bounds of π/μ


class Distance(NamedTuple):
    """How far a generator's policy μ is from the trainer's π, over its samples."""

    kl: float  # KL(μ‖π) of a token, nats, for policies over the same tokens
    drift: float  # mean log μ/π of a token, nats: the same with more noise, for any two
    size: float  # effective sample size of the completions' π/μ
    largest: float  # ratio of a token, or its inverse
    outside: float  # fraction of tokens outside IcePop's bounds


def distance(sequences: list[TrainSequence], logprobs: list[list[float]]) -> Distance:
    pairs = zip(sequences, logprobs, strict=True)
    logs = [np.array(found) - np.array(s.logprobs) for s, found in pairs]
    d = np.concatenate(logs)
    totals = torch.tensor([x.sum() for x in logs])
    low, high = np.log(OUTSIDE)
    return Distance(
        float(np.mean(np.expm1(d) - d)),
        float(-np.mean(d)),
        effective_sample_size(totals),
        float(np.exp(np.abs(d).max())),
        float(np.mean((d < low) | (d > high))),
    )


class Miniature:
    """Prompts of the playground, and workers that sample and score."""

    def __init__(self, groups: int, tokens: int) -> None:
        encoder = PromptEncoder(load_tokenizer("tiny"))
        world = PlaygroundConfig()
        problems = playground.problems(
            "train", 0, world.levels, world.languages, world.kinds, count=groups
        )
        self.prompts = [encoder.encode(p.prompt) for p in problems]
        self.tokens = tokens

    def sample(
        self,
        state: dict[str, torch.Tensor] | None = None,
        keys: Mapping[str, Any] = MappingProxyType({}),
        **truncation: Any,
    ) -> list[TrainSequence]:
        """Completions of all prompts; `state` replaces the weights of the tiny base, `keys` are the
        generator's."""
        longest = max(map(len, self.prompts)) + self.tokens
        config = GeneratorConfig(**{"dtype": "float32", "device": "cpu", **keys})
        generator = Generator.load("tiny", config, len(self.prompts) * GROUP, longest)
        if state:
            generator.update_weights(1, state)
        sampling = SamplingParams(self.tokens, **truncation)
        generator.submit(
            [
                Completion.requested(group, i, prompt, GROUP * group + i, sampling)
                for group, prompt in enumerate(self.prompts)
                for i in range(GROUP)
            ]
        )
        done = []
        while len(done) < len(self.prompts) * GROUP:
            done += generator.step()
        return [TrainSequence.of(c) for c in sorted(done, key=lambda c: (c.group, c.index))]


def new_trainer() -> Trainer:
    config = TrainerConfig(dtype="float32", device="cpu", learning_rate=3e-4)
    return Trainer(load_model("tiny", torch.float32, "cpu"), config, updates=8)


def advance(trainer: Trainer, sequences: list[TrainSequence], updates: int) -> None:
    """Let a trainer learn to write short completions, for some updates."""
    groups = [sequences[i : i + GROUP] for i in range(0, len(sequences), GROUP)]
    scored = [
        [replace(s, reward=1.0 / len(s.token_ids), scored=True) for s in group] for group in groups
    ]
    settings = BatchSettings("", 1.0, max(len(s.token_ids) for s in sequences), len(sequences))
    for _ in range(updates):
        trainer.step(TrainBatch(trainer.version, scored, settings))


def cases(miniature: Miniature) -> Iterator[tuple[str, list[TrainSequence], Trainer]]:
    """Each cause, with samples and the trainer that scores them."""
    plain, trainer = miniature.sample(), new_trainer()
    yield "none", plain, trainer
    yield "kernels: bfloat16 generator", miniature.sample(keys={"dtype": "bfloat16"}), trainer
    if multiplies_int8():
        yield "weights of eight bits", miniature.sample(keys={"weights": "int8"}), trainer
    cut = miniature.sample(top_p=0.95, top_k=1024, record_allowed=True)
    yield "top_p 0.95, allowed tokens ignored", [replace(s, allowed=None) for s in cut], trainer
    yield "top_p 0.95, over the allowed tokens", cut, trainer
    for updates in (1, 2, 4):
        ahead = new_trainer()
        advance(ahead, plain, updates)
        yield f"staleness: {updates} update{'s' * (updates > 1)}", plain, ahead


def rows(found: Iterable[tuple[str, list[TrainSequence], Trainer]]) -> Iterator[str]:
    for name, sequences, trainer in found:
        d = distance(sequences, trainer.logprobs(sequences, 1.0))
        yield (
            f"| {name} | {d.kl:.1e} | {d.drift:.1e} | {d.size:.3f} | {d.largest:.3g} | "
            f"{d.outside:.2%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| cause | KL(μ‖π) | mean log μ/π | effective sample size | largest ratio | outside |")
    print("|---|---|---|---|---|---|")
    for row in rows(cases(Miniature(options.groups, options.tokens))):
        print(row, flush=True)


if __name__ == "__main__":
    main()
