"""Supervised fine-tuning: trains a causal LM on responses to prompts, with the trainer's own step.

It trains the tiny base model on the playground (`configs/tiny_base.yaml`), and prepares models for
RL with any file of prompts and responses, as for Magistral Small (arXiv 2506.10910, section 5).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config.device import dtype_warnings, idle_gpus
from tramontane.config.sft import SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.recorded import Example
from tramontane.errors import InputError
from tramontane.journals import check_same, read_log
from tramontane.models.names import numbered, with_tokenizer
from tramontane.placement.seats import rank_device
from tramontane.sft.examples import ExampleStream, Rows, generated_chats, read_examples
from tramontane.tokens import INSERTED
from tramontane.workplace import commit, disk_faults, owned_folder, sync_all, write_whole

# Imported in functions, since they take seconds, and errors in the examples should come first.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tramontane.trainer import Trainer

logger = logging.getLogger("tramontane")

LOG = "sft_metrics.jsonl"
STATES = "resume"  # folder with the state to resume from, in one `step_N`
KEPT = "checkpoints"  # folder with the weights of `keep_every`, in `step_N`
PROGRESS = "progress.json"  # in `step_N`: position in the examples, step, seconds
SETTINGS = "settings.json"  # in `step_N`: what the state depends on
# These affect speed, or what is written. As in a training run, `dtype` may change with the machine.
FREE = {
    *("name", "output", "save_dtype", "checkpoint_every", "keep_every", "log_every"),
    *("device", "dtype", "ranks", "threads", "microbatch_tokens", "gradient_checkpointing"),
    *("activation_offload", "compile", "reduce_gradients"),
}

Call = Callable[..., Any]  # calls a trainer's method by name


@dataclass(frozen=True)
class SFTMetrics:
    """One log line: means since the previous line. `accuracy` is the share of response tokens that
    are the model's most likely prediction."""

    step: int
    loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    seconds: float


