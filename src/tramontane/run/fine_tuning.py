"""What `tramontane sft --dry-run` finds: what is learned, from what, and the memory it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tramontane.config.sft import SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.recorded import Example
from tramontane.models.shape import shape_of
from tramontane.planning.fit import RunMemory, tuning_memory
from tramontane.planning.memory import Lengths
from tramontane.planning.trainer_memory import Completions
from tramontane.run.header import one_line, sized
from tramontane.sft.examples import ExampleStream, read_examples
from tramontane.sft.sft import check_output, prepare

LEARNED = "⟦", "⟧"  # around what is learned of an example
SHOWN = 1000  # characters of it


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning that was checked but not started.

    Args:
        header: what it learns, on what, as text by name; the last is one example, with `LEARNED`
            around the tokens that are learned.
        warnings: for the user, before it starts.
        memory: of the trainer's ranks, and an error where a device is too small.
    """

    header: dict[str, str]
    warnings: list[str]
    memory: RunMemory


def dry_run(config: SFTConfig, resume: bool = False) -> FineTuning:
    """Check a fine-tuning's settings, model and examples, and compute its sizes.

    Args:
        config: of the run.
        resume: whether the run would continue the config's output folder.

    Raises:
        InputError: see `sft.sft.sft`.
    """
    check_output(Path(config.output), resume)
    rows = read_examples(config)
    prepared = prepare(config, rows)
    config, stream = prepared.config, prepared.stream
    shape = shape_of(prepared.architecture, config.model or "new_model")
    examples = stream.epoch
    longest = max(examples, key=lambda each: len(each.prompt) + len(each.response))
    lengths = Lengths(len(longest.prompt), len(longest.response))
    step = Completions(math.ceil(config.batch_tokens / lengths.longest))
    start = config.model or f"a new {prepared.architecture.model_type}"
    lora = f", LoRA of rank {config.lora.rank}" if config.lora else ""
    header = {
        "model": f"{start}, {sized(shape.parameters)} parameters{lora}; {config.dtype} on "
        f"{config.device}",
        "train": _train_line(config, stream, len(rows) if rows is not None else None),
        "tokens": _tokens_line(examples, endless=rows is None),
        "steps": _steps_line(config, stream, endless=rows is None),
        "learning rate": f"{prepared.rate}; {config.warmup_steps:,} steps of warm-up, then "
        f"{config.schedule}",
        "output": f"{config.output}, in {config.save_dtype}",
        "example": one_line(shown_example(examples[0], stream.encoder), SHOWN),
    }
    memory = tuning_memory(config.trainer, shape, lengths, step)
    return FineTuning(header, prepared.warnings, memory)


def _train_line(config: SFTConfig, stream: ExampleStream, rows: int | None) -> str:
    if rows is None:
        return "playground:, generated without end"
    line = f"{config.data.train}, {rows:,} rows"
    kept, found = len(stream.epoch), len(stream.epoch) + stream.skipped
    if found != rows:
        line += f", {found:,} sequences"
    if stream.skipped:
        line += (
            f"; {stream.skipped:,} left out, longer than {stream.room:,} tokens ({stream.limit}), "
            f"{kept:,} learned"
        )
    return line


def _tokens_line(examples: Sequence[Example], *, endless: bool) -> str:
    sizes = [(len(e.prompt), len(e.response), sum(map(len, e.inserted))) for e in examples]
    total = sum(prompt + response for prompt, response, _ in sizes)
    learned = sum(response - inserted for _, response, inserted in sizes)
    longest = max(prompt + response for prompt, response, _ in sizes)
    first = f" in the first {len(examples):,} examples" if endless else ""
    return (
        f"{total:,}{first}, of which {learned:,} are learned; the longest example has {longest:,}"
    )


def _steps_line(config: SFTConfig, stream: ExampleStream, *, endless: bool) -> str:
    line = f"{config.steps:,} of about {config.batch_tokens:,} tokens"
    if endless:
        return line
    return f"{line}, {config.steps / stream.steps_of_epoch(config.batch_tokens):,.1f} epochs"


def shown_example(example: Example, encoder: PromptEncoder) -> str:
    """An example's tokens as text, special tokens included, with `LEARNED` around those that are
    learned."""
    begin, end = LEARNED
    text, at = encoder.decode(example.prompt), 0
    for span in [*example.inserted, range(len(example.response), len(example.response))]:
        if learned := example.response[at : span.start]:
            text += begin + encoder.decode(learned) + end
        text += encoder.decode(example.response[span.start : span.stop])
        at = span.stop
    return text
