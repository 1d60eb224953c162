"""Opens the model named in a config: a checkpoint, or one behind a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tramontane.asking import Model
from tramontane.asking.endpoint import EndpointClient, authorization
from tramontane.config.asking import ModelConfig
from tramontane.errors import importing


def check_model(config: ModelConfig) -> dict[str, Any]:
    """Check that a model can be asked; returns a fingerprint of its files.

    Raises:
        InputError: no such checkpoint, device or key.
    """
    if config.endpoint:
        authorization(config.endpoint)
        return {}
    with importing():
        from tramontane.asking.checkpoint import check_checkpoint

    return check_checkpoint(config)


def open_model(config: ModelConfig, sending: Callable[[], None] = lambda: None) -> Model:
    """The model named in a config; a checkpoint is loaded into memory. `sending` is called before
    each request to an endpoint."""
    # torch takes seconds to import, and an endpoint does not need it.
    if config.endpoint:
        return EndpointClient(config, sending)
    with importing():
        from tramontane.asking.checkpoint import Checkpoint

    return Checkpoint(config)
