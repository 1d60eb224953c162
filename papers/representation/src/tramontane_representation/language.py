"""Self-prediction on the hidden states of a causal LM, next to supervised fine-tuning, and a
text-state environment with exact values to train and probe it on.

A state is a playground problem with the first t steps of its solution, an action is the text of the
next step. The behavior policy writes each step right with probability p, and otherwise with a
wrong result, from which it continues. The reward is 1 if all steps are right. So V = p^(steps left)
while all steps so far are right and 0 afterwards, Q(s, a) is V of the state after the action, and
the advantage is their difference.

The latent of a state is the hidden state that predicts the first token after it (the input of the
output head). An action's vector is the mean of the input embeddings of its tokens. The objective
plugs into `trainer.Trainer` without changes there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy as np
import torch
from transformers import PreTrainedModel

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config.objectives import SFTOptions
from tramontane.data import playground
from tramontane.data.playground.arithmetic import Step, apply
from tramontane.data.playground.generate import Split
from tramontane.data.playground.traces import Style, near_miss, trace
from tramontane.data.prompts import PromptEncoder
from tramontane.models.packing import pack
from tramontane.trainer.objectives import Metrics, Sequences, Tokens, sft
from tramontane_representation.losses import SelfPrediction, SelfPredictionConfig

PACKED_SOLUTIONS = 16  # in one forward pass of `state_latents`


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
    """An endless stream of the behavior policy's solutions to English problems.

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
    """The next solutions, until they have at least `tokens` tokens with their prompts."""
    taken: list[Solution] = []
    used = 0
    while used < tokens:
        taken += islice(stream, 1)
        used += len(taken[-1].prompt_ids) + len(taken[-1].token_ids)
    return taken


class SelfPredictiveSFT:
    """An objective of the trainer: supervised fine-tuning plus self-prediction of the hidden states
    at step boundaries.

    The trainer does not pass hidden states to an objective, so a hook on the output head keeps
    them. The reward of a sequence, which supervised learning does not use, is its number in
    `begin`. The target is the hidden state itself under a stop-gradient, without a target network.

    Args:
        model: the LM that the trainer computes with (in float32, the one it was given).
        config: the auxiliary loss; `target_rate` has no effect.
    """

    def __init__(self, model: PreTrainedModel, config: SelfPredictionConfig) -> None:
        self.embeddings = model.get_input_embeddings()
        head = model.get_output_embeddings()
        assert head is not None
        head.register_forward_pre_hook(self._keep)
        width = head.in_features
        self.config = config
        self.predictions = SelfPrediction(width, width, config)
        self.hidden: torch.Tensor | None = None
        self.solutions: list[Solution] = []
        self.transitions = 1

    def _keep(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.hidden = inputs[0][0]

    def begin(self, solutions: list[Solution]) -> TrainBatch:
        """The batch of one optimizer step."""
        self.solutions = solutions
        horizon = self.config.steps
        # A state t of n steps has min(horizon, n − t) predictions.
        self.transitions = sum(min(horizon, s.steps - t) for s in solutions for t in range(s.steps))
        settings = BatchSettings("", temperature=1.0, l_max=0, n_minibatch=len(solutions))
        groups = [[_sequence(solution, number)] for number, solution in enumerate(solutions)]
        return TrainBatch(0, groups, settings)

    def advantages(self, sequences: Sequences, options: SFTOptions) -> torch.Tensor:
        return sft.advantages(sequences, options)

    def loss(self, tokens: Tokens, options: SFTOptions) -> tuple[torch.Tensor, Metrics]:
        """The loss of supervised fine-tuning, plus the auxiliary loss as a mean over the batch."""
        loss, metrics = sft.loss(tokens, options)
        used = (tokens.weights > 0).float()
        metrics["nll"] = (-(used * tokens.logprobs.detach()).sum(), used.sum())
        if self.config.method == "none":
            return loss, metrics
        parts = self._transitions(tokens)
        auxiliary, errors = self.predictions(*parts)
        count = parts[-1].sum()
        for name, error in errors.items():
            metrics[f"error_{name}"] = (error * count, count)
        return loss + auxiliary * count / self.transitions, metrics

    def _transitions(self, tokens: Tokens) -> tuple[torch.Tensor, ...]:
        """(latents, actions, targets, valid) of a microbatch, as `SelfPrediction` takes them."""
        assert self.hidden is not None
        firsts = torch.searchsorted(
            tokens.sequence,
            torch.arange(int(tokens.sequence[-1]) + 1, device=tokens.sequence.device),
        )
        rows: list[tuple[torch.Tensor, ...]] = []
        for first in firsts.tolist():
            solution = self.solutions[int(tokens.rewards[first])]
            states = self.hidden[first + torch.tensor(solution.starts)]
            rows.append(self._windows(states, action_vectors(self.embeddings, solution)))
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def _windows(self, states: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each state but the last, the next actions and states up to the horizon."""
        n, horizon = len(actions), self.config.steps
        ahead = torch.arange(n)[:, None] + torch.arange(horizon)
        valid = ahead < n
        inside = ahead.clamp(max=n - 1)
        return states[:-1], actions[inside], states[inside + 1], valid


def action_vectors(embeddings: torch.nn.Module, solution: Solution) -> torch.Tensor:
    """Mean input embedding of each step's tokens, without gradient: [n, width]."""
    with torch.no_grad():
        embedded = embeddings(torch.tensor(solution.token_ids))
    bounds = zip(solution.starts[:-1], solution.starts[1:], strict=True)
    return torch.stack([embedded[begin:end].mean(0) for begin, end in bounds])


def _sequence(solution: Solution, number: int) -> TrainSequence:
    length = len(solution.token_ids)
    return TrainSequence(
        prompt_ids=solution.prompt_ids,
        token_ids=solution.token_ids,
        logprobs=array("f", bytes(4 * length)),
        versions=array("i", bytes(4 * length)),
        reward=float(number),
    )


@torch.no_grad()
def state_latents(model: PreTrainedModel, solutions: list[Solution]) -> list[torch.Tensor]:
    """The latents of all states of each solution: [n + 1, width] each."""
    found = []
    for first in range(0, len(solutions), PACKED_SOLUTIONS):
        block = solutions[first : first + PACKED_SOLUTIONS]
        inputs = pack([[*s.prompt_ids, *s.token_ids] for s in block])
        hidden = model.base_model(**inputs).last_hidden_state[0]
        begin = 0
        for solution, length in zip(block, inputs["packing"].lengths, strict=True):
            before = begin + len(solution.prompt_ids) - 1
            found.append(hidden[before + torch.tensor(solution.starts)])
            begin += length
    return found
