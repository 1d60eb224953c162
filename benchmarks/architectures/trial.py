"""What the generator and the trainer compute on a tiny model of one architecture, against a plain
forward of transformers."""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import shutil
import tempfile
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.architectures.rows import wraps
from benchmarks.architectures.sizes import EOS, VOCAB, of_text, save, tiny_config, tiny_model
from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models.loading import load_model
from tramontane.models.names import resolve
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams

Cell = float | str  # largest difference of log-probs in nats, or what was said instead

LIMIT = 600  # seconds that a row may take
REFUSED, FAILED = "refused: ", "failed: "
TEXT_HALF = "text half"  # the column of wrapped models alone
_PROMPTS = (3, 12, 25, 40, 40, 60)
_LENGTHS = ((3, 20), (12, 30), (25, 50), (40, 10), (5, 70), (5, 8))

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class Trial:
    """The trials of one architecture.

    Args:
        kind: `model_type` of its config.
        changed: keys of the config that differ from the tiny one.
        folder: for checkpoints.

    Attributes:
        cells: what was found, by column.
        name: the model's class.

    Raises:
        Exception: transformers cannot build, save or load the model.
    """

    def __init__(self, kind: str, changed: Mapping[str, Any] | None, folder: Path) -> None:
        self.cells: dict[str, Cell] = {}
        self._folder, self._path = folder, str(folder / "model")
        made = tiny_model(kind, changed)
        save(made, kind, changed, self._path)
        whole = _reread(made, self._path) if isinstance(made.config, CONFIG_MAPPING[kind]) else made
        self._plain: Any = of_text(whole)
        AutoTokenizer.from_pretrained(resolve("tiny")).save_pretrained(self._path)
        ends = json.dumps({"eos_token_id": EOS})
        (folder / "model/generation_config.json").write_text(ends, encoding="utf-8")
        self._sequences = _trained()
        self.name = type(made).__name__
        self._wrapped = wraps(kind)
        self._experts = any(m._modules.get("experts") is not None for m in made.modules())

    def run(self) -> dict[str, Cell]:
        self._try("decode", self._decode)
        self._try("packed", self._packed)
        self._try("LoRA", self._lora)
        self._try("export", self._export)
        if self._wrapped:  # those are the text half's, against the whole model's
            self.cells[TEXT_HALF] = self.cells["packed"]
        if self._experts:
            self._try("replay", self._replay)
        return self.cells

    def _try(self, column: str, trial: Callable[[], float]) -> None:
        try:
            self.cells[column] = float(f"{trial():.1e}")
        except InputError as error:
            self.cells[column] = REFUSED + _sentence(str(error), self._folder)
        except Exception as error:  # a row of the table, not the end of it
            self.cells[column] = FAILED + _sentence(
                f"{type(error).__name__}: {error}", self._folder
            )

    def _decode(self) -> float:
        """Log-probs of sampled tokens, as the generator recorded them."""
        sampled = self._sampled()
        return _largest(self._plain, sampled, [list(s.logprobs) for s in sampled])

    def _packed(self) -> float:
        """Log-probs of sequences of different lengths in packed rows."""
        return self._against(self._plain, self._full)

    def _export(self) -> float:
        """Weights after an update, read by transformers."""
        return self._reloaded(self._full, 1)

    def _lora(self) -> float:
        """Merged weights after two updates of adapters, read by transformers."""
        return self._reloaded(self._trainer(lora={"rank": 4}, learning_rate=1e-2), 2)

    def _reloaded(self, trainer: Trainer, updates: int) -> float:
        count = len(self._sequences)
        for _ in range(updates):
            groups = [[s] for s in self._sequences]
            settings = BatchSettings("", 1.0, max(_LENGTHS)[1], count)
            trainer.step(TrainBatch(trainer.version, groups, settings))
        path = self._folder / "weights"
        shutil.rmtree(path, ignore_errors=True)
        trainer.save_weights(path)
        again = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        return self._against(again.eval(), trainer)

    def _replay(self) -> float:
        """Log-probs with the experts that the generator recorded."""
        sampled = self._sampled(return_routed_experts=True)
        found = self._trainer(router_replay=True).logprobs(sampled, 1.0)
        return _largest(self._plain, sampled, found)

    @cached_property
    def _full(self) -> Trainer:
        return self._trainer()

    def _trainer(self, **config: Any) -> Trainer:
        objective = {"name": "sft"}
        own = TrainerConfig(dtype="float32", device="cpu", objective=objective, **config)
        return Trainer.load(self._path, own, 4)

    def _sampled(self, **config: Any) -> list[TrainSequence]:
        own = GeneratorConfig(dtype="float32", device="cpu", **config)
        generator = Generator.load(self._path, own, slots=6, max_len=200)
        prompts = [_ids(n) for n in _PROMPTS]
        requests = [
            Completion.requested(i, 0, p, i, SamplingParams(40)) for i, p in enumerate(prompts)
        ]
        same = [Completion.requested(3, j, prompts[3], 100 + j, SamplingParams(30)) for j in (1, 2)]
        generator.submit(requests + same)
        ended = []
        while generator.pending():
            ended += generator.step()
        return [TrainSequence.of(completion) for completion in ended]

    def _against(self, plain: PreTrainedModel, trainer: Trainer) -> float:
        return _largest(plain, self._sequences, trainer.logprobs(self._sequences, 1.0))


