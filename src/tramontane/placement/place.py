"""Chooses where workers run, by `placement.kind`; the rest of the program does not depend on it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tramontane.config import Config
from tramontane.errors import InputError, install
from tramontane.placement.handle import ConcurrentHandle, Handle

if TYPE_CHECKING:
    from tramontane.models.weights import Weights
    from tramontane.placement.files import Folder
    from tramontane.placement.seats import Seats


class Placement(Protocol):
    """Starts workers, each from a function that makes the plain object.

    Attributes:
        seats: the devices of the workers.
        replaces_trainer: True if a lost trainer can be restarted.
        generators_first: True if a generator shares a GPU with the trainer or a teacher. It
            measures the GPU's memory at its start, so the others must start later.
    """

    @property
    def seats(self) -> Seats: ...

    @property
    def replaces_trainer(self) -> bool: ...

    @property
    def generators_first(self) -> bool: ...

    def model(self, name: str) -> str | Folder:
        """A model as an argument for workers, whose machines may lack its files."""

    def reserve(self) -> None:
        """Reserve resources for the trainer's ranks before other workers take them."""

    def generator(self, number: int, make: Callable[[], Any]) -> ConcurrentHandle: ...

    def judge(self, name: str, make: Callable[[], Any]) -> ConcurrentHandle:
        """Start a verifier or a process of environments, with the resources of a verifier."""

    def trainer(self, make: Callable[[], Any]) -> Handle:
        """Start `trainer.ranks` trainers behind one handle."""

    def teacher(self, name: str, make: Callable[[], Any]) -> Handle:
        """Start a worker of a teacher."""

    def weights(self) -> Weights:
        """An empty container for the next version of the weights."""

    def close(self) -> None: ...


def check(config: Config) -> None:
    """Check that the packages of the placement are installed, and suit the generators.

    Raises:
        InputError: Ray or NIXL is configured but not installed, or the weights cannot travel as
            configured.
    """
    if config.placement.kind != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            f"placement.kind is ray, but Ray is not installed; install it: {install('ray')}"
        )
    if config.placement.weights == "nixl" and importlib.util.find_spec("nixl") is None:
        raise InputError(
            f"placement.weights is nixl, but NIXL is not installed; install it, or use store: "
            f"{sys.executable} -m pip install nixl"
        )
    generator = config.generator
    if config.placement.weights == "differences" and (
        generator.dtype == "float32" or generator.weights != "full"
    ):
        raise InputError(
            "placement.weights is differences, which are of 16-bit weights (in float32 nearly "
            "every value changes, and eight bits are not what travels): set generator.dtype to "
            "bfloat16 and generator.weights to full, or placement.weights to store"
        )


def place(config: Config, note: Callable[..., None]) -> Placement:
    """Start the placement `config.placement.kind`.

    `note(name, process=...)` is called for each process started for a worker.

    Raises:
        InputError: see `check`; or no cluster at the address, or one that is too small.
    """
    check(config)
    if config.placement.kind != "ray":
        from tramontane.placement.thread import LocalPlacement  # torch takes seconds to import

        return LocalPlacement(config, note)
    from tramontane.placement.actors import Cluster  # Ray is an extra

    return Cluster(config, note)
