"""A value network: a second model that predicts a number from every prefix of a sequence.

It starts as a copy of the policy whose head is replaced by a linear layer with one output and zero
weights. It shares nothing with the policy (DRO, arXiv 2405.19107, uses separate networks), has its
own optimizer with the same settings, and is saved and loaded with it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tramontane.config import TrainerConfig
from tramontane.trainer import forwards, sharding
from tramontane.trainer.optimizer import build_optimizer
from tramontane.trainer.replicas import refresh, working_model
from tramontane.trainer.rows import PackedRow
from tramontane.trainer.state import StateFiles


class ValueNetwork:
    """V(x, y_<t) for the prefix before every generated token.

    Args:
        model: the policy, whole or on the meta device, before it is sharded.
        config: optimizer, dtype and memory of training.
        device: device of this rank.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._peak_rate = config.peak_rate(model.num_parameters())
        self.model = sharding.skeleton(model, torch.float32)
        head = torch.nn.Linear(model.config.hidden_size, 1, bias=False, device="meta")
        self.model.set_output_embeddings(head)
        self.model.config.tie_word_embeddings = False

    def initialize(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights, once they are initialized. Every rank must call it."""
        config = self._config
        sharding.shard(self.model, self._device, config.dtype)
        sharding.materialize(self.model, self._device)
        head = self.model.get_output_embeddings().weight
        weights = dict(policy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter is head:
                    sharding.local(parameter).zero_()
                else:
                    sharding.local(parameter).copy_(sharding.local(weights[name]))
        self.model.requires_grad_(True)
        if config.gradient_checkpointing:
            forwards.checkpoint_blocks(self.model, config)
        forwards.train_blocks(self.model)
        self._working = working_model(self.model, config.dtype)
        self._optimizer = build_optimizer(
            self.model.parameters(), self._peak_rate, config.betas, config.weight_decay
        )
        self.state_files = StateFiles(self.model, self._optimizer)

    def __call__(self, row: PackedRow, last: bool) -> torch.Tensor:
        """The values of the prefixes before the row's N generated tokens, with gradient.

        Args:
            row: the microbatch.
            last: this microbatch's backward pass is the last before `step`.

        Returns:
            [N] float32 (float64 for a model in float64).
        """
        sharding.reduce_gradients(
            self._working, last or self._config.reduce_gradients == "microbatch"
        )
        values = row.kept(self._working(**row.inputs).logits)[0, : len(row.targets), 0]
        return values if values.dtype == torch.float64 else values.float()

    def step(self, rate: float, apply: bool) -> None:
        """Clip the gradient and step at the learning rate `rate`. Without `apply`, or if the
        gradient is not finite, only drop the gradient."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if apply and bool(sharding.whole(norm).isfinite()):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self.state_files.release_tensors()
            self._optimizer.step()
            self.refresh()
        self._optimizer.zero_grad()

    def refresh(self) -> None:
        """Compute with the weights that were loaded."""
        refresh(self._working, self.model)
