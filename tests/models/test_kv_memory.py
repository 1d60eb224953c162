"""Memory of keys and values, against formulas and against the tensors of a real prefill."""

from __future__ import annotations

import pytest
import torch

from tests.generator.slot_models import FAMILIES, make_model
from tramontane.generator.forward import examine_model
from tramontane.models.kv_memory import kv_budget, kv_bytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_per_token_are_those_that_the_model_caches(family, dtype):
    """Among them a model whose head size is not hidden size / heads (qwen3)."""
    model = make_model(family, dtype=getattr(torch, dtype))
    layout, _ = examine_model(model, 16)
    cached = sum(planes * heads * d for planes, heads, d in layout.shapes) * layout.dtype.itemsize
    assert kv_bytes_per_token(model.config, dtype) == cached


def test_the_weights_and_the_budget_fill_the_share_of_the_device():
    assert kv_budget(80 * 2**30, 16 * 2**30, 0.9) == 56 * 2**30
    assert kv_budget(80 * 2**30, 79 * 2**30, 0.9) == 0
