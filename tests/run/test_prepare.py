"""Sizes of a run, and warnings, before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import small_config
from tramontane.run.prepare import dtype_warnings, prepare, resolved


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ({}, []),
        ({"generator": "cuda"}, ["generator.dtype"]),
        ({"generator": "cuda:1", "trainer": "cuda"}, ["generator.dtype", "trainer.dtype"]),
    ],
)
def test_float32_on_a_gpu_is_warned_of(tmp_path: Path, devices: dict, named: list[str]) -> None:
    """The default there is bfloat16."""
    given = {name: {"device": device} for name, device in devices.items()}
    assert not dtype_warnings(small_config(tmp_path, **given))
    given = {name: {"device": device, "dtype": "float32"} for name, device in devices.items()}
    warnings = dtype_warnings(small_config(tmp_path, **given))
    assert len(warnings) == bool(named)
    assert all(name in warnings[0] for name in named)


@pytest.mark.parametrize(
    ("generator", "slots", "mib"),
    [
        ({}, 32, 72),  # each of 32 slots in lanes of 352 and 112, of 5 KiB a position
        ({"slots": 4}, 4, 9),
        ({"kv_cache_mib": 50}, 22, 50),
        ({"kv_cache_mib": 50, "slots": 4}, 4, 9),
    ],
)
def test_slots_follow_from_the_memory_limit(
    tmp_path: Path, generator: dict, slots: int, mib: int
) -> None:
    lines = resolved(prepare(small_config(tmp_path, generator=generator)))
    assert lines["generators"] == f"1 × {slots} slots"
    assert lines["KV cache"] == f"{mib} MiB at most (5.0 KiB a token)"
