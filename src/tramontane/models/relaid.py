"""A language model's weights in the layout of its multimodal parent's files, where they differ:
Qwen3-VL-MoE, for example, stores its experts together and transposed, and Qwen3-MoE one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tramontane.models.families import transformers_fails
from tramontane.models.loading import load_model, load_own_config
from tramontane.models.weight_files import Entry, WeightFiles, write_files
from tramontane.models.weights import tied_names
from tramontane.models.wrapped import LOADING


def empty_wrapper(parent: str) -> PreTrainedModel | None:
    """The whole multimodal model, without memory; None if the parent is none."""
    config = copy.deepcopy(load_own_config(parent))
    config.quantization_config = None
    wrapper: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if wrapper is None:
        return None
    with transformers_fails(f"code of {config.model_type}"), LOADING, torch.device("meta"):
        return cast(PreTrainedModel, wrapper(config))


def load_weights(language_model: str, files: WeightFiles) -> dict[str, torch.Tensor]:
    """A language model's weights by their names in the module, in the number type of its files;
    tied ones once."""
    exact = any(entry.dtype == torch.float32 for entry in files.entries().values())
    tensors = load_model(language_model, torch.float32 if exact else torch.bfloat16).state_dict(
        keep_vars=True
    )
    return {names[0]: tensors[names[0]].detach() for names in tied_names(tensors)}


def write_relaid(
    wrapper: PreTrainedModel, weights: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Write some weights of a wrapper, by their names in the module, as transformers saves them."""
    placed = revert_weight_conversion(wrapper, dict(weights))
    entries = {name: Entry(tensor.shape, tensor.dtype) for name, tensor in placed.items()}
    write_files(folder, entries, placed.items())
