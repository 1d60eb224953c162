"""A text-state environment: partial solutions of playground problems, with exact values.

A state is a problem with the first t steps of its solution, an action is the text of the next step.
The behaviour policy writes each step right with probability p, and otherwise with a wrong result,
from which it continues. The reward is 1 if all steps are right. So V = p^(steps left) while all
steps so far are right and 0 afterwards, Q(s, a) is V of the state after the action, and the
advantage is their difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy as np

from tramontane.data import playground
from tramontane.data.playground.arithmetic import Step, apply
from tramontane.data.playground.generate import Split
from tramontane.data.playground.traces import Style, near_miss, trace
from tramontane.data.prompts import PromptEncoder


@dataclass(frozen=True)
class Solution:
    """A solution of n steps, as tokens.

    Args:
        prompt_ids: int array, the problem.
        token_ids: int array, the whole response with its EOS.
        starts: index in `token_ids` of the first token of each step, and of what follows the last
            step: n + 1 numbers. State t is everything before `starts[t]`, and action t is the
            tokens from `starts[t]` to `starts[t + 1]`.
        right: True for state t if its first t steps are right: n + 1 values.
    """

    prompt_ids: array[int]
    token_ids: array[int]
    starts: tuple[int, ...]
    right: tuple[bool, ...]

    @property
    def steps(self) -> int:
        return len(self.starts) - 1

    def values(self, p: float) -> np.ndarray:
        """V of each state under a policy whose steps are right with probability p: [n + 1]."""
        left = np.arange(self.steps, -1, -1)
        return np.where(self.right, p**left, 0.0)


def solutions(
    encoder: PromptEncoder, split: Split, seed: int, *, levels: tuple[int, int], p: float
) -> Iterator[Solution]:
    """Solutions by the behaviour policy of English problems, without end.

    Args:
        encoder: makes prompts, and has the tokenizer.
        split: split of the playground's problems.
        seed: of problems, slips and wording.
        levels: easiest and hardest level.
        p: probability that a step is right.
    """
    rng = Random(f"solutions/{split}/{seed}")
    for problem in playground.problems(split, seed, levels, ("en",)):
        steps, right = slipped([tuple(step) for step in problem.metadata["steps"]], rng, p)
        written = replace(problem, metadata={**problem.metadata, "steps": steps})
        text = trace(written, rng, Style())
        (prompt,) = encoder.encode_all([problem.problem])
        encoded = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        starts = [0] + [int(np.searchsorted(begins, end)) for end in step_ends(text, steps)]
        tokens = array("i", [*encoded["input_ids"], encoder.tokenizer.eos_token_id])
        yield Solution(array("i", prompt), tokens, tuple(starts), right)


def slipped(steps: list[Step], rng: Random, p: float) -> tuple[list[Step], tuple[bool, ...]]:
    """The chain as the policy works it, and whether all steps are right before and after each."""
    worked: list[Step] = []
    right = [True]
    value = steps[0][0]
    for _, op, b, _ in steps:
        result = apply(value, op, b)
        is_right = rng.random() < p
        written = result if is_right else near_miss(rng, result)
        worked.append((value, op, b, written))
        right.append(right[-1] and is_right)
        value = written
    return worked, tuple(right)


def step_ends(text: str, steps: list[Step]) -> list[int]:
    """The position after each step's sentence in a trace."""
    ends, position = [], 0
    for a, op, b, c in steps:
        equation = f"{a} {op} {b} = {c}"
        position = text.index(equation, position) + len(equation)
        while position < len(text) and text[position] in ".,;:!":
            position += 1
        ends.append(position)
    return ends


def take_tokens(stream: Iterator[Solution], tokens: int) -> list[Solution]:
    """The next solutions, as many as reach `tokens` tokens with their prompts."""
    taken: list[Solution] = []
    used = 0
    while used < tokens:
        taken += islice(stream, 1)
        used += len(taken[-1].prompt_ids) + len(taken[-1].token_ids)
    return taken
