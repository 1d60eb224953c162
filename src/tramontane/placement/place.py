"""Where workers run, by config: one key chooses, and nothing else of the program differs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tramontane.config import Config
from tramontane.errors import InputError
from tramontane.models.weights import CopiedWeights, LocalWeights, Weights
from tramontane.placement.handle import Handle
from tramontane.placement.ranks import ProcessRanks, collective_backend
from tramontane.placement.thread import ThreadHandle


class Placement(Protocol):
    """Makes workers, each by its name and a function that makes the plain object."""

    def generator(self, number: int, make: Callable[[], Any]) -> Handle: ...

    def verifier(self, number: int, make: Callable[[], Any]) -> Handle: ...

    def trainer(self, make: Callable[[], Any]) -> Handle:
        """`trainer.ranks` of them behind one handle."""

    def weights(self) -> Weights:
        """An empty vessel for the next version of the weights."""

    def close(self) -> None: ...


class Controller:
    """Workers in the controller's own process, a thread each; a process for each of several ranks
    of the trainer."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def generator(self, number: int, make: Callable[[], Any]) -> Handle:
        return ThreadHandle(f"generator {number}", make)

    def verifier(self, number: int, make: Callable[[], Any]) -> Handle:
        return ThreadHandle(f"verifier {number}", make)

    def trainer(self, make: Callable[[], Any]) -> Handle:
        config, limit = self._config.trainer, self._config.timeouts.training
        if config.ranks == 1:
            return ThreadHandle("trainer", make)
        backend = collective_backend(config.device)
        return ProcessRanks("trainer", make, config.ranks, backend, limit)

    def weights(self) -> Weights:
        if self._config.trainer.ranks == 1:
            return LocalWeights()
        return CopiedWeights(getattr(torch, self._config.generator.dtype))

    def close(self) -> None: ...


def check(config: Config) -> None:
    """Refuse a placement that cannot be had here.

    Raises:
        InputError: Ray or NIXL is wanted and not installed.
    """
    if config.placement.kind != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            "placement.kind is ray, but Ray is not installed; pip install 'tramontane[ray]'"
        )
    if config.placement.weights == "nixl" and importlib.util.find_spec("nixl") is None:
        raise InputError(
            "placement.weights is nixl, but NIXL is not installed; pip install nixl, or take store"
        )


def place(config: Config, note: Callable[..., None]) -> Placement:
    """The placement that `config.placement.kind` names, started; `note` is told, by the worker's
    name, of each `process` that is started for one.

    Raises:
        InputError: as `check`; or no cluster at the address, or one too small.
    """
    check(config)
    if config.placement.kind == "thread":
        return Controller(config)
    from tramontane.placement.actors import Cluster  # Ray is an extra

    return Cluster(config, note)
