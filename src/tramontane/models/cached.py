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
from tramontane.models.states import StateCache

_MEASURED = "measured"
# Queries, keys and values of each call of attention in a forward, kept so that ids stay unique.
_calls: ContextVar[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = ContextVar("_calls")


class Cached(NamedTuple):
    """Sizes as the embedded generator meets them: of layers with sliding windows it keeps all
    positions, and of latent attention the keys and values that are made from latents."""

    token: int  # numbers in one token's keys and values, over all layers
    sequence: int = 0  # numbers in one sequence's states, over all layers
    # Of the widest attention.
    heads: int = 1  # of queries
    kv_heads: int = 1  # of keys and values
    head_dim: int = 1

    @classmethod
    def of(cls, model: PreTrainedModel) -> Cached:
        """Measure a forward of one token.

        Args:
            model: on the meta device; its number type becomes bfloat16, and its attention another.
        """
        cache = StateCache()
        _calls.set([])
        model.bfloat16()  # which kernels of experts want
        model.set_attn_implementation(_MEASURED)
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=ids, use_cache=True, **{cache_argument(type(model).forward): cache})
        calls = _calls.get()
        # Some layers attend to the keys and values of an earlier one.
        kept = {id(x): x.numel() for _, *pair in calls for x in pair}
        states = sum(x.numel() for x in cache.states.values())
        if not calls:
            return cls(0, states)
        query, key, _ = max(calls, key=lambda call: call[0].numel())
        return cls(sum(kept.values()), states, query.shape[1], key.shape[1], query.shape[-1])

    @classmethod
    def by(cls, config: PreTrainedConfig) -> Cached:
        """By the config, for code that reads numbers, which a model without memory does not have:
        of older architectures, whose layers are alike."""
        heads = getattr(config, "num_attention_heads", None) or 1
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(2 * config.num_hidden_layers * kv_heads * width, 0, heads, kv_heads, width)


def _measured(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An output of attention without values, [B, N, Hq, d]."""
    _calls.get().append((query, key, value))
    return query.new_empty((*query.shape[:-1], value.shape[-1])).transpose(1, 2), None


@functools.cache
def cache_argument(forward: Any) -> str:
    """The name that a model's forward gives its cache; models without attention differ."""
    names = inspect.signature(forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


AttentionInterface.register(_MEASURED, _measured)
AttentionMaskInterface.register(_MEASURED, no_mask)
