"""The teacher worker: completions in, the log-probs of a frozen model out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tramontane.batches import TeacherScores, TrainSequence
from tramontane.config import TeacherConfig
from tramontane.models.loading import load_model
from tramontane.trainer.collate import lay_out
from tramontane.trainer.head import CHUNK_ELEMENTS, SMALLEST_CHUNK
from tramontane.trainer.microbatch import PackedRow, pack_row


class Teacher:
    """Scores completions of a policy with the same vocabulary, token by token.

    Args:
        model: a causal LM; its own dropout is off.
        budget: tokens per forward pass.
        top_k: number of likeliest tokens that are reported for each place; 0: the whole vocabulary;
            None: only the sampled tokens.
        vocabulary: entries of the policy's output head. A teacher whose head is padded to more
            never has these tokens sampled.
    """

    def __init__(
        self, model: PreTrainedModel, budget: int, top_k: int | None, vocabulary: int
    ) -> None:
        self.model = model.eval()
        self._budget, self._top_k, self._vocabulary = budget, top_k, vocabulary

    @classmethod
    def load(
        cls, path: str, config: TeacherConfig, budget: int, top_k: int | None, vocabulary: int
    ) -> Teacher:
        """Load a checkpoint folder, Hugging Face name or `tiny`.

        Raises:
            InputError: no model there, or damaged weights.
        """
        model = load_model(path, getattr(torch, config.dtype), config.device)
        return cls(model, budget, top_k, vocabulary)

    @torch.no_grad()
    def score(self, sequences: Sequence[TrainSequence], temperature: float) -> list[TeacherScores]:
        """The scores of each sequence, at the temperature that it was sampled with. Inserted tokens
        have scores too, which are not used."""
        layouts, _ = lay_out(sequences, 1, self._budget, together=False)
        found: dict[int, TeacherScores] = {}
        for indices in layouts[0]:
            row = pack_row([sequences[i] for i in indices], self.model.device)
            found |= zip(indices, self._score(row, temperature), strict=True)
        return [found[i] for i in range(len(sequences))]

    def _score(self, row: PackedRow, temperature: float) -> list[TeacherScores]:
        """The scores of each sequence of a row."""
        logits = self.model(**row.inputs).logits[0, : len(row.targets), : self._vocabulary]
        elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cpu"])
        size = max(SMALLEST_CHUNK, elements // logits.shape[1])
        found: list[tuple[torch.Tensor, ...]] = []
        for part, targets in zip(logits.split(size), row.targets.split(size), strict=True):
            z = torch.log_softmax(part.float() / temperature, dim=-1)
            top, ids = z.topk(min(self._top_k or 0, z.shape[1]))
            chosen = z.gather(-1, targets[:, None])[:, 0]
            found.append((chosen, ids.int(), z if self._top_k == 0 else top))
        columns = [torch.cat(x).cpu().split(row.lengths) for x in zip(*found, strict=True)]
        return [
            TeacherScores(*(x.numpy() for x in scores)) for scores in zip(*columns, strict=True)
        ]
