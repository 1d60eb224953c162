"""A run's memory compared with its devices: a table, and errors that name the keys to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple

import torch

from tramontane.config import GPU_MEMORY_SHARE, Config, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.memory import machine_memory
from tramontane.models.shape import ModelShape, load_shape
from tramontane.placement.seats import rank_device, seats
from tramontane.planning.gpus import GIB, GPUS
from tramontane.planning.memory import (
    Lengths,
    Memory,
    controller_memory,
    generator_memory,
    judge_memory,
    staged_memory,
    verifier_memory,
)
from tramontane.planning.remedies import GENERATOR, OFFLOADED, RANK, STAGED, remedies
from tramontane.planning.trainer_memory import (
    MASTER,
    Completions,
    offloaded_memory,
    reference_memory,
    teacher_memory,
    trainer_memory,
    value_memory,
)

# Assumptions about memory that no formula gives, in bytes.
LIBRARIES = 0.45 * GIB  # of a Python process with torch and transformers
VERIFIER = 0.09 * GIB  # of a grading process without work
CUDA_CONTEXT = 0.75 * GIB
NCCL = 1.0 * GIB  # buffers of a rank
# Memory lost between blocks, as a share of the memory in use. On a CPU, malloc also keeps most of
# what a trainer rank gathers and frees: about two copies of the whole model in float32
# (benchmarks/memory.py).
GPU_GAPS, CPU_GAPS, GATHERED_COPIES = 0.05, 0.15, 2

MIN_SHARE = 0.01  # of a GPU, for a generator beside a trainer that fills it

TEACHER, JUDGE, MACHINE = "teacher", "judge", "machine"
APART = (TEACHER, JUDGE)  # in processes of their own, on their own device
HOSTS = {STAGED: f"host of each {GENERATOR}", OFFLOADED: f"host of each {RANK}"}  # on a cluster
PARTS = {"cache": "KV cache", "records": "tokens, texts", "reused": "used in turn"}


class Worker(NamedTuple):
    """Workers of one kind.

    Args:
        name: the kind, e.g. `trainer rank`.
        number: workers of this kind in the run.
        device: as in the config.
        memory: of each, on its device.
        together: how many of them share one device.
    """

    name: str
    number: int
    device: str
    memory: Memory
    together: int = 1


@dataclass(frozen=True)
class Load:
    """A device and its workers; may stand for several devices with the same workers.

    Args:
        device: readable name of the device.
        capacity: its memory in bytes; None if unknown.
        workers: the workers on it.
        overhead: bytes that libraries take, and on a GPU memory that is lost between blocks.
        growing: maximum bytes of caches, tokens and programs that take memory only as needed.
        tolerance: excess over the capacity, as a share of it, that still counts as fitting.
    """

    device: str
    capacity: float | None
    workers: tuple[Worker, ...]
    overhead: float
    growing: float = 0.0
    tolerance: float = 0.0

    @property
    def needed(self) -> float:
        """Bytes of all workers and the overhead, without what grows as needed."""
        workers = sum(w.together * w.memory.total for w in self.workers)
        return workers - self.growing + self.overhead

    @property
    def fits(self) -> bool:
        """False if the device is known to be too small."""
        return self.capacity is None or self.needed <= self.capacity * (1 + self.tolerance)

    @property
    def shortfall(self) -> str:
        """Readable description of the missing memory."""
        assert self.capacity is not None
        return (
            f"{self.device} has {self.capacity / GIB:,.1f} GiB, and {self.names} need "
            f"{self.needed / GIB:,.1f} GiB"
        )

    @property
    def names(self) -> str:
        """The workers, as readable text."""
        *others, last = (
            f"{w.together} × {w.name}" if w.together > 1 else w.name for w in self.workers
        )
        return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run by device.

    Args:
        loads: the devices and their workers.
        refusals: for each device that is too small, what is missing and the keys to change.
    """

    loads: tuple[Load, ...]
    refusals: tuple[str, ...]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of a table, in GiB: the first names the workers, the others a part of memory each,
        the last is their sum. Memory that two parts use at different times is subtracted once."""
        workers = [worker for load in self.loads for worker in load.workers]
        yield ("GiB", *(f"{w.name} × {w.number}" if w.number > 1 else w.name for w in workers))
        for part in fields(Memory):
            sign = -1 if part.name == "reused" else 1
            values = [sign * getattr(worker.memory, part.name) / GIB for worker in workers]
            if any(round(v, 2) for v in values):
                name = PARTS.get(part.name, part.name)
                yield (name, *(f"{round(v, 2) or 0:,.2f}" if v else "" for v in values))
        yield ("sum", *(f"{worker.memory.total / GIB:,.2f}" for worker in workers))

    def verdicts(self) -> Iterator[str]:
        """For each device a line: what it needs, what it has, and whether that fits."""
        for load in self.loads:
            line = f"{load.device}: {load.needed / GIB:,.1f} GiB for {load.names}"
            if load.overhead:
                line += f", including {load.overhead / GIB:,.1f} for libraries"
            if load.growing:
                line += f", and what grows as needed, up to {load.growing / GIB:,.1f} GiB"
            if load.capacity is None:
                yield f"{line}; its memory is not known"
            else:
                verdict = "fits" if load.fits else "does NOT fit"
                yield f"{line}; {verdict} in {load.capacity / GIB:,.1f} GiB"


def run_memory(
    stages: Sequence[Config],
    shape: ModelShape,
    lengths: Sequence[Lengths],
    gpu: str | None = None,
    tolerance: float = 0.0,
) -> RunMemory:
    """Compute the memory of a run, on this machine or on assumed GPUs.

    Args:
        stages: the config of each stage.
        shape: the model's sizes.
        lengths: lengths of each stage.
        gpu: a GPU of `planning/gpus.yaml`, or a GPU's memory in GiB. None: this machine's GPU.
        tolerance: share by which a device's memory may be exceeded.

    Raises:
        InputError: an unknown GPU.
    """
    devices = _Devices.of(stages[0], gpu, tolerance)

    found = _loads(stages, shape, lengths, devices)
    refusals = []
    for number, load in enumerate(found):
        if not load.fits:

            def fits(changed: Sequence[Config], number: int = number) -> bool:
                return _loads(changed, shape, lengths, devices)[number].fits

            kinds = {worker.name for worker in load.workers}
            advice = remedies(stages, max(n.longest for n in lengths), kinds, fits)
            refusals.append(f"{load.shortfall}: {advice}")
    return RunMemory(tuple(found), tuple(refusals))


def tuning_memory(
    config: TrainerConfig, shape: ModelShape, lengths: Lengths, step: Completions
) -> RunMemory:
    """Compute the memory of a fine-tuning on this machine, which has trainer ranks alone.

    Args:
        config: the trainer's keys.
        shape: the model's sizes.
        lengths: of the longest example.
        step: examples of an optimizer step.
    """
    on_gpu, (name, capacity, _) = _on_gpu(config.device), _gpu(None)
    rank = Worker(RANK, config.ranks, config.device, trainer_memory(config, shape, lengths, step))
    gaps = memory_gaps(rank.memory, on_gpu=on_gpu)
    if on_gpu:
        overhead = CUDA_CONTEXT + NCCL * (config.ranks > 1) + gaps
        load = Load(f"each GPU ({name})", capacity, (rank,), overhead)
    else:
        rank = rank._replace(together=config.ranks)
        overhead = config.ranks * (LIBRARIES + gaps + gathering_gaps(config, shape))
        load = Load("this machine", machine_memory(), (rank,), overhead)
    advice = (
        "lower microbatch_tokens, batch_tokens or max_length, or set gradient_checkpointing or lora"
    )
    return RunMemory((load,), () if load.fits else (f"{load.shortfall}: {advice}",))


def generator_limits(
    stages: Sequence[Config],
    shape: ModelShape,
    lengths: Sequence[Lengths],
    gpu: str | None = None,
) -> dict[str, float]:
    """Values for those keys of `generator` that limit its memory on a GPU and are null.

    A generator on the GPU of other workers gets what their computed memory leaves. vLLM would
    measure free memory while they still allocate, so the size of its cache is computed too.

    Arguments as for `run_memory`.
    """
    config, devices = stages[0], _Devices.of(stages[0], gpu, 0.0)
    generator, memory = config.generator, devices.gpu_memory
    if not _on_gpu(generator.device) or generator.gpu_memory_utilization is not None:
        return {}
    if config.placement.kind == "ray":
        fraction = min(1.0, config.placement.generator.gpus or 1.0)
        return {"gpu_memory_utilization": round(GPU_MEMORY_SHARE * fraction, 3)}
    of_generators = seats(config, devices.gpus).of_generators
    beside: dict[str, list[Worker]] = {device: [] for device in of_generators}
    for worker in _workers(stages, shape, lengths, memory):
        for device, together in _seats(config, worker, devices.gpus):
            if device in beside and worker.name != GENERATOR:
                beside[device].append(worker._replace(together=together))
    if not any(beside.values()):
        return {"gpu_memory_utilization": GPU_MEMORY_SHARE}
    if memory is None:
        return {"gpu_memory_utilization": GPU_MEMORY_SHARE / 2}
    taken = max(
        sum(w.together * w.memory.total for w in workers) + _gpu_overhead(config, workers)
        for workers in beside.values()
    )
    share = max(MIN_SHARE, round(GPU_MEMORY_SHARE - taken / memory, 3))
    limits = {"gpu_memory_utilization": share}
    if generator.kind == "vllm" and generator.kv_cache_mib is None:
        update = {"generator": generator.model_copy(update=limits)}
        limited = [stage.model_copy(update=update) for stage in stages]
        by_stage = zip(limited, lengths, strict=True)
        largest = _largest(generator_memory(s, shape, n, memory) for s, n in by_stage)
        limits["kv_cache_mib"] = int(largest.cache * generator.workers) >> 20
    return limits


class _Devices(NamedTuple):
    """The GPUs and the machine of the controller: names, number, and memory in bytes if they are
    known; and the tolerance of `run_memory`."""

    gpu: str
    gpu_memory: float | None
    gpus: int | None
    machine: str
    machine_memory: float | None
    tolerance: float

    @classmethod
    def of(cls, config: Config, gpu: str | None, tolerance: float) -> _Devices:
        devices = [config.generator.device, config.trainer.device]
        judge = config.verifier.judge
        devices += [part.device for part in (config.teacher, judge and judge.local) if part]
        on_gpus = any(map(_on_gpu, devices))
        # With assumed GPUs or a cluster's address, the run takes place on other machines.
        if (gpu and on_gpus) or (config.placement.kind == "ray" and config.placement.address):
            return cls(*_gpu(gpu), "machine of the controller", None, tolerance)
        return cls(*_gpu(gpu), "this machine", machine_memory(), tolerance)


def _gpu(name: str | None) -> tuple[str, float | None, int | None]:
    """Name, memory and number of GPUs by their name or size in GiB; by default this machine's."""
    if name is None:
        if not torch.cuda.is_available():
            return "GPU", None, None
        about = torch.cuda.get_device_properties(0)
        return about.name, about.total_memory, torch.cuda.device_count()
    if known := GPUS.get(name.lower()):
        return known.name, known.memory, None
    if name.replace(".", "", 1).isdigit():
        return "GPU", float(name) * GIB, None
    raise InputError(
        f"--gpu {name}: unknown GPU; choose from {', '.join(GPUS)}, or give its memory in GiB"
    )


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda")


