"""Steps of layers that carry state compute what transformers' reference functions do."""

import pytest
import torch
from torch.nn.functional import softplus

from tramontane.models import steps


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_s_newest_output(bias: bool, activation: str | None) -> None:
    torch.manual_seed(0)
    state, x, weight = drawn(3, 6, 4), drawn(3, 6, 1), drawn(6, 4)
    added = drawn(6) if bias else None
    seen = torch.cat([state[..., 1:], x], -1)
    expected = (seen * weight).sum(-1) + (added if added is not None else 0)
    expected = torch.nn.functional.silu(expected) if activation else expected
    found = steps.causal_conv1d_update(x, state, weight, added, activation)
    torch.testing.assert_close(found, expected[..., None])
    assert torch.equal(state, seen)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_gated_delta_rule(normalize: bool, key_heads: int) -> None:
    """With S' = e^g S: S' + k ⊗ β (v − k S'), and q times it."""
    torch.manual_seed(0)
    q, k, v = drawn(2, 1, key_heads, 8), drawn(2, 1, key_heads, 8), drawn(2, 1, 4, 5)
    g, beta, state = -drawn(2, 1, 4).exp(), drawn(2, 1, 4).sigmoid(), drawn(2, 4, 8, 5)
    before = state.clone()
    found, after = steps.torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, state, use_qk_l2norm_in_kernel=normalize
    )
    for b in range(2):
        for h in range(4):
            query, key = (x[b, 0, h * key_heads // 4] for x in (q, k))
            if normalize:
                query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
            kept = before[b, h] * g[b, 0, h].exp()
            new = kept + torch.outer(key, beta[b, 0, h] * (v[b, 0, h] - key @ kept))
            torch.testing.assert_close(after[b, h], new)
            torch.testing.assert_close(found[b, 0, h], query @ new / 8**0.5)
    assert after is state


@pytest.mark.parametrize("gated", [False, True])
def test_a_step_of_mamba_2(gated: bool) -> None:
    torch.manual_seed(0)
    heads, width, size, groups = 4, 3, 5, 2
    state, x = drawn(2, heads, width, size), drawn(2, heads, width)
    dt, bias, A, D = drawn(2, heads), drawn(heads), -drawn(heads).exp(), drawn(heads)
    B, C = drawn(2, groups, size), drawn(2, groups, size)
    z = drawn(2, heads, width) if gated else None
    before = state.clone()

    def along(values: torch.Tensor, *sizes: int) -> torch.Tensor:
        return values.reshape(*values.shape, *[1] * len(sizes)).expand(*values.shape, *sizes)

    found = steps.mamba2_selective_state_update(
        state, x, along(dt, width), along(A, width, size), B, C, along(D, width),
        along(bias, width), z,
    )  # fmt: skip
    for b in range(2):
        for h in range(heads):
            delta, group = softplus(dt[b, h] + bias[h]), h // (heads // groups)
            new = before[b, h] * (delta * A[h]).exp() + delta * torch.outer(x[b, h], B[b, group])
            torch.testing.assert_close(state[b, h], new)
            out = new @ C[b, group] + D[h] * x[b, h]
            if z is not None:
                out = out * torch.nn.functional.silu(z[b, h])
            torch.testing.assert_close(found[b, h], out)
