"""LongRoPE (arXiv 2402.13753), as in Phi-3 and Phi-4-mini: a model has two sets of rotary
frequencies, for sequences up to its original context and for longer ones.

transformers chooses between them by the longest sequence of a forward, so a sequence's log-probs
depend on what else is in its batch, and change when it grows past the original context, also those
of its earlier tokens. Here one set applies to all sequences of a model, whatever their length: the
long one, as in vLLM for a context beyond the original; or the short one, with the key
`rope_factors: short` in the checkpoint's `config.json`, which limits the context to the original.
The config says so by two equal sets, and a saved model keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tramontane.errors import InputError

KEY = "rope_factors"  # in a checkpoint's config.json


def unify(config: Any) -> None:
    """Give a transformers config with LongRoPE the same factors for all lengths.

    Raises:
        InputError: `rope_factors` is neither `long` nor `short`.
    """
    kept = getattr(config, KEY, "long")
    if kept not in ("long", "short"):
        raise InputError(f"{KEY} in the model's config.json is {kept!r}; choose long or short")
    other = "short" if kept == "long" else "long"
    for rope in _ropes(config, "longrope"):
        # PhiMoE also has a scale of queries and keys for each.
        for part in ("factor", "mscale"):
            if f"{kept}_{part}" in rope:
                rope[f"{other}_{part}"] = rope[f"{kept}_{part}"]


def original_context(config: Any) -> int | None:
    """Positions of the original context, if that is the limit: with `rope_factors: short`."""
    if getattr(config, KEY, "long") == "long":
        return None
    ropes = _ropes(config, "longrope")
    return min((int(rope["original_max_position_embeddings"]) for rope in ropes), default=None)


def dynamic_context(config: Any) -> int | None:
    """Positions up to which a model with dynamic NTK scaling has the same rotary frequencies for
    all sequences; beyond them, transformers computes them from the longest sequence of a forward.
    None for other models."""
    return config.max_position_embeddings if any(_ropes(config, "dynamic")) else None


def _ropes(config: Any, kind: str) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a `rope_type`: one set, or several by kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == kind:
            yield rope
