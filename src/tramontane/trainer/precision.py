"""bfloat16 computation over float32 weights.

The whole forward runs in bfloat16, as in the generator: nothing is cast on the way, which autocast
does at every matrix product. Gradients of microbatches add up in float32.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from transformers import PreTrainedModel

from tramontane.trainer import sharding


def to_bfloat16(model: PreTrainedModel) -> None:
    """Cast the weights in place, and not the buffers: rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def working_model(master: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """What computes for `master`: itself in float32, and where FSDP casts; else a bfloat16 copy,
    whose gradients go to the master's, and which `refresh` brings up to date."""
    if dtype == "float32" or sharding.ranks() > 1:
        return master
    working = copy.deepcopy(master)
    to_bfloat16(working)
    for own, rough in zip(master.parameters(), working.parameters(), strict=True):
        rough.register_post_accumulate_grad_hook(partial(_hand_over, own))
    return working


def _hand_over(own: torch.nn.Parameter, rough: torch.Tensor) -> None:
    assert rough.grad is not None
    exact = rough.grad.float()
    own.grad = exact if own.grad is None else own.grad.add_(exact)
    rough.grad = None


@torch.no_grad()
def refresh(working: PreTrainedModel, master: PreTrainedModel) -> None:
    """Copy the master's weights, which have changed."""
    if working is not master:
        torch._foreach_copy_(list(working.parameters()), list(master.parameters()))
