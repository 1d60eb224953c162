"""Weights of linear layers in eight bits, and which layers of a model are worth them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.packing import pack
from tramontane.models.states import stateful_layers

if TYPE_CHECKING:
    from typing_extensions import Self

SMALLEST = 64  # features of a layer that is worth it
# A text whose activations show which channels are large, which hardly depends on the text.
SAMPLE = """Question: a train leaves at 7:45 and arrives at 12:10. How long does it take?
Let me think. From 7:45 to 12:00 it is 4 h 15 min, and 10 min more, so 4 h 25 min: \\boxed{265} min.
def add(a, b):
    return [x + y for x, y in zip(a, b)]
La somme de 3/4 et 2 est \\frac{11}{4}. Die Summe ist größer als 2. Ответ: 2,75. 答案是 2.75。"""


class QuantizedWeight:
    """The weight of a linear layer, [N, K], which is quantized as it arrives.

    Args:
        shape: [N, K].
        parts: what it consists of, each with a row for each of the N output channels.
    """

    def __init__(self, shape: torch.Size, parts: Sequence[torch.Tensor]) -> None:
        self.shape, self.parts = shape, list(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def room(self, parts: Sequence[torch.Tensor] | None = None) -> Self:
        """An uninitialized weight of the same form, in given tensors or in new ones."""
        found = copy.copy(self)
        found.parts = [torch.empty_like(x) for x in self.parts] if parts is None else list(parts)
        return found

    def write(self, start: int, rows: torch.Tensor) -> torch.Tensor:
        """Quantize rows, [n, K] of any dtype, from row `start` on; returns their scales, which are
        not finite if a value is not."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """The weight that is computed with, [N, K] float32."""
        raise NotImplementedError

    def take(self, other: Self, in_place: bool) -> None:
        """Use the values of another weight of the same form: copied if `in_place`, in the order of
        the GPU's stream, and otherwise swapped with its own."""
        for own, others in zip(self.parts, other.parts, strict=True):
            if in_place:
                own.copy_(others, non_blocking=own.is_cuda)
            else:
                own.data, others.data = others.data, own.data


def check_quantizable(model: PreTrainedModel) -> None:
    """Check that a model's linear layers may be replaced.

    Raises:
        InputError: a model with layers that carry state, whose kernels read weights themselves.
    """
    if stateful_layers(model):
        raise InputError(
            f"generator.weights: {type(model).__name__} has layers that carry state, which read "
            f"their weights in full; leave it out"
        )


@torch.inference_mode()
def by_input(
    model: PreTrainedModel, sample: Sequence[int], full: Sequence[nn.Module]
) -> list[tuple[list[nn.Linear], torch.Tensor]]:
    """The layers to quantize, all but `full`, grouped by their input, with the largest |activation|
    of each of its channels, [K], on a text of token ids."""
    found: list[tuple[list[nn.Linear], torch.Tensor]] = []
    last: list[torch.Tensor] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        (x,) = inputs
        if last and x is last[0]:
            found[-1][0].append(layer)
        else:
            found.append(([layer], x.flatten(0, -2).float().abs().amax(0)))
        last[:] = [x]

    with _hooked(model, note, full):
        model(**pack([list(sample)], model.device))
    return found


@contextmanager
def _hooked(
    model: nn.Module,
    note: Callable[[nn.Module, tuple[torch.Tensor, ...]], None],
    full: Sequence[object],
) -> Iterator[None]:
    """Context manager: `note` is called with the input of each layer to quantize."""
    hooks = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if type(module) is nn.Linear
        and module not in full
        and min(module.in_features, module.out_features) >= SMALLEST
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def named_weights(model: nn.Module) -> dict[str, torch.Tensor | QuantizedWeight]:
    """The tensors of a model's state dict by name, tied ones the same object, and the weights in
    eight bits."""
    found: dict[str, torch.Tensor | QuantizedWeight] = dict(model.state_dict(keep_vars=True))
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), QuantizedWeight):
            found[f"{name}.weight"] = weight
    return found