def _loads(
    stages: Sequence[Config], shape: ModelShape, lengths: Sequence[Lengths], devices: _Devices
) -> list[Load]:
    """The devices of a run, each worker at its largest stage: GPUs, the controller's machine, and
    hosts of workers on other machines."""
    config = stages[0]
    by_device: dict[str, list[Worker]] = {}
    for worker in _workers(stages, shape, lengths, devices.gpu_memory):
        for device, together in _seats(config, worker, devices.gpus):
            by_device.setdefault(device, []).append(worker._replace(together=together))
    machine = by_device.pop(MACHINE)
    hosts = {name: by_device.pop(name) for name in HOSTS.values() if name in by_device}
    found = [
        Load(
            f"{device} ({devices.gpu})",
            _share(config, workers, devices.gpu_memory),
            tuple(workers),
            _gpu_overhead(config, workers),
            tolerance=devices.tolerance,
        )
        for device, workers in _alike(by_device)
    ]
    limited = config.generator.kv_cache_mib is not None
    growing = [w.memory.records + (0 if limited else w.memory.cache) for w in machine]
    gaps = sum(w.together * memory_gaps(w.memory, on_gpu=False) for w in machine)
    gaps += config.trainer.ranks * gathering_gaps(config.trainer, shape)
    on_machine = Load(
        device=devices.machine,
        capacity=devices.machine_memory,
        workers=tuple(machine),
        overhead=LIBRARIES * (_processes(config) + _judges(machine))
        + VERIFIER * config.verifier.workers
        + gaps,
        growing=sum(w.together * n for w, n in zip(machine, growing, strict=True)),
        tolerance=devices.tolerance,
    )
    on_hosts = [Load(name, None, tuple(workers), 0.0) for name, workers in hosts.items()]
    return [*found, on_machine, *on_hosts]


