"""Rates of the generator and the trainer alone, on one core, with the work of a run.

    python benchmarks/core_rates.py CONFIG PROMPTS

CONFIG is a run's config, PROMPTS a JSON-lines file of prompt texts. The generator has the run's
`n_async` slots and always more requests than slots; the trainer updates on the completions that
the generator returned. Prints a JSON line with completion tokens per second of processor time of
each (`generator`, `trainer`). `vs_trl.py` computes its two-core bound from them.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "512"

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import Config, load_config
from tramontane.generator import Generator
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams, Verdict

TURNS = 3
# Updates that are not counted: blocks are compiled and kernels are built.
WARM_UP = 3


def generate(config: Config, prompts: list[str]) -> tuple[float, list[Completion]]:
    """Completion tokens per second while all slots are busy, and the completions."""
    pipeline = config.pipeline
    slots, group_size = pipeline.n_async, pipeline.group_size
    generator = Generator.load(
        str(config.model), config.generator, slots, max(map(len, prompts)) + pipeline.l_max
    )
    ids = generator.tokenizer(prompts)["input_ids"]
    sampling = SamplingParams(pipeline.l_max, config.generator.temperature)
    count = slots * (TURNS + 1)
    generator.submit(
        [
            Completion.requested(n // group_size, n % group_size, ids[n // group_size], n, sampling)
            for n in range(count)
        ]
    )
    completions = []
    while len(completions) < slots:  # from here on, sequences of all ages are decoded
        completions += generator.step()
    before, began = generator.stats(), time.process_time()
    while count - len(completions) > slots:
        completions += generator.step()
    tokens = generator.stats()["generated_tokens"] - before["generated_tokens"]
    rate = tokens / (time.process_time() - began)
    while generator.pending():
        completions += generator.step()
    return rate, completions


def train(config: Config, completions: list[Completion]) -> float:
    """Completion tokens per second of updates with `n_batch` completions each."""
    pipeline = config.pipeline
    alone = config.trainer.model_copy(update={"threads": 1})
    trainer = Trainer.load(str(config.model), alone, 1000)
    by_group: dict[int, list[TrainSequence]] = {}
    for completion in sorted(completions, key=lambda c: (c.group, c.index)):
        verdict = Verdict(completion.index % 2, {}, "right")
        by_group.setdefault(completion.group, []).append(TrainSequence.of(completion, verdict))
    groups = list(by_group.values())
    size = pipeline.n_batch // pipeline.group_size
    settings = BatchSettings(
        stage="",
        temperature=config.generator.temperature,
        l_max=pipeline.l_max,
        n_minibatch=pipeline.n_batch,
    )
    rates = []
    for number in range(WARM_UP + TURNS):
        chosen = [groups[(number * size + i) % len(groups)] for i in range(size)]
        batch = TrainBatch(trainer.version, chosen, settings)
        began = time.process_time()
        trained = trainer.step(batch)["completion_tokens"]
        rates.append(trained / (time.process_time() - began))
    return median(rates[WARM_UP:])


def main() -> None:
    torch.set_num_threads(1)
    config = load_config(sys.argv[1])
    prompts = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
    generator, completions = generate(config, prompts)
    print(json.dumps({"generator": generator, "trainer": train(config, completions)}))


if __name__ == "__main__":
    main()