def sft(
    config: SFTConfig,
    resume: bool = False,
    on_log: Callable[[SFTMetrics], None] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Path:
    """Train and return the folder of the result.

    `output/` gets the weights (safetensors), the tokenizer and `sft_metrics.jsonl`, and with `lora`
    the adapters in `adapter/`;
    `output/resume/` holds the state that `resume` continues from, until the run is done;
    `output/checkpoints/step_N` the weights that `keep_every` keeps. Once `stopping()` is true, the
    state is saved after the current step.

    Raises:
        KeyboardInterrupt: `stopping()` was true.
        InputError: not exactly one of `model` and `new_model`; rows without the fields; a prompt
            that does not fit; an `output` that already holds a checkpoint; nothing to resume from,
            or a run with different settings; a missing device or compiler.
    """
    output = Path(config.output)
    with owned_folder(output, "fine-tuned"):
        check_output(output, resume)
        rows = read_examples(config)
        settings = _settings(config, rows)
        state = _newest_state(output) if resume else None
        if state is not None:
            remedy = f"resume with the same, or delete {output} and start without --resume"
            check_same(state / PROGRESS, state / SETTINGS, settings, remedy, levels=2)
        prepared = prepare(config, rows)
        if config.learning_rate is None:
            logger.warning("learning_rate: %s; learning_rate=… sets another", prepared.rate)
        config, tokenizer, stream = prepared.config, prepared.tokenizer, prepared.stream
        for warning in prepared.warnings:
            logger.warning(warning)
        with _trainer(config, prepared.architecture) as call:
            progress: dict[str, Any] = {"step": 0, "seconds": 0.0}
            if state is not None:
                progress = _load_state(call, state)
                stream.position = tuple(progress["position"])
            log = _Log(output / LOG, config, progress["step"], progress["seconds"], on_log)
            for step in range(progress["step"] + 1, config.steps + 1):
                log.add(step, call("step", _train_batch(stream.take(config.batch_tokens), config)))
                if config.keep_every and (step % config.keep_every == 0 or step == config.steps):
                    _keep(call, tokenizer, config, step)
                stop = stopping() and step < config.steps
                if (step % config.checkpoint_every == 0 or stop) and step < config.steps:
                    progress = {"step": step, "seconds": log.seconds, "position": stream.position}
                    _save_state(call, output, progress, settings)
                    _save_result(call, tokenizer, config)
                if stop:
                    raise KeyboardInterrupt
            _save_result(call, tokenizer, config)
        with disk_faults(output):
            sync_all(output)
        shutil.rmtree(output / STATES, ignore_errors=True)
    return output


class Prepared(NamedTuple):
    """A config whose examples and model were read and checked, before any work."""

    config: SFTConfig  # with its learning rate filled in
    architecture: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stream: ExampleStream
    rate: str  # the learning rate, and why
    warnings: list[str]


def prepare(config: SFTConfig, rows: Rows | None) -> Prepared:
    """Check model, device and settings, and tokenize the examples.

    Args:
        config: the run's.
        rows: the result of `read_examples` for it.

    Raises:
        InputError: see `sft`.
    """
    devices = [rank_device(config.device, rank) for rank in range(config.ranks)]
    for warning in filter(None, (idle_gpus(*devices), *dtype_warnings(config))):
        warnings.warn(warning, stacklevel=3)
    architecture, tokenizer = _model(config)
    from tramontane.models.image_tokens import ImageProcessor
    from tramontane.models.loading import context_length
    from tramontane.trainer.optimizer import chosen_rate, rate_warnings, warmup_warnings

    unusual = list[str]()
    if (model := config.model) is None:
        reason = f"{config.learning_rate:g}"
    else:
        rate, reason = chosen_rate(config.trainer, model)
        config = config.model_copy(update={"learning_rate": rate})
        unusual += rate_warnings("", config.trainer, model)
    unusual += warmup_warnings("warmup_steps", config.warmup_steps, "steps", config.steps)
    data = config.data
    pictures = ImageProcessor(model) if model is not None else None
    encoder = PromptEncoder(tokenizer, data, data.thinking_tags, data.effort, images=pictures)
    stream = ExampleStream(config, encoder, context_length(architecture), rows)
    return Prepared(config, architecture, tokenizer, stream, reason, unusual)


class _Log:
    """The metrics file. A resumed run keeps the lines up to its checkpoint."""

    def __init__(
        self,
        file: Path,
        config: SFTConfig,
        step: int,
        seconds: float,
        on_log: Callable[[SFTMetrics], None] | None,
    ) -> None:
        self._file, self._config, self._on_log = file, config, on_log
        rows = list(read_log(file)) if step else []
        write_whole(file, "".join(json.dumps(x) + "\n" for x in rows if x["step"] <= step))
        self._began = time.monotonic() - seconds
        self._since = time.monotonic()
        self._window: list[dict[str, float]] = []  # metrics of the steps since the last line

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its sessions."""
        return time.monotonic() - self._began

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add a step's metrics, and write a line if one is due."""
        self._window.append(metrics)
        if step % self._config.log_every and step < self._config.steps:
            return
        taken = [m for m in self._window if not m["skipped_steps"]]
        if not taken:  # no gradient was finite: the next line includes these steps
            return
        now = time.monotonic()
        tokens = sum(m["computed_tokens"] for m in self._window)
        means = {key: mean(m[key] for m in taken) for key in ("loss", "accuracy", "grad_norm")}
        line = SFTMetrics(
            step=step,
            **means,
            learning_rate=metrics["learning_rate"],
            tokens_per_second=tokens / (now - self._since),
            seconds=self.seconds,
        )
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        if self._on_log:
            self._on_log(line)
        self._window, self._since = [], now


def _train_batch(examples: list[Example], config: SFTConfig) -> TrainBatch:
    """Make one optimizer step's batch: each response is its own group."""
    groups = [
        [
            TrainSequence(
                prompt_ids=array("i", example.prompt),
                token_ids=array("i", example.response),
                logprobs=array("f", bytes(4 * len(example.response))),
                versions=_versions(len(example.response), example.inserted),
                images=example.images,
                put_images=example.put_images,
            )
        ]
        for example in examples
    ]
    settings = BatchSettings(
        stage="", temperature=1.0, l_max=config.max_length, n_minibatch=len(groups)
    )
    return TrainBatch(0, groups, settings)


def _versions(length: int, inserted: Iterable[range]) -> array[int]:
    """Versions that keep inserted tokens from being learned."""
    versions = array("i", bytes(4 * length))
    for span in inserted:
        versions[span.start : span.stop] = array("i", [INSERTED] * len(span))
    return versions


@contextmanager
def _trainer(config: SFTConfig, architecture: PreTrainedConfig) -> Iterator[Call]:
    """Start the trainer, in this process or in one process per rank, and yield its `Call`."""
    from tramontane.placement.ranks import ProcessRanks

    make = partial(make_trainer, config, architecture)
    if config.ranks == 1:
        trainer = make()
        yield lambda method, *args: getattr(trainer, method)(*args)
        return
    handle = ProcessRanks("trainer", make, config.ranks, config.device)
    try:
        handle.started.result()
        yield lambda method, *args: handle.submit(method, *args).result()
    finally:
        handle.close()


def make_trainer(config: SFTConfig, architecture: PreTrainedConfig) -> Trainer:
    """Load the model, or initialize a new one from the seed (the same on every rank)."""
    import torch
    from transformers import AutoModelForCausalLM

    from tramontane.trainer import Trainer
    from tramontane.trainer.sharding import device_of_rank

    if config.model is not None:
        return Trainer.load(config.model, config.trainer, config.steps, config.seed, alone=True)
    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="packed")
    model = model.to(device_of_rank(config.device))
    return Trainer(model, config.trainer, config.steps, seed=config.seed, alone=True)


