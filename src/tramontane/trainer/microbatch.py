"""Minibatches: the sequences of an optimizer step, with their tokens' weights and advantages, cut
into microbatches, each one forward pass and one loss."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tramontane.batches import BatchSettings, TeacherScores, TrainBatch, TrainSequence
from tramontane.config import TrainerConfig
from tramontane.config.objectives import Charge, ObjectiveOptions
from tramontane.errors import InputError
from tramontane.models.packing import upload
from tramontane.tokens import ELSEWHERE, INSERTED
from tramontane.trainer import masks, ratios, sharding
from tramontane.trainer.advantages import loss_weights
from tramontane.trainer.allowed import allowed_of
from tramontane.trainer.collate import lay_out, padding_fraction
from tramontane.trainer.objectives import Objective, Sequences, Tokens
from tramontane.trainer.rows import PackedRow, Predictions, joined, pack_row
from tramontane.types import TrainedFigures

# Which tokens, by their versions, have a weight in a term; see `ObjectiveOptions.term_tokens`.
CHOSEN: dict[str, Callable[[NDArray[np.int32]], NDArray[np.bool_]]] = {
    "all": lambda versions: versions != INSERTED,
    "sampled": lambda versions: versions >= 0,
    "recorded": lambda versions: versions == ELSEWHERE,
}
_NONE = np.zeros((0, 0), np.float32)
NO_SCORES = TeacherScores(_NONE.ravel(), _NONE.astype(np.int32), _NONE)


@dataclass(frozen=True)
class Microbatch:
    """Input of one forward pass: indices of sequences in their minibatch.

    A microbatch that is not `live` has no weight: its rank computes it only to keep in step with
    ranks that have more microbatches.
    """

    indices: list[int]
    live: bool = True


class Minibatch:
    """Whole groups for one optimizer step. Only `microbatches` and `frozen` differ between ranks.

    Args:
        groups: in batch order.
        config: the token budget, and the objective's options if `settings` has none.
        settings: those that the completions were sampled and are trained with.

    Attributes:
        options: the objective's options.
        completions: the S sequences, in order.
        lengths: [S] int64, generated tokens of each sequence.
        owners: [S] int64, the completion that each sequence belongs to, from 0: that of the
            sequence before it, if it `continues` a conversation.
        sequences: the figures of the completions, several sequences of one conversation as one.
        weights: [S] float64, the loss weight of each token of a sequence.
        added: the same for each term that is added to the objective, by name, and which tokens it
            applies to.
        advantages: [S] or [S, 2] float64, zeros until `set_advantages`.
        microbatches: this rank's.
        padding: padding fraction of the microbatches of all ranks.
        computed_tokens: tokens of the microbatches of all ranks; a prompt counts once for all its
            completions in a microbatch.
        frozen: log-probs by the name of the policy, for each microbatch [N] float32: `reference`
            and `proximal` stay fixed during the update, `policy` during an optimizer step; and
            `teacher`, whose log-probs come with the batch.
        baselines: of the charges, by the name of the policy, for each microbatch [N].
        trained: by a microbatch's number, [N] float32, the log-probs that it was trained with.
        kept: by a microbatch's number, [N] bool, the tokens that no mask leaves out; empty until
            `set_mask`.
        masked: the fraction of tokens that masks leave out.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[TrainSequence]],
        config: TrainerConfig,
        settings: BatchSettings,
    ) -> None:
        self.settings = settings
        self.device = torch.device(config.device)
        self.options = settings.options or config.objective.options
        self.needs, self._charges = config.objective.needs, config.objective.charges
        self._mask = config.objective.mask
        self._sharing = config.context_parallel  # ranks
        self.completions = [sequence for group in groups for sequence in group]
        self.lengths = torch.tensor([len(s.token_ids) for s in self.completions])
        self.owners = torch.tensor([not s.continues for s in self.completions]).cumsum(0) - 1
        begun = [(n, s) for n, group in enumerate(groups) for s in group if not s.continues]
        self.sequences = Sequences(
            rewards=torch.tensor([s.reward for _, s in begun], dtype=torch.float64),
            groups=torch.tensor([n for n, _ in begun]),
            scored=torch.tensor([s.scored for _, s in begun]),
            lengths=self._per_completion(self.lengths),
            answers=torch.tensor([s.answer for _, s in begun]),
        )
        self.weights = self._weights(self.options, self._counts("all"))
        self.added = {
            name: (self._weights(term.options, self._counts(chosen)), chosen)
            for name, term in config.objective.terms.items()
            for chosen in [term.options.term_tokens]
        }
        self.microbatches, used = self._lay_out(config.microbatch_tokens)
        self.padding = padding_fraction(used, config.microbatch_tokens)
        self.computed_tokens = sum(used)
        self.advantages = torch.zeros_like(self.weights)
        self.frozen: dict[str, list[torch.Tensor]] = {}
        self.baselines: dict[str, list[torch.Tensor]] = {}
        self.trained: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.masked = 0.0

    def _counts(self, chosen: str) -> torch.Tensor:
        """The number of each sequence's chosen tokens: [S] int64."""
        versions = [s.versions for s in self.completions]
        owners = np.repeat(np.arange(len(versions)), [*map(len, versions)])
        counts = np.bincount(owners, CHOSEN[chosen](joined(versions)), len(versions))
        return torch.from_numpy(counts.astype(np.int64))

    def _weights(self, options: ObjectiveOptions, counts: torch.Tensor) -> torch.Tensor:
        """The loss weight of each token of a sequence, [S], of which `counts` [S] have one; others,
        e.g. inserted ones, count in no normalizer."""
        lengths = self._per_completion(counts)
        return loss_weights(
            lengths,
            self.sequences.groups,
            self.sequences.scored & (lengths > 0),
            options.loss_normalization,
            self.settings.l_max,
        )[self.owners]

    def _lay_out(self, budget: int) -> tuple[list[Microbatch], list[int]]:
        """Return this rank's microbatches, as many as the busiest rank has, and the tokens of each
        live microbatch of all ranks."""
        # Every rank lays out the microbatches of all ranks, so no communication is needed.
        together = "conversations" in self.needs
        ranks, rank = sharding.ranks() // self._sharing, sharding.rank() // self._sharing
        layouts, used = lay_out(self.completions, ranks, budget, together)
        microbatches = [Microbatch(indices) for indices in layouts[rank]]
        shortest = int(self.lengths.argmin())
        idle = max(map(len, layouts)) - len(microbatches)
        microbatches += [Microbatch([shortest], live=False)] * idle
        return microbatches, used

    def row(self, index: int, trained: bool = False) -> PackedRow:
        """Pack microbatch `index`. With `trained`, the row includes the teacher's likeliest tokens
        if the objective needs them."""
        sequences = [self.completions[i] for i in self.microbatches[index].indices]
        row = pack_row(sequences, self.device, self._sharing)
        if (allowed := allowed_of(sequences)) is not None:
            row = replace(row, allowed=self.upload(allowed))
        if trained and "teacher_top" in self.needs:
            ids = self._teacher(index, "top_ids").astype(np.int64)
            row = replace(row, candidates=self.upload(ids))
        return row

    def set_advantages(self, objective: Objective) -> None:
        """Compute the advantages [S] or [S, 2], with the sums of log-probs that the objective
        needs. Collective: every rank must call it."""
        sequences, needs = self.sequences, self.needs
        if "sequence_logprobs" in needs:
            names = self.frozen.keys() & {"policy", "reference"}
            sums = {name: self._summed(self.frozen[name]) for name in sorted(names)}
            sequences = replace(sequences, **sums)
        if "targets" in needs:
            pairs = enumerate(self.frozen["policy"])
            of_targets = [values * self.upload(self._targets(index)) for index, values in pairs]
            sequences = replace(
                sequences,
                targets=self._per_completion(torch.tensor([s.target for s in self.completions])),
                target_logprobs=self._summed(of_targets),
            )
        if "behavior_sums" in needs:
            behavior = [math.fsum(s.logprobs) for s in self.completions]
            sums_of_behavior = torch.tensor(behavior, dtype=torch.float64)
            sequences = replace(sequences, behavior=self._per_completion(sums_of_behavior))
        self.advantages = objective.advantages(sequences, self.options)[self.owners]

    def set_mask(self) -> None:
        """Leave out of the objective, and of its normalizers, the tokens that its masks find, which
        need `frozen["policy"]`. Collective: every rank must call it."""
        kept = torch.zeros(len(self.completions), dtype=torch.float64)
        for index, micro in enumerate(self.microbatches):
            self.kept[index] = found = self._kept(index)
            if micro.live:
                parts = found.split(self.lengths[micro.indices].tolist())
                kept[micro.indices] = torch.tensor([float(part.sum()) for part in parts]).double()
        kept = self._total(kept)
        self.weights = self._weights(self.options, kept)
        self.masked = 1 - float(kept.sum() / self._counts("all").sum())

    def _kept(self, index: int) -> torch.Tensor:
        """[N] bool: the tokens of microbatch `index` that no mask leaves out."""
        indices = self.microbatches[index].indices
        rows = torch.tensor(indices).repeat_interleave(self.lengths[indices])
        whole = torch.tensor([not (self._mask.truncated and s.truncated) for s in self.completions])
        versions = torch.from_numpy(self.versions(index))
        kept = (versions != INSERTED) & whole[rows]
        if self._mask.of_policy:
            sampled = (versions >= 0).nonzero().squeeze(1)
            advantages = self.advantages if self.advantages.dim() == 1 else self.advantages[:, 0]
            kept[sampled] &= masks.kept(
                self._mask,
                self.frozen["policy"][index].cpu().double()[sampled],
                torch.from_numpy(self.behavior(index)).double()[sampled],
                advantages[rows[sampled]],
                torch.from_numpy(self._numbers(index))[sampled],
            )
        return kept

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all rows, on the CPU, of what each rank found in its own; ranks that share rows
        have found the same. Collective."""
        if sharding.rank() % self._sharing:
            values = torch.zeros_like(values)
        return sharding.total(values.to(self.device)).cpu()

    def _per_completion(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of the sequences' values over each completion, on the CPU."""
        return ratios.totals(values, self.owners)[: int(self.owners[-1]) + 1]

    def _summed(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Sum per-microbatch token values, without those of inserted tokens, over each completion:
        float64, from all ranks. Collective."""
        sums = torch.zeros(len(self.completions), dtype=torch.float64, device=self.device)
        for index, (micro, row_values) in enumerate(zip(self.microbatches, values, strict=True)):
            if micro.live:
                lengths = self.lengths[micro.indices].tolist()
                inserted = self.upload(self.versions(index) == INSERTED)
                chosen = row_values.masked_fill(inserted, 0.0)
                parts = [part.double().sum() for part in chosen.split(lengths)]
                sums[micro.indices] = torch.stack(parts)
        return self._per_completion(self._total(sums))

    def learned(self) -> TrainedFigures:
        """The figures of all sequences, in order, from all ranks. Collective: every rank must call
        it."""
        lengths = self.lengths.tolist()
        ends = self.lengths.cumsum(0).tolist()
        found = torch.zeros(ends[-1], device=self.device)
        for number, micro in enumerate(self.microbatches):
            if not micro.live:
                continue
            parts = self.trained[number].float().split([lengths[i] for i in micro.indices])
            for index, part in zip(micro.indices, parts, strict=True):
                found[ends[index] - lengths[index] : ends[index]] = part
        logprobs = self._total(found)
        if any(s.target for s in self.completions):
            pairs = zip(logprobs.split(lengths), self.completions, strict=True)
            sampled = [
                F.pad(part[: len(part) - s.target], (0, s.replaced), value=math.nan)
                for part, s in pairs
            ]
            logprobs = torch.cat(sampled)
        advantages = self.advantages if self.advantages.dim() == 1 else self.advantages[:, 0]
        return TrainedFigures(
            array("d", advantages.tolist()), array("f", logprobs.numpy().tobytes())
        )

    def log_weights(self) -> torch.Tensor:
        """log π/μ of each scored completion that this run sampled, over its tokens, as they were
        trained: [B] float64. Collective."""
        drifts = [
            torch.where(self.upload(self.versions(i) >= 0), x - self.upload(self.behavior(i)), 0.0)
            for i, x in sorted(self.trained.items())
        ]
        sampled = self._per_completion(self._counts("sampled")) > 0
        return self._summed(drifts)[sampled & self.sequences.scored]

    def set_baselines(self) -> None:
        """Compute the baselines of the charges, and upload the teacher's log-probs, if any."""
        if "teacher" in self.needs:
            numbers = range(len(self.microbatches))
            self.frozen["teacher"] = [self.upload(self._teacher(n, "logprobs")) for n in numbers]
        charges = self._charges.items()
        self.baselines = {name: self._baseline(c) for name, c in charges if c.baseline}

    def _baseline(self, charge: Charge) -> list[torch.Tensor]:
        """For each token, the mean charge at the same position over the other completions of its
        group that are long enough: [N] for each microbatch. It does not depend on the completion
        itself, so the gradient stays unbiased (arXiv 2506.09477). The others' ratios are those of
        the behavior policy. Collective."""
        reference = self.frozen[charge.policy]
        shape = int(self.sequences.groups.max()) + 1, int(self.sequences.lengths.max())
        sums = torch.zeros(2, *shape, dtype=torch.float64)  # returns, and their number
        found: list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]] = []
        for index, micro in enumerate(self.microbatches):
            sequence = torch.from_numpy(self._numbers(index))
            owners = self.owners[micro.indices].repeat_interleave(self.lengths[micro.indices])
            # The policy did not choose inserted tokens, so they have no position either.
            sampled = torch.from_numpy(self.versions(index) != INSERTED)
            positions = ratios.sums_from_start(sampled.double(), sequence).long() - 1
            behavior = torch.from_numpy(self.behavior(index))
            log_ratio = behavior.double() - reference[index].cpu()
            log_ratio = torch.where(sampled, log_ratio, 0.0)
            values = ratios.returns(log_ratio, sequence, charge)
            places = self.sequences.groups[owners], positions.clamp(min=0)
            counted = self.sequences.scored[owners] & sampled & micro.live
            values = torch.where(counted, values, 0.0)
            sums[0].index_put_(places, values, accumulate=True)
            sums[1].index_put_(places, counted.double(), accumulate=True)
            found.append((places, values))
        sums = self._total(sums)
        return [
            upload(baseline.to(logprobs.dtype), self.device)
            for (places, values), logprobs in zip(found, reference, strict=True)
            for baseline in [(sums[0][places] - values) / (sums[1][places] - 1).clamp(min=1)]
        ]

    def behavior(self, index: int) -> NDArray[np.float32]:
        """[N]: log μ of microbatch `index`, as the generator recorded it."""
        return joined([self.completions[i].logprobs for i in self.microbatches[index].indices])

    def _teacher(self, index: int, name: str) -> NDArray[Any]:
        """An array of the teacher's scores of the N tokens of microbatch `index`, one sequence
        after another; zeros for tokens that it did not score, which have no weight in the term."""
        sequences = [self.completions[i] for i in self.microbatches[index].indices]
        assert all(s.teacher or max(s.versions) < 0 for s in sequences)  # others are all scored
        like = next((s.teacher for s in sequences if s.teacher), NO_SCORES)
        scores = [s.teacher or like.zeros(len(s.token_ids)) for s in sequences]
        return np.concatenate([getattr(found, name) for found in scores])

    def versions(self, index: int) -> NDArray[np.int32]:
        """[N]: the weights version that sampled each token of microbatch `index`."""
        return joined([self.completions[i].versions for i in self.microbatches[index].indices])

    def _numbers(self, index: int) -> NDArray[np.int64]:
        """[N]: the completion of each token of microbatch `index`, numbered from 0."""
        indices, number = self.microbatches[index].indices, -1
        numbers = []
        for last, i in pairwise([-1, *indices]):
            number += not (self.completions[i].continues and i == last + 1)
            numbers.append(number)
        return np.repeat(numbers, [len(self.completions[i].token_ids) for i in indices])

    def _targets(self, index: int) -> NDArray[np.bool_]:
        """[N]: True for the tokens of given answers in microbatch `index`."""
        sequences = [self.completions[i] for i in self.microbatches[index].indices]
        counts = [n for s in sequences for n in (len(s.token_ids) - s.target, s.target)]
        return np.repeat(np.tile([False, True], len(sequences)), counts)

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """Copy to the device; see `packing.upload`."""
        return upload(torch.from_numpy(values), self.device)

    def tokens(self, index: int, predictions: Predictions) -> Tokens:
        """Build the loss's input for microbatch `index`: the tokens that have a weight. It never
        waits for a GPU, since the CPU decides which tokens these are."""
        micro, dtype = self.microbatches[index], predictions.logprobs.dtype
        sequences = [self.completions[i] for i in micro.indices]
        rows = np.repeat(np.arange(len(sequences)), [len(s.token_ids) for s in sequences])
        scored, versions = np.array([s.scored for s in sequences])[rows], self.versions(index)
        trained = scored & (versions != INSERTED) & micro.live

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values[micro.indices].to(dtype)[torch.from_numpy(rows)]

        target = torch.from_numpy(self._targets(index)) if "targets" in self.needs else None
        advantages = spread(self.advantages)
        if advantages.dim() == 2 and target is not None:
            advantages = torch.where(target, advantages[:, 1], advantages[:, 0])
        of_cpu = {
            "behavior": torch.from_numpy(self.behavior(index)).to(dtype),
            "advantages": advantages,
            "weights": spread(self.weights) * self.kept.get(index, 1),
            "sequence": torch.from_numpy(self._numbers(index)),
            "rewards": spread(self.sequences.rewards[self.owners]),
            "target": target,
        }
        if "teacher_top" in self.needs:
            top = self._teacher(index, "top_logprobs")
            of_cpu["teacher_top"] = torch.from_numpy(top).to(dtype)
        # In an update of a single optimizer step, π_old is the π_θ just computed.
        frozen = {"proximal": predictions.logprobs.detach()} | {
            name: values[index].to(dtype) for name, values in self.frozen.items()
        }
        fields = {
            **vars(predictions),
            **{name: upload(x, self.device) for name, x in of_cpu.items() if x is not None},
            **{name: values for name, values in frozen.items() if name in self.needs},
        }
        baselines = {name: values[index].to(dtype) for name, values in self.baselines.items()}
        added = {
            name: upload(spread(weights) * torch.from_numpy(CHOSEN[chosen](versions)), self.device)
            for name, (weights, chosen) in self.added.items()
        }
        if not trained.all():
            places = self.upload(np.flatnonzero(trained))
            fields, baselines, added = (
                {name: x.index_select(0, places) for name, x in columns.items() if x is not None}
                for columns in (fields, baselines, added)
            )
        return Tokens(**fields, baselines=baselines, added=added)


def cut_batch(batch: TrainBatch, config: TrainerConfig) -> list[Minibatch]:
    """Cut a batch into minibatches of at most `n_minibatch` completions, whole groups in batch
    order.

    Raises:
        InputError: no groups, or minibatches smaller than a group.
    """
    settings = batch.settings
    sizes = [sum(not s.continues for s in group) for group in batch.groups]
    if settings.n_minibatch < max(sizes, default=settings.n_minibatch + 1):
        raise InputError(
            f"a batch of {len(batch.groups)} groups cannot be cut into minibatches of "
            f"{settings.n_minibatch} completions: give at least one group, and whole groups a "
            f"minibatch"
        )
    parts: list[list[list[TrainSequence]]] = [[]]
    filled = 0
    for group, size in zip(batch.groups, sizes, strict=True):
        if filled + size > settings.n_minibatch:
            parts.append([])
            filled = 0
        parts[-1].append(group)
        filled += size
    return [Minibatch(groups, config, settings) for groups in parts]
