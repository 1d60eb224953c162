"""What runs need of the machine, in a process that `sweeps.runner` starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tramontane.config import Config, parse, read_settings
from tramontane.config.device import VISIBLE
from tramontane.errors import InputError
from tramontane.placement.seats import on_gpu, seats
from tramontane.planning.fit import RunMemory
from tramontane.run.prepare import MEMORY_TOLERANCE
from tramontane.start import dry_run
from tramontane.sweeps.runner import Needs


def needs_of(config: Config, memory: RunMemory, cores: int) -> Needs:
    """The part of the machine that a run takes; a run on a Ray cluster takes all cores.

    Raises:
        InputError: it does not fit into an empty machine.
    """
    sizes = [(load, load.capacity) for load in memory.loads if load.capacity is not None]
    if any(load.needed > capacity * (1 + MEMORY_TOLERANCE) for load, capacity in sizes):
        raise InputError("\n".join(memory.refusals))
    if config.placement.kind == "ray":
        return Needs(cores=os.cpu_count() or 1)
    seated = seats(config, torch.cuda.device_count() or None)
    judge = config.verifier.judge
    devices = {*seated.ranks, *seated.of_generators, *seated.teachers}
    devices |= {judge.local.device} if judge and judge.local else set()
    last = max((int(d.partition(":")[2] or 0) for d in devices if on_gpu(d)), default=-1)
    gpu_loads = [load for load in memory.loads if any(on_gpu(w.device) for w in load.workers)]
    others = [load for load in memory.loads if load not in gpu_loads]
    return Needs(
        cores=cores,
        memory=max((load.needed for load in others), default=0.0),
        gpus=last + 1,
        gpu_memory=max((load.needed for load in gpu_loads), default=0.0),
    )


def _gpus() -> dict[str, float]:
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = [torch.cuda.get_device_properties(n).total_memory for n in range(count)]
    return dict(zip(names or map(str, range(count)), map(float, memory), strict=False))


def needs(cores: int, files: Sequence[str]) -> dict[str, Any]:
    """`needs` and `errors` of runs by their files, and the memory of each GPU (`gpus`). Runs that
    differ in nothing but seed, name and folder are checked once."""
    checked: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {"needs": {}, "errors": {}}
    for file in files:
        config = parse(Config, read_settings(Path(file)), file)
        same = config.model_dump_json(exclude={"seed", "name", "run_dir"})
        if same not in checked:
            try:
                result = dry_run(config)
                taken = asdict(needs_of(result.config, result.memory, cores))
                checked[same] = {"needs": taken}
            except InputError as error:
                checked[same] = {"errors": str(error)}
        for kind, value in checked[same].items():
            found[kind][file] = value
    return found | {"gpus": _gpus()}
