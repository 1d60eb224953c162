"""Log-probs at the output head, against the plain formula over all logits."""

import copy
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.rollouts import VOCAB, batch, equal, model, trainer
from tramontane.models.compiling import compiled
from tramontane.trainer import head
from tramontane.trainer.head import (
    fused_predictions,
    head_scale,
    plain_predictions,
    token_logprobs,
)
from tramontane.trainer.rows import pack_row

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
# Models whose logits are another function of the head's output than itself.
SCALED = {
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625, "bos_token_id": 1, "eos_token_id": 2},
}


def make(model_type, **extra):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **extra)
    return AutoModelForCausalLM.from_config(config, attn_implementation="packed").train()


@pytest.fixture(params=[(1, 0), (10, 0), (1, 250), (10, 250), (1 << 20, 0), (1 << 20, 1 << 20)])
def part(request, monkeypatch):
    """Parts of one or two entries of the vocabulary, or all at once; of their logits none, some or
    all are kept for the backward pass."""
    elements, kept = request.param
    monkeypatch.setattr(head, "SMALLEST_PART", 1)
    monkeypatch.setitem(head.PART_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(head, "KEPT_BYTES", kept)


def plain(hidden, weight, bias, targets, temperature):
    logp = torch.log_softmax(F.linear(hidden, weight, bias) / temperature, dim=-1)
    return logp.gather(1, targets), -(logp.exp() * logp).sum(-1)


# The second and third of each token are others of its place, one of them its target again.
SEVERAL = torch.tensor([[0, 0, 6], [6, 5, 6], [3, 0, 1], [3, 3, 2], [5, 4, 6]])


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize(
    ("outputs", "bias"),
    [((0,), True), ((1,), False), ((0, 1), False), ((0, 1), True)],
    ids=["logprobs", "entropy", "both", "both with a bias"],
)
def test_gradients_are_the_derivatives_in_float64(bias, outputs):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    inputs = [hidden, weight, torch.randn(7, dtype=torch.float64) if bias else None]
    for x in filter(torch.is_tensor, inputs):
        x.requires_grad_()
    for targets in (torch.tensor([[0], [6], [3], [3], [5]]), SEVERAL):

        def selected(*inputs, targets=targets):
            found = head._HeadLogprobs.apply(*inputs, targets, 0.7)
            return tuple(found[i] for i in outputs)

        assert torch.autograd.gradcheck(selected, inputs)
        expected = plain(*inputs, targets, 0.7)
        for got, i in zip(selected(*inputs), outputs, strict=True):
            torch.testing.assert_close(got, expected[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", *SCALED])
def test_a_model_gives_the_predictions_and_gradients_of_its_logits(model_type, tied, monkeypatch):
    monkeypatch.setattr(head, "SMALLEST_PART", 1)
    monkeypatch.setitem(head.PART_ELEMENTS, "cpu", 400)  # four parts or more
    monkeypatch.setattr(head, "KEPT_BYTES", 4000)  # some of them
    fused = make(model_type, tie_word_embeddings=tied, **SCALED.get(model_type, {})).double()
    unfused = copy.deepcopy(fused)
    scale = head_scale(fused.float())
    fused.double()
    assert scale == {"granite": 1 / 8, "cohere": 0.0625}.get(model_type, 1.0)
    row = pack_row(batch().sequences[:4], torch.device("cpu"))
    got = fused_predictions(fused, row, 0.8, scale, entropy_grad=True)
    logits = unfused(**row.inputs).logits[0, : len(row.targets)]
    logprobs, entropy = token_logprobs(logits, row.targets, 0.8, entropy_grad=True)
    torch.testing.assert_close(got.logprobs, logprobs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-9, atol=1e-9)
    assert torch.equal(got.top1, (logits.argmax(-1) == row.targets).double())
    weights = torch.randn(2, len(row.targets), dtype=torch.float64)
    (weights[0] @ got.logprobs + weights[1] @ got.entropy).backward()
    (weights[0] @ logprobs + weights[1] @ entropy).backward()
    for (name, a), b in zip(fused.named_parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9, msg=name)
    # The model itself is as before.
    assert fused(**row.inputs).logits.shape[-1] == VOCAB


def test_log_probs_of_other_tokens_are_those_of_the_logits(monkeypatch):
    monkeypatch.setattr(head, "SMALLEST_PART", 16)
    monkeypatch.setitem(head.PART_ELEMENTS, "cpu", 1)
    llama = model().double()
    row = pack_row(batch().sequences[:4], torch.device("cpu"))
    ids = torch.stack([row.targets, (row.targets + 7) % VOCAB], dim=1)
    gradients = []
    for predict in (lambda *a: fused_predictions(*a, 1.0), plain_predictions):
        found = predict(llama, replace(row, candidates=ids), 0.8)
        torch.testing.assert_close(found.policy_top[:, 0], found.logprobs, rtol=1e-9, atol=1e-9)
        llama.zero_grad()
        (found.policy_top.exp().sum() + found.logprobs.sum()).backward()
        gradients.append([p.grad for p in llama.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_whole_vocabularies_in_bfloat16_are_divided_by_the_temperature_in_float32(temperature):
    llama, row = model().bfloat16(), pack_row(batch().sequences[:4], torch.device("cpu"))
    whole = row.targets.new_empty((len(row.targets), 0))
    found = plain_predictions(llama, replace(row, candidates=whole), temperature)
    logits = llama(**row.inputs).logits[0, : len(row.targets)].double()
    wanted = (logits / temperature).log_softmax(-1).float()
    torch.testing.assert_close(found.policy_top, wanted, rtol=1e-5, atol=1e-5)
    at_targets = wanted.gather(1, row.targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, at_targets, rtol=1e-5, atol=1e-5)


def test_a_model_that_computes_all_logits_is_read_at_the_positions_that_predict():
    # Whisper's decoder does so, whatever `logits_to_keep` says.
    llama, row = model().double(), pack_row(batch().sequences[:4], torch.device("cpu"))
    every = copy.deepcopy(llama)
    every.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"logits_to_keep": 0}), with_kwargs=True
    )
    for predict in (lambda *a: fused_predictions(*a, 1.0), plain_predictions):
        found, wanted = predict(every, row, 0.8), predict(llama, row, 0.8)
        torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-9, atol=1e-9)


def test_entropy_has_a_gradient_only_on_request():
    llama, row = model(), pack_row(batch().sequences[:2], torch.device("cpu"))
    assert not fused_predictions(llama, row, 1.0, 1.0).entropy.requires_grad


def test_soft_capped_logits_and_other_heads_take_the_plain_path():
    capped = make("gemma2", final_logit_softcapping=30.0, head_dim=8, attn_logit_softcapping=None)
    assert head_scale(capped) is None
    other = model(tied=False)
    other.lm_head = torch.nn.Sequential(other.lm_head)
    assert head_scale(other) is None


def test_logits_of_which_some_are_masked_take_the_plain_path():
    masked = model()
    forward = masked.forward

    def with_mask(**inputs):
        output = forward(**inputs)
        output.logits[..., -3:] = -torch.inf
        return output

    masked.forward = with_mask
    assert head_scale(masked) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_a_step_is_that_of_the_plain_path(dtype, entropy_coef, monkeypatch):
    monkeypatch.setattr(head, "SMALLEST_PART", 16)
    monkeypatch.setitem(head.PART_ELEMENTS, "cpu", 1)
    objective = {"magistral": {"entropy_coef": entropy_coef}}
    fused, plain_path = (trainer(dtype=dtype, objective=objective) for _ in range(2))
    plain_path._head_scale = None
    before, b = fused.weights(), batch(groups=2)
    one, two = fused.step(b), plain_path.step(b)
    rough = dtype == "bfloat16"
    assert one == pytest.approx(two, rel=2e-2 if rough else 1e-4, abs=1e-2 if rough else 1e-6)
    assert not equal(fused.weights(), before)


def test_a_certain_token_keeps_its_gradient_in_bfloat16():
    # p = 0.9991 rounds to 1 in bfloat16: e_y − p must not vanish for it.
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprob, _, top1 = head._HeadLogprobs.apply(hidden, weight, None, torch.tensor([[0]]), 1.0)
    (grad,) = torch.autograd.grad(logprob.sum(), weight)
    rest = 1 / (1 + torch.e**7)
    assert grad[:, 0].tolist() == pytest.approx([rest, -rest], rel=1e-2)
    assert top1.item() == 1


def test_parts_fill_the_cache_and_are_never_a_few_columns():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert head.part_size(1024, cpu) == 1024
    assert head.part_size(100_000, cpu) == head.SMALLEST_PART
    assert head.part_size(8192, gpu) == 8192


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("entropy", [False, True])
def test_compiled_passes_write_nothing_of_the_logits_size_but_their_gradient(entropy):
    """They read logits in bfloat16, compute in float32, and agree with the passes as they stand."""
    torch.manual_seed(0)
    logits = torch.randn(48, 1000).bfloat16()
    column = torch.randint(1000, (48, 1))
    rows = head._Rows(*torch.randn(3, 48, 1), torch.randn(48, 1) if entropy else None)
    for function, inputs in (
        (head._summarize, (column, 0.7, False)),
        (head._differentiate, (0.7, rows)),
    ):
        found, sources = run_and_get_code(compiled(function), logits, *inputs)
        expected = function(logits.clone(), *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        written = re.findall(r"empty_strided_cpu\(\((\w+), (\w+)\), .*, torch\.(\w+)\)", sources[0])
        whole = [dtype for _, columns, dtype in written if columns != "1"]
        assert whole == (["bfloat16"] if function is head._differentiate else [])
