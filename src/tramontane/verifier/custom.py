"""The user's own rewards: Python functions named by import path, added to the four axes.

A function takes (problem, text, n_tokens) and returns a number between 0 and 1; its part of the
reward is that number times its weight. It runs where `reward.grade` runs, in a worker process of
the pool, so that time and memory are bounded; an exception makes the completion unscorable.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache

from tramontane.config import CustomReward
from tramontane.errors import InputError
from tramontane.types import Problem

RewardFunction = Callable[[Problem, str, int], float]


class RewardFailed(Exception):
    """A reward function raised an exception, or did not return a number between 0 and 1."""


def check(rewards: Iterable[CustomReward]) -> None:
    """Import every reward function.

    Raises:
        InputError: a name cannot be imported, or is not callable.
    """
    for reward in rewards:
        where = f"verifier.reward.custom: {reward.name}: function {reward.function!r}"
        try:
            function = load(reward.function)
        except Exception as error:  # a user's module may raise anything while it is imported
            raise InputError(
                f"{where} cannot be imported ({type(error).__name__}: {error}); name it as "
                f"module.function, the module in this folder, installed, or on PYTHONPATH"
            ) from error
        if not callable(function):
            raise InputError(f"{where} is a {type(function).__name__}, not a function")


@lru_cache
def load(path: str) -> RewardFunction:
    """Import a function by its path; the current folder is searched last."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    module, _, name = path.rpartition(".")
    function: RewardFunction = getattr(importlib.import_module(module), name)
    return function


def part(reward: CustomReward, problem: Problem, text: str, n_tokens: int) -> float:
    """The weighted part of the reward that one function gives a completion.

    Raises:
        RewardFailed: the function failed; the message names the reward.
    """
    try:
        value = float(load(reward.function)(problem, text, n_tokens))
    except Exception as error:  # `grade` makes it unscorable
        raise RewardFailed(f"{reward.name}: {type(error).__name__}: {error}") from error
    if not 0 <= value <= 1:  # NaN fails too
        raise RewardFailed(f"{reward.name}: {value:g} is not between 0 and 1")
    return reward.weight * value
