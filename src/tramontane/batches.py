"""A batch on its way to the trainer: Group → Batch → TrainBatch, whose sequences are token ids and
numbers only. Plain data, like `types`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tramontane.statistics import merged
from tramontane.tokens import AllowedTokens, EarlierSequence, ints
from tramontane.types import Completion, Group, TrainedFigures, Verdict

Vote = Callable[[str], str | None]  # the key under which an answer counts


@dataclass(frozen=True)
class BatchSettings:
    """Settings that a batch's completions were sampled and are trained with."""

    stage: str  # name of the curriculum's stage; empty in a run without stages
    temperature: float  # the sampling temperature
    l_max: int  # longest completion allowed, in tokens
    n_minibatch: int  # completions per optimizer step
    # The objective's section of the config, which a stage may change; None: the trainer's own
    # config has it.
    options: Any = None
    # The same batches give the same bits; False: the trainer's threads share its work as they
    # become free.
    repeatable: bool = True


@dataclass
class TeacherScores:
    """A teacher's log-probs of one sequence of T tokens, at the temperature of sampling."""

    logprobs: NDArray[np.float32]  # [T] float32, of the sequence's tokens
    # [T, k] int32, the k likeliest tokens at each place; [T, 0] if the whole vocabulary is scored.
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]  # [T, k] float32, theirs; or [T, V], of the whole vocabulary

    def zeros(self, tokens: int) -> TeacherScores:
        """Zeros of the same form for another number of tokens."""
        arrays = vars(self).values()
        return TeacherScores(*(np.zeros((tokens, *x.shape[1:]), x.dtype) for x in arrays))


@dataclass
class TrainSequence:
    """A completion as the trainer receives it: token ids and numbers, in compact arrays. A forked
    conversation is several consecutive sequences, with one advantage."""

    prompt_ids: array[int]  # int array, the prompt's tokens
    token_ids: array[int]  # int array [T], the generated tokens
    # float32 array [T], log-probability of each token under the distribution that it was drawn
    # from; 0 for a given response, which was not sampled.
    logprobs: array[float]
    # int array [T], the weights version that sampled each token, or `ELSEWHERE` or `INSERTED`.
    versions: array[int]
    reward: float = 0.0  # the verdict's reward
    scored: bool = True  # False without a verdict; the sequence is then left out of training
    answer: int = -1  # equal for equal answers of a group; −1 for none
    # Number of tokens at the end that are a given answer, i.e. the reference answer instead of the
    # sampled one.
    target: int = 0
    replaced: int = 0  # number of sampled tokens that the given answer replaces
    # True if its completion was cut at the longest length, by its own tokens or by what an
    # environment answered.
    truncated: bool = False
    continues: bool = False  # True if it belongs to the same conversation as the sequence before it
    # See `tokens.SampledTokens`.
    experts: NDArray[np.int16] | None = None
    allowed: AllowedTokens | None = None
    # Of the prompt, and of the tokens put in behind it, as data URIs.
    images: tuple[str, ...] = ()
    put_images: tuple[str, ...] = ()
    # A teacher's log-probs, if the objective learns from them here.
    teacher: TeacherScores | None = None

    @classmethod
    def of(
        cls,
        completion: Completion | EarlierSequence,
        verdict: Verdict | None = None,
        prompt_ids: array[int] | None = None,
    ) -> TrainSequence:
        """The (last) sequence of a completion, whose arrays it shares; not scored without a
        verdict.

        `prompt_ids`: the prompt's array, which a group's sequences may share, so that a message
        holds it once.
        """
        return cls(
            prompt_ids=ints(completion.prompt_ids) if prompt_ids is None else prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            experts=completion.experts,
            allowed=completion.allowed,
            reward=verdict.reward if verdict else 0.0,
            scored=verdict is not None,
            images=tuple(completion.images),
            put_images=tuple(completion.put_images),
        )


@dataclass
class TrainBatch:
    """One update's training data: whole groups of sequences, to train on at weights version
    `version`."""

    version: int
    groups: list[list[TrainSequence]]
    settings: BatchSettings

    @property
    def sequences(self) -> list[TrainSequence]:
        return [s for group in self.groups for s in group]


@dataclass
class Batch:
    """`n_batch` completions in whole graded groups, to train on at weights version `version`. The
    controller keeps it for the records, and the trainer receives its `train_batch`. After training,
    `learned` has the trainer's figures of all completions, in order.
    """

    version: int
    groups: list[Group]
    settings: BatchSettings
    learned: TrainedFigures | None = None

    @property
    def completions(self) -> list[Completion]:
        return [c for g in self.groups for c in g.completions]

    def share_learned(self) -> None:
        """Give each group its part of `learned`, if any."""
        if (learned := self.learned) is None:
            return
        sequence = token = 0
        for group in self.groups:
            lasts = [*accumulate(len(c.sequences) for c in group.completions)]
            tokens = token + sum(c.n_tokens for c in group.completions)
            group.learned = TrainedFigures(
                array("d", [learned.advantages[sequence + last - 1] for last in lasts]),
                learned.logprobs[token:tokens],
            )
            sequence, token = sequence + lasts[-1], tokens

    def train_batch(self, vote: Vote) -> TrainBatch:
        """The same groups as tokens, rewards and versions only."""
        groups = []
        for group in self.groups:
            prompt = group.completions[0].sequences[0].prompt_ids
            shared = array("i", prompt)  # environments may begin a problem differently
            sequences = []
            for completion, verdict, answer in zip(
                group.completions, group.verdicts, _answers(group, vote), strict=True
            ):
                for number, part in enumerate(completion.sequences):
                    ids = shared if part.prompt_ids == prompt else ints(part.prompt_ids)
                    sequence = TrainSequence.of(part, verdict, ids)
                    sequence.answer, sequence.continues = answer, number > 0
                    sequence.truncated = (
                        completion.finish_reason == "length" or completion.ending == "context_full"
                    )
                    sequences.append(sequence)
            groups.append(sequences)
        return TrainBatch(self.version, groups, self.settings)


def _answers(group: Group, vote: Vote) -> Iterator[int]:
    """A number for each verdict's answer, by its vote as in maj@k: 0 if right, −1 without one.
    Programs count as written."""
    key = vote if group.problem.tests is None else str.strip
    answers = [verdict.answer for verdict in group.verdicts]
    votes = [None if answer is None else key(answer) for answer in answers]
    numbers: dict[str | bool, int] = {True: 0}
    for voted in merged(votes, [verdict.verdict == "right" for verdict in group.verdicts]):
        yield -1 if voted is None else numbers.setdefault(voted, len(numbers))