def _ids(n: int, seed: int = 0) -> list[int]:
    numbers = torch.Generator().manual_seed(1000 * n + seed)
    return torch.randint(5, VOCAB, (n,), generator=numbers).tolist()


def _trained() -> list[TrainSequence]:
    return [
        TrainSequence(
            array("i", _ids(prompt)),
            array("i", _ids(n, 1)),
            array("f", [0.0] * n),
            array("i", [0] * n),
        )
        for prompt, n in _LENGTHS
    ]


def _largest(
    plain: PreTrainedModel, sequences: Sequence[TrainSequence], found: Sequence[Sequence[float]]
) -> float:
    """Largest difference in nats of found log-probs from those of plain forwards."""
    apart = [
        (_logprobs(plain, s) - torch.tensor(own)).abs()
        for s, own in zip(sequences, found, strict=True)
    ]
    return float(torch.cat(apart).max())


@torch.no_grad()
def _logprobs(plain: PreTrainedModel, sequence: TrainSequence) -> torch.Tensor:
    """[T] log-probs of a sequence's tokens, by a forward of it alone."""
    ids = torch.tensor([*sequence.prompt_ids, *sequence.token_ids])
    logits = plain(input_ids=ids[None], use_cache=False).logits[0].float()
    found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return found[len(sequence.prompt_ids) - 1 :]


def _sentence(text: str, folder: Path) -> str:
    """The first sentence of a message, without the folder of this trial."""
    text = re.sub(rf"^(model )?\S*{re.escape(str(folder))}\S*: |^model \S+: ", "", text.strip())
    text = text.replace(str(folder), "FOLDER")
    return re.split(r"[;\n]|\. |: the embedded", text, maxsplit=1)[0][:300]


def _reread(made: PreTrainedModel, path: str) -> PreTrainedModel:
    """The model as transformers reads what it has saved: it resets some weights (seen in Youtu's
    embeddings). Of ShieldGemma 2, transformers 5.23 does not read back the text layers that it has
    saved (findings/shieldgemma2_reload.sh)."""
    try:
        again, info = type(made).from_pretrained(
            path, attn_implementation="eager", output_loading_info=True
        )
    except OSError:  # it wants a file that it has not saved (seen in Qwen2.5-Omni)
        return made
    return made if info["missing_keys"] else again.eval()


def _of_no_model(kind: str, changed: Mapping[str, Any] | None, folder: Path) -> Cell:
    """What is said of a checkpoint whose model transformers itself does not build."""
    tiny_config(kind, changed).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    try:
        load_model(str(folder))
    except InputError as error:
        return REFUSED + _sentence(str(error), folder)
    except Exception as error:
        return FAILED + _sentence(f"{type(error).__name__}: {error}", folder)
    return FAILED + "loaded"


def trial(kind: str, changed: Mapping[str, Any] | None) -> dict[str, Any]:
    """All trials of one architecture: its class, and each column's figure or words; `unbuilt`, if
    transformers has no such config."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            own = Trial(kind, changed, Path(folder))
        except Exception as error:  # transformers does not build it, save it or load it
            reason = _sentence(f"{type(error).__name__}: {error}", Path(folder))
            try:
                said = _of_no_model(kind, changed, Path(folder) / "alone")
            except Exception:  # nor its config
                return {"unbuilt": reason}
            return {"cells": {"decode": said}, "transformers": reason}
        return {"class": own.name, "cells": own.run()}


def isolated(kind: str, changed: Mapping[str, Any] | None) -> dict[str, Any]:
    """`trial` in a process of its own, whose end is a result too."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send, args=(sender, kind, changed), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(LIMIT):
            return receiver.recv()
        process.kill()
        return {"crashed": f"not finished after {LIMIT} seconds"}
    except EOFError:
        process.join()
        return {"crashed": f"exit code {process.exitcode}"}
    finally:
        process.join()


def _send(sender: Connection, kind: str, changed: Mapping[str, Any] | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("tramontane").setLevel(logging.ERROR)
    sender.send(trial(kind, changed))
