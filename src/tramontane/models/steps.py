"""Decode steps of layers that carry state: one token for each sequence, on the CPU; and the lengths
of chunks in which Mamba 2 reads several tokens there.

Transformers has three functions for such a step, which the mixers of all its families call by the
same names, and whose reference implementations read and write a state many times over. These here
have the same arguments, compute the same within rounding, and update the state in place in a few
operations. On a GPU, transformers' own run, with its kernels where they are installed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN


def causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """A convolution's output at the newest of its inputs.

    Args:
        hidden_states: [B, C, 1], the newest input.
        conv_state: [B, C, W] inputs before it, to which it is appended. It becomes a view of a
            contiguous [B, W, C], so that the channels of an input are read at once.
        weight: [C, K], K ≤ W.
        bias: [C].
        activation: name of the function of the output.

    Returns:
        [B, C, 1].
    """
    before, newest = (x.transpose(1, 2).to(conv_state.dtype) for x in (conv_state, hidden_states))
    inputs = torch.cat([before[:, 1:], newest], 1)
    conv_state.data = inputs.transpose(1, 2)
    seen = inputs[:, -weight.shape[-1] :].to(weight.dtype).unbind(1)
    factors = weight.t().contiguous()
    out = seen[0] * factors[0] if bias is None else torch.addcmul(bias, seen[0], factors[0])
    for x, factor in zip(seen[1:], factors[1:], strict=True):
        out = torch.addcmul(out, x, factor)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out[..., None].to(hidden_states.dtype)


def torch_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (arXiv 2412.06464, equation 10): with S' = exp(g) S, the new state is
    S' + k ⊗ β (v − k S'), and the output q times it.

    Args:
        query: [B, 1, Hk, dk].
        key: [B, 1, Hk, dk]; Hk divides Hv.
        value: [B, 1, Hv, dv].
        g: [B, 1, Hv], logarithm of the decay.
        beta: [B, 1, Hv].
        initial_state: [B, Hv, dk, dv], updated in place if it is in float32.
        use_qk_l2norm_in_kernel: divide queries and keys by their lengths.
        **kwargs: further arguments of transformers.

    Returns:
        [B, 1, Hv, dv], and the state.
    """
    batch, _, heads, width = value.shape
    state = initial_state.float()
    rows = torch.stack([query[:, 0], key[:, 0]], 2).float()  # [B, Hk, 2, dk]
    if use_qk_l2norm_in_kernel:
        rows = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
    if heads > rows.shape[1]:
        rows = rows.repeat_interleave(heads // rows.shape[1], 1)
    q, k = (rows[:, :, i] for i in range(2))
    decay = g[:, 0].float().exp()[..., None]
    read = torch.bmm(rows.flatten(0, 1), state.flatten(0, 1)).view(batch, heads, 2, width)
    read = read * decay[..., None]
    delta = (value[:, 0].float() - read[:, :, 1]) * beta[:, 0].float()[..., None]
    state.mul_(decay[..., None]).addcmul_(k[..., None], delta[:, :, None])
    out = torch.addcmul(read[:, :, 0], (q * k).sum(-1, keepdim=True), delta)
    return (out * q.shape[-1] ** -0.5)[:, None].to(query.dtype), state


def mamba2_selective_state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A step of Mamba 2 (arXiv 2405.21060): with Δ = softplus(dt + bias), the new state is
    exp(Δ A) S + Δ x ⊗ B, and the output C times it plus D x.

    Args:
        state: [B, H, P, N], updated in place.
        hidden_states: [B, H, P].
        dt: [B, H, P], equal along P, as are the next two.
        A: [H, P, N], equal along N too.
        B: [B, G, N]; G divides H.
        C: [B, G, N].
        D: [H, P].
        dt_bias: [H, P].
        z: [B, H, P], a gate of the output.
        **kwargs: further arguments of transformers.

    Returns:
        [B, H, P].
    """
    batch, groups, size = B.shape
    step = F.softplus(dt[..., 0] + dt_bias[:, 0]).float()  # [B, H]
    state.mul_(torch.exp(step * A[:, 0, 0].float())[..., None, None])
    rows = state.view(batch, groups, -1, size)  # the heads of a group are rows of one product
    added = (step[..., None] * hidden_states).view(batch, groups, -1, 1)
    rows.addcmul_(added.to(rows.dtype), B[:, :, None].to(rows.dtype))
    # Several times as fast as a product with one column.
    out = torch.bmm(C.reshape(-1, 1, size).to(rows.dtype), rows.flatten(0, 1).transpose(1, 2))
    out = torch.addcmul(out.view_as(hidden_states), hidden_states, D)
    return (out if z is None else out * F.silu(z)).to(hidden_states.dtype)


_STEPS: tuple[Callable[..., Any], ...] = (
    causal_conv1d_update,
    torch_recurrent_gated_delta_rule,
    mamba2_selective_state_update,
)
_SCAN, _SHORTEST_CHUNK = "mamba2_chunk_scan", 16


@functools.cache
def with_steps(cls: Any) -> Any:
    """A layer's class, whose forward calls the functions above for tensors on the CPU."""
    forward = inspect.unwrap(cls.forward)
    theirs = forward.__globals__
    ours = {f.__name__: _on_cpu(f, theirs[f.__name__]) for f in _STEPS if f.__name__ in theirs}
    if _SCAN in theirs:
        ours[_SCAN] = _on_cpu(_in_balanced_chunks(theirs[_SCAN]), theirs[_SCAN])
    made = FunctionType(
        forward.__code__, theirs | ours, None, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return type(cls.__name__, (cls,), {"forward": made, "__module__": cls.__module__})


def _on_cpu(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def function(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (ours if first.device.type == "cpu" else theirs)(first, *args, **kwargs)

    return function


def _in_balanced_chunks(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' scan of Mamba 2 in chunks of the length at which work within chunks, L · chunk
    · (P + N), equals that between them, (L / chunk)² · P · N. Checkpoints name the length that is
    best for GPUs, 256, to which short sequences would be padded."""

    def balanced(
        x: torch.Tensor, dt: Any, A: Any, B: torch.Tensor, C: Any, *, chunk_size: int, **kwargs: Any
    ) -> Any:
        length, width, size = x.shape[1], x.shape[3], B.shape[3]
        best = (length * width * size / (width + size)) ** (1 / 3)
        chunk = max(_SHORTEST_CHUNK, 1 << round(math.log2(best)))
        return scan(x, dt, A, B, C, chunk_size=min(chunk_size, chunk), **kwargs)

    return balanced
