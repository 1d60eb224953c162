"""What a family of models needs to be trained and sampled here, checked by what it computes.

A row holds several sequences, so a model must keep them apart: its attention goes through
transformers' attention interface, its positions are those that it is given, and no layer carries
state over a boundary. No list of architectures says which ones do. A model is run on a few short
sequences instead, once packed and once alone with its own (`eager`) attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.attention import PACKED
from tramontane.models.packing import pack

# Of the two ways, the largest root mean square difference of a token's logits, as a share of their
# standard deviation. Faults seen are above 0.3; bfloat16 rounds differently in each way.
SAME = {torch.float32: 1e-2, torch.bfloat16: 0.25}
_LENGTHS = (13, 5, 22)
_WINDOW = 4  # sliding windows during the check, so that short sequences go beyond them


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Check that a model computes the same for packed sequences as for each of them alone.

    Args:
        model: its attention is `packed`. With sharded weights, every rank must call it.

    Raises:
        InputError: the logits differ, or the model does not take packed rows at all.
    """
    sequences = short_sequences(model)
    training = model.training
    model.eval()
    with _short_windows(model):
        packed = _packed_logits(model, sequences)
        model.set_attn_implementation("eager")
        alone = [_logits(model, _row(sequence, model)) for sequence in sequences]
        model.set_attn_implementation(PACKED)
    model.train(training)
    wanted = torch.cat(alone)
    if not bool(wanted.isfinite().all()):
        return  # broken weights say nothing about the family
    error = (packed - wanted).square().mean(-1).sqrt() / wanted.std(-1).clamp_min(1e-6)
    # A mixture of experts in bfloat16 may choose other experts for a few tokens.
    later = error[_LENGTHS[0] :]  # nothing comes before the first sequence
    found = error.max() if model.dtype == torch.float32 else later.median()
    if not float(found) <= SAME.get(model.dtype, SAME[torch.bfloat16]):
        raise InputError(
            f"{type(model).__name__} computes other logits for sequences that are packed in one "
            f"row than for each alone (they differ by {float(found):.2g} standard deviations): one "
            f"example would leak into the next, or its attention is not computed here. Choose "
            f"another model"
        )


def short_sequences(model: PreTrainedModel) -> list[list[int]]:
    """A few short token sequences, the same for each call; few of a tokenizer's special tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 1))
    ids = torch.randint(min(8, vocabulary - 1), vocabulary, (sum(_LENGTHS),), generator=generator)
    return [part.tolist() for part in ids.split(_LENGTHS)]


def _row(sequence: Sequence[int], model: PreTrainedModel) -> dict[str, Any]:
    return {"input_ids": torch.tensor([sequence], device=model.device), "use_cache": False}


def _logits(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """[N, V] float32."""
    return model(**inputs).logits[0].float()


def _packed_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, V] float32 of the sequences in one row."""
    try:
        return _logits(model, pack(sequences, model.device))
    except torch.OutOfMemoryError:  # of the machine, not of the family
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:160]
        raise InputError(
            f"{type(model).__name__} does not take sequences packed in one row ({reason}); choose "
            f"another model"
        ) from error


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model's sliding windows are short, in its layers and in the configs that
    masks are made from."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    changed = []
    for owner in (*configs.values(), *model.modules()):
        window = vars(owner).get("sliding_window")
        if isinstance(window, int) and not isinstance(window, bool) and window > _WINDOW:
            changed.append((owner, window))
            owner.sliding_window = _WINDOW
    try:
        yield
    finally:
        for owner, window in changed:
            owner.sliding_window = window
