"""The engine's calls of the model: packed prefill, one-token decode, and a compatibility check."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator import attention  # noqa: F401 (registers `slots`)
from tramontane.generator.arena import ArenaCache
from tramontane.generator.cache import SlotCache
from tramontane.generator.fusion import uncompiled
from tramontane.generator.graphs import ValueReadDetector
from tramontane.generator.lanes import Layout, PackedCache, Prefix, RecordedCache, WrittenCache
from tramontane.models.packing import pack, recurring

SHAPES_PER_OCTAVE = 8  # filler adds 4 % to linear layers
_ADVICE = "the embedded generator cannot run it; choose another model"
_CACHED_LAYERS = {"full_attention", "sliding_attention"}


def prefill(
    model: PreTrainedModel, layout: Layout, sequences: Sequence[Sequence[int]]
) -> list[Prefix]:
    """Keys and values of non-empty token sequences, computed in one packed forward."""
    lengths = [len(sequence) for sequence in sequences]
    if filler := _filler(model, sum(lengths)):
        sequences = [*sequences, [0] * filler]
    cache = PackedCache(layout, sum(lengths) + filler)
    _prefill(model, sequences, cache)
    return cache.split(lengths)


def _prefill(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], cache: WrittenCache
) -> None:
    inputs = pack(sequences, model.device).model_inputs | {"use_cache": True}
    model(**inputs, past_key_values=cache, logits_to_keep=1)


def decode(
    model: PreTrainedModel,
    cache: SlotCache | ArenaCache,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    unshared: torch.Tensor,
) -> torch.Tensor:
    """Feed one token to each sequence.

    Args:
        model: prepared by `examine_model`.
        cache: holds the sequences' keys and values.
        tokens: [B] int64, the newest token of each sequence.
        lengths: [B] int64, cached positions of each sequence.
        unshared: [B] int64, cached positions that are not in a shared prefix.

    Returns:
        Logits [B, V], in the model's number type.
    """
    rows = len(tokens)
    if filler := _filler(model, rows):
        tokens, lengths = F.pad(tokens, (0, filler)), F.pad(lengths, (0, filler))
    out = model(
        input_ids=tokens[:, None],
        position_ids=lengths[:, None],
        past_key_values=cache,
        use_cache=True,
        decode=cache.begin(unshared),
    )
    return out.logits[:rows, -1]


def _filler(model: PreTrainedModel, rows: int) -> int:
    """Number of rows to add, so that shapes recur."""
    if model.device.type != "cpu" or model.dtype == torch.float32:
        return 0
    return recurring(rows, SHAPES_PER_OCTAVE) - rows


@torch.inference_mode()
def examine_model(model: PreTrainedModel, max_len: int) -> tuple[Layout, bool]:
    """Set the model's attention to `slots`, and test one prefill and one decode step.

    An unsuitable model fails here, not in mid-run.

    Returns:
        The layout of the model's keys and values, and whether a decode step can be recorded, i.e.
        its forward reads no values of tensors.

    Raises:
        InputError: the engine would not run the model, or would compute it wrongly.
    """
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise InputError(f"{name} does not go through transformers' attention interface: {_ADVICE}")
    layers = set(getattr(model.config, "layer_types", None) or ())
    if uncached := sorted(layers - _CACHED_LAYERS):
        raise InputError(
            f"{name} has layers of kind {', '.join(uncached)}, whose state is not keys and values: "
            f"{_ADVICE}"
        )
    model.set_attn_implementation("slots")
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    with uncompiled(model):
        example = RecordedCache()
        _prefill(model, [[0]], example)
        layout = Layout(example)
        cache = SlotCache(layout, 1, max_len)
        cache.admit([0], 0, Prefix(0, []))
        cache.begin(zero)  # its first step makes tensors
        with ValueReadDetector() as detector:
            decode(model, cache, zero, zero, zero)
    if not cache.reads:
        raise InputError(f"{name} does not pass keyword arguments on to its attention: {_ADVICE}")
    return layout, not detector.operations
