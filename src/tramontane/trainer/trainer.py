"""The trainer worker: batches of token sequences with rewards in, new weights out.

`Trainer` is a plain class, independent of where it runs. With several ranks of `torch.distributed`,
each rank holds one trainer and every call is made on all of them; rank 0's result is used.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import TrainerConfig
from tramontane.errors import InputError
from tramontane.models import flash, memory, routing
from tramontane.models.families import check_packing
from tramontane.models.host import HostMemory
from tramontane.models.loading import empty_model, load_model
from tramontane.models.packing import pack
from tramontane.models.states import separate_states
from tramontane.models.vision import Vision
from tramontane.models.weight_files import WeightFiles
from tramontane.models.weights import BUCKET_BYTES, Weights
from tramontane.tokens import INSERTED
from tramontane.trainer import export, forwards, lora, sharding
from tramontane.trainer.allowed import renormalized, with_candidates
from tramontane.trainer.context import check_parts, exchange_of, part_of
from tramontane.trainer.head import fused_predictions, head_scale, plain_predictions
from tramontane.trainer.microbatch import Minibatch, cut_batch
from tramontane.trainer.objectives import load_objective
from tramontane.trainer.optimizer import build_optimizer, lr_at
from tramontane.trainer.ratios import effective_sample_size
from tramontane.trainer.replicas import Replicas, refresh, trained, working_model
from tramontane.trainer.rows import PackedRow, Predictions, joined, seeing
from tramontane.trainer.sharding import Averages
from tramontane.trainer.state import StateFiles
from tramontane.trainer.tower import TowerTraining
from tramontane.trainer.value import ValueNetwork
from tramontane.types import TrainedFigures


class Trainer:
    """Holds the float32 weights and updates them.

    Args:
        model: a causal LM, whole, from `models.loading.load_model`, or on the meta device, from
            `models.loading.empty_model`; the trainer takes ownership. In float32, or any dtype with
            `lora`. Its initial weights are also the frozen reference, if the objective needs one.
        config: optimizer, memory and objective.
        updates: number of updates of the run, for the learning-rate schedule.
        files: the files that the weights of a model on the meta device are read from.
        seed: the run's, for the initial weights of adapters.
        alone: no generator shares the cores, so all `threads` run at normal priority.

    Raises:
        InputError: an objective that needs what the trainer does not provide, a `ranks` other than
            the process group's size, adapters for layers that the model does not have, a model that
            is not deterministic in training mode or whose rows `context_parallel` ranks cannot
            share, `compile` without a compiler, or an `attention_kernel` that cannot run here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        updates: int,
        files: WeightFiles | None = None,
        seed: int = 0,
        alone: bool = False,
    ) -> None:
        if config.ranks != sharding.ranks():
            raise InputError(
                f"trainer.ranks is {config.ranks}, but the process group has {sharding.ranks()}"
            )
        self.objective = load_objective(config.objective)
        self._needs = config.objective.needs
        self.device = sharding.device_of_rank(config.device)
        config = config.model_copy(update={"device": str(self.device)})
        self.model, self.config = model, config
        self._peak_rate = config.peak_rate(model.num_parameters())
        self.updates = updates
        forwards.use_expandable_segments(self.device)
        self.version = 0
        self._writer = export.CheckpointWriter(model)
        forwards.disable_dropout(model)
        separate_states(model)
        if config.router_replay or config.float32_router:
            routing.prepare(model, config.float32_router)
        dtype = getattr(torch, config.dtype)
        if config.attention_kernel == "fa3":
            flash.use_fa3(self.device, dtype)
        self._adapters = lora.Adapters(model, config.lora, dtype) if config.lora else None
        self._reference = model
        if "reference" in self._needs and not config.lora:
            self._reference = sharding.skeleton(model, dtype)
        self._values: ValueNetwork | None = None
        if "values" in self._needs:
            self._values = ValueNetwork(model, config, self.device)
        sharding.shard(model, self.device, config.dtype)
        if files is not None:
            sharding.materialize(model, self.device)
            sharding.read(lora.base_tensors(model), files)
        if self._adapters:
            lora.check_merged(model, dtype)
            self._adapters.initialize(seed)
        if self._reference is not model:
            sharding.shard(self._reference, self.device, config.dtype)
            sharding.materialize(self._reference, self.device)
            sharding.copy_parameters(model, self._reference)
        if self._values:
            self._values.initialize(model)
        if config.gradient_checkpointing:
            forwards.checkpoint_blocks(model, config)
        forwards.train_blocks(model)
        self._working = working_model(model, config.dtype)
        with lora.check_applied(self._working) if config.lora else nullcontext():
            forwards.check_repeatable(self._working, self.device)
        if files is not None:  # otherwise checked when it was loaded
            check_packing(self._working, dtype)
        self._exchange = exchange_of(config.context_parallel, self.device)
        if self._exchange:
            check_parts(self._working, self._exchange, dtype)
        if config.router_replay:
            routing.choices(self._working)  # of the checks' forwards
        sharding.free_gathered(self._working)
        self._head_scale = head_scale(self._working)
        if config.lora:
            self._reference = self._working  # without its adapters
        self._replicas = Replicas(model, self._working, config.threads, alone)
        # A compiler does not trace the interception of a router's choice.
        self._compiled = forwards.compilation(config).enabled and not routing.blocks(model)
        if self._compiled:
            for replica in self._replicas.models:
                forwards.compile_blocks(replica)
        self.optimizer = build_optimizer(
            trained(model), self._peak_rate, config.betas, config.weight_decay
        )
        self._state_files = StateFiles(model, self.optimizer)
        self._states = {"": self._state_files}  # by subfolder of the state's folder
        if self._values:
            self._states["value"] = self._values.state_files
        self._host_memory = HostMemory() if self.device.type == "cuda" else None
        self._published: Weights | None = None  # what the next version follows
        self.vision: Vision | None = None
        self._tower: TowerTraining | None = None
        self._busy, self._computed = 0.0, 0
        self._learned = TrainedFigures()
        self._skipped_in_a_row = 0  # optimizer steps, up to now

    @classmethod
    def load(
        cls, path: str, config: TrainerConfig, updates: int, seed: int = 0, alone: bool = False
    ) -> Trainer:
        """Load a checkpoint folder, Hugging Face name or `tiny` and build its trainer.

        With several ranks, each reads only its own shards, if the checkpoint allows that
        (`models.loading.empty_model`).

        Raises:
            InputError: no model there, damaged weights, or see the constructor.
        """
        whole = sharding.ranks() == 1
        model, files = (None if whole else empty_model(path)) or (None, None)
        if model is None:  # FSDP moves it to this rank's device block by block
            # Adapters are float32 in any case.
            dtype = getattr(torch, config.dtype) if config.lora else torch.float32
            model = load_model(path, dtype, config.device if whole else "cpu")
        trainer = cls(model, config, updates, files, seed, alone)
        if config.vision == "frozen":
            trainer.vision = Vision(path, trainer.device)
        else:
            trainer.vision = Vision(path, trainer.device, torch.float32)
            trainer._tower = TowerTraining(trainer.vision, config)
            trainer._states["vision"] = trainer._tower.state_files
        return trainer

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One update: an optimizer step per minibatch, over groups in batch order.

        Collective: all ranks must call it, with the same batch. A step whose gradient is not finite
        is skipped: weights and moments are unchanged, and the metrics exclude it. The norm is
        global, so all ranks decide alike. The version increases in any case: it counts updates.

        Returns:
            Metrics by name, all floats: see `docs/training.md`.

        Raises:
            InputError: no groups, or minibatches smaller than a group; or `max_nonfinite_steps`
                consecutive steps were skipped, and the weights are those of the last finite step.
        """
        began = time.perf_counter()
        rate = self._set_learning_rate()
        minibatches = cut_batch(batch, self.config)
        self._freeze_logprobs(minibatches)
        averages, norms, log_weights = Averages(), [], []
        for number, minibatch in enumerate(minibatches):
            self._set_advantages(minibatch)
            found = Averages()
            # Later minibatches are computed with weights that have moved.
            version = batch.version if number == 0 else None
            accumulate = partial(self._accumulate, minibatch, version)
            count, repeatable = len(minibatch.microbatches), batch.settings.repeatable
            for part in self._replicas.map(accumulate, count, repeatable=repeatable):
                found.merge(part)
            self._replicas.sum_gradients()
            norm = self._optimizer_step()
            if self._values:
                self._values.step(rate, math.isfinite(norm))
            if self._tower:
                self._tower.step(rate, self._peak_rate, math.isfinite(norm))
            if math.isfinite(norm):
                averages.merge(found)
                norms.append(norm)
                log_weights.append(minibatch.log_weights())
        self.version += 1
        self._learned = TrainedFigures()
        for minibatch in minibatches:
            self._learned.extend(minibatch.learned())
        versions = joined([s.versions for s in batch.sequences])
        ages = batch.version - versions[versions >= 0]
        computed = sum(m.computed_tokens for m in minibatches)
        metrics = averages.result() | ({"grad_norm": sum(norms) / len(norms)} if norms else {})
        metrics |= {
            "skipped_steps": float(len(minibatches) - len(norms)),
            "learning_rate": rate,
            "padding_fraction": sum(m.padding for m in minibatches) / len(minibatches),
            "computed_tokens": float(computed),
            "completion_tokens": float((versions != INSERTED).sum()),
        }
        metrics |= routing.balance(self._working, [s.experts for s in batch.sequences])
        if len(ages):  # tokens that this run sampled
            metrics |= {
                "staleness_mean": float(ages.mean()),
                "staleness_max": float(ages.max()),
            }
        if log_weights and len(whole := torch.cat(log_weights)):
            metrics["effective_sample_size"] = effective_sample_size(whole)
        if self.config.objective.mask.enabled:
            metrics["masked_tokens"] = sum(m.masked for m in minibatches) / len(minibatches)
        self._computed += computed
        self._busy += time.perf_counter() - began
        return metrics

    def learned(self) -> TrainedFigures:
        """The last update's advantages and log-probs, in batch order. Collective."""
        return self._learned

    def weights(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Copy the whole model's weights to the CPU, by the names of `model.state_dict()`.

        Collective: every rank must call it, and each gets all weights. Tied weights are one tensor
        under two names.
        """
        return export.copied(export.buckets(self.model, BUCKET_BYTES), dtype)

    def publish(self, weights: Weights) -> Weights:
        """Add this rank's rows of all weights to `weights`. Collective: every rank must call it,
        though only the matrices A of adapters are gathered."""
        tower = [[*self._tower.parts()]] if self._tower else []
        weights.add_all(lambda: chain(export.held(self.model), tower), self._host_memory)
        self._published = weights.follow(self._published)
        return weights

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainSequence], temperature: float) -> list[list[float]]:
        """Log-probs of each sequence's tokens under the current weights, computed as in training.
        Collective: every rank must call it, and computes some of the sequences.

        Args:
            sequences: without given answers; at least one.
            temperature: the one that the tokens were sampled with.

        Returns:
            For each sequence, a log-prob in nats for each of its tokens.
        """
        lengths = [len(sequence.token_ids) for sequence in sequences]
        settings = BatchSettings("", temperature, max(lengths), len(sequences))
        minibatch = Minibatch([sequences], self.config, settings)
        for index in range(len(minibatch.microbatches)):
            row = minibatch.row(index)
            minibatch.trained[index] = self._forward(self._working, row, temperature).logprobs
        sharding.free_gathered(self._working)
        found = iter(minibatch.learned().logprobs)
        return [list(islice(found, length)) for length in lengths]

    @torch.no_grad()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Hidden states of one sequence: the embeddings, then each layer's output, each
        [len(ids), hidden] float32 on the CPU."""
        output = self._working(**pack([ids], self.device), output_hidden_states=True)
        sharding.free_gathered(self._working)
        return [hidden[0].float().cpu() for hidden in output.hidden_states]

    def save_state(self, folder: Path, wait: bool = True) -> None:
        """Write everything that `load_state` needs. Collective: every rank must call it, and writes
        its shards.

        Args:
            folder: created if missing.
            wait: return when all ranks have written. Otherwise return immediately: a thread writes
                from the trainer's own tensors while the next update computes its gradients; only an
                optimizer step waits for it. `state_saved` tells when the state is complete.

        Raises:
            OSError: a file cannot be written, on whichever rank.
        """
        for name, files in self._states.items():
            files.begin(folder / name, self.version)
        for files in self._states.values() if wait else ():
            files.finish()
        memory.release_free_memory()

    def close(self, seconds: float) -> None:
        """Wait for each state that is being written, at most so long."""
        for files in self._states.values():
            files.close(seconds)

    def state_saved(self) -> bool:
        """True if every rank has written its part of the last `save_state`.

        Raises:
            OSError: a file could not be written, on whichever rank.
        """
        return all(files.finished() for files in self._states.values())

    def load_state(self, folder: Path) -> None:
        """Continue from `save_state`, possibly with a different number of ranks. Collective.

        Raises:
            InputError: no state there, a damaged one, or another model's; do not use this trainer
                afterwards.
        """
        self.version, *_ = [files.load(folder / name) for name, files in self._states.items()]
        refresh(self._working, self.model)
        if self._values:
            self._values.refresh()
        if self._tower:
            self._tower.forget()

    def save_weights(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config and weights (safetensors) in the Hugging Face layout. Collective: every rank
        must call it; rank 0 writes, and holds one bucket of weights at a time; it reads the first
        files back as a whole.

        Raises:
            InputError: transformers reads other weights from the files.
            OSError: a file cannot be written.
        """
        buckets = partial(export.buckets, self.model, BUCKET_BYTES, dtype)
        self._writer.save(folder, buckets, dtype)
        if self._tower:
            self._tower.save(folder, dtype)

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters in peft's layout, if `lora` is set. Collective: every rank must call
        it; rank 0 writes.

        Raises:
            OSError: a file cannot be written.
        """
        if self._adapters:
            self._adapters.save(folder)

    def stats(self) -> dict[str, Any]:
        """`busy_seconds` spent in `step`, `computed_tokens`, and `version`, the number of updates;
        see `docs/training.md`."""
        return {
            "busy_seconds": self._busy,
            "computed_tokens": self._computed,
            "version": self.version,
        }

    def _set_learning_rate(self) -> float:
        """Set and return the learning rate of this update."""
        config = self.config
        rate = lr_at(
            self.version, self.updates, config.warmup_updates, config.schedule, self._peak_rate
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def _freeze_logprobs(self, minibatches: list[Minibatch]) -> None:
        """Compute the log-probs that stay fixed during the update, if the objective needs any."""
        policies = set(self._needs & {"reference"})
        if "proximal" in self._needs and len(minibatches) > 1:
            policies.add("proximal")
        for minibatch in minibatches:
            for name in sorted(policies):
                self._freeze(minibatch, name)
            minibatch.set_baselines()

    @torch.no_grad()
    def _set_advantages(self, minibatch: Minibatch) -> None:
        """Compute the advantages of the next minibatch, and which of its tokens count."""
        mask = self.config.objective.mask
        if self._needs & {"sequence_logprobs", "targets"} or mask.of_policy:
            self._freeze(minibatch, "policy")
        minibatch.set_advantages(self.objective)
        if mask.enabled:
            minibatch.set_mask()

    def _freeze(self, minibatch: Minibatch, name: str) -> None:
        """Store the log-probs of the reference model, or of the current weights, under a name."""
        model = self._reference if name == "reference" else self._working
        temperature = minibatch.settings.temperature
        with lora.disabled(model) if name == "reference" else nullcontext():
            minibatch.frozen[name] = [
                self._forward(model, minibatch.row(index), temperature).logprobs
                for index in range(len(minibatch.microbatches))
            ]
        sharding.free_gathered(model)

    def _accumulate(
        self, minibatch: Minibatch, version: int | None, replica: PreTrainedModel, index: int
    ) -> Averages:
        """Forward and backward of one microbatch; returns its metrics, with the mismatch if the
        batch's `version` is given."""
        row, temperature = minibatch.row(index, trained=True), minibatch.settings.temperature
        predictions = self._forward(replica, row, temperature, "entropy" in self._needs)
        minibatch.trained[index] = predictions.logprobs.detach()
        last = index == len(minibatch.microbatches) - 1
        if self._values:
            part = part_of(row, self._exchange)
            values = part.gather(self._values(part.row, last))
            predictions = replace(predictions, values=values)
        tokens = minibatch.tokens(index, predictions)
        loss, metrics = self.objective.loss(tokens, minibatch.options)
        sharding.reduce_gradients(replica, last or self.config.reduce_gradients == "microbatch")
        # FSDP averages gradients over ranks, and the loss is the ranks' sum.
        (loss * sharding.ranks()).backward()
        # Weight 1 per minibatch: microbatches and ranks add up to the minibatch's loss.
        first = sharding.rank() < self.config.context_parallel
        once = torch.full_like(loss, float(index == 0 and first))
        averages = Averages()
        averages.add({**metrics, "loss": (loss, once)})
        if version is not None:
            self._add_mismatch(minibatch, index, version, averages)
        return averages

    def _add_mismatch(
        self, minibatch: Minibatch, index: int, version: int, averages: Averages
    ) -> None:
        """Add |Δ log-prob| between trainer and generator, by the age of each token's weights."""
        logprobs, versions = minibatch.trained[index], minibatch.versions(index)
        ages = np.where(versions < 0, -1, np.maximum(version - versions, 0))
        masks = np.stack([ages == 0, ages == 1, ages >= 2]) & minibatch.microbatches[index].live
        delta = (logprobs - minibatch.upload(minibatch.behavior(index))).abs()
        selected = torch.where(minibatch.upload(masks), delta, 0.0)
        for name, mask, values in zip(("0", "1", "2plus"), masks, selected, strict=True):
            count = values.new_full((), float(mask.sum()))
            averages.add({f"mismatch_age_{name}": (values.sum(), count)})
            averages.maximum(f"mismatch_age_{name}", values.max())

    def _optimizer_step(self) -> float:
        """Clip the gradient and step, unless the gradient is not finite; returns its norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        value = float(sharding.whole(norm))
        if math.isfinite(value):
            self._skipped_in_a_row = 0
            self._state_files.release_tensors()
            self.optimizer.step()
            refresh(self._working, self.model)
        else:
            self._skipped_in_a_row += 1
        self.optimizer.zero_grad()
        limit = self.config.max_nonfinite_steps
        if self._skipped_in_a_row == limit:
            raise InputError(
                f"the gradients of {limit} consecutive optimizer steps are not finite (norm "
                f"{value} in update {self.version + 1}; the limit is max_nonfinite_steps); none of "
                f"them changed the weights. Resume with a learning_rate below "
                f"{self._peak_rate:g}. If the run then fails again, the newest checkpoint has "
                f"already diverged: delete its folder, and resume from the previous one"
            )
        return value

    def _forward(
        self, model: PreTrainedModel, row: PackedRow, temperature: float, entropy_grad: bool = False
    ) -> Predictions:
        """Compute log-probs and entropies of the row's generated tokens."""
        allowed, part = row.allowed, part_of(with_candidates(row), self._exchange)
        row = part.row
        if self.config.router_replay:
            routing.replay(model, row.experts)
        with seeing(model, row, self.vision) as inputs:
            row = replace(row, inputs=inputs)
            if self._head_scale is None:
                predictions = plain_predictions(model, row, temperature, entropy_grad)
            else:
                predictions = fused_predictions(
                    model, row, temperature, self._head_scale, entropy_grad, self._compiled
                )
        return renormalized(predictions.map(part.gather), allowed)
