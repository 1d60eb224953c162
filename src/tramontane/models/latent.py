"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) by its latents.

A token has one latent c and one rotary key r for all heads. A head's keys are [U c, r] and its
values V c, where U and V are its part of a layer's up-projection. Since q · U c = (Uᵀ q) · c, and
the weighted sum of V c is V times that of c, a decode step need not make the keys and values of the
tokens before it: its queries attend to their latents [c, r], as one key head of all query heads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

# What transformers calls the method of a layer that makes keys and values, and the projection.
_EXPAND, _PROJECTION = "expand_kv", "kv_b_proj"


class _Latent(nn.Module):
    """A layer that gives attention its latents as keys and values; mixed into its own class."""

    def expand_kv(
        self, kv_nope: Float[torch.Tensor, "B 1 N rank"], k_rot: Float[torch.Tensor, "B 1 N rope"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.cat((kv_nope, k_rot), -1)
        return latents, latents


@functools.cache
def _with_latents(cls: Any) -> Any:
    return type(cls.__name__, (_Latent, cls), {"__module__": cls.__module__})


def up_projections(model: nn.Module) -> set[nn.Linear]:
    """The layers of a model that make keys and values from latents."""
    layers = [m for m in model.modules() if hasattr(m, _EXPAND)]
    found: list[Any] = [getattr(layer, _PROJECTION, None) for layer in layers]
    return {x for x in found if type(x) is nn.Linear and x.bias is None}


def keep_latents(model: nn.Module) -> None:
    """Let a model's attention be called with latents, [B, 1, N, rank + rope], in place of both keys
    and values; it finds its `UpProjection` by the module."""
    projections = up_projections(model)
    for module in model.modules():
        if getattr(module, _PROJECTION, None) in projections and not isinstance(module, _Latent):
            cls: Any = type(module)
            module.__class__ = _with_latents(cls)


def up_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight [Hq (dn + dv), rank] of an attention layer's up-projection; None if it is called
    with keys and values."""
    if not isinstance(module, _Latent):
        return None
    weight: torch.Tensor = getattr(module, _PROJECTION).weight
    return weight


class UpProjection(NamedTuple):
    """A layer's up-projection, for queries of dn + rope and values of dv numbers."""

    weight: torch.Tensor  # [Hq (dn + dv), rank]
    heads: int  # Hq
    inner: int  # dn

    @classmethod
    def of(cls, weight: torch.Tensor, query: torch.Tensor, latents: torch.Tensor) -> UpProjection:
        """By its weight, and the shapes of queries [B, Hq, N, dn + rope] and latents."""
        rope = latents.shape[3] - weight.shape[1]
        return cls(weight, query.shape[1], query.shape[3] - rope)

    @property
    def width(self) -> int:
        """dv"""
        return len(self.weight) // self.heads - self.inner

    def _parts(self) -> tuple[torch.Tensor, ...]:
        """U [Hq, dn, rank] and V [Hq, dv, rank]."""
        return self.weight.unflatten(0, (self.heads, -1)).split([self.inner, self.width], 1)

    def expand(
        self, latents: Float[torch.Tensor, "B 1 N latent"]
    ) -> tuple[Float[torch.Tensor, "B Hq N d"], Float[torch.Tensor, "B Hq N dv"]]:
        """Keys and values of all heads."""
        rank = self.weight.shape[1]
        made = F.linear(latents[:, 0, :, :rank], self.weight).unflatten(2, (self.heads, -1))
        keys, values = made.transpose(1, 2).split([self.inner, self.width], 3)
        rotary = latents[..., rank:].expand(-1, self.heads, -1, -1)
        return torch.cat((keys, rotary), 3), values

    def absorb(
        self, query: Float[torch.Tensor, "B Hq N d"]
    ) -> Float[torch.Tensor, "B Hq N latent"]:
        """Queries of latents."""
        inner, rotary = query[..., : self.inner], query[..., self.inner :]
        absorbed = torch.einsum("bhnd,hdr->bhnr", inner.to(self.weight.dtype), self._parts()[0])
        return torch.cat((absorbed, rotary.to(absorbed.dtype)), 3)

    def values(self, out: Float[torch.Tensor, "B N Hq latent"]) -> Float[torch.Tensor, "B N Hq dv"]:
        """Weighted sums of values, from those of latents."""
        rank = self.weight.shape[1]
        return torch.einsum("bnhr,hdr->bnhd", out[..., :rank], self._parts()[1])
