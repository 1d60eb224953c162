"""The engine's calls of the model: packed prefill, one-token decode, and a compatibility check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import Cache, PreTrainedModel

from tramontane.errors import InputError
from tramontane.generator.arena import ArenaCache
from tramontane.generator.attention import forward_over
from tramontane.generator.cache import SlotCache
from tramontane.generator.fusion import uncompiled
from tramontane.generator.graphs import ValueReadDetector
from tramontane.generator.lanes import Layout, PackedCache, Prefix, RecordedCache, WrittenCache
from tramontane.generator.parking import NOTHING, Context, ContinuedCache
from tramontane.models.attention import uses_interface
from tramontane.models.cached import cache_argument
from tramontane.models.families import SAME, deviation, short_sequences, short_windows
from tramontane.models.latent import keep_latents
from tramontane.models.packing import pack, recurring
from tramontane.models.states import separate_states, stateful_layers
from tramontane.models.vision import Pictured, Vision

_STEPS = 4  # that are checked
SHAPES_PER_OCTAVE = 8  # filler adds 4 % to linear layers
_ADVICE = "the embedded generator cannot run it; choose another model"
_STATE_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}
_CACHED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def prefill(
    model: PreTrainedModel,
    layout: Layout,
    contexts: Sequence[Context],
    most: int,
    vision: Vision | None = None,
) -> Iterator[Prefix]:
    """Keys and values of contexts.

    Args:
        model: prepared by `examine_model`.
        layout: layout of its keys and values.
        contexts: what to compute; nothing is computed for known tokens.
        most: maximum number of tokens, known ones included, that are prefilled at once; a longer
            context gets its own forward.
        vision: makes the features of the contexts' images; None if they have none.
    """
    start = 0
    while start < len(contexts):
        end, tokens = start + 1, len(contexts[start].tokens)
        while end < len(contexts) and tokens + len(contexts[end].tokens) <= most:
            tokens += len(contexts[end].tokens)
            end += 1
        yield from _prefill_together(model, layout, contexts[start:end], vision)
        start = end


def _prefill_together(
    model: PreTrainedModel, layout: Layout, contexts: Sequence[Context], vision: Vision | None
) -> list[Prefix]:
    pasts = [context.take() for context in contexts]
    new = [c.tokens[past.length :] for c, past in zip(contexts, pasts, strict=True)]
    made = dict.fromkeys(range(len(new)), NOTHING)
    # A prompt of one token has nothing to cache, and a forward takes no empty sequence.
    for continued in (False, True):
        if rows := [i for i in made if new[i] and continued == bool(pasts[i].length)]:
            lengths = [len(new[i]) for i in rows]
            filler = [[0] * n] if (n := _filler(model, sum(lengths))) else []
            filled = [*lengths, *map(len, filler)]
            inputs = pack([*(new[i] for i in rows), *filler], model.device)
            own = [contexts[i] for i in rows]
            cache = PackedCache(layout, sum(filled), [{}] * len(filled))
            if continued:
                cached = [*(pasts[i] for i in rows), *(NOTHING for _ in filler)]
                cache = ContinuedCache(layout, cached, filled)
                shifts = [vision.shift(c.given_ids, c.images) if vision else 0 for c in own]
                inputs["position_ids"] = cache.position_ids([*shifts, *(0 for _ in filler)])
            known = [pasts[i].length for i in rows]
            with _pictures(model, inputs, own, known, vision) as pictured:
                if isinstance(cache, ContinuedCache):
                    cache.packing = pictured["packing"]
                _packed_forward(model, pictured, cache)
            made |= zip(rows, cache.split(lengths), strict=True)
            del cache
    return [past.joined(made[i]) if past.length else made[i] for i, past in enumerate(pasts)]


def _pictures(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    contexts: Sequence[Context],
    known: Sequence[int],
    vision: Vision | None,
) -> AbstractContextManager[dict[str, Any]]:
    """Within the context, a packed forward of the tokens of `contexts` behind the first `known` of
    each takes the features of their images; its inputs, with what the images change."""
    if vision is None or not any(context.images for context in contexts):
        return nullcontext(inputs)
    lengths = (len(c.tokens) - n for c, n in zip(contexts, known, strict=True))
    ends = [*accumulate(lengths, initial=0)]
    found = [
        Pictured(start, context.given_ids, context.images, end, before)
        for start, end, context, before in zip(ends, ends[1:], contexts, known, strict=False)
        if vision.processor.token_id in context.given_ids[before:]
    ]
    return vision.entering(model, found, inputs) if found else nullcontext(inputs)


def _packed_forward(model: PreTrainedModel, inputs: dict[str, Any], cache: WrittenCache) -> None:
    """Write the keys and values of a packed row to `cache`, in one forward."""
    decode = cache if isinstance(cache, ContinuedCache) else None
    inputs = inputs | {"use_cache": True}
    # No logits are needed. As a number, it would make Gemma 4 drop positions from its last layers.
    first = torch.zeros(1, dtype=torch.int64, device=model.device)
    with forward_over(cache, decode, inputs["packing"]):
        model(**inputs, **{cache_argument(type(model).forward): cache}, logits_to_keep=first)


def decode(
    model: PreTrainedModel,
    cache: SlotCache | ArenaCache,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    unshared: torch.Tensor,
) -> torch.Tensor:
    """Feed one token to each sequence.

    Args:
        model: prepared by `examine_model`.
        cache: holds the sequences' keys and values.
        tokens: [B] int64, the newest token of each sequence.
        positions: [B] int64, those of the tokens: how many are cached, but for what a prompt's
            images shift.
        unshared: [B] int64, cached positions that are not in a shared prefix.

    Returns:
        Logits [B, V], in the model's number type.
    """
    rows = len(tokens)
    # States have no row for filler.
    if filler := 0 if cache.layout.states else _filler(model, rows):
        tokens, positions = F.pad(tokens, (0, filler)), F.pad(positions, (0, filler))
    step = cache.begin(unshared)
    with forward_over(cache, step):
        out = model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            use_cache=True,
            **{cache_argument(type(model).forward): cache},
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

    An unsuitable model fails here, not in the middle of a run.

    Returns:
        The layout of the model's keys and values, and whether a decode step can be recorded, i.e.
        its forward reads no values of tensors.

    Raises:
        InputError: the engine would not run the model, or would compute it wrongly.
    """
    name = type(model).__name__
    separate_states(model)
    keep_latents(model)
    has_state = bool(stateful_layers(model))
    if not (uses_interface(model) or has_state):
        raise InputError(f"{name} does not go through transformers' attention interface: {_ADVICE}")
    if has_state and not hasattr(Cache, "get_conv_state"):
        raise InputError(
            f"{name} carries state, which can be kept with transformers 5.21 or newer, and "
            f"{transformers.__version__} is installed: upgrade it (to Python 3.11 too, which it "
            f"needs), or choose another model"
        )
    layers = set(getattr(model.config, "layer_types", None) or ())
    if uncached := sorted(layers - _CACHED_LAYERS - (_STATE_LAYERS if has_state else set())):
        raise InputError(
            f"{name} has layers of kind {', '.join(uncached)}, whose state is not keys and values: "
            f"{_ADVICE}"
        )
    model.set_attn_implementation("slots")
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    with uncompiled(model):
        layout = _layout(model)
        cache = SlotCache(layout, 1, max_len)
        cache.admit([0], 0, Prefix(0, []))
        cache.begin(zero)  # its first step makes tensors
        with ValueReadDetector() as detector:
            decode(model, cache, zero, zero, zero)
    if layout.shapes and not cache.reads:
        raise InputError(f"{name} never calls the attention that it was given: {_ADVICE}")
    return layout, not detector.operations


