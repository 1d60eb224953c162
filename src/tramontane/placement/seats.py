"""Which device each worker of a run has, from the config and the machine's number of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tramontane.config import Config
from tramontane.errors import InputError


class Seats(NamedTuple):
    """The device of each rank of the trainer, the first device of each generator, the number of
    GPUs that each generator has if it is on GPUs, and the device of each rank of a teacher.

    Devices are names for torch in the process that the worker runs in: two workers of one process
    share a device if their names are equal.
    """

    ranks: tuple[str, ...]
    generators: tuple[str, ...]
    width: int = 1
    teachers: tuple[str, ...] = ()

    @property
    def of_generators(self) -> list[str]:
        """All devices of the generators."""
        return [
            rank_device(first, n)
            for first in self.generators
            for n in range(self.width if on_gpu(first) else 1)
        ]

    def beside_generator(self, devices: Iterable[str]) -> bool:
        """True if one of these devices is a GPU of a generator."""
        return any(on_gpu(device) for device in {*devices} & {*self.of_generators})


def on_gpu(device: str) -> bool:
    """True for a CUDA device."""
    return device.startswith("cuda")


def rank_device(device: str, rank: int) -> str:
    """Device of one of several ranks on a machine: `cuda` or `cuda:N` is rank 0's, and each further
    rank gets the next GPU; all ranks share a CPU."""
    kind, _, first = device.partition(":")
    return f"cuda:{int(first or 0) + rank}" if kind == "cuda" else device


def seats(config: Config, gpus: int | None) -> Seats:
    """The devices of a run's workers.

    On one machine every rank and every generator has a GPU of its own (with vLLM,
    `tensor_parallel` of them), from its `device` on. Generators on `cuda`, without a number, begin
    after the trainer's GPUs if there are enough for all, else at GPU 0, which one of them then
    shares with the trainer. On Ray, each process sees only its own GPUs.

    Args:
        config: sizes, devices and placement.
        gpus: number of the machine's GPUs; None: unknown, one or as many as needed.

    Raises:
        InputError: too few GPUs for the generators.
    """
    trainer, generator, teacher = config.trainer, config.generator, config.teacher
    teachers: tuple[str, ...] = ()
    if config.placement.kind == "ray":
        teachers = (teacher.device,) * teacher.ranks if teacher else ()
        generators = (generator.device,) * generator.workers
        return Seats((trainer.device,) * trainer.ranks, generators, teachers=teachers)
    if teacher:
        teachers = tuple(rank_device(teacher.device, rank) for rank in range(teacher.ranks))
    ranks = tuple(rank_device(trainer.device, rank) for rank in range(trainer.ranks))
    if not on_gpu(generator.device):
        return Seats(ranks, (generator.device,) * generator.workers, teachers=teachers)
    width, first = generator.devices, int(generator.device.partition(":")[2] or 0)
    if generator.device == "cuda" and on_gpu(trainer.device) and gpus is not None:
        behind = 1 + int(ranks[-1].partition(":")[2])
        first = behind if behind + width * generator.workers <= gpus else 0
    if gpus is not None and generator.workers and first + width * generator.workers > gpus:
        each = "a GPU each" if width == 1 else f"{width} GPUs each (tensor_parallel)"
        fitting = (gpus - first) // width
        remedy = (
            f"Set it to {fitting}: one generator decodes as many completions at once as several on "
            f"one GPU"
            if fitting > 0
            else "Not even one fits there: lower generator.vllm.tensor_parallel, or change "
            "generator.device"
        )
        raise InputError(
            f"generator.workers is {generator.workers}, which need {each} from cuda:{first} on, "
            f"and torch sees {gpus}. {remedy}"
        )
    firsts = (rank_device("cuda", first + width * n) for n in range(generator.workers))
    return Seats(ranks, tuple(firsts), width, teachers)
