"""The experts that a mixture of experts chooses for each token: recorded by the generator, and
replayed by the trainer with its own gate weights (R3, arXiv 2510.11370).

A router's choice is its top-k over the scores of all experts. It is intercepted there, so that the
weights of the chosen experts are computed by the model's own code, whichever experts they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from tramontane.errors import InputError

NO_CHOICE = -1  # in place of an expert: none was recorded, and the router chooses


class _RoutedBlock(nn.Module):
    """Mixed into the class of a module that has experts.

    Attributes:
        forced: [N, k] int64, experts to use for each token of the next forwards, or `NO_CHOICE`;
            None: the router chooses for all tokens.
        chosen: [N, k] int64, the experts of the last forward.
        float32: compute the router's scores in float32.
    """

    forced: torch.Tensor | None
    chosen: torch.Tensor | None
    float32: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Interception(self):
            return super().forward(*args, **kwargs)

    @property
    def experts_count(self) -> int:
        """Number of experts."""
        experts = self._modules["experts"]
        if isinstance(experts, nn.ModuleList):
            return len(experts)
        return len(next(experts.parameters()))  # type: ignore[union-attr]

    def gates(self) -> list[nn.Parameter]:
        """The weights of the router's linear layers."""
        named = self.named_parameters()
        return [p for name, p in named if p.dim() == 2 and not name.startswith("experts.")]


class _Interception(TorchFunctionMode):
    """While a block's forward runs: records and replaces its choice of experts."""

    def __init__(self, block: _RoutedBlock) -> None:
        super().__init__()
        self._block, self._count = block, block.experts_count
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None  # scores, and before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._block.float32 and func is F.linear and self._is_gate(args[1]):
            args = tuple(x.float() if isinstance(x, torch.Tensor) else x for x in args)
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.masked_fill:  # of groups that the router does not choose
            self._masked = result, args[0]
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0]
            if scores.dim() == 2 and scores.shape[1] == self._count:
                return self._choose(scores, result)
        return result

    def _is_gate(self, weight: torch.Tensor) -> bool:
        """True for the weights of the router's last layer."""
        return len(weight) == self._count and any(weight is p for p in self._block.gates())

    def _choose(self, scores: torch.Tensor, own: Any) -> Any:
        values, experts = own
        if (forced := self._block.forced) is not None:
            experts = torch.where(forced == NO_CHOICE, experts, forced)
            if self._masked is not None and self._masked[0] is scores:
                scores = self._masked[1]
            values = scores.gather(1, experts)
        self._block.chosen = experts
        return torch.return_types.topk((values, experts))  # type: ignore[attr-defined]


def prepare(model: nn.Module, float32: bool = False) -> None:
    """Make the choices of a model's routers recordable and replaceable.

    Raises:
        InputError: the model is not a mixture of experts.
    """
    for module in model.modules():
        if module._modules.get("experts") is not None:
            kind = type(module)
            module.__class__ = type(kind.__name__, (_RoutedBlock, kind), {})
            vars(module).update(forced=None, chosen=None, float32=float32)
    if not blocks(model):
        raise InputError(
            f"{type(model).__name__} is not a mixture of experts, so it has no choice of experts "
            f"to record: set trainer.router_replay to false"
        )


def blocks(model: nn.Module) -> list[_RoutedBlock]:
    """The model's blocks with experts, in its order; empty if it is not prepared."""
    return [module for module in model.modules() if isinstance(module, _RoutedBlock)]


def choices(model: nn.Module) -> torch.Tensor:
    """The experts of the last forward, [N, layers, k] int16.

    Raises:
        InputError: a router does not choose by a top-k over all experts.
    """
    found = [block.chosen for block in blocks(model)]
    chosen = [x for x in found if x is not None]
    if len(chosen) < len(found) or len({x.shape for x in chosen}) != 1:
        raise InputError(
            f"{type(model).__name__} does not choose its experts by one top-k over all of them in "
            f"each layer, so they cannot be recorded: set trainer.router_replay to false"
        )
    return torch.stack(chosen, 1).short()


def replay(model: nn.Module, experts: torch.Tensor | None) -> None:
    """Set the experts of the next forwards, and of their recomputation in backward passes.

    Args:
        model: prepared.
        experts: [N, layers · k] integers, or `NO_CHOICE` where the routers choose; None: they
            choose everywhere.
    """
    routed = blocks(model)
    for number, block in enumerate(routed):
        block.forced = None
        if experts is not None:
            block.forced = experts.unflatten(1, (len(routed), -1))[:, number].long()


def balance(model: nn.Module, recorded: Sequence[NDArray[np.int16] | None]) -> dict[str, float]:
    """Metrics of how evenly tokens are spread over the experts; none without recorded experts.

    Args:
        model: prepared.
        recorded: of each sequence [n, layers · k], or None.
    """
    found, routed = [x for x in recorded if x is not None], blocks(model)
    if not found or not routed:
        return {}
    experts = np.concatenate(found)
    experts = experts[(experts != NO_CHOICE).all(1)].reshape(
        -1, len(routed), found[0].shape[1] // len(routed)
    )
    return {"expert_imbalance": imbalance(experts, routed[0].experts_count)} if len(experts) else {}


def imbalance(experts: NDArray[np.int16], count: int) -> float:
    """Load of the busiest expert of a layer, relative to the mean load: 1 is balanced, `count` /
    k is one set of experts for all tokens. The mean over layers.

    Args:
        experts: [N, layers, k], without `NO_CHOICE`.
        count: number of experts of a layer.
    """
    loads = [np.bincount(layer.ravel(), minlength=count) for layer in experts.swapaxes(0, 1)]
    return float(np.mean([load.max() / load.mean() for load in loads]))
