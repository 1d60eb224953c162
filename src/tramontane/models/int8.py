"""Linear layers with weights of eight bits, for generators on CPUs that multiply such numbers
(AVX-512 VNNI, AVX-VNNI, AMX) several times as fast as float32.

    x Wᵀ ≈ s_x · s_w · (256 · H + L) Vᵀ + x_O W_Oᵀ

Each row of W, an output channel, has a scale s_w and 8-bit values V. Each row of x has a scale s_x
and 16 bits, in two halves H and L, which one product of 8-bit numbers multiplies: 8 bits alone make
SmolLM2-135M another policy. A few input channels O stay in full, as in LLM.int8 (arXiv 2208.07339):
those with the largest products of an activation and a weight, since they would set everyone's
scale, and carry most of the error. See docs/off-policy.md.

Norms stay as they are, and so do the up-projections of latent attention, with which a decode step
multiplies queries, and embeddings, unless they are tied to the output head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.latent import up_projections
from tramontane.models.quantized import (
    SMALLEST,
    QuantizedWeight,
    by_input,
    check_quantizable,
)

OUTLIERS = 24  # of so many input channels, one is in full
_LEVELS, _FINE = 127, 127 * 256  # largest values of a weight and of an activation


class Int8Weight(QuantizedWeight):
    """The weight of a linear layer, [N, K].

    Attributes:
        channels: [k] int64, the input channels in full.
        values: [N, K] int8; 0 in `channels`.
        scales: [N] float32.
        outliers: [N, k] float32, the columns of `channels`.
    """

    def __init__(self, shape: torch.Size, channels: torch.Tensor) -> None:
        values, outliers = torch.empty(shape, dtype=torch.int8), (shape[0], len(channels))
        super().__init__(shape, [values, torch.empty(shape[0]), torch.empty(outliers)])
        self.channels = channels

    @property
    def values(self) -> torch.Tensor:
        return self.parts[0]

    @property
    def scales(self) -> torch.Tensor:
        return self.parts[1]

    @property
    def outliers(self) -> torch.Tensor:
        return self.parts[2]

    def write(self, start: int, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().to("cpu", torch.float32, copy=True)
        end = start + len(rows)
        self.outliers[start:end] = rows[:, self.channels]
        rows[:, self.channels] *= 0  # NaN stays NaN
        scales = rows.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny).div_(_LEVELS)
        self.values[start:end] = rows.div_(scales[:, None]).round_()
        self.scales[start:end] = scales
        return scales

    def whole(self) -> torch.Tensor:
        found = self.values.float().mul_(self.scales[:, None])
        found[:, self.channels] = self.outliers
        return found


class _Halves(NamedTuple):
    """Rows x [M, K] of activations in 16 bits."""

    halves: torch.Tensor  # [2M, K] int8: the high halves, then the low ones
    scales: torch.Tensor  # [M, 1] float32
    outliers: torch.Tensor  # [M, k] float32


class _Input:
    """The input of `readers` layers, which is quantized once: the last of them forgets it."""

    def __init__(self, channels: torch.Tensor, features: int, readers: int) -> None:
        self.channels, self._readers = channels, readers
        self._others = torch.ones(features)
        self._others[channels] = 0
        self._x: torch.Tensor | None = None
        self._found: _Halves | None = None
        self._left = 0

    def read(self, x: torch.Tensor) -> _Halves:
        """`x`, [..., K], as halves of M rows."""
        found = self._found
        if found is None or x is not self._x:
            found, self._left = self._halves(x.flatten(0, -2).float()), self._readers
        self._left -= 1
        self._x, self._found = (x, found) if self._left else (None, None)
        return found

    def _halves(self, rows: torch.Tensor) -> _Halves:
        outliers = rows.index_select(1, self.channels)
        rest = rows * self._others
        scales = rest.abs().amax(1, keepdim=True)
        scales = scales.clamp_(min=torch.finfo(torch.float32).tiny).div_(_FINE)
        whole = rest.div_(scales).round_().to(torch.int16)
        halves = torch.empty(2 * len(rows), rows.shape[1], dtype=torch.int8)
        halves[: len(rows)] = (whole + 128) >> 8
        halves[len(rows) :] = whole  # its low byte
        return _Halves(halves, scales, outliers)


class Int8Linear(nn.Module):
    """A linear layer in eight bits; its output has the input's dtype."""

    def __init__(self, layer: nn.Linear, read: _Input) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = Int8Weight(layer.weight.shape, read.channels)
        self.weight.write(0, layer.weight)
        self.bias, self._read = layer.bias, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, w = self._read.read(x), self.weight
        m = len(rows.scales)
        sums = torch._int_mm(rows.halves, w.values.T).float()
        out = sums[m:].add_(sums[:m], alpha=256).mul_(rows.scales).mul_(w.scales)
        out.addmm_(rows.outliers, w.outliers.T)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).unflatten(0, x.shape[:-1])


