"""One matrix product for several linear layers that read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class Product:
    """The outputs of several linear layers, computed together. Their weights are views of its own,
    so they must be written in place.

    Args:
        layers: with the same input features, all with a bias or all without.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = self.joined(biases) if biases else None
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._left = 0  # outputs that no layer has taken

    @staticmethod
    def joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameters one after another; they become views of the result."""
        joined = torch.cat([p.data for p in parameters])
        for p, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            p.data = part
        return joined

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs, [..., K] → [..., sum of `sizes`]."""
        raise NotImplementedError

    def part(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """The output of the layer at `place`. The first layer that reads `x` computes all outputs,
        and the last one forgets them."""
        if x is not self._input:
            self._input, self._left = x, len(self.sizes)
            self._outputs = list(self.compute(x).split(self.sizes, -1))
        output = self._outputs[place]
        self._left -= 1
        if not self._left:
            self._input, self._outputs = None, []
        return output


class FullProduct(Product):
    """A product with the layers' weights as they are."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        self.weight = self.joined([layer.weight for layer in layers])

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class ProductPart(nn.Module):
    """A linear layer whose output is a part of a product's.

    Args:
        layer: the layer that it replaces.
        weight: the layer's, or what the product has in its place.
    """

    def __init__(self, layer: nn.Linear, weight: object, product: Product, place: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._product, self._place = product, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.part(self._place, x)
