"""Ranks that compute a row together (DeepSpeed Ulysses, arXiv 2309.14509): each has a share of the
row's tokens, and in attention all tokens of a share of the heads.

The exchange between the two is one all-to-all, and its gradient is the exchange back. Attention
itself does not change: it sees the whole row, with its packing, shared prompts and windows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tramontane.errors import InputError


class HeadExchange:
    """The c ranks that compute a row of N tokens together, in the order of their tokens. Every
    method is collective, its gradient too: all of them must call it.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def of_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values [N, heads, d] of this rank's heads, and its sinks.

        Key-value heads are repeated, if need be, until the ranks can share them evenly.

        Args:
            q: [N / c, Hq, d].
            k: [N / c, Hkv, d].
            v: [N / c, Hkv, dv].
            sinks: [Hq], or None.

        Raises:
            InputError: c does not divide the number of query heads.
        """
        check_heads(q.shape[1], self.size)
        if (copies := self.size // math.gcd(self.size, k.shape[1])) > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        own = None if sinks is None else sinks.chunk(self.size)[self.rank]
        return *(_Exchange.apply(x, self, True) for x in (q, k, v)), own  # type: ignore[return-value]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens: [N, Hq / c, d] → [N / c, Hq, d]."""
        out: torch.Tensor = _Exchange.apply(x, self, False)
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' values one after another: [K, …] → [c · K, …]. The gradient is that of this
        rank's own, since all ranks go on to compute the same loss."""
        out: torch.Tensor = _Gather.apply(x, self)
        return out

    def swapped(self, x: torch.Tensor) -> torch.Tensor:
        """Part i of rank j and part j of rank i change places: [c, …]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


def check_heads(heads: int, ranks: int) -> None:
    """Check that ranks can share the query heads of a layer.

    Raises:
        InputError: they cannot.
    """
    if heads % ranks:
        raise InputError(
            f"trainer.context_parallel: {ranks} ranks cannot share the {heads} query heads of a "
            f"layer evenly; choose a divisor of {heads}"
        )


def _to_heads(x: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """[N / c, H, d] → [N, H / c, d]."""
    parts = x.unflatten(1, (exchange.size, -1)).transpose(0, 1)  # by heads
    return exchange.swapped(parts).flatten(0, 1)


def _to_tokens(x: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
    """[N, H / c, d] → [N / c, H, d]."""
    parts = x.unflatten(0, (exchange.size, -1))  # by tokens
    return exchange.swapped(parts).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: HeadExchange, by_heads: bool) -> torch.Tensor:
        ctx.exchange, ctx.by_heads = exchange, by_heads
        return (_to_heads if by_heads else _to_tokens)(x, exchange)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_to_tokens if ctx.by_heads else _to_heads)(grad, ctx.exchange), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
        ctx.exchange = exchange
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(exchange.size)]
        dist.all_gather(parts, x, group=exchange.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.exchange.size)[ctx.exchange.rank], None
