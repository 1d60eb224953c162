"""Environments of other packages, which `data.environment` names as `textarena:NAME`.

An adapter is an environment class whose attribute `name` is the NAME. A row's field `seed` replaces
the seed of its group.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tramontane.config.data import SCHEMES
from tramontane.errors import InputError, install
from tramontane.types import Problem


def adapted(path: str, key: str) -> type[Any]:
    """The class of an environment that another package knows by name.

    Args:
        path: a scheme in `SCHEMES`, a colon, and a name that the package knows.
        key: the config's key, for messages.

    Raises:
        InputError: the package is not installed, or cannot provide the environment.
    """
    scheme, _, name = path.partition(":")
    module, _, attribute = SCHEMES[scheme].rpartition(".")
    try:
        adapter = getattr(import_module(module), attribute)
    except ImportError as error:
        raise InputError(f"{key}: {path}: {error}; install: {install(scheme)}") from None
    try:
        adapter.check(name)
    except InputError as error:
        raise InputError(f"{key}: {path}: {error}") from None
    return type(attribute, (adapter,), {"name": name})


def seed_of(problem: Problem, seed: int) -> int:
    """The seed of a problem's environment: that of its row, if it has one."""
    return int(problem.metadata.get("seed", seed))
