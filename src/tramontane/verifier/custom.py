"""The user's own rewards: Python functions named by import path, added to the four axes.

A function takes (problem, text, n_tokens) and returns a number between 0 and 1; its part of the
reward is that number times its weight. It runs where `reward.grade` runs, in a worker process of
the pool, so that time and memory are bounded; an exception makes the completion unscorable.
"""

from __future__ import annotations

from tramontane.config import CustomReward
from tramontane.types import Problem
from tramontane.verifier import functions

PARAMETERS = ("problem", "text", "n_tokens")


class RewardFailed(Exception):
    """A reward function raised an exception, or did not return a number between 0 and 1."""


def check(reward: CustomReward) -> None:
    """Import a reward function.

    Raises:
        InputError: see `functions.check`.
    """
    functions.check(reward.function, f"verifier.reward.custom: {reward.name}", PARAMETERS)


def part(reward: CustomReward, problem: Problem, text: str, n_tokens: int) -> float:
    """The weighted part of the reward that one function gives a completion.

    Raises:
        RewardFailed: the function failed; the message names the reward.
    """
    try:
        value = float(functions.load(reward.function)(problem, text, n_tokens))
    except Exception as error:  # `grade` makes it unscorable
        raise RewardFailed(f"{reward.name}: {type(error).__name__}: {error}") from error
    if not 0 <= value <= 1:  # NaN fails too
        raise RewardFailed(f"{reward.name}: {value:g} is not between 0 and 1")
    return reward.weight * value