def _model(config: SFTConfig) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the model's Hugging Face config and the tokenizer, loaded or new."""
    if (config.model is None) == (config.new_model is None):
        raise InputError("give exactly one of `model` (a checkpoint) and `new_model` (sizes)")
    from transformers import AutoConfig

    from tramontane.data.tokenizer import train_tokenizer
    from tramontane.models.loading import check_device, check_files, load_config, load_tokenizer
    from tramontane.models.shape import load_shape
    from tramontane.trainer import forwards, lora

    check_device(config.device)
    forwards.compilation(config)
    if config.model is not None:
        check_files(config.model)
        if config.lora:
            lora.check(config.lora, load_shape(config.model).linear_layers)
        return load_config(config.model), load_tokenizer(
            with_tokenizer(config.model, config.tokenizer)
        )
    if config.lora:
        raise InputError("lora trains adapters of a `model`; a `new_model` has nothing to keep")
    new = config.new_model
    assert new is not None
    chats = generated_chats(config.data, config.seed, new.tokenizer_examples)
    texts = ("\n".join(message["content"] for message in chat) for chat, _ in chats)
    tokenizer = train_tokenizer(texts, new.vocab_size)
    architecture = AutoConfig.for_model(
        new.model_type,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **new.architecture,
    )
    return architecture, tokenizer


def _save_result(call: Call, tokenizer: PreTrainedTokenizerBase, config: SFTConfig) -> None:
    output = Path(config.output)
    _save_model(call, tokenizer, config, output)
    if config.lora:
        call("save_adapters", output / "adapter")


def _save_model(
    call: Call, tokenizer: PreTrainedTokenizerBase, config: SFTConfig, folder: Path
) -> None:
    import torch

    from tramontane.models.tokenizers import save_tokenizer

    with disk_faults(folder):
        call("save_weights", folder, getattr(torch, config.save_dtype))
        save_tokenizer(tokenizer, folder)


def _keep(call: Call, tokenizer: PreTrainedTokenizerBase, config: SFTConfig, step: int) -> None:
    """Keep the weights of a step; the folder will be complete or absent."""
    folder = Path(config.output) / KEPT / f"step_{step}"
    partial_folder = folder.with_suffix(".partial")
    for old in (folder, partial_folder):  # left by a killed run
        shutil.rmtree(old, ignore_errors=True)
    _save_model(call, tokenizer, config, partial_folder)
    commit(partial_folder, folder)


def _settings(config: SFTConfig, rows: Rows | None) -> dict[str, Any]:
    """What a state depends on, in JSON types. Rows count by their content, wherever they lie."""
    settings = config.model_dump(mode="json", exclude=FREE)
    if rows is not None:
        content = hashlib.sha256()
        for _, *fields in rows:
            content.update(repr(fields).encode())
        settings["data"]["train"] = content.hexdigest()
    return settings


def _save_state(
    call: Call, output: Path, progress: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Write a new state beside the old one, and delete the old one once the new one is complete."""
    folder = output / STATES / f"step_{progress['step']}"
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)  # left by a killed run
    with disk_faults(partial_folder):
        call("save_state", partial_folder)
        (partial_folder / PROGRESS).write_text(json.dumps(progress))
        (partial_folder / SETTINGS).write_text(json.dumps(settings, indent=1))
        commit(partial_folder, folder)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other)


def _load_state(call: Call, folder: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: damaged, nothing can be resumed from it ({error}); delete "
            f"{folder.parent.parent} and start without --resume"
        ) from None
    call("load_state", folder)
    return progress


def is_unfinished(output: Path) -> bool:
    """True if the folder holds the state of an unfinished run."""
    return _newest_state(output) is not None


def _newest_state(output: Path) -> Path | None:
    return next(reversed(numbered(output / STATES)), None)


def check_output(output: Path, resume: bool) -> None:
    """Refuse a folder that holds something, or nothing to resume from."""
    state = _newest_state(output)
    if resume and state is None:
        raise InputError(
            f"{output / STATES}: nothing to resume from (a finished run leaves nothing); start "
            f"without --resume"
        )
    if not resume and state is not None:
        raise InputError(
            f"output {output}: holds an unfinished run; continue it with --resume, delete the "
            f"folder, or name another one (output=FOLDER)"
        )
    if not resume and (output / "config.json").is_file():
        raise InputError(
            f"output {output}: holds a checkpoint already; delete the folder, or name another one "
            f"(output=FOLDER)"
        )
