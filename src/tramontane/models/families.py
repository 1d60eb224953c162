"""What a family of models needs to be trained and sampled here: tables of what only some need, and
a check of what any computes.

A row holds several sequences, so a model must keep them apart: its attention goes through
transformers' attention interface, its positions are those that it is given, and no layer carries
state over a boundary. No list of architectures says which ones do. A model is run on a few short
sequences instead, once packed and once alone with its own (`eager`) attention.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from transformers import (
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)

from tramontane.errors import InputError
from tramontane.models.attention import PACKED, unknown_arguments, uses_interface
from tramontane.models.packing import pack
from tramontane.models.states import stateful_layers

# transformers 5.23 has this class, and AutoModelForCausalLM does not know it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

# Causal LMs that compute on text what text halves without a causal LM of their own compute: of
# multimodal rotary embeddings, all three positions of a text token are equal.
EQUIVALENTS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "glm_ocr_text": "glm4",
    "emu3_text_model": "llama",
    "granite4_vision_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "paddleocr_vl_text": "llama",  # ERNIE 4.5 rotates pairs, and this wrapper halves
}
# Of these text halves, keys whose default in the causal LM is not what the wrapper's code computes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "glm_ocr_text": {"attention_bias": False},
}
WHOLE_HEADS = {"glm4v_text", "glm_ocr_text"}  # are rotated, if their config does not say what part
# What causal LMs do with logits after the output head, by key of their config, with the value that
# does nothing.
SCALES = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "final_logit_softcapping": None,
}

# Of the two ways, the largest root mean square difference of a token's logits, as a share of their
# standard deviation. Faults seen are above 0.3; bfloat16 rounds differently in each way.
SAME = {torch.float32: 1e-2, torch.bfloat16: 0.25}
_LENGTHS = (13, 5, 22, 9)
_WINDOW = 4  # sliding windows during the check, so that short sequences go beyond them
# Keys of configs, and of layers, for numbers of positions from which a layer computes otherwise.
_WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale")


class ForwardFails(InputError):
    """A model cannot be built or run by transformers itself."""


@torch.no_grad()
def check_packing(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Check that a model computes the same for packed sequences as for each of them alone, also
    for one that shares the tokens before it with another.

    Args:
        model: its attention is `packed`. With sharded weights, every rank must call it.
        dtype: what it computes in; None: the number type of its weights. Sharded weights are
            float32 whatever it is.

    Raises:
        InputError: the logits differ, or the model does not take packed rows at all.
    """
    sequences = short_sequences(model)
    with _evaluating(model), short_windows(model):
        model.set_attn_implementation("eager")
        # The first is read where the last continues it: to a causal model that is the same.
        whole = [*sequences[1:-1], sequences[0] + sequences[-1]]
        *others, both = [_logits_alone(model, ids) for ids in whole]
        first, last = both.split([len(sequences[0]), len(sequences[-1])])
        alone = [first, *others, last]
        model.set_attn_implementation(PACKED)
        packed = _packed_logits(model, sequences)
    wanted = torch.cat(alone)
    if not bool(wanted.isfinite().all()):
        return  # broken weights say nothing about the family
    dtype = dtype or model.dtype
    error = deviation(packed, wanted)
    if dtype == torch.float32:
        found = error.max()
    else:  # a mixture of experts may choose other experts for a few tokens
        found = max(part.median() for part in error.split(_LENGTHS))
    if not float(found) <= SAME.get(dtype, SAME[torch.bfloat16]):
        raise InputError(
            f"{type(model).__name__} computes other logits for sequences that are packed in one "
            f"row than for each alone (they differ by {float(found):.2g} standard deviations): "
            f"{_cause(model) or 'one example would leak into the next'}. Choose another model"
        )


def deviation(
    found: Float[torch.Tensor, "N V"], wanted: Float[torch.Tensor, "N V"]
) -> Float[torch.Tensor, " N"]:
    """The root mean square difference of each token's logits, in their standard deviations."""
    return (found - wanted).square().mean(-1).sqrt() / wanted.std(-1).clamp_min(1e-6)


def short_sequences(model: PreTrainedModel) -> list[list[int]]:
    """A few short token sequences, the same for each call; few of a tokenizer's special tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 1))
    ids = torch.randint(min(8, vocabulary - 1), vocabulary, (sum(_LENGTHS),), generator=generator)
    return [part.tolist() for part in ids.split(_LENGTHS)]


def _logits(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """[N, V] float32."""
    return model(**inputs).logits[0].float()


def _logits_alone(model: PreTrainedModel, sequence: Sequence[int]) -> torch.Tensor:
    """[N, V] float32 of one sequence."""
    ids = torch.tensor([sequence], device=model.device)
    with transformers_fails(f"own forward of {type(model).__name__}"):
        return _logits(model, {"input_ids": ids, "use_cache": False})


@contextmanager
def transformers_fails(what: str) -> Iterator[None]:
    """Context manager: what fails in transformers' code fails whoever calls it.

    Raises:
        ForwardFails: an exception was raised there.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not _raised_by_model(error):
            raise
        raise ForwardFails(
            f"transformers' {what} fails ({_first_line(error)}); choose another model, or correct "
            f"its config.json"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def _packed_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, V] float32 of the sequences in one row, the last of which continues the first."""
    inputs = pack(sequences, model.device, [*[None] * (len(sequences) - 1), 0])
    try:
        return _logits(model, inputs)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not _raised_by_model(error):
            raise
        reason = _cause(model) or _first_line(error)
        raise InputError(
            f"{type(model).__name__} does not take sequences packed in one row ({reason}); choose "
            f"another model"
        ) from error


def _cause(model: PreTrainedModel) -> str:
    """Why a model does not take packed rows, as far as its code tells; empty if it does not."""
    if names := unknown_arguments(model):
        return f"it gives its attention {', '.join(names)}, which is not computed here"
    if not uses_interface(model) and not stateful_layers(model):
        return "it computes attention itself, not through transformers' attention interface"
    return ""


def _raised_by_model(error: Exception) -> bool:
    """True if an exception comes from the model's code in transformers, not from this package's in
    the same forward."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    return [p for p in packages if p in ("transformers", "tramontane")][-1] == "transformers"


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: all modules are in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model's sliding windows, and what else depends on a number of positions,
    are short, in its layers and in the configs that masks are made from; but not those that hold
    all positions of the model."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    changed = []
    for owner in (*configs.values(), *model.modules()):
        for name in _WINDOWS:
            size = vars(owner).get(name)
            if type(size) in (int, float) and _WINDOW < size < context:
                changed.append((owner, name, size))
                setattr(owner, name, _WINDOW)
    try:
        yield
    finally:
        for owner, name, size in changed:
            setattr(owner, name, size)
