"""Saving and loading the trainer's whole state: `torch.distributed.checkpoint`, sharded or not."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

from tramontane.errors import InputError
from tramontane.models.memory import release_free_memory
from tramontane.models.names import crc32
from tramontane.trainer.sharding import rank, ranks

# Names in the `.metadata` of a state of tensors, other than dtypes.
_METADATA_NAMES = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
}
BLOCK = 1 << 22  # bytes read at once
WRITE_SECONDS = 3600.0  # longest time to write a state, and to wait for the other ranks' files


class DamagedState(InputError):
    """A file of a trainer's state differs from what was written."""


class StateFiles:
    """Writes and reads the whole state of a model and its optimizer, each rank its shards.

    A thread writes the state from the trainer's own tensors. Nothing is copied, so it takes no
    memory, but the tensors must not change until all are written. The ranks' threads have their own
    process group, since the trainer uses the default one at the same time.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._group = None
        if ranks() > 1:
            timeout = timedelta(seconds=WRITE_SECONDS)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, folder: Path, version: int) -> None:
        """Begin to write weights, optimizer moments and version, once the previous state is
        written. Collective: every rank must call it. No random state is saved: only the adapters'
        dropout is random, and it draws new numbers after a resume."""
        self.release_tensors()
        folder.mkdir(parents=True, exist_ok=True)
        state = _state(self._model, self._optimizer, version)
        self._writing = self._thread.submit(self._write, folder, state)

    def release_tensors(self) -> None:
        """Wait until the trainer's tensors may change.

        Raises:
            OSError: they are still being written after `WRITE_SECONDS`.
        """
        if self._writing is not None and wait([self._writing], WRITE_SECONDS).not_done:
            raise OSError(f"the trainer's state was not written within {WRITE_SECONDS:g} s")

    def close(self, seconds: float) -> None:
        """Wait for what is being written, at most so long: whoever resumes the run writes into the
        same folder."""
        wait([self._writing] if self._writing else [], seconds)
        self._thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait until every rank has written its part.

        Raises:
            OSError: a file cannot be written, on whichever rank.
        """
        if self._writing is not None:
            self._writing.result(WRITE_SECONDS)

    def finished(self) -> bool:
        """True if every rank has written its part.

        Raises:
            OSError: a file could not be written, on whichever rank.
        """
        if self._writing is None or not self._writing.done():
            return self._writing is None
        self._writing.result()
        return True

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        """Write this rank's files, and wait for the other ranks."""
        alone = self._group is None
        try:
            with _quiet():
                dcp.save(state, checkpoint_id=folder, no_dist=alone, process_group=self._group)
        except CheckpointException as error:  # a BaseException, which callers do not expect
            raise OSError(_reasons(error)) from error
        del state
        failure = None
        try:
            (folder / f"checksums_{rank()}").write_bytes(_checksums(folder, rank()))
        except OSError as error:
            failure = f"rank {rank()}: {error}"
        failures = [failure]
        if not alone:
            failures = [None] * ranks()
            dist.all_gather_object(failures, failure, group=self._group)
        if found := [failure for failure in failures if failure]:
            raise OSError("; ".join(found))
        release_free_memory()

    def load(self, folder: Path) -> int:
        """Load a state into model and optimizer, in place, and return the version. Collective:
        every rank must call it.

        Raises:
            InputError: no state there, or one of another model.
            DamagedState: a file is missing, truncated or changed; the tensors may be overwritten.
        """
        self.release_tensors()
        if not any(folder.glob("checksums_*")):
            raise InputError(f"{folder}: no trainer state here (no checksums_0 file)")
        state = _state(self._model, self._optimizer, 0)
        reader = _Reader(folder)
        try:
            with _quiet():
                dcp.load(state, storage_reader=reader, no_dist=ranks() == 1)
        except CheckpointException as error:
            # If `read_metadata` fails, torch reports another error.
            for failure in (reader.failure, *(failure for failure, _ in error.failures.values())):
                if isinstance(failure, InputError):  # of `_Reader`
                    raise failure from None
            # The files are intact, so their tensors do not fit this model's.
            raise InputError(
                f"{folder}: the trainer state belongs to another model, or other adapters "
                f"({_reasons(error)}); resume with the model and the lora settings that the run "
                f"started with"
            ) from error
        return int(state["version"])


class _Reader(FileSystemReader):
    """Reads a state from an untrusted source without running code in it: torch itself would
    unpickle any class that `.metadata` names, and any object that is not a tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CheckedFiles(folder)
        self.failure: InputError | None = None  # the first one

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._read_metadata(Path(self._get_metadata_path(kwargs.get("rank"))))
        except InputError as error:
            self.failure = self.failure or error
            raise

    def _read_metadata(self, path: Path) -> Metadata:
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"a {type(metadata).__name__}")
            for name, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    raise TypeError(f"{name} is not a tensor")
            for item in metadata.storage_data.values():
                if not re.fullmatch(r"__\d+_\d+\.distcp", item.relative_path):
                    raise ValueError(f"{item.relative_path!r} is not a file of a state")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
        except DamagedState:
            raise
        except Exception as error:  # a foreign pickle may raise anything
            raise InputError(
                f"{path}: not the list of tensors that a trainer's state has ({error}); it was not "
                f"loaded. Resume from an older checkpoint, or ask whoever made it"
            ) from None
        return metadata


class _CheckedFiles(FileSystem):
    """Opens each file once: its checksum is compared before anything is read from it."""

    def __init__(self, folder: Path) -> None:
        lists = [path.read_text("utf-8", "replace") for path in folder.glob("checksums_*")]
        lines = [line.partition(" ") for text in lists for line in text.splitlines()]
        self._written = {name: checksum for checksum, _, name in lines}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path, checksum = Path(path), 0
        fault = f"{path}: the trainer state is damaged, resume from an older checkpoint"
        if not path.is_file():
            raise DamagedState(f"{fault} (no such file)")
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                checksum = zlib.crc32(block, checksum)
            if f"{checksum:08x}" != self._written.get(path.name):
                raise DamagedState(f"{fault} (checksum)")
            file.seek(0)
            yield file


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes of `_METADATA_NAMES` and dtypes, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # an enum's member, in Python 3.11.2
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _memory_format(of: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """In the place of `getattr`: the one enum that a state holds, and of nothing else."""
    if of is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks {of!r} for {name}")
    return _MEM_FORMAT_ENCODING[name]


def _state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: int
) -> dict[str, Any]:
    """The live tensors by name, so that loading fills them in place, however they are sharded."""
    # `state_dict` makes FSDP put the sharded parameters in place; the optimizer's moments are keyed
    # by these.
    weights = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:  # the adapters' base, loaded unchanged
            del weights[name]
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        "model": weights,
        "optimizer": {names[p]: values for p, values in optimizer.state.items()},
        "version": torch.tensor(version),
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
