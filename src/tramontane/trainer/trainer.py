"""The trainer worker: batches of graded completions in, new weights out.

A plain class that knows nothing of where it runs. Where `torch.distributed` is initialised with
several ranks, each holds one trainer, all are called alike, and the result is one rank's.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tramontane.config import TrainerConfig
from tramontane.errors import InputError
from tramontane.models import memory
from tramontane.models.loading import load_model
from tramontane.models.packing import pack
from tramontane.models.weights import BUCKET_BYTES, Bucket, CopiedWeights, Weights
from tramontane.trainer import precision, sharding, state
from tramontane.trainer.averages import Averages
from tramontane.trainer.collate import collate_shared
from tramontane.trainer.compiling import compile_blocks
from tramontane.trainer.logprobs import token_logprobs
from tramontane.trainer.microbatch import Minibatch, Rows, pack_rows
from tramontane.trainer.objectives import load_objective
from tramontane.trainer.optimizer import build_optimizer, lr_at
from tramontane.types import TrainBatch, TrainSequence


class Trainer:
    """Holds the float32 weights and updates them.

    Args:
        model: a causal LM in float32, from `models.load_model`; the trainer makes it its own. Its
            weights at this moment are also the frozen reference, where the objective wants one.
        config: optimizer, memory and objective.
        updates: the length of the run, for the learning-rate schedule.
        seed: with the update's number, it fixes which rank computes which completion.

    Raises:
        InputError: an unknown objective, or a `ranks` that is not the process group's size.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, updates: int, seed: int
    ) -> None:
        if config.ranks != sharding.ranks():
            raise InputError(
                f"trainer.ranks is {config.ranks}, but the process group has {sharding.ranks()}"
            )
        self.objective = load_objective(config.objective)
        self._needs = self.objective.needs(config.objective)
        self.model, self.config = model, config
        self.updates, self.seed = updates, seed
        self.device = torch.device(config.device)
        self.version = 0
        _disable_dropout(model)
        self._reference = model
        if "reference" in self._needs:
            self._reference = copy.deepcopy(model).requires_grad_(False)
            if config.dtype == "bfloat16":
                precision.to_bfloat16(self._reference)
            sharding.shard(self._reference, self.device, config.dtype)
        if config.gradient_checkpointing:
            # transformers 5 renames the method on its way.
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)()
        # There is no dropout; gradient checkpointing works in training mode only.
        model.train()
        sharding.shard(model, self.device, config.dtype)
        self._working = precision.working_model(model, config.dtype)
        if config.compile:
            compile_blocks(self._working)
        self.optimizer = build_optimizer(
            model.parameters(), config.learning_rate, config.betas, config.weight_decay
        )
        self._busy, self._tokens = 0.0, 0

    @classmethod
    def load(cls, model_path: str, config: TrainerConfig, updates: int, seed: int) -> Trainer:
        """Load a checkpoint folder, Hugging Face name or `tiny` and build its trainer.

        Raises:
            InputError: nothing there, damaged weights, or what the constructor raises.
        """
        model = load_model(model_path, torch.float32, config.device)
        return cls(model, config, updates, seed)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One update: `n_batch / n_minibatch` optimizer steps, over groups in batch order.

        Returns:
            Metrics, all floats: see `docs/training.md`.

        Raises:
            RuntimeError: the gradient is not finite; no step is taken then.
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
        self._look_ahead(minibatches)
        averages, norms = Averages(), []
        for number, minibatch in enumerate(minibatches):
            for index in range(len(minibatch.microbatches)):
                # Later minibatches meet weights that have moved: only the first compares.
                compared = batch.version if number == 0 else None
                self._accumulate(minibatch, index, averages, compared)
            norms.append(self._optimizer_step())
        self.version += 1
        ages = [batch.version - v for s in batch.sequences for v in s.versions]
        trained = sum(m.tokens_total for m in minibatches)
        metrics = averages.result() | {
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "padding_fraction": sum(m.padding for m in minibatches) / len(minibatches),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
            "trained_tokens": float(trained),
            "completion_tokens": float(len(ages)),
        }
        self._tokens += trained
        self._busy += time.perf_counter() - began
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model's weights, copied to the CPU, by the names of `model.state_dict()`.

        With several ranks, every one must call it, and each gets them all. Tied weights are one
        tensor under two names.
        """
        weights = CopiedWeights(torch.float32)
        for bucket in self.buckets(BUCKET_BYTES):
            weights.add(bucket)
        return weights.tensors()

    def publish(self, weights: Weights) -> Weights:
        """Add the whole model to `weights`, one bucket after another; every rank must call it, and
        the first one's result counts."""
        for bucket in self.buckets(BUCKET_BYTES):
            if sharding.rank() == 0:
                weights.add(bucket)
        return weights

    def buckets(self, size: int) -> Iterator[Bucket]:
        """The weights by the names of `model.state_dict()`, gathered from all ranks, in buckets of
        at most `size` bytes (a larger tensor has one to itself).

        A bucket is gathered when it is asked for and emptied when the next one is, so that no more
        than one is held; its tensors may be the trainer's own. Every rank must go through all.
        """
        tensors = self.model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        bucket: Bucket = {}
        filled = 0
        for tied in names.values():
            tensor = tensors[tied[0]].detach()
            own = tensor.numel() * tensor.element_size()  # of the whole, where it is sharded
            if bucket and filled + own > size:
                yield bucket
                bucket.clear()
                filled = 0
            bucket |= dict.fromkeys(tied, sharding.whole(tensor))
            filled += own
        yield bucket

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainSequence], temperature: float) -> list[list[float]]:
        """Log-probs of each sequence's tokens under the current weights, computed as in training;
        `temperature` is that of the distribution which they were drawn from."""
        result: list[list[float]] = [[] for _ in sequences]
        microbatches, _ = collate_shared(sequences, self.config.microbatch_tokens)
        for indices in microbatches:
            row = pack_rows([sequences[i] for i in indices], self.device)
            logprobs, _ = self._forward(self._working, row, temperature)
            for i, own in zip(indices, logprobs.split(row.lengths), strict=True):
                result[i] = own.tolist()
        return result

    @torch.no_grad()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Of one sequence: the embeddings, then each layer's output, [len(ids), hidden] float32."""
        packed = pack([ids], self.device)
        output = self._working(**packed.model_inputs, output_hidden_states=True)
        return [hidden[0].float().cpu() for hidden in output.hidden_states]

    def save_state(self, folder: Path) -> None:
        """Write all that `load_state` needs, and give back free memory; every rank must call it."""
        state.save(folder, self.model, self.optimizer, self.version)
        memory.give_back()

    def load_state(self, folder: Path) -> None:
        """Go on from `save_state`, with as many ranks or others.

        Raises:
            InputError: nothing there, damaged, or of another model; this trainer is then unfit.
        """
        self.version = state.load(folder, self.model, self.optimizer)
        precision.refresh(self._working, self.model)

    def save_weights(self, folder: Path) -> None:
        """Write config and weights (safetensors) in the Hugging Face layout; every rank must call
        it."""
        weights = self.weights()
        if sharding.rank() == 0:
            self.model.save_pretrained(folder, state_dict=weights)

    def stats(self) -> dict[str, Any]:
        """`busy_seconds` spent in `step`, and `trained_tokens`, of prompts and completions."""
        return {"busy_seconds": self._busy, "trained_tokens": self._tokens}

    def _minibatches(self, batch: TrainBatch) -> list[Minibatch]:
        """The batch's groups cut into minibatches, in order."""
        settings = batch.settings
        objective = self.config.objective.model_copy(update={"eps_high": settings.eps_high})
        per = settings.n_minibatch // len(batch.groups[0])
        steps = math.ceil(len(batch.groups) / per)
        return [
            Minibatch(
                batch.groups[number * per : (number + 1) * per],
                self.config.model_copy(update={"objective": objective}),
                settings,
                seed=(self.seed * self.updates + self.version) * steps + number,
            )
            for number in range(steps)
        ]

    @torch.no_grad()
    def _look_ahead(self, minibatches: list[Minibatch]) -> None:
        """Log-probs that stay fixed during the update, where wanted, and then the advantages."""
        models = {"reference": self._reference, "proximal": self._working}
        wanted = self._needs & {"reference"}
        totals = "sequence_logprobs" in self._needs
        if totals or ("proximal" in self._needs and len(minibatches) > 1):
            wanted.add("proximal")
        for minibatch in minibatches:
            temperature = minibatch.settings.temperature
            for name in sorted(wanted):
                minibatch.frozen[name] = [
                    self._forward(models[name], minibatch.rows(index), temperature)[0]
                    for index in range(len(minibatch.microbatches))
                ]
            minibatch.credit(self.objective, totals)

    def _accumulate(
        self, minibatch: Minibatch, index: int, averages: Averages, compared: int | None
    ) -> None:
        """Forward and backward of one microbatch."""
        row = minibatch.rows(index)
        temperature, with_grad = minibatch.settings.temperature, "entropy" in self._needs
        logprobs, entropy = self._forward(self._working, row, temperature, with_grad)
        tokens = minibatch.tokens(index, logprobs, entropy, self._needs)
        loss, metrics = self.objective.loss(tokens, minibatch.config.objective)
        # FSDP averages gradients over ranks, and the loss is their sum.
        (loss * sharding.ranks()).backward()
        # One weight a minibatch: microbatches and ranks add up to its loss.
        once = torch.full_like(loss, float(index == 0 and sharding.rank() == 0))
        averages.add({**metrics, "loss": (loss, once)})
        if compared is not None:
            micro = minibatch.microbatches[index]
            versions = [v for i in micro.indices for v in minibatch.completions[i].versions]
            delta = (logprobs - tokens.behavior).detach().abs() * micro.live
            ages = compared - torch.tensor(versions, device=self.device)
            for name, those in (("0", ages <= 0), ("1", ages == 1), ("2plus", ages >= 2)):
                own = delta * those
                averages.add({f"mismatch_age_{name}": (own.sum(), those.sum() * micro.live)})
                averages.maximum(f"mismatch_age_{name}", own.max())

    def _optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        value = float(sharding.whole(norm))
        if not math.isfinite(value):
            raise RuntimeError(
                f"the gradient of update {self.version + 1} is not finite (norm {value}); lower "
                f"trainer.learning_rate and resume from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        precision.refresh(self._working, self.model)
        return value

    def _forward(
        self, model: PreTrainedModel, row: Rows, temperature: float, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the row's generated tokens: [N] float32."""
        logits = model(**row.model_inputs).logits[0, : len(row.targets)]
        return token_logprobs(logits, row.targets, temperature, entropy_grad)


def _disable_dropout(model: PreTrainedModel) -> None:
    """The generator samples without dropout, and the trainer's log-probs must be of its model."""
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
