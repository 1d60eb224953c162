"""Supervised fine-tuning: a causal LM learns responses to prompts; packed, completion-only loss.

It makes the tiny base from the playground (`configs/tiny_base.yaml`), and gives RL a start from
any prompt/response file, as Magistral Small had one (arXiv 2506.10910, section 5).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tramontane.config import PlaygroundConfig, Section
from tramontane.data import playground
from tramontane.data.files import read_rows, shuffled
from tramontane.data.prompts import encode_prompt
from tramontane.data.tokenizer import train_tokenizer
from tramontane.errors import InputError
from tramontane.models import load_model, load_tokenizer, pack
from tramontane.trainer.optimizer import build_optimizer, lr_at
from tramontane.types import Problem

CHUNK = 4096


class NewModelConfig(Section):
    """A model from nothing: `model_type` and sizes as in its Hugging Face config, and a tokenizer
    of `vocab_size` trained on `tokenizer_examples` generated ones."""

    model_type: str = "llama"
    vocab_size: int = Field(2048, ge=512)
    tokenizer_examples: int = Field(20000, ge=1)
    architecture: dict[str, Any] = Field(default_factory=dict)


class MixtureConfig(Section):
    """Shares of the failings in generated traces; see `playground.Mixture`."""

    work: float = 0.35
    guess: float = 0.57
    ramble: float = 0.08
    no_box: float = 0.12
    unclosed: float = 0.03
    unopened: float = 0.03
    switch: float = 0.15
    slip: float = 0.0
    guess_right: float = 0.15


class PlaygroundShare(PlaygroundConfig):
    """One part of generated data; `share` is relative to the other parts'."""

    share: float = Field(1.0, gt=0)


class DrillsConfig(Section):
    """Bare equations among the generated examples; `share` is relative to the playground's
    parts; see `playground.drills`."""

    share: float = Field(0.0, ge=0)
    levels: tuple[int, int] = (1, 4)
    equations: int = Field(12, ge=1)


class SFTDataConfig(Section):
    """`train` is `playground:`, mixed from the parts under `playground`, or a JSONL/Parquet file
    with a `prompt` and a `response` a row (`fields` maps other names)."""

    train: str = "playground:"
    fields: dict[str, str] = Field(default_factory=dict)
    system_prompt: str | None = None
    playground: tuple[PlaygroundShare, ...] = (PlaygroundShare(),)
    drills: DrillsConfig = Field(default_factory=DrillsConfig)
    mixture: MixtureConfig = Field(default_factory=MixtureConfig)