class Int8Embedding(nn.Module):
    """Embeddings that are tied to an output head in eight bits."""

    def __init__(self, head: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self._dtype = head.weight, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        w = self.weight
        found = w.values[ids].float().mul_(w.scales[ids][..., None])
        found[..., w.channels] = w.outliers[ids]
        return found.to(self._dtype)


def layer_bytes(inputs: int, outputs: int) -> int:
    """Bytes of the weight of a linear layer, if it is worth eight bits; else 0."""
    worth = min(inputs, outputs) >= SMALLEST
    return outputs * (inputs + 4 + 4 * _outliers(inputs)) if worth else 0


def _outliers(features: int) -> int:
    """Input channels in full of a layer with this many."""
    return min(max(16, features // OUTLIERS), features // 4)


def is_exact() -> bool:
    """True if torch multiplies numbers of eight bits exactly here: without VNNI or AMX, its sums
    are cut off at 16 bits."""
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.T) == 127 * 127 * 64).all())


@cache
@torch.inference_mode()
@torch.random.fork_rng(devices=[])  # what a run draws by its seed must not depend on this
def speedup(inputs: int, outputs: int, rows: int = 128) -> float:
    """How many times as fast as in float32 a layer of [outputs, inputs] computes `rows` rows in
    eight bits on this processor; measured once, for a tenth of a second each."""
    layer = nn.Linear(inputs, outputs, bias=False)
    eight = Int8Linear(layer, _Input(torch.arange(_outliers(inputs)), inputs, 1))
    x, counts = torch.randn(rows, inputs), []
    for module in (layer, eight):
        module(x)  # the first product makes the kernel
        count, end = 0, time.perf_counter() + 0.1
        while time.perf_counter() < end:
            module(x)
            count += 1
        counts.append(count)
    return counts[1] / counts[0]


def quantize(model: PreTrainedModel, sample: Sequence[int]) -> None:
    """Replace the linear layers of a model on a CPU, and embeddings that are tied to the head.

    Args:
        model: its weights are freed layer by layer.
        sample: token ids whose activations show which input channels to keep in full.

    Raises:
        InputError: products are not exact (`is_exact`), or see `check_quantizable`.
    """
    if not is_exact():
        raise InputError(
            "generator.weights: torch's products of int8 are not exact on this processor, or with "
            "the instructions that ONEDNN_MAX_CPU_ISA allows; leave it out"
        )
    check_quantizable(model)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    full: list[nn.Module] = [*up_projections(model)]
    if head is not None and tied and type(embeddings) is not nn.Embedding:
        full.append(head)
    names = {module: name for name, module in model.named_modules()}
    for layers, largest in by_input(model, sample, full):
        weights = torch.stack([x.weight.detach().abs().amax(0).float() for x in layers]).amax(0)
        channels = (largest * weights).topk(_outliers(len(largest))).indices.sort().values
        read = _Input(channels, len(largest), len(layers))
        for layer in layers:
            parent, _, own = names[layer].rpartition(".")
            eight = Int8Linear(layer, read)
            setattr(model.get_submodule(parent), own, eight)
            if layer is head and tied:
                model.set_input_embeddings(Int8Embedding(eight, layer.weight.dtype))
