"""Packed rows through layers that carry state: every sequence as if it were alone."""

import copy

import pytest
import torch

from tests.hybrids import FAMILIES, VOCAB, make_hybrid
from tests.trainer.rollouts import batch, model
from tramontane.config import TrainerConfig
from tramontane.models.packing import pack
from tramontane.models.states import separate_states, stateful_layers
from tramontane.trainer.trainer import Trainer


def packed(net):
    other = copy.deepcopy(net)
    other.set_attn_implementation("packed")
    separate_states(other)
    return other


def sequences():
    """Sequences of many lengths; the last two continue the one before them."""
    numbers = torch.Generator().manual_seed(1)
    lengths = (23, 1, 41, 2, 40, 19, 7, 8)
    rows = [torch.randint(3, VOCAB, (n,), generator=numbers).tolist() for n in lengths]
    return rows, [*[None] * 6, 5, 5]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sequence_is_that_sequence_alone(family):
    alone = make_hybrid(family)
    together = packed(alone)
    rows, continues = sequences()
    sizes = [len(row) for row in rows]
    logprobs = together(**pack(rows, continues=continues)).logits[0].log_softmax(-1)
    logprobs[:, 5].mean().backward()
    for row, parent, found in zip(rows, continues, logprobs.split(sizes), strict=True):
        whole = (rows[parent] if parent is not None else []) + row
        expected = alone(input_ids=torch.tensor([whole]), use_cache=False).logits[0]
        expected = expected.log_softmax(-1)[-len(row) :]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        (expected[:, 5].sum() / sum(sizes)).backward()
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-3 * q.grad.norm() + 1e-6


def test_without_the_change_states_leak():
    alone = make_hybrid("qwen3_5_text")
    leaking = copy.deepcopy(alone)
    leaking.set_attn_implementation("packed")
    rows, _ = sequences()
    inputs = pack(rows[:3])
    assert (leaking(**inputs).logits - packed(alone)(**inputs).logits).abs().max() > 0.1


def test_models_without_state_are_untouched():
    net = model()
    kinds = [type(module) for module in net.modules()]
    separate_states(net)
    assert [type(module) for module in net.modules()] == kinds
    assert not stateful_layers(net)


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16", "threads": 2}])
def test_a_trainer_does_not_mix_sequences_of_a_row(keys):
    """Its copies in bfloat16 and in threads keep their rows apart too."""
    small, large = (
        Trainer(
            packed(make_hybrid("lfm2")),
            TrainerConfig(microbatch_tokens=tokens, gradient_checkpointing=True, **keys),
            1,
        )
        for tokens in (1, 4096)
    )
    given = batch(groups=2, size=3)
    metrics = [one.step(given) for one in (small, large)]
    tolerance = 0.05 if keys else 1e-4
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=tolerance)
