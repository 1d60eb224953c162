"""The base of experts for the study of router replay."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tramontane.models.names import resolve
from tramontane.studies.experts import upcycled


@pytest.mark.parametrize("redrawn", [0.0, 0.5])
def test_copies_of_an_mlp_compute_what_it_computes_and_redrawn_ones_do_not(tmp_path, redrawn):
    upcycled(tmp_path, experts=4, chosen=2, redrawn=redrawn)
    ids = torch.arange(5, 45)[None]
    dense, sparse = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (resolve("tiny"), tmp_path)
    )
    assert ((sparse - dense).abs().max() < 1e-4) == (redrawn == 0)
