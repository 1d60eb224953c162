"""A reward model: a Hugging Face sequence classifier that scores answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tramontane.config.device import number_type
from tramontane.config.judge import RewardModelConfig
from tramontane.errors import InputError
from tramontane.models.loading import check_device, load_classifier
from tramontane.types import Problem
from tramontane.verifier.custom import GroupResult
from tramontane.verifier.judge import harmless

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Classifier:
    """Scores answers with a classifier: the probability of its last label or, if it has only one,
    the logistic function of its logit.

    Raises:
        InputError: no such checkpoint or device, or one with more than two labels.
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

    @torch.inference_mode()
    def score(self, problem: Problem, answers: list[str]) -> GroupResult:
        """The scores of a problem's answers; None for one that is too long."""
        encoded = [encode(self.tokenizer, problem.problem, answer) for answer in answers]
        fits = [i for i, ids in enumerate(encoded) if len(ids) <= self.config.max_tokens]
        values: list[float | None] = [None] * len(answers)
        # Without a padding token, the model takes one sequence at a time.
        padded = self.model.config.pad_token_id is not None
        size = self.config.batch_size if padded else 1
        for start in range(0, len(fits), size):
            places = fits[start : start + size]
            logits = logits_of(self.model, [encoded[i] for i in places])
            chances = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
            for i, chance in zip(places, chances[:, -1].tolist(), strict=True):
                values[i] = chance
        limit = f"judge: longer than {self.config.max_tokens} tokens (reward_model.max_tokens)"
        return GroupResult(values, notes=[limit if v is None else "" for v in values])


def encode(tokenizer: PreTrainedTokenizerBase, problem: str, answer: str) -> list[int]:
    """The tokens that a reward model reads: a chat of the two, or both as they are."""
    problem, answer = harmless(problem), harmless(answer)
    if not tokenizer.chat_template:
        return list(tokenizer(problem, answer)["input_ids"])
    chat = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def logits_of(model: PreTrainedModel, encoded: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of token sequences, padded to the longest: float32, [sequences, labels]."""
    ids = torch.full((len(encoded), max(map(len, encoded))), model.config.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    logits: torch.Tensor = model(ids.to(model.device), attention_mask=mask.to(model.device)).logits
    return logits.float()
