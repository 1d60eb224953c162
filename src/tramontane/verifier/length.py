"""The soft length penalty (arXiv 2506.10910, section 2.2, equation 2)."""

from __future__ import annotations


def length_penalty(n_tokens: int, l_max: int, l_cache: int, scale: float = 0.1) -> float:
    """The penalty for a completion of `n_tokens` tokens: between −scale and 0.

    0 up to l_max − l_cache tokens, then linear, −scale from l_max on. With an `l_cache` of 0 it is
    a step: 0 up to l_max, −scale beyond.
    """
    excess = n_tokens - (l_max - l_cache)
    if excess <= 0:
        return 0.0
    if n_tokens > l_max:
        return -scale
    return -scale * excess / l_cache
