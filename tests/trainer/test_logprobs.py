import pytest
import torch

from tramontane.trainer import head as module
from tramontane.trainer.head import token_logprobs


def naive(logits, targets, temperature):
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(n=37, vocabulary=53, dtype=torch.float32):
    torch.manual_seed(0)
    logits = (3 * torch.randn(n, vocabulary)).to(dtype).requires_grad_()
    return logits, torch.randint(vocabulary, (n,))


@pytest.fixture(params=[1, 53 * 10, 1 << 20])
def chunk(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_values_and_gradients_are_those_of_the_plain_formula(temperature, entropy_grad):
    logits, targets = inputs()
    weights = torch.randn(2, len(targets))
    got = token_logprobs(logits, targets, temperature, entropy_grad)
    expected = naive(logits, targets, temperature)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    differentiable = expected if entropy_grad else (expected[0], expected[1].detach())
    (grad,) = torch.autograd.grad(
        sum((w * x).sum() for w, x in zip(weights, got, strict=True)), logits
    )
    (plain,) = torch.autograd.grad(
        sum((w * x).sum() for w, x in zip(weights, differentiable, strict=True)), logits
    )
    torch.testing.assert_close(grad, plain, atol=1e-6, rtol=1e-5)


def test_gradcheck():
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (5,))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 0.7, True), logits)
    # The entropy alone, without a gradient of the log-probs.
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, 1.3, True)[1], logits)


def test_bfloat16_logits_are_accumulated_in_float32():
    logits, targets = inputs(dtype=torch.bfloat16)
    got, entropy = token_logprobs(logits, targets)
    expected, expected_entropy = naive(logits, targets, 1.0)
    assert got.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (grad,) = torch.autograd.grad(got.sum(), logits)
    (plain,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(grad, plain, atol=4e-3, rtol=1e-2)


def test_a_certain_token_keeps_its_gradient_in_bfloat16():
    # p = 0.9991 rounds to 1 in bfloat16: e_y − p must not vanish for it.
    logits = torch.tensor([[7.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprob, _ = token_logprobs(logits, torch.tensor([0]))
    (grad,) = torch.autograd.grad(logprob.sum(), logits)
    rest = 1 / (1 + torch.e**7)
    assert grad[0].tolist() == pytest.approx([rest, -rest], rel=1e-2)


def test_an_impossible_token_leaves_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, -float("inf")], [0.0, -300.0, -300.0]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 0]))
    assert logprobs.tolist() == pytest.approx([-0.693147, 0.0])
    assert entropy.tolist() == pytest.approx([0.693147, 0.0])
