"""Modules that share their code are compiled, however many versions of it there are."""

from __future__ import annotations

import torch
from torch import nn

from tramontane.models.compiling import compile_module


class Scaled(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_more_than_eight_versions_of_one_code_are_compiled():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for factor in range(2, 12):
        module = Scaled(factor)
        compile_module(module, backend)
        assert module(torch.ones(3)).tolist() == [factor] * 3
    assert len(compiled) == 10
