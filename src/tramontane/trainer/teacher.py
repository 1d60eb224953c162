"""The teacher worker: completions in, the log-probs of a frozen model out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tramontane.batches import TeacherScores, TrainSequence
from tramontane.config import TeacherConfig
from tramontane.models.families import check_packing
from tramontane.models.loading import empty_model, load_model
from tramontane.models.vision import Vision
from tramontane.trainer import sharding
from tramontane.trainer.collate import lay_out
from tramontane.trainer.head import CHUNK_ELEMENTS, SMALLEST_CHUNK
from tramontane.trainer.rows import PackedRow, pack_row, seeing


class Teacher:
    """Scores completions of a policy with the same vocabulary, token by token.

    Args:
        model: a causal LM; its own dropout is off.
        budget: tokens per forward pass.
        top_k: number of likeliest tokens that are reported for each place; 0: the whole vocabulary;
            None: only the sampled tokens.
        vocabulary: entries of the policy's output head. If the teacher's head is padded to more
            entries, these are ignored.
        shared: the ranks of the process group share its weights and its sequences.
        vision: makes the features of images, by its own tower; None: sequences have none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int,
        top_k: int | None,
        vocabulary: int,
        shared: bool = False,
        vision: Vision | None = None,
    ) -> None:
        self.model, self._vision = model.eval(), vision
        self._rank, self._ranks = (sharding.rank(), sharding.ranks()) if shared else (0, 1)
        self._budget, self._top_k, self._vocabulary = budget, top_k, vocabulary

    @classmethod
    def load(
        cls, path: str, config: TeacherConfig, budget: int, top_k: int | None, vocabulary: int
    ) -> Teacher:
        """Load a checkpoint folder, Hugging Face name or `tiny`.

        With several ranks, each reads only its own shards, if the checkpoint allows that
        (`models.loading.empty_model`). Collective then: every rank must call it.

        Raises:
            InputError: no model there, or damaged weights.
        """
        dtype, device = getattr(torch, config.dtype), sharding.device_of_rank(config.device)
        if sharding.ranks() == 1:
            model = load_model(path, dtype, config.device)
        elif found := empty_model(path):
            model = sharding.skeleton(found[0], dtype)
            sharding.shard(model, device, config.dtype)
            sharding.materialize(model, device)
            sharding.read(model.state_dict(keep_vars=True), found[1])
            check_packing(model, dtype)
            sharding.free_gathered(model)
        else:
            model = load_model(path, dtype).requires_grad_(False)
            sharding.shard(model, device, config.dtype)
        return cls(model, budget, top_k, vocabulary, shared=True, vision=Vision(path, device))

    @torch.no_grad()
    def score(self, sequences: Sequence[TrainSequence], temperature: float) -> list[TeacherScores]:
        """The scores of each sequence, at the temperature that it was sampled with. Inserted tokens
        have scores too, which are not used. Collective: every rank must call it with the same
        sequences, and computes some; rank 0 returns all of them."""
        layouts, _ = lay_out(sequences, self._ranks, self._budget, together=False)
        own, found = layouts[self._rank], dict[int, TeacherScores]()
        # A forward pass gathers weights from all ranks, so a rank with nothing left repeats one.
        idle = max(map(len, layouts)) - len(own)
        for indices in [*own, *[[0]] * idle]:
            row = pack_row([sequences[i] for i in indices], self.model.device)
            found |= zip(indices, self._score(row, temperature), strict=True)
        sharding.free_gathered(self.model)
        if self._ranks > 1:
            parts: list[dict[int, TeacherScores]] = [{}] * self._ranks
            dist.gather_object(found, parts if self._rank == 0 else None)
            for part in parts:
                found |= part
        return [found[i] for i in range(len(sequences)) if i in found]

    def _score(self, row: PackedRow, temperature: float) -> list[TeacherScores]:
        """The scores of each sequence of a row."""
        with seeing(self.model, row, self._vision) as inputs:
            logits = self.model(**inputs).logits[0, : len(row.targets), : self._vocabulary]
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
