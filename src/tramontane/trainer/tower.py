"""The vision tower and projector as a part of what is trained (`trainer.vision`).

Their gradients come from the policy's loss, through the features that stand in place of image
tokens; they have an optimizer of their own, with their own learning rate and clipped by themselves,
and are published, saved and loaded with the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tramontane.config import TrainerConfig
from tramontane.models.transplant import TOWER
from tramontane.models.vision import PUBLISHED, Vision
from tramontane.models.weight_files import Entry, write_files
from tramontane.models.weights import Part
from tramontane.trainer.optimizer import build_optimizer
from tramontane.trainer.state import StateFiles

DEFAULT_SHARE = 0.1  # of the policy's learning rate; with all of it, `tiny_vision` learns less


class TowerTraining:
    """Trains the weights of a tower that `config.vision` names.

    Args:
        vision: the tower; it computes features with gradients from now on.
        config: optimizer and learning rate.

    Raises:
        InputError: the model takes no images, or has no projector.
    """

    def __init__(self, vision: Vision, config: TrainerConfig) -> None:
        assert config.vision != "frozen"
        self._vision, self._max_norm = vision, config.max_grad_norm
        self._weights = vision.train(config.vision)
        self._rate = config.vision_learning_rate
        self._optimizer = build_optimizer(
            self._weights.values(), self._rate or 0.0, config.betas, config.weight_decay
        )
        module = torch.nn.ParameterDict(
            {name.replace(".", "/"): weight for name, weight in self._weights.items()}
        )
        self.state_files = StateFiles(module, self._optimizer)

    def step(self, rate: float, peak: float, apply: bool) -> None:
        """Clip the gradient and step. Without `apply`, or if the gradient is not finite, only drop
        the gradient.

        Args:
            rate: the policy's learning rate in this update.
            peak: its learning rate after warm-up, which the tower's own rises and falls with.
            apply: the policy steps too.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self._max_norm)
        if apply and bool(norm.isfinite()):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * (DEFAULT_SHARE if self._rate is None else self._rate / peak)
            self.state_files.release_tensors()
            self._optimizer.step()
            self._vision.forget()
        self._optimizer.zero_grad()

    def forget(self) -> None:
        """Drop the features of weights that were replaced."""
        self._vision.forget()

    def parts(self) -> Iterator[Part]:
        """The weights, for generators."""
        for name, weight in self._weights.items():
            yield Part.whole([PUBLISHED + name], weight.detach())

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the weights beside those of the text half, where `Vision` and `transplant` look for
        them.

        Raises:
            OSError: a file cannot be written.
        """
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        entries = {name: Entry(weight.shape, dtype) for name, weight in weights.items()}
        write_files(folder / TOWER, entries, iter(weights.items()))