def _workers(
    stages: Sequence[Config],
    shape: ModelShape,
    lengths: Sequence[Lengths],
    gpu_memory: float | None,
) -> Iterator[Worker]:
    config, trainer = stages[0], stages[0].trainer
    by_stage = list(zip(stages, lengths, strict=True))
    rank = _largest(trainer_memory(s.trainer, shape, n, Completions.of(s)) for s, n in by_stage)
    yield Worker(RANK, trainer.ranks, trainer.device, rank)
    offloaded = _largest(
        offloaded_memory(trainer, shape, n, Completions.of(s)) for s, n in by_stage
    )
    if offloaded.total:
        yield Worker(OFFLOADED, trainer.ranks, "cpu", offloaded)
    if "reference" in trainer.objective.needs and not trainer.lora:
        reference = reference_memory(trainer, shape)
        yield Worker("reference", trainer.ranks, trainer.device, reference)
    if "values" in trainer.objective.needs:
        network = _largest(
            value_memory(s.trainer, shape, n, Completions.of(s)) for s, n in by_stage
        )
        yield Worker("value network", trainer.ranks, trainer.device, network)
    if teacher := config.teacher:
        for model in config.teachers:
            of_model = load_shape(model)
            found = _largest(teacher_memory(s, of_model, n) for s, n in by_stage)
            yield Worker(TEACHER, teacher.workers * teacher.ranks, teacher.device, found)
    generator = _largest(generator_memory(s, shape, n, gpu_memory) for s, n in by_stage)
    yield Worker(GENERATOR, config.generator.workers, config.generator.device, generator)
    if (staged := staged_memory(config.generator, shape)).total:
        yield Worker(STAGED, config.generator.workers, "cpu", staged)
    longest = max(lengths, key=lambda n: n.longest)
    yield Worker("controller", 1, "cpu", controller_memory(stages, shape, longest))
    verifier = verifier_memory(config.verifier)
    yield Worker("verifier", config.verifier.workers, "cpu", verifier)
    if (judge := config.verifier.judge) and judge.local:
        # On Ray, each verifier has one.
        number = config.verifier.workers if config.placement.kind == "ray" else judge.workers
        found = judge_memory(judge, config, gpu_memory)
        yield Worker(JUDGE, number, judge.local.device, found)


