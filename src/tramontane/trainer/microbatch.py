"""From a batch's groups to the tensors that one forward and one loss take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from tramontane.config import TrainerConfig
from tramontane.models.packing import Packed, pack
from tramontane.trainer import sharding
from tramontane.trainer.advantages import loss_weights
from tramontane.trainer.collate import collate_shared, padding_fraction, shares
from tramontane.trainer.objectives import Objective, Sequences, Tokens
from tramontane.types import BatchSettings, TrainSequence


@dataclass(frozen=True)
class Rows:
    """Completions with their prompts in one packed row, N of its tokens generated.

    Args:
        packed: the row; it may end with tokens that nothing looks at.
        keep: [N or more] int64, the positions whose logits predict the generated tokens; what is
            more predicts nothing.
        targets: [N] int64, the generated tokens.
        lengths: generated tokens of each completion.
    """

    packed: Packed
    keep: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {**self.packed.model_inputs, "logits_to_keep": self.keep}


def pack_rows(completions: Sequence[TrainSequence], device: torch.device) -> Rows:
    """Pack prompts and completions; neighbours with the same prompt share its tokens.

    The logits at i − 1 predict the token at i, so what is after a prompt is predicted by the
    prompt's last, and a completion's last token predicts nothing: it is left out.
    """
    sequences: list[Sequence[int]] = []
    continues: list[int | None] = []
    keep, end = [], 0
    for prompt, siblings in groupby(completions, key=lambda c: c.prompt_ids):
        shared = len(sequences)
        sequences.append(prompt)
        continues.append(None)
        end += len(prompt)
        last = end - 1
        for c in siblings:
            keep.append(last)
            if own := c.token_ids[:-1]:
                sequences.append(own)
                continues.append(shared)
                keep += range(end, end + len(own))
                end += len(own)
    if device.type == "cpu":
        # A CPU's kernels are made for one shape each, at a tenth of a step's time where every row
        # has a length of its own.
        if filler := _rounded(end) - end:
            sequences.append([0] * filler)
            continues.append(None)
        keep += [0] * (_rounded(len(keep)) - len(keep))
    return Rows(
        packed=pack(sequences, device, continues),
        keep=torch.tensor(keep, device=device),
        targets=torch.tensor([t for c in completions for t in c.token_ids], device=device),
        lengths=[len(c.token_ids) for c in completions],
    )


def _rounded(n: int) -> int:
    """Up to the next of 32 to 64 lengths an octave: 1 to 2 % more."""
    step = 1 << max(0, n.bit_length() - 6)
    return -(-n // step) * step


@dataclass(frozen=True)
class Microbatch:
    """What one forward takes: indices of completions in their minibatch. One that is not `live`
    only keeps this rank in step with ranks that have more, and weighs nothing."""

    indices: list[int]
    live: bool = True


class Minibatch:
    """Whole groups, for one optimizer step. Only `microbatches` and `frozen` are a rank's own.

    Args:
        groups: in batch order.
        config: the token budget and the loss normalisation.
        settings: those under which the completions were sampled and are trained on.
        seed: fixes which rank computes which completion.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[TrainSequence]],
        config: TrainerConfig,
        settings: BatchSettings,
        seed: int,
    ) -> None:
        self.settings = settings
        self.config, self.device = config, torch.device(config.device)
        self.completions = [s for group in groups for s in group]
        self.sequences = Sequences(
            rewards=torch.tensor([s.reward for s in self.completions], dtype=torch.float64),
            groups=torch.tensor([n for n, group in enumerate(groups) for _ in group]),
            scored=torch.tensor([s.scored for s in self.completions]),
            lengths=torch.tensor([len(c.token_ids) for c in self.completions]),
        )
        self.weights = loss_weights(
            self.sequences.lengths,
            self.sequences.groups,
            self.sequences.scored,
            config.objective.loss_normalization,
            settings.l_max,
        )
        self.microbatches, self.padding = self._lay_out(config.microbatch_tokens, seed)
        self.advantages = torch.zeros_like(self.weights)
        self.frozen: dict[str, list[torch.Tensor]] = {}

    @property
    def tokens_total(self) -> int:
        """Prompt and completion tokens, of all ranks."""
        return sum(len(c.prompt_ids) + len(c.token_ids) for c in self.completions)

    def _lay_out(self, budget: int, seed: int) -> tuple[list[Microbatch], float]:
        """This rank's microbatches, as many as every rank has, and the padding fraction of all."""
        dealt = shares(len(self.completions), sharding.ranks(), seed)
        # Every rank lays out all ranks' microbatches, so none need ask how many there are.
        layouts, used = [], []
        for share in dealt:
            layout, tokens = collate_shared([self.completions[i] for i in share], budget)
            layouts.append([[share[i] for i in m] for m in layout])
            used += tokens
        own = [Microbatch(indices) for indices in layouts[sharding.rank()]]
        everything = range(len(self.completions))
        shortest = min(everything, key=lambda i: len(self.completions[i].token_ids))
        own += [Microbatch([shortest], live=False)] * (max(map(len, layouts)) - len(own))
        return own, padding_fraction(used, budget)

    def rows(self, index: int) -> Rows:
        """Microbatch `index`, packed."""
        indices = self.microbatches[index].indices
        return pack_rows([self.completions[i] for i in indices], self.device)

    def credit(self, objective: Objective, sequence_logprobs: bool) -> None:
        """Set the advantages, from summed log-probs too where the objective wants these."""
        sequences = self.sequences
        if sequence_logprobs:
            sums = {name: self._summed(values) for name, values in self.frozen.items()}
            sequences = replace(sequences, **sums)
        self.advantages = objective.advantages(sequences, self.config.objective)

    def _summed(self, values: list[torch.Tensor]) -> torch.Tensor:
        """[S] float64 over the tokens of each completion, from all ranks."""
        sums = torch.zeros(len(self.completions), dtype=torch.float64, device=self.device)
        for micro, own in zip(self.microbatches, values, strict=True):
            if micro.live:
                lengths = self.sequences.lengths[micro.indices].tolist()
                parts = torch.stack([part.double().sum() for part in own.split(lengths)])
                sums[micro.indices] = parts
        return sharding.total(sums).cpu()

    def tokens(
        self, index: int, logprobs: torch.Tensor, entropy: torch.Tensor, needs: set[str]
    ) -> Tokens:
        """What the loss of microbatch `index` takes; tensors as `Tokens` says."""
        micro = self.microbatches[index]
        completions = [self.completions[i] for i in micro.indices]
        lengths = self.sequences.lengths[micro.indices]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values[micro.indices].float().repeat_interleave(lengths).to(self.device)

        frozen = {name: values[index] for name, values in self.frozen.items()}
        if "proximal" in needs:
            # In an update of a single optimizer step, π_old is the π_θ just computed.
            frozen.setdefault("proximal", logprobs.detach())
        return Tokens(
            logprobs=logprobs,
            behavior=torch.tensor([x for c in completions for x in c.logprobs]).to(self.device),
            advantages=spread(self.advantages),
            weights=spread(self.weights) * micro.live,
            sequence=torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device),
            rewards=spread(self.sequences.rewards),
            entropy=entropy,
            **{name: values for name, values in frozen.items() if name in needs},
        )
