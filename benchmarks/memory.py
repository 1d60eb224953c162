"""Peak memory of trainer and generator against the table of `--dry-run`.

    python benchmarks/memory.py [--model FOLDER]

Each worker runs in a process of its own, and with several ranks rank 0 counts. Its peak is the most
that the process has allocated after a warm-up with a model of a few numbers, in which libraries are
loaded: by malloc's own accounting (`allocations.py`), since the pages that malloc holds without
using them depend on the machine and its load. Those are in the report too, as `resident_mib`. The
table's figure is the sum of its formulas (docs/memory.md). FOLDER is a checkpoint, e.g. of
`tramontane fetch smollm2`; without it, only the 25 M model is measured. Linux with glibc only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from allocations import measured
from measure import (
    Memory,
    Promise,
    finish,
    machine,
    make_llama,
    random_groups,
    train_batch,
)
from transformers import LlamaConfig, LlamaForCausalLM

from tramontane.config import Config
from tramontane.generator.engine import SlotEngine
from tramontane.models.loading import load_model
from tramontane.models.memory import release_free_memory
from tramontane.models.shape import load_shape
from tramontane.models.staging import StagedWeights
from tramontane.models.weights import LocalWeights, Part
from tramontane.placement.ranks import Membership
from tramontane.planning.fit import gathering_gaps, memory_gaps
from tramontane.planning.memory import Lengths, generator_memory
from tramontane.planning.trainer_memory import Completions, trainer_memory
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams

ALLOWED = 0.15  # largest difference, as a share of the measured peak

LENGTHS, GROUP_SIZE = Lengths(prompt=64, completion=96), 8
LONG_LENGTHS, LONG_GROUP_SIZE = Lengths(prompt=128, completion=640), 2  # fused attention
SLOTS, PREFILL = 64, 512
TINY = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
JOIN_SECONDS = 7200.0
_PLAIN = str.maketrans("", "", '{}":')  # JSON without its marks


class Case(NamedTuple):
    """One measurement: of `worker`, `trainer` or `generator`, with keys of its section of the
    config; `long` for sequences of 768 tokens in place of 160."""

    worker: str
    dtype: str
    keys: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    long: bool = False

    def __str__(self) -> str:
        keys = "".join(
            f", {key} {json.dumps(value).translate(_PLAIN)}" for key, value in self.keys.items()
        )
        return f"{self.worker}, {self.dtype}{keys}{', long' if self.long else ''}"

    @property
    def lengths(self) -> Lengths:
        return LONG_LENGTHS if self.long else LENGTHS

    @property
    def group_size(self) -> int:
        return LONG_GROUP_SIZE if self.long else GROUP_SIZE

    @property
    def groups(self) -> int:
        """Groups of a batch: a microbatch each, and two for each rank or thread, so that the sums
        of gradients are there when the second begins."""
        return 2 * int(self.keys.get("ranks", 1)) * int(self.keys.get("threads", 1))

    @property
    def config(self) -> Config:
        prompt, completion = self.lengths
        sections: dict[str, Any] = {
            "pipeline": {
                "n_async": SLOTS,
                "n_batch": self.groups * self.group_size,
                "group_size": self.group_size,
                "l_max": completion,
            },
            "generator": {"prefill_tokens": PREFILL, "slots": SLOTS},
            "trainer": {"microbatch_tokens": prompt + self.group_size * completion},
        }
        sections[self.worker] |= {"dtype": self.dtype} | self.keys
        return Config.model_validate(sections)


CHECKPOINTING = {"gradient_checkpointing": True}
EACH_MICROBATCH = {"ranks": 2, "reduce_gradients": "microbatch"}
LORA = {"lora": {"rank": 16}}
CASES = (
    Case("trainer", "float32"),
    Case("trainer", "bfloat16"),
    Case("trainer", "float32", CHECKPOINTING),
    Case("trainer", "bfloat16", CHECKPOINTING),
    Case("trainer", "bfloat16", CHECKPOINTING | {"activation_offload": True}),
    Case("trainer", "bfloat16", {"threads": 2}),
    Case("trainer", "bfloat16", long=True),
    Case("trainer", "float32", {"ranks": 2}),
    Case("trainer", "bfloat16", {"ranks": 2}),
    Case("trainer", "float32", EACH_MICROBATCH),
    Case("trainer", "bfloat16", EACH_MICROBATCH),
    Case("trainer", "bfloat16", EACH_MICROBATCH | CHECKPOINTING),
    Case("trainer", "float32", LORA),
    Case("trainer", "bfloat16", LORA),
    Case("trainer", "bfloat16", LORA | CHECKPOINTING),
    Case("trainer", "bfloat16", LORA | EACH_MICROBATCH),
    Case("generator", "float32"),
    Case("generator", "bfloat16"),
)


def run_trainer(case: Case, model: str, lengths: Lengths) -> None:
    """One update."""
    trainer = Trainer.load(model, case.config.trainer, updates=1)
    groups = random_groups(
        trainer.model.config.vocab_size,
        groups=case.groups,
        size=case.group_size,
        prompt=lengths.prompt,
        tokens=lengths.completion,
    )
    trainer.step(train_batch(0, groups))


def run_generator(case: Case, model: str, lengths: Lengths) -> None:
    """With the next version of the weights fetched, fill all slots to their last token but one,
    swap the weights, and compute keys and values of all sequences again."""
    loaded = load_model(model, getattr(torch, case.dtype)).requires_grad_(False)
    staged, weights = StagedWeights(loaded), LocalWeights()
    weights.add([Part.whole([name], tensor) for name, tensor in loaded.state_dict().items()])
    engine = SlotEngine(loaded, SLOTS, lengths.longest, prefill_tokens=PREFILL)
    sampling = SamplingParams(lengths.completion, 0.7)
    prompts = random_groups(
        loaded.config.vocab_size,
        groups=SLOTS // case.group_size,
        size=1,
        prompt=lengths.prompt,
        tokens=1,
    )
    engine.submit(
        [
            Completion.requested(n, i, list(group[0].prompt_ids), n * case.group_size + i, sampling)
            for n, group in enumerate(prompts)
            for i in range(case.group_size)
        ]
    )
    staged.fetch(1, weights)
    for _ in range(lengths.completion - 1):
        engine.step()
    staged.swap(1, in_place=engine.needs_fixed_addresses)
    engine.recompute()
    while engine.unfinished:
        engine.step()


def _measured(case: Case, model: str, tiny: str, member: Membership | None, answers: Any) -> None:
    """Run one worker in this process, with a `tiny` model and then with `model`, and put the second
    run's peaks into `answers`."""
    torch.set_num_threads(1)
    if member is not None:
        member.join()
    run = run_trainer if case.worker == "trainer" else run_generator
    run(case, tiny, Lengths(2, 4))
    release_free_memory()
    with Memory() as memory, measured() as allocated:
        run(case, model, case.lengths)
    rank = 0 if member is None else member.rank
    answers.put((rank, (allocated.highest, memory.rise)))


