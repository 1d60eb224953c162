"""Weights in safetensors files, in the Hugging Face layout: read slice by slice, written tensor by
tensor. A whole model is never in memory: safetensors' own writer takes all tensors of a file at
once.

A file is the header's length (8 bytes, little-endian), the header (JSON: type, shape and place of
each tensor) and the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.weights import tied_names

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
# Names of types in the header.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class WeightFiles:
    """The tensors of a checkpoint folder, in one safetensors file or several with an index.

    Args:
        folder: the checkpoint.
        names: the names in the files of the tensors to read, by the names that they get here; None:
            all, under their own names.

    Raises:
        InputError: a file is damaged or missing.
    """

    def __init__(self, folder: Path, names: Mapping[str, str] | None = None) -> None:
        paths = [folder / SINGLE]
        if (index := folder / INDEX).is_file():
            paths = [folder / name for name in listed_files(index)]
        self._files: dict[str, Any] = {}
        self._names: dict[str, list[str]] = {}  # by file
        for path in paths:
            if not path.is_file():
                raise InputError(
                    f"model {folder}: incomplete, it has no file {path.name}; fetch it again, or "
                    f"save it as safetensors"
                )
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise InputError(f"{path}: damaged, not a safetensors file ({error})") from None
            self._names[path.name] = list(file.keys())
            self._files |= dict.fromkeys(self._names[path.name], file)
        self._stored = {name: name for name in self._files} if names is None else names

    @staticmethod
    def present(folder: Path) -> bool:
        """True if the folder has weights in safetensors files."""
        return (folder / SINGLE).is_file() or (folder / INDEX).is_file()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._stored)

    def by_file(self) -> dict[str, list[str]]:
        """Names of each file's tensors."""
        return self._names

    def entries(self) -> dict[str, Entry]:
        """Shape and type of each tensor; none is read."""
        return {name: self.entry(name) for name in self.names}

    def entry(self, name: str) -> Entry:
        """Shape and type of a tensor, without reading it."""
        stored = self._stored[name]
        part = self._files[stored].get_slice(stored)
        return Entry(torch.Size(part.get_shape()), _TYPES[part.get_dtype()])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Read a tensor, or its rows from `start` to `stop`, in the file's type."""
        stored = self._stored[name]
        file = self._files[stored]
        tensor = file.get_tensor(stored) if start is None else file.get_slice(stored)[start:stop]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Describe the first weight of the model that the files lack or hold in a different form;
        None if the files fit. Tied weights must be in the files once."""
        tensors = model.state_dict(keep_vars=True)
        for tied in tied_names(tensors):
            found = [name for name in tied if name in self]
            if not found:
                return f"there is no {tied[0]}"
            if len(found) > 1:
                return f"{found[0]} and {found[1]} are tied, and both are there"
            shape = list(self.entry(found[0]).shape)
            if shape != list(tensors[tied[0]].shape):
                return f"{found[0]} has shape {shape}"
        return None


class Entry(NamedTuple):
    """Shape and type of a tensor in a file."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def plan_files(
    entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[str]]:
    """Distribute tensors, in order, over files of at most `shard_bytes`; a larger tensor gets its
    own file. Returns the names of each file's tensors."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, entry in entries.items():
        if groups[-1] and filled + entry.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += entry.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def write_files(
    folder: Path,
    entries: Mapping[str, Entry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    files: Mapping[str, list[str]] | None = None,
) -> None:
    """Write tensors as they arrive; only one is held at a time.

    Args:
        folder: created if missing.
        entries: shape and type of each tensor in the files.
        tensors: in the order of `files`, in any type.
        files: names of each file's tensors; None: by `plan_files`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = plan_files(entries) if files is None else files
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX]:
        old.unlink(missing_ok=True)
    stream = iter(tensors)
    for file_name, names in files.items():
        with (folder / file_name).open("wb") as file:
            _write_header(file, {name: entries[name] for name in names})
            for expected in names:
                name, tensor = next(stream)
                assert name == expected, f"{name} came in the place of {expected}"
                data = tensor.detach().to("cpu", entries[name].dtype).contiguous()
                file.write(data.view(-1).view(torch.uint8).numpy().data)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def listed_files(index: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: damaged, not a safetensors index ({error!r})") from None


def _write_header(file: IO[bytes], entries: Mapping[str, Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        places = [end, end := end + entry.nbytes]
        header[name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": places,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
