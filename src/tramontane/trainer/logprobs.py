"""Log-probabilities of tokens, and entropies, from logits: in chunks, accumulated in float32.

Not needed for models whose logits are a linear function of the hidden states; see `head.py`.
"""

from __future__ import annotations

from typing import Any

import torch

# Logits that are worked on at once in float32. On a CPU, 0.5 MB stay in the cache between the
# passes over them; on a GPU, 256 MB keep it busy.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26, "mps": 1 << 24}
SMALLEST_CHUNK = 8  # rows, however large the vocabulary: fewer would cost a dozen calls per token


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / T) at the targets, and the entropy of the whole distribution.

    No float32 copy of all logits ever exists. For the gradient, one tensor of the logits' shape
    and dtype is kept: the probabilities.

    Args:
        logits: [N, V], float32 or lower.
        targets: [N] int64.
        temperature: T, with which the tokens were sampled.
        entropy_grad: let gradients flow through the entropy too.

    Returns:
        Log-probs [N] and entropies [N], in nats, float32 (float64 for float64 logits).
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature)
    return logprobs, entropy if entropy_grad else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(z), z = logits / T, H = −Σ p log p:
    ∂ log p_y / ∂z = e_y − p and ∂H / ∂z = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, vocabulary = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = logits.new_empty(n, dtype=dtype)
        entropy = logits.new_empty(n, dtype=dtype)
        keep = ctx.needs_input_grad[0]
        probabilities = torch.empty_like(logits) if keep else None
        elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cpu"])
        rows = max(SMALLEST_CHUNK, elements // vocabulary)
        for start in range(0, n, rows):
            chunk = slice(start, start + rows)
            z = torch.log_softmax(logits[chunk].to(dtype) / temperature, dim=-1)
            logprobs[chunk] = z.gather(-1, targets[chunk, None])[:, 0]
            p = z.exp()
            if probabilities is not None:
                probabilities[chunk] = p
            # A token of log p = −∞ adds 0 · log p = 0 to the entropy, not NaN.
            entropy[chunk] = -torch.linalg.vecdot(p, z.clamp_(min=-1e4))
        if probabilities is not None:
            ctx.save_for_backward(probabilities, targets, logprobs, entropy)
            ctx.temperature, ctx.rows = temperature, rows
            ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        probabilities, targets, logprobs, entropy = ctx.saved_tensors
        scale = 1.0 / ctx.temperature
        grad = torch.zeros_like(probabilities) if grad_logprobs is None else None
        if grad_logprobs is not None:
            g = (grad_logprobs * scale)[:, None]
            grad = probabilities * (-g).to(probabilities.dtype)
            # For a rounded p near 1, 1 − p would be lost, so the target's entry comes from its
            # log-prob.
            exact = -torch.expm1(logprobs)[:, None] * g
            grad.scatter_(1, targets[:, None], exact.to(grad.dtype))
        assert grad is not None
        if grad_entropy is not None:
            for start in range(0, len(grad), ctx.rows):
                chunk = slice(start, start + ctx.rows)
                p = probabilities[chunk].to(logprobs.dtype)
                inner = torch.special.xlogy(p, p) + p * entropy[chunk, None]
                grad[chunk] -= (inner * (grad_entropy[chunk, None] * scale)).to(grad.dtype)
        return grad, None, None
