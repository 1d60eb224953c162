"""Weights in safetensors files, in the Hugging Face layout: read slice by slice, written tensor by
tensor. A whole model is never in memory.

A file is the header's length (8 bytes, little-endian), the header (JSON: type, shape and place of
each tensor) and the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from tramontane.errors import InputError

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
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class WeightFiles:
    """The tensors of a checkpoint folder, in one safetensors file or several with an index.

    Args:
        folder: the checkpoint.

    Raises:
        InputError: an index that names a missing file.
    """

    def __init__(self, folder: Path) -> None:
        paths = [folder / SINGLE]
        if (index := folder / INDEX).is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        self._files: dict[str, Any] = {}
        for path in paths:
            if not path.is_file():
                raise InputError(f"model {folder}: incomplete, it has no file {path.name}")
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    @staticmethod
    def present(folder: Path) -> bool:
        """True if the folder has weights in safetensors files."""
        return (folder / SINGLE).is_file() or (folder / INDEX).is_file()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._files)

    def entry(self, name: str) -> Entry:
        """Shape and type of a tensor, without reading it."""
        part = self._files[name].get_slice(name)
        return Entry(torch.Size(part.get_shape()), _TYPES[part.get_dtype()])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Read a tensor, or its rows from `start` to `stop`, in the file's type."""
        file = self._files[name]
        tensor = file.get_tensor(name) if start is None else file.get_slice(name)[start:stop]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Describe the first weight of the model that the files lack or hold in a different form;
        None if the files fit. Tied weights must be in the files once."""
        names: dict[int, list[str]] = {}
        tensors = model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        for tied in names.values():
            found = [name for name in tied if name in self]
            if not found:
                return f"there is no {tied[0]}"
            if len(found) > 1:
                return f"{found[0]} and {found[1]} are tied, and both are there"
            shape = list(self._files[found[0]].get_slice(found[0]).get_shape())
            if shape != list(tensors[tied[0]].shape):
                return f"{found[0]} has shape {shape}"
        return None


class Entry(NamedTuple):
    """A tensor to write."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def plan_files(entries: Mapping[str, Entry], shard_bytes: int) -> dict[str, list[str]]:
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
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as they arrive, in the order of `entries`; only one is held at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    files = plan_files(entries, shard_bytes)
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
