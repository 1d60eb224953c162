"""Principal components of a run's checkpoints in weight space, streamed from disk.

Magistral's analysis (arXiv 2506.10910) stacks checkpoints as X ∈ R^{T×W}, subtracts their mean and
takes the top two eigenvectors of XᵀX, c_1 and c_2, for a plane around the final checkpoint:
w = w* + α_1 c_1 + α_2 c_2. With W weights, XᵀX has W² entries. Its eigenvectors follow from those
of the Gram matrix XXᵀ, which has T²: if XXᵀ u = λu, then c = Xᵀu / √λ, of length 1.

At most one tensor of the model is in memory, and a part of the same tensor of every checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tramontane.config import load_config
from tramontane.errors import InputError
from tramontane.models.names import numbered, resolve
from tramontane.models.weight_files import INDEX, Entry, WeightFiles, write_files
from tramontane.run.folder import RunFolder

CHUNK_BYTES = 64 << 20  # rows of one tensor, of all checkpoints, in float64
LEAST_CHECKPOINTS = 3  # two directions


@dataclass(frozen=True)
class Plane:
    """The plane of the two largest principal components.

    Args:
        mixtures: weights of the checkpoints, less their mean, in each direction: [2, T].
        coordinates: place of each checkpoint relative to the final one, in units of the Euclidean
            norm of weights: [T, 2].
        explained: share of the checkpoints' variance in each component, largest first: [T − 1].
    """

    mixtures: np.ndarray
    coordinates: np.ndarray
    explained: np.ndarray


def trajectory(run: Path) -> dict[int, Path]:
    """The weights that a run has kept, by the updates done, oldest first: in the Hugging Face
    layout, from 0, the model that the run began with, if that is a folder with the same tensors and
    no cold start followed.

    Raises:
        InputError: not a run, too few checkpoints, or different tensors in one of them.
    """
    RunFolder(run).check_begun()
    found = {
        int(folder.name.partition("_")[2]): folder / "weights"
        for folder in numbered(run / "checkpoints")
        if (folder / "weights").is_dir()
    }
    if found:
        newest = _shapes(found[max(found)])
        start = Path(resolve(load_config(run / "config.yaml").model)).expanduser()
        cold_start = (run / "sft").exists()
        if not cold_start and WeightFiles.present(start) and _shapes(start) == newest:
            found[0] = start
        for folder in found.values():
            if _shapes(folder) != newest:
                raise InputError(f"{folder}: other tensors than {found[max(found)]}")
    if len(found) < LEAST_CHECKPOINTS:
        raise InputError(
            f"{run}: {len(found)} checkpoints, and a plane takes {LEAST_CHECKPOINTS}; train with "
            f"checkpoint.every=1 checkpoint.keep=1000 checkpoint.weights_dtype=float32"
        )
    return dict(sorted(found.items()))


def files_of(folder: Path) -> list[list[int]]:
    """[bytes, time of the last change in ns] of each of a checkpoint's weight files: a run that is
    repeated in the same folder has different ones."""
    stats = [file.stat() for file in sorted(folder.glob("*.safetensors"))]
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats]


def principal_plane(folders: Sequence[Path], chunk_bytes: int = CHUNK_BYTES) -> Plane:
    """The plane of the two largest components of the checkpoints, the last of which is its origin.

    Raises:
        InputError: checkpoints that are all equal, or on one line.
    """
    values, vectors = np.linalg.eigh(gram_matrix(folders, chunk_bytes))
    values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
    if values[1] <= 1e-12 * values[0] or not values[0]:
        raise InputError(f"{folders[-1].parents[1]}: the checkpoints lie on one line, not a plane")
    lengths = np.sqrt(values[:2])
    # The sign of an eigenvector is arbitrary: the trajectory arrives from below.
    signs = np.where(vectors[-1, :2] < vectors[0, :2], -1.0, 1.0)
    places = vectors[:, :2] * lengths * signs  # of the checkpoints relative to their mean
    mixtures = (vectors[:, :2] * signs / lengths).T
    explained = values[: len(folders) - 1] / values.sum()
    return Plane(mixtures, places - places[-1], explained)


def gram_matrix(folders: Sequence[Path], chunk_bytes: int = CHUNK_BYTES) -> np.ndarray:
    """Inner products of the checkpoints after subtracting their mean: float64, [T, T]."""
    files = [WeightFiles(folder) for folder in folders]
    gram = np.zeros((len(files), len(files)))
    for name in files[-1].names:
        for rows in _rows(files, name, chunk_bytes):
            centered = rows - rows.mean(0)
            gram += (centered @ centered.T).numpy()
    return gram


def write_directions(
    folders: Sequence[Path], plane: Plane, out: Path, chunk_bytes: int = CHUNK_BYTES
) -> list[Path]:
    """Write c_1 and c_2 as weights in float32, into `out/direction_1` and `out/direction_2`."""
    files = [WeightFiles(folder) for folder in folders]
    shapes = {name: files[-1].entry(name).shape for name in files[-1].names}
    entries = {name: Entry(shape, torch.float32) for name, shape in shapes.items()}
    written = []
    for number, mixture in enumerate(plane.mixtures, 1):
        # The mixture of centered checkpoints is one of the checkpoints themselves.
        weights = torch.from_numpy(mixture - mixture.mean())

        def tensors(weights: torch.Tensor = weights) -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in shapes.items():
                result, end = torch.empty(shape.numel(), dtype=torch.float32), 0
                for rows in _rows(files, name, chunk_bytes):
                    result[end : end + rows.shape[1]] = weights @ rows
                    end += rows.shape[1]
                yield name, result.reshape(shape)

        write_files(folder := out / f"direction_{number}", entries, tensors())
        written.append(folder)
    return written


def write_point(final: Path, directions: Sequence[Path], place: Sequence[float], out: Path) -> None:
    """Write the model at w* + α_1 c_1 + α_2 c_2, in the types of the final checkpoint.

    Args:
        final: weights of the final checkpoint; its config and tokenizer are copied.
        directions: the folders of c_1 and c_2.
        place: α_1 and α_2.
        out: folder of the model, which is replaced.
    """
    origin, steps = WeightFiles(final), [WeightFiles(folder) for folder in directions]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in final.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy(file, out / file.name)
    entries = {name: origin.entry(name) for name in origin.names}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in entries.items():
            tensor = origin.read(name)
            if entry.dtype.is_floating_point:
                tensor = tensor.to(torch.float32, copy=True)
                for amount, step in zip(place, steps, strict=True):
                    tensor.add_(step.read(name), alpha=amount)
            yield name, tensor

    write_files(out, entries, tensors())


def _shapes(folder: Path) -> dict[str, torch.Size]:
    files = WeightFiles(folder)
    return {name: files.entry(name).shape for name in files.names}


def _rows(files: Sequence[WeightFiles], name: str, chunk_bytes: int) -> Iterator[torch.Tensor]:
    """A tensor of every checkpoint, some rows at a time: float64, [T, elements of these rows]."""
    shape = files[-1].entry(name).shape
    if len(shape) == 0:
        yield torch.stack([file.read(name).double().view(-1) for file in files])
        return
    row_bytes = 8 * len(files) * max(1, shape[1:].numel())
    step = max(1, chunk_bytes // row_bytes)
    for start in range(0, shape[0], step):
        parts = [file.read(name, start, min(start + step, shape[0])) for file in files]
        yield torch.stack([part.double().flatten() for part in parts])
