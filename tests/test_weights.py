"""Weights through the object store arrive as they were, in the generators' dtype."""

from typing import Any

import pytest
import torch

from tramontane.weights import LocalWeights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_weights_are_the_trainer_s_in_the_generators_dtype(
    ray_cluster: Any, dtype: torch.dtype
) -> None:
    from tramontane.placement.actors import StoredWeights

    shared = torch.randn(5, 7)
    buckets = [
        {"a": torch.randn(3), "b": torch.randn(33, 2), "scalar": torch.tensor(2.5)},
        {"in": shared, "out": shared, "bf16": torch.randn(4).bfloat16()},
    ]
    stored, local = StoredWeights(dtype), LocalWeights()
    for bucket in buckets:
        stored.add(bucket)
        local.add(bucket)
        for tensor in bucket.values():
            tensor.zero_()  # as the next update will
    there = ray_cluster.get(ray_cluster.remote(_as_bytes).remote(stored))
    for name, tensor in local.tensors().items():
        expected = tensor.to(dtype)
        assert there[name] == (tuple(expected.shape), expected.float().flatten().tolist())
    tensors = stored.tensors()
    assert tensors["in"] is tensors["out"]


def _as_bytes(stored: Any) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """In another process: what it finds."""
    found = stored.tensors()
    return {name: (tuple(t.shape), t.float().flatten().tolist()) for name, t in found.items()}
