"""Writes the text half of a multimodal model as a checkpoint of its own, for tools that read only
causal LMs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tramontane.errors import InputError
from tramontane.models import wrapped
from tramontane.models.loading import converts_weights, load_model, load_own_config, load_tokenizer
from tramontane.models.names import folder_of, has_tokenizer
from tramontane.models.tokenizers import save_tokenizer
from tramontane.models.weight_files import WeightFiles, write_files
from tramontane.models.wrapped import LOADING, TextHalf, write_config
from tramontane.workplace import whole_folder


def extract(parent: str, out: str | Path) -> Path:
    """Write a multimodal model's text half, with its tokenizer, in the number type of its files.

    Tensors are copied one at a time, bit for bit, unless transformers converts their layout.
    Quantized weights are written as plain ones, in the number type of the config. The config names
    the parent and its commit, so that `transplant` puts a trained half back.

    Args:
        parent: checkpoint folder or name of the multimodal model.
        out: folder of the result, which must not exist or be empty.

    Returns:
        `out`.

    Raises:
        InputError: the model wraps no language model, is damaged or quantized in a way that cannot
            be undone, or `out` is not empty or is being written by another process.
    """
    out = Path(out)
    with whole_folder(out, "written") as unfinished:
        folder = folder_of(parent)
        half = wrapped.find(parent, load_own_config(parent), folder)
        if half is None:
            raise InputError(f"model {parent!r}: wraps no language model, so there is no text half")
        with LOADING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(half.config)
        if (files := _copyable(model, half, folder)) is None:
            model = load_model(parent, model.dtype)
            model.save_pretrained(unfinished)
        else:
            write_files(unfinished, files.entries(), ((n, files.read(n)) for n in files.names))
        write_config(model, unfinished)
        if (folder / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(folder).save_pretrained(unfinished)
        if has_tokenizer(folder):
            save_tokenizer(load_tokenizer(parent), unfinished)
    return out


def _copyable(model: PreTrainedModel, half: TextHalf, folder: Path) -> WeightFiles | None:
    """The files whose tensors are the text half's as they stand; None: they must be loaded."""
    quantized = getattr(half.config, "quantization_config", None) is not None
    if half.names is None or quantized or converts_weights(model):
        return None
    files = WeightFiles(folder, half.names)
    return files if files.misfit(model) is None else None
