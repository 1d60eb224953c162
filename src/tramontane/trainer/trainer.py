"""The trainer worker: batches of graded completions in, new weights out.

A plain class that knows nothing of where it runs. Where `torch.distributed` is initialised with
several ranks, each holds one trainer, all are called alike, and the result is one rank's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tramontane.config import PipelineConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models import load_model, pack
from tramontane.trainer import sharding, state
from tramontane.trainer.averages import Averages
from tramontane.trainer.collate import padding_fraction, shares
from tramontane.trainer.logprobs import token_logprobs
from tramontane.trainer.microbatch import Minibatch, Rows, flat, rows
from tramontane.trainer.objectives import Sequences, Tokens, load_objective
from tramontane.trainer.optimizer import build_optimizer, lr_at
from tramontane.types import Batch, Completion

AGES = ("0", "1", "2plus")


class Trainer:
    """Holds the float32 weights and updates them.

    Args:
        model: a causal LM in float32, from `models.load_model`; the trainer makes it its own. Its
            weights at this moment are also the frozen reference, where the objective wants one.
        config: optimizer, memory and objective.
        pipeline: the sizes; `group_size` must divide `n_minibatch`.
        temperature: the generator's; log-probs are of the distribution that was sampled from.
        updates: the length of the run, for the learning-rate schedule.
        seed: with the update's number, it fixes which rank computes which completion.

    Raises:
        InputError: sizes that do not divide, an unknown objective, or a `ranks` that is not the
            process group's size.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        pipeline: PipelineConfig,
        temperature: float,
        updates: int,
        seed: int,
    ) -> None:
        self.objective = load_objective(config.objective)
        self._needs = self.objective.needs(config.objective)
        _check_sizes(config, pipeline)
        self.model, self.config, self.pipeline = model, config, pipeline
        self.temperature, self.updates, self.seed = temperature, updates, seed
        self.device = torch.device(config.device)
        self.version = 0
        _disable_dropout(model)
        self._reference = None
        if "reference" in self._needs:
            self._reference = copy.deepcopy(model).requires_grad_(False)
            sharding.shard(self._reference, self.device)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # Dropout is off; `train` only because gradient checkpointing looks for it.
        model.train()
        sharding.shard(model, self.device)
        self.optimizer = build_optimizer(
            model.parameters(), config.learning_rate, config.betas, config.weight_decay
        )
        self._busy, self._tokens = 0.0, 0

    @classmethod
    def load(
        cls,
        model_path: str,
        config: TrainerConfig,
        pipeline: PipelineConfig,
        temperature: float,
        updates: int,
        seed: int,
    ) -> Trainer:
        """Load a checkpoint folder, Hugging Face name or `tiny` and build its trainer.

        Raises:
            InputError: nothing there, damaged weights, or what the constructor raises.
        """
        model = load_model(model_path, torch.float32, config.device)
        return cls(model, config, pipeline, temperature, updates, seed)

    def step(self, batch: Batch) -> dict[str, float]:
        """One update: `n_batch / n_minibatch` optimizer steps, over groups in batch order.

        Returns:
            Metrics, all floats: see `docs/training.md`.

        Raises:
            RuntimeError: a gradient that is not finite; the weights are left as they were.
        """
        began = time.perf_counter()
        rate = lr_at(
            self.version,
            self.updates,
            self.config.warmup_steps,
            self.config.schedule,
            self.config.learning_rate,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        minibatches = self._minibatches(batch)
        frozen = self._frozen_logprobs(minibatches)
        averages = Averages(self.device)
        norms, losses = [], torch.zeros((), dtype=torch.float64, device=self.device)
        for number, minibatch in enumerate(minibatches):
            losses += self._accumulate(minibatch, frozen[number], averages, batch.version, number)
            norms.append(self._optimizer_step())
        self.version += 1
        lengths = [n for m in minibatches for n in m.lengths]
        self._busy += time.perf_counter() - began
        self._tokens += sum(lengths)
        ages = [batch.version - v for c in batch.completions for v in c.versions]
        return averages.result() | {
            "loss": sharding.total(losses).item() / len(minibatches),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "padding_fraction": _padding(minibatches, self.config.microbatch_tokens),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
            "trained_tokens": float(sum(lengths)),
            "completion_tokens": float(len(ages)),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights, copied to the CPU, by the names of `model.state_dict()`.

        With several ranks, each must call it, and each gets them all. Tied weights are one tensor
        under two names.
        """
        copies: dict[int, torch.Tensor] = {}
        result = {}
        for name, tensor in self.model.state_dict().items():
            key = _storage(tensor)
            if key not in copies:
                copies[key] = sharding.whole(tensor.detach()).to("cpu", copy=True)
            result[name] = copies[key]
        return result

    @torch.no_grad()
    def logprobs(self, completions: list[Completion]) -> list[list[float]]:
        """Of each completion's tokens under the current weights, computed as in training."""
        minibatch = [len(c.prompt_ids) + len(c.token_ids) for c in completions]
        result: list[list[float]] = [[] for _ in completions]
        for indices in self._collate(minibatch):
            row = rows([completions[i] for i in indices], self.device)
            values = self._forward(self.model, row)[0].split(row.lengths.tolist())
            for i, own in zip(indices, values, strict=True):
                result[i] = own.tolist()
        return result

    @torch.no_grad()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Of one sequence: the embeddings, then each layer's output, [len(ids), hidden] float32."""
        with self._autocast():
            output = self.model(
                **pack([ids], self.device).model_inputs, output_hidden_states=True
            )
        return [h[0].float().cpu() for h in output.hidden_states]

    def save_state(self, folder: Path) -> None:
        """Write all that `load_state` needs; every rank must call it."""
        state.save(folder, self.model, self.optimizer, self.version)

    def load_state(self, folder: Path) -> None:
        """Go on from `save_state`, with as many ranks or others.

        Raises:
            InputError: nothing there, damaged, or of another model; this trainer is then unfit.
        """
        self.version = state.load(folder, self.model, self.optimizer)

    def save_weights(self, folder: Path) -> None:
        """Write config and weights (safetensors) in the Hugging Face layout."""
        weights = self.weights()
        if sharding.rank() == 0:
            self.model.save_pretrained(folder, state_dict=weights)

    def stats(self) -> dict[str, Any]:
        """`busy_seconds` spent in `step`; `trained_tokens`, prompts and completions, since then."""
        return {"busy_seconds": self._busy, "trained_tokens": self._tokens}
