"""bfloat16 computation over float32 weights.

The whole forward runs in bfloat16, as in the generator, without autocast's casts at every matrix
product. Gradients of microbatches are summed in float32.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from transformers import PreTrainedModel

from tramontane.trainer import sharding


def to_bfloat16(model: PreTrainedModel) -> None:
    """Cast the weights in place; buffers (rotary frequencies) stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def working_model(master: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Return the model that computes for `master`.

    In float32, and under FSDP (which casts itself), it is `master`. Otherwise it is a bfloat16
    copy, whose gradients are added to the master's and which `refresh` updates. Frozen parameters
    are those of `master`, not copies.
    """
    if dtype == "float32" or sharding.ranks() > 1:
        return master
    working = copy.deepcopy(master, {id(p): p for p in master.parameters() if not p.requires_grad})
    to_bfloat16(working)
    collect_gradients(master, working)
    return working


def collect_gradients(master: PreTrainedModel, working: PreTrainedModel) -> None:
    """Add each gradient of the bfloat16 copy to the master's in float32, once it is computed."""
    for exact, rough in zip(trained(master), trained(working), strict=True):
        rough.register_post_accumulate_grad_hook(partial(_move_gradient, exact))


def _move_gradient(exact: torch.nn.Parameter, rough: torch.Tensor) -> None:
    assert rough.grad is not None
    gradient = rough.grad.float()
    exact.grad = gradient if exact.grad is None else exact.grad.add_(gradient)
    rough.grad = None


@torch.no_grad()
def refresh(working: PreTrainedModel, master: PreTrainedModel) -> None:
    """Copy the master's weights after an update."""
    if working is not master:
        torch._foreach_copy_([*trained(working)], [*trained(master)])


def trained(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
