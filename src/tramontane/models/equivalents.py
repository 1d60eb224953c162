"""A check of text halves that are loaded as a causal LM of another architecture
(`families.EQUIVALENTS`): the two compute the same, with the checkpoint's own config."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.families import (
    SAME,
    ForwardFails,
    deviation,
    short_windows,
    transformers_fails,
)
from tramontane.models.miniature import draw_wide, small_configs
from tramontane.models.wrapped import LOADING, converted

_TOKENS = 24


def check_equivalent(name: str, own: PreTrainedConfig, half: PreTrainedConfig) -> None:
    """Check that a text half computes what its wrapper's text model does, on a small model of each
    with the same random weights, in less than a second; configs that were checked are remembered.

    Args:
        name: of the checkpoint.
        own: the wrapper's config.
        half: that of its text half as a causal LM.

    Raises:
        InputError: they differ.
    """
    text = own.get_text_config()
    if half.model_type == text.model_type:
        return
    cls: Any = type(text)
    apart = _largest_deviation(cls, text.to_json_string(use_diff=False), half.model_type)
    if apart > SAME[torch.float32]:
        raise InputError(
            f"model {name!r}: with this config, {own.model_type} computes something else on text "
            f"than {half.model_type}, as which its text half is loaded (they differ by {apart:.2g} "
            f"standard deviations); choose another model"
        )


@functools.cache
def _largest_deviation(cls: type[PreTrainedConfig], values: str, kind: str) -> float:
    """0 where transformers does not run the text model by itself, or where names or shapes of the
    weights differ, which are then missed on loading."""
    model = _text_model(cls)
    *divided, whole = small_configs(cls(**json.loads(values)))
    for small in (divided[:2] or [whole]) if model else ():
        with suppress(ForwardFails):  # only of these widths
            return _deviation(model, small, kind)
    return 0.0


def _deviation(model: Any, small: PreTrainedConfig, kind: str) -> float:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with transformers_fails("code"), LOADING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        first = model._from_config(small, **options).eval()
        second = AutoModelForCausalLM.from_config(converted(small, kind), **options).eval()
        draw_wide(first)
        body = second.base_model
        weights = first.state_dict()
        if _shapes(weights) != _shapes(body.state_dict()):
            return 0.0
        body.load_state_dict(weights)
        ids = torch.randint(0, small.vocab_size, (1, _TOKENS))
        with short_windows(first), short_windows(body):
            states = [part(input_ids=ids, use_cache=False)[0][0] for part in (first, body)]
    return float(deviation(states[1], states[0]).max())


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _text_model(cls: type[PreTrainedConfig]) -> Any:
    """The class of transformers that computes the hidden states of a text half; None: not found."""
    module = importlib.import_module(cls.__module__.replace(".configuration_", ".modeling_"))
    models = [
        model
        for _, model in inspect.getmembers(module, inspect.isclass)
        if issubclass(model, PreTrainedModel) and model.config_class is cls
    ]
    return next((model for model in models if model.__name__.endswith("TextModel")), None)
