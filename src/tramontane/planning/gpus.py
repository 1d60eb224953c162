"""Rates of devices: data sheets of GPUs from `gpus.yaml` next to this file, or a report of
`benchmarks.bounds`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.config.yaml_text import read_own
from tramontane.errors import InputError
from tramontane.journals import parse_object
from tramontane.models.memory import machine_memory

GIB = 1 << 30


class Gpu(NamedTuple):
    """Data sheet of a GPU, or the measured rates of a device.

    Args:
        name: lower-case name, e.g. `h100`.
        memory: total memory as CUDA reports it, in bytes.
        flops: dense bf16 FLOP/s.
        bandwidth: of the device's memory, in bytes/s.
        link: bandwidth to another GPU of the same node, in bytes/s and one direction.
        network: bandwidth to a GPU of another node, in bytes/s and one direction.
        device: as in a config: `cuda`, or `cpu` for one core.
        dtype: number type of the arithmetic that `flops` counts.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    device: str = "cuda"
    dtype: str = "bfloat16"


GPUS = {
    name: Gpu(
        name=name,
        memory=row["memory_gib"] * GIB,
        flops=row["tflops"] * 1e12,
        bandwidth=row["bandwidth_tb_s"] * 1e12,
        link=row["link_gb_s"] * 1e9,
        network=row["network_gb_s"] * 1e9,
    )
    for name, row in read_own(Path(__file__).with_suffix(".yaml").read_bytes()).items()
}
"""All known GPUs by name."""


def sheet_of(name: str) -> Gpu | None:
    """The data sheet of a GPU by a name such as `NVIDIA H100 80GB HBM3`; None if there is none."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((sheet for key, sheet in GPUS.items() if key in words), None)


def is_report(gpu: str) -> bool:
    """True if `gpu` is the path of a report."""
    return gpu.endswith(".json")


def measured_gpu(path: str) -> Gpu:
    """A machine's measured rates in the form of a data sheet.

    A GPU has the memory and the links of its data sheet. On a CPU each core counts as a device,
    with an equal part of this machine's memory, and exchanges data as fast as it copies memory.

    Raises:
        InputError: not a report of `benchmarks.bounds`, or a GPU without a data sheet.
    """
    report = _read_report(path)
    flops, copy = report["gemm"], report["copy"]
    if name := report.get("gpu"):
        if (sheet := sheet_of(name)) is None:
            raise InputError(f"{path}: no data sheet for {name}; there are {', '.join(GPUS)}")
        return sheet._replace(name=name, flops=flops, bandwidth=copy, dtype=report["dtype"])
    memory = machine_memory() / report["cores"]
    return Gpu(report["cpu"], memory, flops, copy, copy, copy, "cpu", report["dtype"])


def measured_keys(path: str) -> dict[str, float]:
    """Keys of `PlanConfig` that a report measured: the shares of the machine's rates that a trainer
    and a generator reach.

    The trainer ran without checkpointing, so a trained token takes 6 operations a parameter.

    Raises:
        InputError: not a report of `benchmarks.bounds`.
    """
    report = _read_report(path)
    best: dict[str, float] = {}
    for row in report["rows"]:
        worker = row["worker"].split(",")[0]
        best[worker] = max(best.get(worker, 0.0), row["share"]["median"])
    if missing := {"trainer", "generator"} - best.keys():
        raise InputError(f"gpu {path}: has no rows of the {' and the '.join(sorted(missing))}")
    keys = {
        "train_mfu": best["trainer"],
        "decode_bandwidth": best["generator"],
        "prefill_mfu": best["generator"],
        "step_seconds": 0.0,
    }
    return keys if "gpu" in report else keys | {"train_flops": 6.0}


def _read_report(path: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise InputError(f"gpu {path}: no such file")
    try:
        report = parse_object(file.read_bytes())
    except ValueError as error:
        raise InputError(f"gpu {path}: {error}; run benchmarks.bounds again") from None
    if missing := {"rows", "gemm", "copy", "cpu", "cores", "dtype"} - report.keys():
        raise InputError(
            f"gpu {path}: not a report of benchmarks.bounds (without {', '.join(sorted(missing))})"
        )
    return report
