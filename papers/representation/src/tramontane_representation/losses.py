"""The three losses for networks: predictors of future latents, and their gradients in the encoder.

In the linear theory the predictors solve their own least squares exactly, also those of a loss that
counts with a minus sign. Here every predictor minimizes its own error by gradient descent, at a
higher learning rate than the encoder, and BYOL-VAR reverses the gradient of BYOL-Π's loss in the
encoder alone. Source: arXiv 2406.02035; what it does not print is an option.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from tramontane.config import Section

# Signs of the losses of BYOL-Π and BYOL-AC in the encoder; 0: the loss is not computed.
ENCODER_SIGNS = {"none": (0, 0), "pi": (1, 0), "ac": (0, 1), "var": (-1, 1)}
PARTS = ("pi", "ac")


class SelfPredictionConfig(Section):
    """The auxiliary loss."""

    method: Literal["none", "pi", "ac", "var"] = "none"
    """`pi` predicts the next latent from the latent, `ac` from the latent and the action, `var` is
    the difference AC − Π; `none`: no auxiliary loss."""
    weight: float = Field(1.0, ge=0)
    """Factor of the loss."""
    steps: int = Field(1, ge=1)
    """Future steps that are predicted; step h is predicted from the prediction of step h − 1."""
    ensemble: int = Field(1, ge=1)
    """Number of predictors of each kind, whose losses are averaged."""
    hidden: int = Field(64, ge=0)
    """Hidden units of a predictor; 0: linear, one matrix for each action."""
    target_rate: float = Field(0.01, gt=0, le=1)
    """Share of the encoder that moves into the target network at each step; 1: the target is the
    encoder itself under a stop-gradient, as in the linear theory."""
    predictor_speed: float = Field(5.0, gt=0)
    """Learning rate of the predictors, as a multiple of the encoder's."""
    normalize: bool = True
    """Compare latents of unit length; otherwise as they are."""


class Predictor(nn.Module):
    """Predicts the next latent: [B, width], from a latent and, for AC, an action.

    Args:
        width: size of a latent.
        action_width: size of an action's vector (one-hot for discrete actions); 0: Π.
        hidden: hidden units; 0: a matrix P for Π, and Σ_j a_j P_j for AC, which is P_a for one-hot
            actions.
    """

    def __init__(self, width: int, action_width: int, hidden: int) -> None:
        super().__init__()
        self.action_width = action_width
        self.matrices: nn.Parameter | None = None
        if hidden:
            self.layers = nn.Sequential(
                nn.Linear(width + action_width, hidden), nn.ReLU(), nn.Linear(hidden, width)
            )
        else:
            shape = (max(1, action_width), width, width)
            self.matrices = nn.Parameter(torch.randn(shape) / width**0.5)

    def forward(self, latent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        if self.matrices is None:
            parts = [latent, action] if self.action_width else [latent]
            return self.layers(torch.cat(parts, dim=-1))  # type: ignore[no-any-return]
        if not self.action_width:
            return latent @ self.matrices[0]
        return torch.einsum("ba,ade,bd->be", action, self.matrices, latent)


class SelfPrediction(nn.Module):
    """The auxiliary loss of a batch.

    Args:
        width: size of a latent.
        action_width: size of an action's vector.
        config: method and options.
    """

    def __init__(self, width: int, action_width: int, config: SelfPredictionConfig) -> None:
        super().__init__()
        self.config = config
        signs = zip(PARTS, (0, action_width), ENCODER_SIGNS[config.method], strict=True)
        self.signs = {part: sign for part, _, sign in signs if sign}
        widths = {"pi": 0, "ac": action_width}
        self.members = nn.ModuleDict(
            {
                part: nn.ModuleList(
                    Predictor(width, widths[part], config.hidden) for _ in range(config.ensemble)
                )
                for part in self.signs
            }
        )

    def forward(
        self,
        latents: torch.Tensor,
        actions: torch.Tensor,
        targets: torch.Tensor,
        valid: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss to minimize, and the error of each kind of predictor.

        Args:
            latents: [B, width] with gradient.
            actions: [B, steps, action_width], the actions that were taken.
            targets: [B, steps, width], latents of the following states; no gradient flows there.
            valid: [B, steps] bool; False after the end of an episode.
        """
        total = latents.new_zeros(())
        errors = {}
        for part, sign in self.signs.items():
            # The value of the latent, with its gradient times `sign`: predictors learn as usual.
            seen = latents if sign > 0 else 2 * latents.detach() - latents
            members = cast(nn.ModuleList, self.members[part])
            found = [self._error(m, seen, actions, targets.detach(), valid) for m in members]
            error = torch.stack(found).mean()
            errors[part] = float(error.detach())
            total = total + error
        return self.config.weight * total, errors

    def _error(
        self,
        member: nn.Module,
        latents: torch.Tensor,
        actions: torch.Tensor,
        targets: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """Mean squared distance of the predictions over the valid steps."""
        total = latents.new_zeros(())
        predicted = latents
        for h in range(targets.shape[1]):
            predicted = member(predicted, actions[:, h])
            distance = self._distance(predicted, targets[:, h])
            total = total + (distance * valid[:, h]).sum()
        return total / valid.sum().clamp(min=1)

    def _distance(self, predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.config.normalize:
            predicted, target = F.normalize(predicted, dim=-1), F.normalize(target, dim=-1)
        return ((predicted - target) ** 2).sum(-1)


class TargetNetwork:
    """A copy of an encoder that follows it slowly; its outputs are what predictors aim at.

    Args:
        encoder: the network that is trained.
        rate: share of the encoder that moves into the copy at each `follow`.
    """

    def __init__(self, encoder: nn.Module, rate: float) -> None:
        self.encoder, self.rate = encoder, rate
        self.copy = copy.deepcopy(encoder).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the copy towards the encoder, after an optimizer step."""
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = zip(
            self.copy.parameters(), self.encoder.parameters(), strict=True
        )
        for slow, fast in pairs:
            slow.lerp_(fast, self.rate)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode, without gradients, for a while."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
