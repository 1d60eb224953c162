"""Supervised fine-tuning: a causal LM learns responses to prompts; packed, completion-only loss.

It makes the tiny base from the playground (`configs/tiny_base.yaml`), and gives RL a start from
any prompt/response file, as Magistral Small had one (arXiv 2506.10910, section 5).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tramontane.data import playground
from tramontane.data.files import read_rows, shuffled
from tramontane.data.prompts import encode_prompt
from tramontane.data.tokenizer import train_tokenizer
from tramontane.errors import InputError
from tramontane.models.loading import context_length, load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.sft.config import SFTConfig, SFTDataConfig
from tramontane.trainer.optimizer import build_optimizer, lr_at
from tramontane.types import Problem

CHUNK = 4096

Pair = tuple[list[int], list[int]]  # a prompt's tokens, a response's


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
        InputError: no model named, or both; rows without the fields; a prompt that does not fit;
            an `output` that holds a checkpoint already, or nothing to resume from.
    """
    output = Path(config.output)
    state_file, log_file = output / "resume.pt", output / "sft_metrics.jsonl"
    _check_output(output, state_file, resume)
    torch.manual_seed(config.seed)
    model, tokenizer = _start(config)
    optimizer = build_optimizer(
        model.parameters(), config.learning_rate, config.betas, config.weight_decay
    )
    stream = ExampleStream(config, tokenizer, context_length(model.config))
    output.mkdir(parents=True, exist_ok=True)
    step, seconds = 0, 0.0
    if resume:
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


def _check_output(output: Path, state_file: Path, resume: bool) -> None:
    for path in (output, *output.parents):
        if path.is_file():
            raise InputError(f"output {output}: {path} is a file; name a folder")
    if resume and not state_file.is_file():
        raise InputError(
            f"{state_file}: nothing to resume from (a finished run leaves nothing); start without "
            f"--resume"
        )
    if not resume and state_file.is_file():
        raise InputError(
            f"output {output}: holds an unfinished run; continue it with --resume, delete the "
            f"folder, or name another one (output=FOLDER)"
        )
    if not resume and (output / "config.json").is_file():
        raise InputError(
            f"output {output}: holds a checkpoint already; delete the folder, or name another one "
            f"(output=FOLDER)"
        )


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
        raise InputError(
            f"{file}: damaged, nothing can be resumed from it ({error}); delete {file.parent} and "
            f"start without --resume"
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


def _microbatches(batch: list[Pair], budget: int) -> Iterator[list[Pair]]:
    """In order of length: attention alone is padded, and so hardly at all."""
    micro: list[Pair] = []
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

    A response counts with its EOS. One that does not fit behind its prompt is left out, since cut
    off it would teach never to end; a warning says how many are.

    Args:
        config: where pairs come from, and `max_length`.
        tokenizer: the model's.
        context: positions that the model has; None: not known, so no bound.

    Attributes:
        position: (chunk, index in it), all that a resumed run needs.

    Raises:
        InputError: rows without the fields; a prompt in a file that leaves no room for a token
            of its response; nothing left that fits.
    """

    def __init__(
        self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, context: int | None = None
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.room = min(config.max_length, context or config.max_length)
        self.position: tuple[int, ...] = (0, 0)
        self._chunk: tuple[int, list[Pair]] | None = None
        self._rows: list[Pair] | None = None
        if config.data.train != "playground:":
            self._rows = self._fitting(_rows(config.data))

    def take(self, tokens: int) -> list[Pair]:
        """The next pairs, until they hold `tokens` tokens."""
        taken: list[Pair] = []
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

    def _tokenized(self, number: int) -> list[Pair]:
        if self._chunk is None or self._chunk[0] != number:
            seed = self.config.seed + 1 + number
            if self._rows is None:
                drawn = _generated(self.config.data, seed, CHUNK)
                pairs = self._fitting([("playground:", p, r) for p, r in drawn])
            else:
                pairs = shuffled(self._rows, seed)
            self._chunk = (number, pairs)
        return self._chunk[1]

    def _fitting(self, rows: list[tuple[str, str, str]]) -> list[Pair]:
        """The tokens of (where, prompt, response) that fit."""
        pairs = []
        for where, prompt, response in rows:
            ids = encode_prompt(self.tokenizer, prompt, self.config.data.system_prompt)
            if len(ids) >= self.room:
                raise InputError(
                    f"{where}: its prompt has {len(ids)} tokens, which leaves none of "
                    f"{self.room} to the response ({self._bound()}): remove it, or {self._remedy()}"
                )
            answer = self.tokenizer(response, add_special_tokens=False)["input_ids"]
            if len(ids) + len(answer) < self.room:
                pairs.append((ids, [*answer, self.tokenizer.eos_token_id]))
        source = self.config.data.train
        said = (
            f"of {len(rows)} responses in {source!r}, {len(rows) - len(pairs)} do not fit with "
            f"their prompts into {self.room} tokens ({self._bound()})"
        )
        if not pairs:
            raise InputError(f"{said}: nothing is left; {self._remedy()}")
        if len(pairs) < len(rows):
            warnings.warn(f"{said} and are left out", stacklevel=2)
        return pairs

    def _bound(self) -> str:
        return "max_length" if self.room == self.config.max_length else "the model's context"

    def _remedy(self) -> str:
        if self.room == self.config.max_length:
            return "raise max_length"
        return "take a model with more context"


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


def _rows(data: SFTDataConfig) -> list[tuple[str, str, str]]:
    """(where, prompt, response) of every row."""
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
        pairs.append((where, row[prompt], row[response]))
    return pairs
