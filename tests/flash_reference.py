"""torch's flash attention operators for tensors on a CPU, in plain operations.

torch has them for CUDA alone. With `flash_on_cpu`, code that calls them runs on a CPU unchanged,
and computes what the kernel computes according to its source: sequences by their ends, masks
aligned to the sequences' ends, the first `seqused_k` keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from tramontane.models import flash


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Context manager: the operators take CPU tensors, and Tramontane uses them there."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "supports", lambda key, value: key.shape[-1] == value.shape[-1])
        yield
    library._destroy()


class _Sequences:
    """Slices of queries and keys and the visible keys of each sequence."""

    def __init__(self, q, k, ends, sizes, causal, left, right, used=None):
        self.group = q.shape[1] // k.shape[1]
        self.q, self.k, self.causal, self.left, self.right = q, k, causal, left, right
        query_ends, key_ends = ends
        longest_query, longest_key = sizes
        for x in (query_ends, key_ends) if used is None else (query_ends, key_ends, used):
            assert x.dtype == torch.int32
            assert x.is_contiguous()
        assert len(query_ends) == len(key_ends)
        assert query_ends[-1] == len(q)
        self.pairs = []
        starts = key_ends.tolist()
        for row, (first, last) in enumerate(pairwise(query_ends.tolist())):
            count = starts[row + 1] - starts[row] if used is None else used[row].item()
            assert 0 <= last - first <= longest_query
            assert 0 <= count <= longest_key
            assert count == 0 or 0 <= starts[row] <= starts[row] + count <= len(k)
            self.pairs.append((slice(first, last), slice(starts[row], starts[row] + count)))

    def scores(self, queries, keys, scale):
        q, k = self.q[queries].transpose(0, 1), self.heads(self.k, keys)
        scores = (q @ k.transpose(1, 2)).float() * scale
        rows, columns = scores.shape[1:]
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if self.causal or self.right == 0:
            hidden |= distance < 0
        if self.left >= 0:
            hidden |= distance > self.left
        return scores.masked_fill(hidden, float("-inf"))

    def heads(self, x, keys):
        return x[keys].repeat_interleave(self.group, 1).transpose(0, 1)


def _forward(
    q, k, v, query_ends, key_ends, longest_query, longest_key, dropout, causal, debug,
    *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, **unused,
):  # fmt: skip
    assert dropout == 0.0
    assert not debug
    assert not any(value is not None for value in unused.values())
    seen = _Sequences(
        q, k, (query_ends, key_ends), (longest_query, longest_key), causal,
        window_size_left, window_size_right, seqused_k,
    )  # fmt: skip
    out = torch.zeros_like(q)
    log_sum = torch.full((q.shape[1], len(q)), float("inf"))  # of rows without keys
    for queries, keys in seen.pairs:
        if keys.start == keys.stop:
            continue
        scores = seen.scores(queries, keys, scale)
        log_sum[:, queries] = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1).to(v.dtype)
        out[queries] = (weights @ seen.heads(v, keys)).transpose(0, 1)
    nothing = q.new_empty(0)
    return out, log_sum, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def _backward(
    grad, q, k, v, out, log_sum, query_ends, key_ends, longest_query, longest_key, dropout,
    causal, random, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert grad.is_contiguous()
    assert random.dtype == torch.uint64
    seen = _Sequences(
        q, k, (query_ends, key_ends), (longest_query, longest_key), causal,
        window_size_left, window_size_right,
    )  # fmt: skip
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in seen.pairs:
        p = torch.exp(seen.scores(queries, keys, scale) - log_sum[:, queries, None]).to(q.dtype)
        grad_out, value = grad[queries].transpose(0, 1), seen.heads(v, keys)
        delta = (grad_out * out[queries].transpose(0, 1)).sum(-1, keepdim=True)
        grad_scores = p * (grad_out @ value.transpose(1, 2) - delta) * scale
        grads[0][queries] += (grad_scores @ seen.heads(k, keys)).transpose(0, 1)
        for total, each in (
            (grads[1], grad_scores.transpose(1, 2) @ q[queries].transpose(0, 1)),
            (grads[2], p.transpose(1, 2) @ grad_out),
        ):
            total[keys] += each.transpose(0, 1).unflatten(1, (-1, seen.group)).sum(2)
    return grads
