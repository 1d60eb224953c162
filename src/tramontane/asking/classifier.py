"""A reward model: a Hugging Face sequence classifier that scores answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, TypeAlias

import torch

from tramontane.config.device import number_type
from tramontane.config.judge import RewardModelConfig
from tramontane.errors import InputError
from tramontane.models.loading import check_device, context_length, load_classifier
from tramontane.types import Message, Problem
from tramontane.verifier.custom import Answered, GroupResult
from tramontane.verifier.judge import harmless, transcript

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Largest difference of logits in a batch from those alone, as a share of the largest logit.
SAME = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# A group's log-odds that differ by more, and its probabilities by less, are saturated.
APART, ALIKE = 0.1, 1e-3
_ANSWERS = ("Yes.", "No, it is not, and here is why.", "It is right. " * 8)

Inputs: TypeAlias = "Mapping[str, Sequence[int]]"  # by name, such as input_ids, token_type_ids


class Classifier:
    """Scores answers with a classifier, by the log-odds of its last label or, if it has only one,
    its logit.

    Raises:
        InputError: no such checkpoint or device, one with more than two labels, or one whose
            scores depend on the other answers of a batch.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        check_device(config.device, "verifier.judge.reward_model.device")
        dtype = getattr(torch, number_type(config.device).dtype)
        self.model, self.tokenizer = load_classifier(config.path, dtype, config.device)
        labels: int = self.model.config.num_labels  # type: ignore[assignment]
        if labels > 2:
            raise InputError(
                f"verifier.judge.reward_model: {config.path!r} has {labels} labels; a reward model "
                f"has one or two"
            )
        # Without a padding token, the model takes one sequence at a time.
        self._size = config.batch_size if self.model.config.pad_token_id is not None else 1
        if self._size > 1:
            self._check_batches()

    @torch.inference_mode()
    def _check_batches(self) -> None:
        """Check that padded answers get the scores that each gets alone."""
        encoded = [encode(self.tokenizer, "Is it right?", answer) for answer in _ANSWERS]
        together = logits_of(self.model, encoded)
        alone = torch.cat([logits_of(self.model, [inputs]) for inputs in encoded])
        found = float((together - alone).abs().max() / alone.abs().max().clamp_min(1e-6))
        if not found <= SAME.get(self.model.dtype, SAME[torch.bfloat16]):
            raise InputError(
                f"verifier.judge.reward_model: {type(self.model).__name__} gives an answer another "
                f"score beside longer answers than alone (its logits differ by {found:.0%}), since "
                f"padding changes what it computes; set reward_model.batch_size to 1"
            )

    @torch.inference_mode()
    def score(self, problem: Problem, answers: Sequence[Answered]) -> GroupResult:
        """The scores of a problem's answers; None for one that is too long."""
        encoded = [
            encode(self.tokenizer, problem.messages or problem.problem, answer)
            for answer in answers
        ]
        limit = min(self.config.max_tokens, context_length(self.model.config) or math.inf)
        fits = [i for i, inputs in enumerate(encoded) if len(inputs["input_ids"]) <= limit]
        odds = torch.full((len(answers),), torch.nan)
        for start in range(0, len(fits), self._size):
            places = fits[start : start + self._size]
            logits = logits_of(self.model, [encoded[i] for i in places]).cpu()
            odds[places] = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)
        kind = self.config.scores
        if kind == "standardized" or (kind == "auto" and saturated(odds)):
            odds = standardized(odds)
        scores = odds.sigmoid().tolist()
        values = [scores[i] if i in fits else None for i in range(len(answers))]
        bound = "reward_model.max_tokens" if limit == self.config.max_tokens else "its context"
        long = f"judge: longer than {limit} tokens ({bound})"
        return GroupResult(values, notes=[long if v is None else "" for v in values])


def saturated(odds: torch.Tensor) -> bool:
    """True if the probabilities of log-odds [N] hide how much these differ; NaN is left out."""
    known = odds[~odds.isnan()]
    if len(known) < 2:
        return False
    chances = known.sigmoid()
    return bool(known.max() - known.min() > APART and chances.max() - chances.min() < ALIKE)


def standardized(values: torch.Tensor) -> torch.Tensor:
    """Values [N] less their mean, divided by their population standard deviation; NaN is left out
    and stays. Zeros where all are equal."""
    known = values[~values.isnan()].double()
    spread = known.std(correction=0) if len(known) else values.new_ones(())
    return ((values - known.mean()) / spread.clamp_min(1e-6)).to(values.dtype)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], answer: Answered
) -> Inputs:
    """What a reward model reads, by the names of its inputs: a chat that ends with the answer, or
    without a chat template, the pair of prompt and answer. Answers of tools are the user's, as
    reward models have no other role for them."""
    if not tokenizer.chat_template:
        if not isinstance(answer, str) and answer[0][0] != "assistant":
            first = next(i for i, (role, _) in enumerate(answer) if role == "assistant")
            prompt = [Message(role=role, content=text) for role, text in answer[:first]]
            answer = answer[first:]
        pair = [harmless(transcript(each)) for each in (prompt, answer)]
        return tokenizer(*pair, return_attention_mask=False)
    asked = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    said = [("assistant", answer)] if isinstance(answer, str) else [*answer]
    if said[0][0] == "assistant":
        said = [(m["role"], m["content"]) for m in asked] + said
    chat: list[dict[str, str]] = []
    for role, content in said:
        told = role == "tool" or (role == "system" and bool(chat))
        own = {"role": "user" if told else role, "content": harmless(content)}
        if chat and chat[-1]["role"] == own["role"]:  # templates want turns to alternate
            chat[-1]["content"] += "\n\n" + own["content"]
        else:
            chat.append(own)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False)


def logits_of(model: PreTrainedModel, encoded: Sequence[Inputs]) -> torch.Tensor:
    """Logits of token sequences, padded to the longest: float32, [sequences, labels]."""
    lengths = [len(inputs["input_ids"]) for inputs in encoded]
    taken = signature(model.forward).parameters  # some tokenizers give more than a model reads
    batch = {
        name: torch.zeros((len(encoded), max(lengths)), dtype=torch.long)
        for name in encoded[0]
        if name in taken
    }
    batch["input_ids"] += model.config.pad_token_id or 0
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for row, inputs in enumerate(encoded):
        batch["attention_mask"][row, : lengths[row]] = 1
        for name in batch.keys() & inputs.keys():
            batch[name][row, : lengths[row]] = torch.tensor(inputs[name])
    logits: torch.Tensor = model(**{k: x.to(model.device) for k, x in batch.items()}).logits
    return logits.float()