class SFTConfig(Section):
    """A supervised run: `steps` optimizer steps of about `batch_tokens` tokens.

    `model` is a checkpoint to start from; null makes the one that `new_model` describes. The
    result goes to `output` in the Hugging Face layout.
    """

    name: str = "sft"
    seed: int = 0
    output: str
    model: str | None = None
    new_model: NewModelConfig | None = None
    data: SFTDataConfig = Field(default_factory=SFTDataConfig)
    steps: int = Field(1000, ge=1)
    batch_tokens: int = Field(16384, ge=1)
    microbatch_tokens: int = Field(2048, ge=1)
    max_length: int = Field(1024, ge=2)
    learning_rate: float = Field(2e-3, gt=0)
    warmup_steps: int = Field(100, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int = Field(200, ge=1)
    log_every: int = Field(20, ge=1)
    device: str = "cpu"


@dataclass(frozen=True)
class SFTMetrics:
    """What one log line says: means since the line before. `accuracy` is the share of completion
    tokens whose most likely prediction is right."""

    step: int
    loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    seconds: float


def sft(
    config: SFTConfig, resume: bool = False, on_log: Callable[[SFTMetrics], None] | None = None
) -> Path:
    """Train as `config` says and return the folder of the result.

    `output/` gets the weights (safetensors), the tokenizer and `sft_metrics.jsonl`;
    `output/resume.pt` holds what `resume` goes on from, until the run is done.

    Raises:
        InputError: no model named, or both; rows without the fields; a damaged `resume.pt`.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    state_file, log_file = output / "resume.pt", output / "sft_metrics.jsonl"
    torch.manual_seed(config.seed)
    model, tokenizer = _start(config)
    optimizer = build_optimizer(
        model.parameters(), config.learning_rate, config.betas, config.weight_decay
    )
    stream = ExampleStream(config, tokenizer)
    step, seconds = 0, 0.0
    if resume:
        if not state_file.is_file():
            raise InputError(f"{state_file}: nothing to resume from; start without --resume")
        state = _read_state(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        stream.position = tuple(state["position"])
        step, seconds = state["step"], state["seconds"]
        kept = log_file.read_text().splitlines()
        log_file.write_text("".join(f"{x}\n" for x in kept if json.loads(x)["step"] <= step))
    else:
        log_file.write_text("")

    def save_state() -> None:
        partial = state_file.with_suffix(".tmp")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "position": stream.position,
            "step": step,
            "seconds": seconds + time.monotonic() - started,
        }
        torch.save(state, partial)
        partial.replace(state_file)

    started = since = time.monotonic()
    window: list[tuple[float, float, float, int]] = []
    model.train()
    while step < config.steps:
        lr = lr_at(step, config.steps, config.warmup_steps, config.schedule, config.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = lr
        window.append(_train_step(model, optimizer, stream, config))
        step += 1
        if step % config.log_every == 0 or step == config.steps:
            now = time.monotonic()
            loss, accuracy, norm = (sum(w[i] for w in window) / len(window) for i in range(3))
            metrics = SFTMetrics(
                step=step,
                loss=loss,
                accuracy=accuracy,
                grad_norm=norm,
                learning_rate=lr,
                tokens_per_second=sum(w[3] for w in window) / (now - since),
                seconds=seconds + now - started,
            )
            with log_file.open("a") as log:
                log.write(json.dumps(metrics.__dict__) + "\n")
            if on_log:
                on_log(metrics)
            window, since = [], now
        if step % config.checkpoint_every == 0 and step < config.steps:
            save_state()
            _save(model, tokenizer, output, config)
    _save(model, tokenizer, output, config)
    state_file.unlink(missing_ok=True)
    return output


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
        raise InputError(
            f"{file}: damaged, nothing can be resumed from it ({error}); start without --resume"
        ) from None
    return state


def _train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    stream: ExampleStream,
    config: SFTConfig,
) -> tuple[float, float, float, int]:
    """One optimizer step: (mean loss a completion token, accuracy, gradient norm, tokens)."""
    batch = stream.take(config.batch_tokens)
    targets_total = sum(len(response) for _, response in batch)
    loss_sum, right = 0.0, 0
    for micro in _microbatches(batch, config.microbatch_tokens):
        packed = pack([p + r for p, r in micro], config.device)
        keep, start = [], 0
        for prompt, response in micro:
            # The token at position i is predicted by the logits at i − 1.
            keep.append(torch.arange(len(response)) + start + len(prompt) - 1)
            start += len(prompt) + len(response)
        targets = torch.tensor([t for _, r in micro for t in r], device=config.device)
        with torch.autocast(
            torch.device(config.device).type, torch.bfloat16, enabled=config.dtype == "bfloat16"
        ):
            logits = model(
                **packed.model_inputs, logits_to_keep=torch.cat(keep).to(config.device)
            ).logits[0]
        loss = F.cross_entropy(logits.float(), targets, reduction="sum")
        (loss / targets_total).backward()
        loss_sum += loss.item()
        right += int((logits.argmax(-1) == targets).sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(len(p) + len(r) for p, r in batch)
    return loss_sum / targets_total, right / targets_total, float(norm), tokens


def _microbatches(
    batch: list[tuple[list[int], list[int]]], budget: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """In order of length: attention alone is padded, and so hardly at all."""
    micro: list[tuple[list[int], list[int]]] = []
    used = 0
    for prompt, response in sorted(batch, key=lambda pair: len(pair[0]) + len(pair[1])):
        size = len(prompt) + len(response)
        if micro and used + size > budget:
            yield micro
            micro, used = [], 0
        micro.append((prompt, response))
        used += size
    yield micro


def _start(config: SFTConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if (config.model is None) == (config.new_model is None):
        raise InputError("give exactly one of `model` (a checkpoint) and `new_model` (sizes)")
    if config.model is not None:
        return load_model(config.model, device=config.device), load_tokenizer(config.model)
    new = config.new_model
    assert new is not None
    examples = _generated(config.data, config.seed, new.tokenizer_examples)
    tokenizer = train_tokenizer((f"{p}\n{r}" for p, r in examples), new.vocab_size)
    architecture = AutoConfig.for_model(
        new.model_type,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **new.architecture,
    )
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation="packed")
    return model.to(config.device), tokenizer


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path, config: SFTConfig
) -> None:
    dtype = getattr(torch, config.save_dtype)
    cast: dict[int, torch.Tensor] = {}  # tied weights stay one tensor, and are saved once
    state = {
        name: cast.setdefault(tensor.data_ptr(), tensor.to(dtype))
        for name, tensor in model.state_dict().items()
    }
    model.config.dtype = dtype
    model.save_pretrained(output, state_dict=state)
    tokenizer.save_pretrained(output)


class ExampleStream:
    """Tokenized (prompt, response) pairs without end, in an order that the seed alone decides.

    `position` is (chunk, index in it): all that a resumed run needs.
    """

    def __init__(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.position: tuple[int, ...] = (0, 0)
        self._chunk: tuple[int, list[tuple[list[int], list[int]]]] | None = None
        self._rows = None if config.data.train == "playground:" else _rows(config.data)

    def take(self, tokens: int) -> list[tuple[list[int], list[int]]]:
        """The next pairs, until they hold `tokens` tokens."""
        taken: list[tuple[list[int], list[int]]] = []
        used = 0
        while used < tokens:
            number, index = self.position
            chunk = self._tokenized(number)
            if index == len(chunk):
                self.position = (number + 1, 0)
                continue
            taken.append(chunk[index])
            used += len(chunk[index][0]) + len(chunk[index][1])
            self.position = (number, index + 1)
        return taken

    def _tokenized(self, number: int) -> list[tuple[list[int], list[int]]]:
        if self._chunk is None or self._chunk[0] != number:
            seed = self.config.seed + 1 + number
            if self._rows is None:
                pairs = _generated(self.config.data, seed, CHUNK)
            else:
                pairs = shuffled(self._rows, seed)
            self._chunk = (number, [self._tokenize(p, r) for p, r in pairs])
        return self._chunk[1]

    def _tokenize(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        ids = encode_prompt(self.tokenizer, prompt, self.config.data.system_prompt)
        answer = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        answer = [*answer, self.tokenizer.eos_token_id]
        return ids, answer[: max(1, self.config.max_length - len(ids))]


def _generated(data: SFTDataConfig, seed: int, count: int) -> list[tuple[str, str]]:
    total = sum(part.share for part in data.playground) + data.drills.share
    pairs = [
        (cast(Problem, e["problem"]).problem, str(e["response"]))
        for part in data.playground
        for e in playground.examples(
            seed=seed,
            count=round(count * part.share / total),
            mixture=playground.Mixture(**data.mixture.model_dump()),
            levels=part.levels,
            languages=part.languages,
            kinds=part.kinds,
        )
    ]
    number = round(count * data.drills.share / total)
    pairs += playground.drills(seed, number, data.drills.levels, data.drills.equations)
    return shuffled(pairs, seed)


def _rows(data: SFTDataConfig) -> list[tuple[str, str]]:
    if unknown := data.fields.keys() - {"prompt", "response"}:
        raise InputError(f"data.fields: {sorted(unknown)} unknown; there are prompt and response")
    prompt, response = data.fields.get("prompt", "prompt"), data.fields.get("response", "response")
    pairs = []
    for where, row in read_rows(data.train):
        for name in (prompt, response):
            if not isinstance(row.get(name), str):
                raise InputError(
                    f"{where}: no text in field {name!r}; the row has {sorted(row)}; map the "
                    f"names with data.fields"
                )
        pairs.append((row[prompt], row[response]))
    return pairs