def _layout(model: PreTrainedModel) -> Layout:
    """The layout of the keys and values that a forward of one token leaves."""
    example = RecordedCache()
    _packed_forward(model, pack([[0]], model.device), example)
    return Layout(example)


@torch.inference_mode()
def check_steps(model: PreTrainedModel) -> None:
    """Check that decode steps compute what a forward of all tokens computes.

    Args:
        model: prepared by `examine_model`.

    Raises:
        InputError: they do not, e.g. since a layer takes a token's position from the cache.
    """
    sequence = max(short_sequences(model), key=len)
    known = len(sequence) - _STEPS
    with short_windows(model), uncompiled(model):
        layout = _layout(model)
        whole = model(**pack([sequence], model.device)).logits[0, known:].float()
        (prefix,) = prefill(model, layout, [Context(sequence[:known])], known)
        cache = SlotCache(layout, 1, len(sequence) + 1)
        cache.admit([0], 0, prefix)
        steps = []
        for place in range(known, len(sequence)):
            shared = known if cache.shares_prefixes else 0
            numbers = [[sequence[place]], [place], [place - shared]]
            steps.append(decode(model, cache, *torch.tensor(numbers, device=model.device)))
    error = float(deviation(torch.cat(steps).float(), whole).median())
    if error > SAME.get(model.dtype, SAME[torch.bfloat16]):  # not so for NaN, of broken weights
        raise InputError(
            f"{type(model).__name__} computes other logits in decode steps than in a forward of "
            f"all tokens (they differ by {error:.2g} standard deviations): {_ADVICE}"
        )
