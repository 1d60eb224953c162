"""Bounds of a GPU's figures, and what to expect of an H100 before there are any."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tramontane.models.shape import ModelShape
from tramontane.planning.gpus import sheet_of

BUS = 64e9  # bytes/s of PCIe 5.0 ×16, in one direction


class Rates(NamedTuple):
    """Rates of a GPU, measured or from its data sheet.

    Args:
        flops: FLOP/s of matrix products in bfloat16.
        bandwidth: bytes/s that a copy on the device reads and writes.
        bus: bytes/s from the device to pinned memory.
    """

    flops: float
    bandwidth: float
    bus: float


@cache
def sheet(gpu: str) -> Rates | None:
    """The data sheet of a GPU by a name such as `NVIDIA H100 80GB HBM3`; None if there is none."""
    found = sheet_of(gpu)
    return found and Rates(found.flops, found.bandwidth, BUS)


def used_weights(shape: ModelShape) -> int:
    """Number of weights that every token uses: all but input embeddings that are not the head."""
    return shape.parameters - (0 if shape.tied else shape.head)


def decode_bound(shape: ModelShape, rows: float, context: float, rates: Rates) -> float:
    """Least seconds of a decode step in bfloat16: the weights, and keys and values of `rows` ×
    `context` tokens, are read once; or each row takes two operations a weight, if that is more."""
    weights = used_weights(shape)
    read = 2 * weights + rows * context * shape.kv_bytes_per_token("bfloat16")
    return max(read / rates.bandwidth, 2 * weights * rows / rates.flops)


def train_flops(shape: ModelShape, length: float, adapters: int | None = None) -> float:
    """Operations that a trained token needs, in a sequence of `length` tokens.

    Six a weight: two in the forward, four in the backward. Of weights frozen beside `adapters`,
    four. Causal attention to half of the sequence on average: four a channel in the forward, so 6 ·
    layers · heads · channels · length with the backward. Recomputation does not count.
    """
    weights = used_weights(shape)
    dense = 6 * weights if adapters is None else 4 * weights + 6 * adapters
    return dense + 6 * shape.layers * shape.heads * shape.head_dim * length


def update_bounds(shape: ModelShape, rates: Rates, processes: bool) -> tuple[float, float]:
    """Least seconds until a generator has new weights, and of the pause that swaps them in.

    In one process the generator reads float32 and writes bfloat16; between processes the weights in
    bfloat16 cross the bus, in both directions at once. The swap is a copy on the device.
    """
    weights = used_weights(shape)
    arrive = 2 * weights / rates.bus if processes else (4 + 2) * weights / rates.bandwidth
    return arrive, 2 * 2 * weights / rates.bandwidth


def run_bound(shape: ModelShape, rows: int, context: float, rates: Rates) -> float:
    """Trained tokens/s of a GPU that takes turns in decode steps and updates at their bounds."""
    decoding = decode_bound(shape, rows, context, rates) / rows
    return 1 / (decoding + train_flops(shape, context) / rates.flops)


# --- what to expect: all computed, nothing measured

KERNELS = {"eager": 44, "graphs": 44, "fused": 11}  # of a decode step, for each layer
LAUNCH = {"eager": 12.2e-6, "graphs": 2e-6, "fused": 2e-6}  # seconds a kernel, at least
REACHED = Rates(0.8, 0.69, 0.8)  # shares of the data sheet in large kernels
EXPECTED_MFU = 0.46  # compiled, with recomputation


def reached(rates: Rates) -> Rates:
    """What large kernels reach of a data sheet's rates."""
    return Rates(*(rate * share for rate, share in zip(rates, REACHED, strict=True)))


def expected_step(shape: ModelShape, rows: float, context: float, rates: Rates, mode: str) -> float:
    """Seconds that a decode step should take: matrix products and then attention, at the rates that
    large kernels reach, and the time to launch all kernels, which overlaps in eager steps."""
    rates, weights = reached(rates), used_weights(shape)
    busy = max(2 * weights / rates.bandwidth, 2 * weights * rows / rates.flops)
    busy += rows * context * shape.kv_bytes_per_token("bfloat16") / rates.bandwidth
    launched = KERNELS[mode] * shape.layers * LAUNCH[mode]
    return max(busy, launched) if mode == "eager" else busy + launched