def _largest(found: Iterable[Memory]) -> Memory:
    return max(found, key=lambda memory: memory.total)


def _seats(config: Config, kind: Worker, gpus: int | None) -> list[tuple[str, int]]:
    """The devices that workers of a kind are on, and how many share each."""
    if config.placement.kind == "ray" and kind.name in HOSTS:
        return [(HOSTS[kind.name], 1)]
    if not _on_gpu(kind.device):
        return [(MACHINE, kind.number)]
    if config.placement.kind == "ray":  # Ray gives each worker a GPU
        beside = kind.name if kind.name in (GENERATOR, *APART) else RANK
        return [(f"GPU of each {beside}", 1)]
    if kind.name == JUDGE:
        return [(rank_device(kind.device, 0), kind.number)]
    found = seats(config, gpus)
    if kind.name == TEACHER:
        return [(device, kind.number // len(found.teachers)) for device in found.teachers]
    if kind.name != GENERATOR:
        return [(device, 1) for device in found.ranks]
    return [(device, 1) for device in found.of_generators]


def _alike(by_device: dict[str, list[Worker]]) -> Iterator[tuple[str, list[Worker]]]:
    """Devices and their workers; devices with the same workers together."""
    for workers, group in groupby(by_device.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        yield (names[0] if len(names) == 1 else f"each of {names[0]} to {names[-1]}"), workers


def _share(config: Config, workers: Sequence[Worker], memory: float | None) -> float | None:
    """Bytes of a GPU that its workers may use: Ray can give each worker a part of a GPU."""
    if memory is None or config.placement.kind != "ray":
        return memory
    place = config.placement
    named = {GENERATOR: place.generator, TEACHER: place.teacher}
    resources = named.get(workers[0].name, place.trainer)
    return memory * min(1.0, resources.gpus or 1.0)


def memory_gaps(memory: Memory, *, on_gpu: bool) -> float:
    """Bytes that a worker loses between blocks of memory."""
    return (GPU_GAPS if on_gpu else CPU_GAPS) * memory.total


def gathering_gaps(trainer: TrainerConfig, shape: ModelShape) -> float:
    """Bytes that a trainer rank on a CPU loses to temporarily gathered weights and gradients."""
    if trainer.ranks == 1 or _on_gpu(trainer.device):
        return 0.0
    return GATHERED_COPIES * MASTER * shape.parameters


def _gpu_overhead(config: Config, workers: Sequence[Worker]) -> float:
    """Bytes of a GPU that go to CUDA's context, NCCL's buffers, and gaps between blocks."""
    names = {worker.name for worker in workers}
    several = config.trainer.ranks > 1
    apart = config.trainer_is_apart or config.generator.kind == "vllm"  # in separate processes
    kinds = len(names & {GENERATOR, RANK, TEACHER})
    contexts = (max(kinds, 1) if apart else 1) + _judges(workers)
    gaps = sum(w.together * memory_gaps(w.memory, on_gpu=True) for w in workers)
    return contexts * CUDA_CONTEXT + NCCL * (several and RANK in names) + gaps


def _judges(workers: Iterable[Worker]) -> int:
    return sum(worker.together for worker in workers if worker.name == JUDGE)


def _processes(config: Config) -> int:
    """Processes with torch on the machine of the controller, the controller among them; without
    judges."""
    ray, trainer = config.placement.kind == "ray", config.trainer
    separate = ray or config.generator.kind == "vllm"
    on_cpu = not _on_gpu(config.generator.device)
    generators = config.generator.workers if separate and on_cpu else 0
    apart = config.trainer_is_apart and not _on_gpu(trainer.device)
    teacher, teachers = config.teacher, 0
    if teacher and not _on_gpu(teacher.device) and config.teachers_are_apart:
        teachers = config.teacher_processes
    return 1 + generators + (trainer.ranks if apart else 0) + teachers
