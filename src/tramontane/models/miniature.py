"""A small model of a config's family: its first layers, one of each kind, with random weights.

What a family computes for packed rows does not depend on its widths, so `tramontane train
--dry-run` checks it on this model, without reading weights.
"""

from __future__ import annotations

import copy
import math
import re
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tramontane.models.attention import PACKED
from tramontane.models.families import ForwardFails, check_packing, transformers_fails
from tramontane.models.states import separate_states
from tramontane.models.wrapped import LOADING

_VOCABULARY, _WIDTH, _EXPERTS, _LAYERS, _HIDDEN = 256, 64, 8, 2, 128
_WIDTHS = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|n_inner")
_VOCABULARIES = re.compile(r"^vocab_size")
_TOKENS = re.compile(r"(pad|bos|eos|sep)_token_id$")
_EXPERT_COUNTS = re.compile(r"(num|n_routed|num_local|moe_num)_experts$")
_EXPERT_GROUPS = re.compile(r"^(n_group|num_expert_groups?)$")
_CHOSEN = re.compile(r"experts_per_tok|^moe_top_?k$|^moe_k$|^top_k_experts$|selected_experts")
# Numbers that shrink together, so that a head keeps its width: of the residual stream, of heads and
# their groups, and of Falcon-H1's inner stream, which is heads times their width.
_PROPORTIONAL = re.compile(
    r"(^|_)hidden_size$|^(d_model|n_embd|mamba_d_ssm|num_query_groups)$"
    r"|(^|_)(n|num)_(\w+_)?heads?$|n_?groups$"
)


def miniature(config: Any) -> PreTrainedModel:
    """A float32 causal LM of a config's family on the CPU, as `models.loading.load_model` makes
    it. Its weights are wide, so that a leak from one sequence to another shows.

    Raises:
        InputError: see `check_packing`.
        ForwardFails: the family does not allow these widths.
    """
    *divided, shallow = small_configs(config, _prefix(config))
    for small in divided:
        with suppress(ForwardFails):  # only of these widths
            return _built(small)
    return _built(shallow)


def small_configs(config: Any, layers: int = _LAYERS) -> list[Any]:
    """The config with its first layers and a small vocabulary, several times: first with the
    narrowest residual stream, last with its own."""
    shallow = _with_layers(_narrow(config), layers)
    factors = [
        factor
        for factor in (64, 32, 16, 8, 4, 2)
        if config.hidden_size % factor == 0 and config.hidden_size >= factor * _HIDDEN
    ]
    return [*(_divided(shallow, factor) for factor in factors), shallow]


def draw_wide(model: PreTrainedModel) -> None:
    """Add noise to a model's matrices, so that what it computes differs from token to token."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.add_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)


def _built(small: Any) -> PreTrainedModel:
    with LOADING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with transformers_fails(f"code of a small {small.model_type}"):
            model = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation="eager"
            )
        draw_wide(model)
    model.set_attn_implementation(PACKED)
    separate_states(model)
    check_packing(model.eval())
    return model


def _narrow(config: Any) -> Any:
    """The config with a small vocabulary, narrow MLPs and few experts."""
    values = config.to_dict()
    groups, chosen = (
        max((v for k, v in values.items() if type(v) is int and v and names.search(k)), default=1)
        for names in (_EXPERT_GROUPS, _CHOSEN)
    )
    experts = max(_EXPERTS, 4 * groups, 2 * chosen)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and _WIDTHS.search(name):  # one for each layer
            changes[name] = [min(x, _WIDTH) for x in value]
        if type(value) is not int:
            continue
        if _WIDTHS.search(name):
            changes[name] = min(value, _WIDTH)
        elif _VOCABULARIES.search(name):
            changes[name] = min(value, _VOCABULARY)
        elif _EXPERT_COUNTS.search(name):
            changes[name] = min(value, -(-experts // groups) * groups)
        elif _TOKENS.search(name):
            changes[name] = min(value, _VOCABULARY - 1)
    return _changed(config, changes)


def _divided(config: Any, factor: int) -> Any:
    """The config with its residual stream and all numbers of heads divided by a power of two; a
    number that has fewer factors of two, by those that it has."""
    changes: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if type(value) is int and _PROPORTIONAL.search(name):
            changes[name] = value // math.gcd(value, factor)
        elif isinstance(value, list) and _PROPORTIONAL.search(name):  # one for each layer
            changes[name] = [n // math.gcd(n, factor) for n in value]
    return _changed(config, changes)


def _prefix(config: Any) -> int:
    """Number of first layers that has one of each kind."""
    with transformers_fails(f"code of {config.model_type}"), LOADING, torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    blocks = [m for m in whole.modules() if type(m).__name__ in (whole._no_split_modules or ())]
    kinds = list(getattr(config, "layer_types", None) or [])
    seen: dict[Any, int] = {}
    for place, block in enumerate(blocks):
        kind = kinds[place] if place < len(kinds) else None
        parts = tuple(type(module).__name__ for module in block.modules())
        seen.setdefault((kind, parts), place)
    return max(_LAYERS, *(place + 1 for place in seen.values())) if seen else _LAYERS


def _with_layers(config: Any, count: int) -> Any:
    """The config with its first layers; of keys with an entry a layer, as many entries."""
    values, whole = config.to_dict(), getattr(config, "num_hidden_layers", count)
    lists = {k: v[:count] for k, v in values.items() if isinstance(v, list) and len(v) == whole}
    return _changed(config, lists | {"num_hidden_layers": min(count, whole)})


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
