"""The reward of `vs_trl.py`, for both sides: a function of the text alone, without a dependency."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile(r"<think>([^<]*)</think>[^<]*\\boxed\{[^{}]*\}[^<]*")


def reward(text: str) -> float:
    """Share of vowels among the characters of the thoughts; 0 for a malformed response."""
    match = _FORM.fullmatch(text)
    if match is None or not match[1]:
        return 0.0
    return sum(c in "aeiou" for c in match[1]) / len(match[1])


def plain_reward(text: str) -> float:
    """Share of vowels among all characters, for a model that was not taught the format."""
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def custom(problem: Any, text: str, n_tokens: int) -> float:
    """`reward` with the signature that `verifier.reward.custom` requires."""
    return reward(text)


def plain_custom(problem: Any, text: str, n_tokens: int) -> float:
    """`plain_reward` with the signature that `verifier.reward.custom` requires."""
    return plain_reward(text)
