"""Activation checkpointing by block, and offload of what it keeps."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.flash_reference import flash_on_cpu
from tests.trainer.rollouts import batch, equal, model, trainer
from tramontane.config import TrainerConfig
from tramontane.models import flash
from tramontane.trainer.forwards import checkpoint_blocks

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
WIDTH = 32


def kept(net):
    """Tensors with a row per token that a forward keeps for its backward pass, except those that
    other saved-tensor hooks, such as those of offload, take away."""
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net.model(IDS)
    return [shape for shape in shapes if shape[:2] == (1, 6)]


def test_only_the_inputs_of_blocks_are_kept_and_offload_takes_those():
    plain, checkpointed, offloaded = (model().train() for _ in range(3))
    keys = {"gradient_checkpointing": True}
    checkpoint_blocks(checkpointed, TrainerConfig(**keys))
    checkpoint_blocks(offloaded, TrainerConfig(**keys, activation_offload=True))
    outside = kept(offloaded)
    assert len(kept(checkpointed)) == len(outside) + len(plain.model.layers)
    assert len(kept(plain)) > len(kept(checkpointed))


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_and_offload_change_no_bit(offload):
    plain, other = trainer(), trainer(gradient_checkpointing=True, activation_offload=offload)
    for version in range(2):
        b = batch(version, groups=2)
        assert plain.step(b) == other.step(b)
    assert equal(plain.weights(), other.weights())


@pytest.mark.parametrize(
    ("keys", "times"),
    [({}, 1), ({"gradient_checkpointing": "full"}, 2), ({"activation_offload": True}, 2)],
    ids=str,
)
def test_flash_attention_is_computed_once_unless_memory_is_to_be_saved(monkeypatch, keys, times):
    calls, compute = [], flash._forward
    monkeypatch.setattr(flash, "_forward", lambda *a, **k: calls.append(a) or compute(*a, **k))
    plain, other = trainer(), trainer(**{"gradient_checkpointing": True} | keys)
    layers = len(plain.model.model.layers)
    with flash_on_cpu():
        wanted, microbatches = plain.step(batch(0)), len(calls) // layers
        calls.clear()
        assert other.step(batch(0)) == wanted
    assert len(calls) == times * microbatches * layers
    assert equal(plain.weights(), other.weights())


def test_blocks_are_recomputed_for_each_backward_pass_over_a_graph():
    net = model().train()
    checkpoint_blocks(net, TrainerConfig(gradient_checkpointing=True))
    with flash_on_cpu():
        loss = net(IDS).logits.logsumexp(-1).mean()
        weights = [*net.parameters()]
        first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_offload_without_checkpointing_is_refused():
    with pytest.raises(ValueError, match="set gradient_checkpointing to true"):
        TrainerConfig(activation_offload=True)
