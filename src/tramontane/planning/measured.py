"""Rates of a machine from a report of `benchmarks.bounds`, instead of a data sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tramontane.errors import InputError
from tramontane.models.memory import machine_memory
from tramontane.planning.gpus import GPUS, Gpu


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
    report = _read(path)
    flops, copy = report["gemm"], report["copy"]
    if name := report.get("gpu"):
        sheet = next((sheet for key, sheet in GPUS.items() if key in name.lower()), None)
        if sheet is None:
            raise InputError(f"{path}: no data sheet for {name}; there are {', '.join(GPUS)}")
        return sheet._replace(name=name, flops=flops, bandwidth=copy, dtype=report["dtype"])
    return Gpu(
        name=report["cpu"],
        memory=machine_memory() / report["cores"],
        flops=flops,
        bandwidth=copy,
        link=copy,
        network=copy,
        device="cpu",
        dtype=report["dtype"],
    )


def measured_keys(path: str) -> dict[str, Any]:
    """Keys of `PlanConfig` that a report measured: the shares of the machine's rates that a trainer
    and a generator reach.

    The trainer ran without checkpointing, so a trained token takes 6 operations a parameter.

    Raises:
        InputError: not a report of `benchmarks.bounds`.
    """
    report = _read(path)
    best: dict[str, float] = {}
    for row in report["rows"]:
        worker = row["worker"].split(",")[0]
        best[worker] = max(best.get(worker, 0.0), row["share"]["median"])
    keys: dict[str, Any] = {
        "train_mfu": best["trainer"],
        "decode_bandwidth": best["generator"],
        "prefill_mfu": best["generator"],
        "step_seconds": 0.0,
    }
    return keys if "gpu" in report else keys | {"train_flops": 6.0}


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise InputError(f"gpu {path}: no such file")
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if missing := {"rows", "gemm", "copy", "cpu", "cores", "dtype"} - report.keys():
        raise InputError(
            f"gpu {path}: not a report of benchmarks.bounds (without {', '.join(sorted(missing))})"
        )
    return report
