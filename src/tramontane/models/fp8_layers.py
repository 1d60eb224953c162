"""Linear layers with weights of eight bits in floating point (E4M3), for generators on GPUs of
capability 8.9 and above.

    x Wᵀ ≈ s_x · s_w · X Vᵀ

Each row of W, an output channel, and each row of x has a scale, which makes its largest value the
largest of E4M3. `torch._scaled_mm` multiplies values and scales in one kernel; what makes X and s_x
is one more, which a compiled block fuses with what is before it. Layers with the same input
quantize it once, and are one product.

The output head, embeddings, norms and the up-projections of latent attention stay in full. A CPU
multiplies the same numbers without fast kernels: a rehearsal, which gives the policy's distance.
See docs/off-policy.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.fp8 import LARGEST, STORED
from tramontane.models.latent import up_projections
from tramontane.models.products import Product, ProductPart
from tramontane.models.quantized import (
    SMALLEST,
    QuantizedWeight,
    by_input,
    check_quantizable,
)

CAPABILITY = 8, 9  # of the first GPUs that multiply such numbers
_MULTIPLE = 16  # divides the sizes of every product
_LEAST = 1e-30  # largest value of a row that is not taken for zeros


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in E4M3, [M, K] of any dtype, and their scales, [M, 1] float32, which are not finite if
    a value is not."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / LARGEST
    return (x / scales).to(STORED), scales


class Fp8Weight(QuantizedWeight):
    """The weight of a linear layer, [N, K]: rows in E4M3, [N, K], and their scales, [N, 1]."""

    def __init__(self, shape: torch.Size, parts: Sequence[torch.Tensor]) -> None:
        super().__init__(shape, parts)
        self._device = self.parts[0].device  # also of the next version's, if that is on the host

    def write(self, start: int, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().to(self._device, non_blocking=True)
        values, scales = quantize_rows(rows)
        for part, made in zip(self.parts, (values, scales), strict=True):
            part[start : start + len(rows)].copy_(made, non_blocking=True)
        return scales

    def whole(self) -> torch.Tensor:
        values, scales = self.parts
        return values.float() * scales


class Fp8Product(Product):
    """One product for linear layers of the same input, in E4M3.

    Attributes:
        weights: of each layer, views of its own values and scales.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        first = layers[0].weight
        rows = sum(self.sizes)
        self._values = torch.empty(rows, first.shape[1], dtype=STORED, device=first.device)
        self._scales = torch.empty(rows, 1, device=first.device)
        parts = zip(self._values.split(self.sizes), self._scales.split(self.sizes), strict=True)
        self.weights = [
            Fp8Weight(layer.weight.shape, part) for layer, part in zip(layers, parts, strict=True)
        ]
        for layer, weight in zip(layers, self.weights, strict=True):
            weight.write(0, layer.weight)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows(x.flatten(0, -2))
        # On a GPU, scales of rows give bfloat16 alone.
        out = torch._scaled_mm(
            values, self._values.t(), scales, self._scales.t(), out_dtype=x.dtype
        )
        if self.bias is not None:
            out = out + self.bias
        return out.unflatten(0, x.shape[:-1])


def is_worth(inputs: int, outputs: int) -> bool:
    """True if a linear layer of these features is computed in E4M3."""
    return min(inputs, outputs) >= SMALLEST and not (inputs % _MULTIPLE or outputs % _MULTIPLE)


def layer_bytes(inputs: int, outputs: int) -> int:
    """Bytes of the weight of a linear layer, if it is worth eight bits; else 0."""
    return outputs * (inputs + 4) if is_worth(inputs, outputs) else 0


def check_device(device: torch.device) -> None:
    """Check that a device multiplies such numbers: a GPU of `CAPABILITY`, or a CPU.

    Raises:
        InputError: a GPU that does not.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise InputError(
            f"generator.weights: fp8 is for GPUs of capability 8.9 and above, and {device} has "
            f"{found[0]}.{found[1]}; leave it out"
        )


def quantize(model: PreTrainedModel, sample: Sequence[int]) -> None:
    """Replace the linear layers of a model, all but its output head.

    Args:
        model: its weights are freed product by product.
        sample: token ids of a forward that shows which layers read the same input.

    Raises:
        InputError: see `check_device` and `check_quantizable`.
    """
    check_device(model.device)
    check_quantizable(model)
    full: list[nn.Module] = [*up_projections(model)]
    if (head := model.get_output_embeddings()) is not None:
        full.append(head)
    names = {module: name for name, module in model.named_modules()}
    full += [
        module
        for module in names
        if type(module) is nn.Linear and not is_worth(module.in_features, module.out_features)
    ]
    for together, _ in by_input(model, sample, full):
        for layers in _alike(together):
            product = Fp8Product(layers)
            for place, (layer, weight) in enumerate(zip(layers, product.weights, strict=True)):
                parent, _, own = names[layer].rpartition(".")
                part = ProductPart(layer, weight, product, place)
                setattr(model.get_submodule(parent), own, part)


def _alike(layers: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """The layers with a bias, and those without."""
    kinds = [[x for x in layers if (x.bias is None) == bare] for bare in (True, False)]
    return [kind for kind in kinds if kind]
