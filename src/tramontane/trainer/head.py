"""Log-probs at a model's output head: matrix product and softmax in one function, one part of the
vocabulary at a time.

At a vocabulary of 50,000 or 150,000 the logits of a microbatch are larger than all its other
activations. Here no tensor of [tokens, vocabulary] exists. Logits are kept for the backward pass up
to a fixed number of bytes; it recomputes the others, using one number kept per token (log Σ exp z).

The operations between the matrix products read the logits of a part, in float32. Compiled, the only
thing of that size that they write is the gradient, in the model's dtype. Uncompiled, they take
several times as long on a GPU, where memory bandwidth limits them.

If the logits are not a linear function of the hidden states, all are kept: `plain_predictions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from tramontane.models import compiling
from tramontane.models.packing import pack
from tramontane.trainer.rows import PackedRow, Predictions
from tramontane.trainer.sharding import free_gathered, plain_class

# Logits computed at once. On a CPU, 4 MB in float32 stay in the cache between the passes over them;
# on a GPU, 256 MB keep its matrix products large.
PART_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26, "mps": 1 << 24}
# Logits kept for the backward pass, which would take a third longer without any.
KEPT_BYTES = 128 << 20
SMALLEST_PART = 256  # entries of the vocabulary, so that matrix products stay efficient
# Logits that are worked on at once in float32. On a CPU, 0.5 MB stay in the cache between the
# passes over them; on a GPU, 256 MB keep it busy.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26, "mps": 1 << 24}
ENTROPY_ROWS = 64  # of log-probs whose entropies are computed at once
SMALLEST_CHUNK = 8  # rows, however large the vocabulary: fewer would cost a dozen calls per token


def part_size(tokens: int, device: torch.device) -> int:
    """Entries of the vocabulary computed at once for this many tokens: a power of two, so that few
    shapes need kernels."""
    fitting = PART_ELEMENTS.get(device.type, PART_ELEMENTS["cpu"]) // max(tokens, 1)
    return max(SMALLEST_PART, 1 << max(fitting.bit_length() - 1, 0))


@torch.no_grad()
def head_scale(model: PreTrainedModel) -> float | None:
    """Return c if the model's logits are c · (W h + b), with W and b of its output head.

    c is 1 for most models, but not for Cohere and Granite. None: the logits are a different
    function of W h + b, as with soft-capping (Gemma), or the head is not a plain linear layer; then
    log-probs must be computed from the logits. The model is probed by one forward of two tokens in
    which known numbers replace the head's output. Collective: every rank must call this.
    """
    head = model.get_output_embeddings()
    if head is None or plain_class(head) is not torch.nn.Linear:
        return None
    device = next(model.parameters()).device
    # Large numbers of both signs, since soft-capping hardly changes small ones.
    probe = (torch.arange(head.out_features, device=device) % 257 - 128).float()
    with _replaced(head, lambda hidden: probe.repeat(*hidden.shape[:-1], 1)):
        logits = model(**pack([[0, 0]], device)).logits
    free_gathered(model)
    if logits.dtype != torch.float32 or logits.shape != (1, 2, head.out_features):
        return None
    scale = float(logits[0, 0, 0] / probe[0])
    deviation = float((logits - probe * scale).abs().max() / probe.abs().max())
    return scale if deviation <= 1e-6 * scale and scale > 0 else None


def fused_predictions(
    model: PreTrainedModel,
    row: PackedRow,
    temperature: float,
    scale: float,
    entropy_grad: bool = False,
    compiled: bool = False,
) -> Predictions:
    """Run the model and compute log softmax(logits / T) at the targets, and at the candidates if
    the row has any, without the logits.

    Args:
        model: a causal LM for which `head_scale` returned `scale`.
        row: the model's input; `keep` selects K positions, whose first N predict the targets.
        temperature: T, with which the tokens were sampled.
        scale: factor c of the logits.
        entropy_grad: let gradients flow through the entropy too.
        compiled: compile the operations between the matrix products.

    Returns:
        Predictions of the N targets, with `top1`; float64 for a model in float64.
    """
    head = model.get_output_embeddings()

    if row.candidates is not None:
        count = row.candidates.shape[1]
        if not count or 2 * count > head.out_features:  # these are the logits
            return plain_predictions(model, row, temperature, entropy_grad)
    targets = row.targets[:, None]
    if row.candidates is not None:
        targets = torch.cat([targets, row.candidates], dim=1)

    def fused(hidden: torch.Tensor) -> torch.Tensor:
        hidden = row.kept(hidden)
        ids = F.pad(targets, (0, 0, 0, hidden.shape[1] - len(targets)))
        logprobs, *others = _HeadLogprobs.apply(
            hidden[0], head.weight, head.bias, ids, temperature / scale, compiled
        )
        # No view, for FSDP's hooks.
        return torch.cat([x.reshape(1, len(ids), -1) for x in (*others, logprobs)], dim=-1)

    # The model returns the predictions in place of its logits, so that FSDP sees their gradient.
    with _replaced(head, fused):
        columns = model(**row.inputs).logits[0, : len(row.targets)] / scale
    entropy, top1, logprobs, *_ = columns.unbind(-1)
    top = None if row.candidates is None else columns[:, 3:]
    return Predictions(
        logprobs, entropy if entropy_grad else entropy.detach(), top1.detach(), policy_top=top
    )


def plain_predictions(
    model: PreTrainedModel, row: PackedRow, temperature: float, entropy_grad: bool = False
) -> Predictions:
    """The same for any model, computed from its logits."""
    logits = row.kept(model(**row.inputs).logits)[0, : len(row.targets)]
    top1 = logits.detach().argmax(-1) == row.targets
    if row.candidates is None:
        logprobs, entropy = token_logprobs(logits, row.targets, temperature, entropy_grad)
        return Predictions(logprobs, entropy, top1.to(logprobs.dtype))
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    del logits
    if temperature != 1:
        scaled = scaled / temperature
    every = scaled.log_softmax(-1)  # the only tensor of this size kept for the gradient
    del scaled
    logprobs = every.gather(-1, row.targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = torch.cat([_entropy(part) for part in every.split(ENTROPY_ROWS)])
    top = every.gather(-1, row.candidates) if row.candidates.shape[1] else every
    return Predictions(logprobs, entropy, top1.to(logprobs.dtype), policy_top=top)


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """The entropy of each row of log-probs: [N]. A token of log p = −∞ adds 0, not NaN."""
    return -torch.linalg.vecdot(logprobs.exp(), logprobs.clamp(min=-1e4))


@contextmanager
def _replaced(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Temporarily replace a module's forward."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _HeadLogprobs(torch.autograd.Function):
    """With z = (W h + b) / t, p = softmax(z) and H = −Σ p log p: ∂ log p_y / ∂z = e_y − p and
    ∂H / ∂z = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        divisor: float,
        compiled: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments: h [K, d], W [V, d], b [V] or None, targets [K, J] int64, t, and whether the
        operations between the matrix products are compiled. Returns log-probs [K, J], and entropies
        and `top1` of the first target, [K] each."""
        found: list[tuple[torch.Tensor, ...]] = []
        kept: list[torch.Tensor] = []
        summarize = compiling.compiled(_summarize) if compiled else _summarize
        room = KEPT_BYTES
        for part in _parts(hidden, weight, bias, targets, []):
            room -= part.logits.nbytes
            if room >= 0:
                kept.append(part.logits)
            found.append(summarize(part.logits, part.column, divisor, room < 0))
        at_column, tops, part_sums, moments = (torch.stack(x) for x in zip(*found, strict=True))
        # The part that holds the target.
        of_target = targets // part_size(len(hidden), hidden.device)
        at_target = at_column.gather(0, of_target[None])[0]  # [K, J]
        part_totals = tops + part_sums.log()
        total = part_totals.logsumexp(0)
        # A part with probability w and entropy h of its own distribution adds w (h − log w).
        log_share = part_totals - total
        part_entropies = part_sums.log() - moments / part_sums
        entropy = (log_share.exp() * (part_entropies - log_share.clamp(min=-1e4))).sum(0)
        logprobs = at_target - total[:, None]
        ctx.save_for_backward(hidden, weight, bias, targets, total, logprobs, entropy)
        ctx.divisor, ctx.kept, ctx.compiled = divisor, kept, compiled
        ctx.set_materialize_grads(False)
        top1 = (at_target[:, 0] >= tops.amax(0)).to(logprobs.dtype)
        ctx.mark_non_differentiable(top1)
        return logprobs, entropy, top1

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_top1: None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of h [K, d], W [V, d] and b [V], each None if not needed, from those of the
        log-probs [K] and entropies [K]; the other arguments have none."""
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, total, logprobs, entropy = ctx.saved_tensors
        slopes = None if grad_logprobs is None else grad_logprobs / ctx.divisor
        several = slopes if targets.shape[1] > 1 else None
        slope = slopes if several is None else several.sum(-1, keepdim=True)
        entropy_slope = None if grad_entropy is None else (grad_entropy / ctx.divisor)[:, None]
        rows = _Rows(total[:, None], entropy[:, None], slope, entropy_slope)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Parts are summed in float32, whatever the model's dtype.
        grad_hidden = torch.zeros(hidden.shape, dtype=logprobs.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        differentiate = compiling.compiled(_differentiate) if ctx.compiled else _differentiate
        # For p near 1, 1 − p would lose precision, so the target's entry comes from its log-prob.
        at_target = _at_target(logprobs[:, :1], rows).to(hidden.dtype)
        for part in _parts(hidden, weight, bias, targets, ctx.kept):
            # Elsewhere the entry keeps its value: to select rows would wait for the GPU.
            if several is not None:
                at_columns = torch.where(part.inside, several, 0.0)
                grad = differentiate(part.logits, ctx.divisor, rows, part.column, at_columns)
            else:
                grad = differentiate(part.logits, ctx.divisor, rows)
                column, inside = part.column[:, :1], part.inside[:, :1]
                entry = torch.where(inside, at_target, grad.gather(1, column))
                grad.scatter_(1, column, entry)
            if needs_hidden:
                grad_hidden += grad @ weight[part.entries]
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[part.entries])
            if grad_bias is not None:
                grad_bias[part.entries] = grad.sum(0)
        return (
            grad_hidden.to(hidden.dtype) if needs_hidden else None,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


class _Rows(NamedTuple):
    """Inputs of the logits' gradient from each token, [K, 1] each: log Σ exp z, the entropy, and
    the gradients of log-prob and entropy divided by t, or None."""

    total: torch.Tensor
    entropy: torch.Tensor
    slope: torch.Tensor | None  # summed over a token's J targets
    entropy_slope: torch.Tensor | None


def _summarize(
    logits: torch.Tensor, column: torch.Tensor, divisor: float, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Figures of a part's scaled logits z: z at the columns, [K, J]; and [K] each, the largest m, Σ
    exp(z − m), and Σ (z − m) exp(z − m)."""
    z = _scaled(logits, divisor, overwrite)
    at_column, top = z.gather(1, column), z.amax(-1)
    p = z.sub_(top[:, None]).exp()
    return at_column, top, p.sum(-1), torch.linalg.vecdot(p, z)


def _differentiate(
    logits: torch.Tensor,
    divisor: float,
    rows: _Rows,
    column: torch.Tensor | None = None,
    at_columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of a part's logits, as if no token's target were among them: [K, entries]; plus
    `at_columns` at the columns, [K, J] each."""
    logp = _scaled(logits, divisor, overwrite=True).sub_(rows.total)
    if rows.entropy_slope is None:
        assert rows.slope is not None  # one of the two has a gradient
        grad = logp.exp_().mul_(-rows.slope)
    else:
        p = logp.exp()
        grad = -p * logp.clamp_(min=-1e4).add_(rows.entropy)
        grad.mul_(rows.entropy_slope)
        if rows.slope is not None:
            grad -= p.mul_(rows.slope)
    if column is not None and at_columns is not None:
        grad.scatter_add_(1, column, at_columns)
    return grad.to(logits.dtype)


def _at_target(logprobs: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Gradient of the target's logit: [K, 1]."""
    grad = torch.zeros_like(logprobs)
    if rows.slope is not None:
        grad = -torch.expm1(logprobs) * rows.slope
    if rows.entropy_slope is not None:
        through = logprobs.exp() * (logprobs.clamp(min=-1e4) + rows.entropy)
        grad = grad - through * rows.entropy_slope
    return grad


class _Part(NamedTuple):
    """A part of the vocabulary."""

    entries: slice  # the part
    logits: torch.Tensor  # [K, entries] W h + b, in the model's dtype
    inside: torch.Tensor  # [K, J] bool, True for the targets that are in this part
    column: torch.Tensor  # [K, J] int64, the target's column in the part; for others, any column


def _parts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kept: list[torch.Tensor],
) -> Iterator[_Part]:
    """All parts; the first parts' logits are taken from `kept`, which is emptied."""
    kept.reverse()
    size = part_size(len(hidden), hidden.device)
    for start in range(0, len(weight), size):
        entries = slice(start, min(start + size, len(weight)))
        if kept:
            logits = kept.pop()
        else:
            logits = F.linear(hidden, weight[entries], None if bias is None else bias[entries])
        column = targets - start
        inside = (column >= 0) & (column < logits.shape[1])
        yield _Part(entries, logits, inside, column.clamp(0, logits.shape[1] - 1))


def _scaled(logits: torch.Tensor, divisor: float, overwrite: bool) -> torch.Tensor:
    """The logits over `divisor` in float32 (float64 for a model in float64); the caller may change
    them."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = logits.to(dtype, copy=not overwrite)
    return z if divisor == 1 else z.div_(divisor)


# ------------------------------------------------------------------------------- from logits


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
        """The gradient of the logits, [N, V] in their dtype, from those of log-probs and entropies,
        [N] each or None."""
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