def measure(case: Case, model: str) -> tuple[int, int]:
    """Peak of a worker in bytes, of rank 0 if there are several: allocated, and resident."""
    ranks = int(case.keys.get("ranks", 1))
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        tiny, address = f"{folder}/tiny", f"file://{folder}/ranks"
        LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tiny)
        members = [
            Membership("gloo", address, rank, ranks, JOIN_SECONDS) if ranks > 1 else None
            for rank in range(ranks)
        ]
        processes = [
            context.Process(target=_measured, args=(case, model, tiny, member, answers))
            for member in members
        ]
        for process in processes:
            process.start()
        rises = dict(answers.get(timeout=JOIN_SECONDS) for _ in processes)
        for process in processes:
            process.join()
    allocated, resident = rises[0]
    return int(allocated), int(resident)


def compare(name: str, model: str, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Rows of the report for one model."""
    shape = load_shape(model)
    rows = []
    for case in cases:
        config, lengths = case.config, case.lengths
        table = (
            trainer_memory(config.trainer, shape, lengths, Completions.of(config))
            if case.worker == "trainer"
            else generator_memory(config, shape, lengths)
        )
        gaps = memory_gaps(table, on_gpu=False)
        if case.worker == "trainer":
            gaps += gathering_gaps(config.trainer, shape)
        allocated, resident = measure(case, model)
        row = {
            "model": name,
            "worker": str(case),
            "measured_mib": round(allocated / 2**20),
            "table_mib": round(table.total / 2**20),
            "ratio": round(table.total / allocated, 3),
            "resident_mib": round(resident / 2**20),
            "with_gaps_mib": round((table.total + gaps) / 2**20),
            "parts_mib": {key: round(v / 2**20) for key, v in vars(table).items() if v},
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a checkpoint folder")
    parser.add_argument("--only", default="", help="only cases that contain this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_llama("25M").save_pretrained(folder)
        models = {"25M": folder}
        if options.model:
            models[Path(options.model).name] = options.model
        chosen = {
            name: tuple(case for case in CASES if options.only in f"{name}, {case}")
            for name in models
        }
        if not any(chosen.values()):
            parser.error(f"--only: no case of {', '.join(models)} contains {options.only!r}")
        rows = []
        for name, cases in chosen.items():
            rows += compare(name, models[name], cases)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    kept = abs(worst["ratio"] - 1) <= ALLOWED
    promise = Promise(
        f"the table is within {ALLOWED:.0%} of each measured peak",
        f"at most {abs(worst['ratio'] - 1):.1%} off ({worst['model']}, {worst['worker']})",
        kept,
    )
    report = {"machine": machine(), "rows": rows}
    finish(__file__, report, [promise])


if __name__ == "__main__":
    main()
