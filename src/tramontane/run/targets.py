"""Reference answers in place of the sampled ones, for objectives that learn from their likelihood
after each chain of thought (JEPO, arXiv 2503.19618)."""

from __future__ import annotations

from array import array

import numpy as np

from tramontane.batches import Batch, TrainBatch, TrainSequence
from tramontane.config import Config
from tramontane.config.objectives import TargetOptions
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.chat_format import ChatFormat
from tramontane.evaluation.thinking import TagFinder
from tramontane.models import loading
from tramontane.tokens import ELSEWHERE
from tramontane.types import Group


def targets_of(config: Config, encoder: PromptEncoder) -> Targets | None:
    """What puts reference answers into a batch; None if the objective does not learn from them."""
    options = config.trainer.objective.options
    if not isinstance(options, TargetOptions):
        return None
    context = loading.context_length(loading.load_config(config.model))
    return Targets(options, encoder, context)


class Targets:
    """Puts the reference answer into completions, after their thoughts.

    Args:
        options: the groups, the text after which the answer begins, and the text that follows.
        encoder: has the model's tokenizer.
        context: the model's context in tokens; None: unknown. A completion that would exceed it
            keeps its own answer.
    """

    def __init__(
        self, options: TargetOptions, encoder: PromptEncoder, context: int | None = None
    ) -> None:
        self._options, self._tokenizer, self._context = options, encoder.tokenizer, context
        self._end = ChatFormat(encoder).turn_end
        self._marker = TagFinder(encoder.tokenizer, options.target_after or encoder.tags.closing)

    def __call__(self, batch: Batch, made: TrainBatch) -> None:
        for group, sequences in zip(batch.groups, made.groups, strict=True):
            if not self._chooses(group):
                continue
            answer = self._answer(group)
            for sequence in sequences:
                self._replace_answer(sequence, answer)

    def _chooses(self, group: Group) -> bool:
        if group.problem.answer is None:
            return False
        solved = any(verdict.verdict == "right" for verdict in group.verdicts)
        return self._options.targets == "always" or not solved

    def _answer(self, group: Group) -> array[int]:
        text = self._options.target_text.replace("{answer}", group.problem.answer or "")
        return array("i", self._tokenizer(text + self._end, add_special_tokens=False)["input_ids"])

    def _replace_answer(self, sequence: TrainSequence, answer: array[int]) -> None:
        """Cut a sequence after its marker, and append the answer; without a marker, leave it."""
        place = self._marker.find(np.array(sequence.token_ids, dtype=np.int32), 0)
        if place is None:
            return
        n = place.after
        whole = len(sequence.prompt_ids) + n + len(answer)
        if self._context is not None and whole > self._context:
            return
        sequence.replaced = len(sequence.token_ids) - n
        if sequence.allowed is not None:
            sequence.allowed = sequence.allowed[:n]
        sequence.token_ids = sequence.token_ids[:n] + answer
        sequence.logprobs = sequence.logprobs[:n] + array("f", bytes(4 * len(answer)))
        sequence.versions = sequence.versions[:n] + array("i", [ELSEWHERE] * len(answer))
        sequence.target = len(answer)
