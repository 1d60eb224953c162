"""Principal components of checkpoints, against numpy's SVD, on small model folders."""

import ctypes
import json
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests import forked
from tramontane.errors import InputError
from tramontane.studies.plane import (
    gram_matrix,
    principal_plane,
    trajectory,
    write_directions,
    write_point,
)

M_MMAP_THRESHOLD = -3  # of malloc.h
SHAPES = {"embed": (50, 7), "head": (7,), "scale": (), "experts": (3, 5, 4)}


def write_run(folder, vectors, shapes=SHAPES, dtype=torch.float32):
    """A run folder with a checkpoint for each row of `vectors`."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "tiny"}))
    for step, vector in enumerate(vectors, 1):
        weights = folder / f"checkpoints/update_{step}/weights"
        weights.mkdir(parents=True)
        parts, end = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            parts[name] = torch.tensor(vector[end : end + size], dtype=dtype).reshape(shape)
            end += size
        save_file(parts | {"ids": torch.arange(4)}, weights / "model.safetensors")
        (weights / "config.json").write_text(json.dumps({"step": step}))
    return list(trajectory(folder).values())


def vector_of(folder, shapes=SHAPES):
    found = load_file(folder / "model.safetensors")
    return np.concatenate([found[name].double().numpy().ravel() for name in shapes])


@pytest.fixture
def vectors():
    rng = np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    # A drift, as of training, with noise around it.
    return 1 + np.outer(np.arange(6), rng.normal(size=size)) + rng.normal(size=(6, size))


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_the_components_are_those_of_a_singular_value_decomposition(vectors, chunk_bytes, tmp_path):
    folders = write_run(tmp_path, vectors)
    stored = np.stack([vector_of(folder) for folder in folders])
    centered = stored - stored.mean(0)
    # The tensor of integers is equal in all checkpoints, and adds nothing.
    gram = gram_matrix(folders, chunk_bytes)
    np.testing.assert_allclose(gram, centered @ centered.T, rtol=1e-9, atol=1e-9)
    _, sizes, right = np.linalg.svd(centered, full_matrices=False)
    plane = principal_plane(folders, chunk_bytes)
    np.testing.assert_allclose(plane.explained, (sizes**2 / (sizes**2).sum())[:5], rtol=1e-9)
    directions = [
        vector_of(f) for f in write_directions(folders, plane, tmp_path / "out", chunk_bytes)
    ]
    for direction, expected in zip(directions, right, strict=False):
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-6)
        assert abs(direction @ expected) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(
        plane.coordinates, (stored - stored[-1]) @ np.stack(directions).T, rtol=1e-5, atol=1e-5
    )
    assert (plane.coordinates[0] <= 0).all()  # the trajectory arrives from below


def test_a_plane_point_of_three_checkpoints_is_the_checkpoint(vectors, tmp_path):
    """Three checkpoints lie in their plane."""
    folders = write_run(tmp_path, vectors[:3])
    plane = principal_plane(folders)
    directions = write_directions(folders, plane, tmp_path / "out")
    for place, folder in zip(plane.coordinates, folders, strict=True):
        write_point(folders[-1], directions, place, tmp_path / "point")
        np.testing.assert_allclose(vector_of(tmp_path / "point"), vector_of(folder), atol=1e-5)
    # The config comes along, and tensors of integers stay as they are.
    assert json.loads((tmp_path / "point/config.json").read_text()) == {"step": 3}
    ids = load_file(tmp_path / "point/model.safetensors")["ids"]
    assert ids.dtype == torch.int64 and ids.tolist() == [0, 1, 2, 3]


def test_the_origin_is_the_final_checkpoint_in_its_own_type(vectors, tmp_path):
    folders = write_run(tmp_path, vectors, dtype=torch.bfloat16)
    directions = write_directions(folders, principal_plane(folders), tmp_path / "out")
    write_point(folders[-1], directions, (0.0, 0.0), tmp_path / "point")
    found, final = (load_file(f / "model.safetensors") for f in (tmp_path / "point", folders[-1]))
    assert all(torch.equal(found[name], final[name]) for name in SHAPES)
    assert found["embed"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:2], "2 checkpoints, and a plane takes 3"),
        (lambda v: v[0] + np.outer(np.arange(4), v[1]), "lie on one line"),
        (lambda v: v[[0, 0, 0]], "lie on one line"),
    ],
)
def test_what_gives_no_plane_is_refused(vectors, change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        principal_plane(write_run(tmp_path, change(vectors)))


def test_checkpoints_of_other_shapes_are_refused(vectors, tmp_path):
    folders = write_run(tmp_path, vectors)
    save_file({"embed": torch.zeros(3)}, folders[1] / "model.safetensors")
    with pytest.raises(InputError, match=r"update_2/weights: other tensors than"):
        trajectory(tmp_path)


def measure_peak(run, chunk, out):
    """Write the bytes in MB that the plane of a run takes at most, in a process of its own."""
    libc = ctypes.CDLL(None)
    # malloc returns freed blocks to the system at once, and keeps none of the imports'.
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
    libc.malloc_trim(0)

    def resident():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    before, peak, done = resident(), [0.0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    folders = list(trajectory(run).values())
    plane = principal_plane(folders, chunk)
    directions = write_directions(folders, plane, run / "out", chunk)
    write_point(folders[-1], directions, (0.1, 0.1), run / "point")
    done.set()
    watcher.join()
    out.write_text(str(peak[0] - before))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_holds_one_tensor_and_not_a_checkpoint(tmp_path):
    """Four checkpoints of 8 tensors of 4 MB each: 32 MB, and 128 together."""
    for step in range(1, 5):
        weights = tmp_path / f"checkpoints/update_{step}/weights"
        weights.mkdir(parents=True)
        tensors = {f"t{n}": torch.rand(1024, 1024) for n in range(8)}
        save_file(tensors, weights / "model.safetensors")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": "tiny"}))
    del tensors
    out = tmp_path / "peak"
    assert forked.end(forked.start(measure_peak, tmp_path, 1 << 20, out)) == 0
    # A tensor as read and in float32, and parts of 1 MB of the same tensor of all checkpoints.
    assert 3 < float(out.read_text()) < 24
