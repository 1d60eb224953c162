"""Saving and loading the trainer's whole state: `torch.distributed.checkpoint`, sharded or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.checksum import crc32
from tramontane.trainer.sharding import rank, ranks


def save(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int
) -> None:
    """Write weights, optimizer moments, version and random state; every rank must call it.

    Raises:
        OSError: a file cannot be written, on whichever rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _quiet():
            dcp.save(_state(model, optimizer, version), checkpoint_id=folder, no_dist=ranks() == 1)
    except CheckpointException as error:  # a BaseException, which callers do not expect
        raise OSError(_reasons(error)) from error
    (folder / f"checksums_{rank()}").write_bytes(_checksums(folder, rank()))


def load(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Load a state into model and optimizer, in place, and return the version.

    Raises:
        InputError: no state there, or damaged, or of another model.
    """
    written = sorted(folder.glob("checksums_*"))
    if not written:
        raise InputError(f"{folder}: no trainer state here (no checksums_0 file)")
    for path in written[rank() :: ranks()]:
        number = int(path.name.removeprefix("checksums_"))
        if path.read_bytes() != _checksums(folder, number):
            raise InputError(
                f"{folder}: the trainer state is damaged (the files of rank {number} are not what "
                f"was written); resume from an older checkpoint"
            )
    state = _state(model, optimizer, 0)
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=folder, no_dist=ranks() == 1)
    except CheckpointException as error:
        # The files are intact, so their tensors do not fit this model's.
        raise InputError(
            f"{folder}: the trainer state belongs to another model ({_reasons(error)}); resume "
            f"with the model that the run started with"
        ) from error
    torch.set_rng_state(state["random"])
    return int(state["version"])


def _state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int
) -> dict[str, Any]:
    """The live tensors by name, so that loading fills them in place, however they are sharded."""
    # FSDP puts the sharded parameters in place when it is asked for the state; the optimizer finds
    # its moments by them.
    weights = model.state_dict()
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        "model": weights,
        "optimizer": {names[p]: values for p, values in optimizer.state.items()},
        "version": torch.tensor(version),
        "random": torch.get_rng_state(),
    }


def _reasons(error: CheckpointException) -> str:
    return "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))


def _checksums(folder: Path, number: int) -> bytes:
    """One line per file that rank `number` wrote; torch itself does not detect a flipped bit."""
    files = sorted(folder.glob(f"__{number}_*.distcp"))
    if number == 0:
        files += folder.glob(".metadata")
    return "".join(f"{crc32(path):08x} {path.name}\n" for path in files).encode()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that torch gives on every call without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
