"""Sizes of attention and of what a generator keeps of a sequence, from a model without memory."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from tramontane.models.attention import no_mask
from tramontane.models.latent import UpProjection, keep_latents, up_projections, up_weight
from tramontane.models.states import StateCache

_MEASURED = "measured"


class _Call(NamedTuple):
    """A call of attention in a forward, with its tensors, so that their ids stay unique."""

    query: torch.Tensor
    key: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor]  # keys and values, or the latents that they are made of


_calls: ContextVar[list[_Call]] = ContextVar("_calls")


class Cached(NamedTuple):
    """Sizes as the embedded generator meets them: of layers with sliding windows it keeps all
    positions, and of latent attention the latents."""

    token: int  # numbers in one token's keys and values, over all layers
    sequence: int = 0  # numbers in one sequence's states, over all layers
    # Of the widest attention.
    heads: int = 1  # of queries
    kv_heads: int = 1  # of keys and values
    head_dim: int = 1
    kept_heads: int = 1  # of what is kept, which tensor parallelism divides; 1 for latents

    @classmethod
    def of(cls, model: PreTrainedModel) -> Cached:
        """Measure a forward of one token.

        Args:
            model: on the meta device; its number type becomes bfloat16, and its attention another,
                which keeps latents.
        """
        cache = StateCache()
        _calls.set([])
        model.bfloat16()  # which kernels of experts want
        model.set_attn_implementation(_MEASURED)
        keep_latents(model)
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=ids, use_cache=True, **{cache_argument(type(model).forward): cache})
        calls = _calls.get()
        # Some layers attend to the keys and values of an earlier one.
        kept = {id(x): x.numel() for call in calls for x in call.kept}
        states = sum(x.numel() for x in cache.states.values())
        if not calls:
            return cls(0, states)
        query, key, (first, _) = max(calls, key=lambda call: call.query.numel())
        heads, kv_heads, kept_heads = (x.shape[1] for x in (query, key, first))
        return cls(sum(kept.values()), states, heads, kv_heads, query.shape[-1], kept_heads)

    @classmethod
    def by(cls, model: PreTrainedModel, config: PreTrainedConfig) -> Cached:
        """By the config and the layers' types, for code that reads numbers, which a model without
        memory does not have; layers are taken to be alike."""
        heads = getattr(config, "num_attention_heads", None) or 1
        if projections := up_projections(model):
            rope = getattr(config, "qk_rope_head_dim", 0)
            width = getattr(config, "qk_nope_head_dim", 0) + rope
            token = sum(x.in_features + rope for x in projections)
            return cls(token, 0, heads, heads, width)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        token = 2 * config.num_hidden_layers * kv_heads * width
        return cls(token, 0, heads, kv_heads, width, kv_heads)


def _measured(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An output of attention without values, [B, N, Hq, d]."""
    kept = key, value
    if (weight := up_weight(module)) is not None:
        key, value = UpProjection.of(weight, query, key).expand(key)
    _calls.get().append(_Call(query, key, kept))
    return query.new_empty((*query.shape[:-1], value.shape[-1])).transpose(1, 2), None


@functools.cache
def cache_argument(forward: Any) -> str:
    """The name that a model's forward gives its cache: `cache` from transformers 5.24 on; before,
    models without attention differed."""
    names = inspect.signature(forward).parameters
    return next(x for x in ("past_key_values", "cache", "cache_params") if x in names)


AttentionInterface.register(_MEASURED, _measured)
AttentionMaskInterface.register(_MEASURED, no_mask)
