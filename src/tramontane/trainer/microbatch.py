"""From a batch's groups to the tensors that one forward and one loss take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tramontane.models import Packed, pack
from tramontane.trainer.advantages import loss_weights
from tramontane.trainer.collate import collate
from tramontane.trainer.objectives import Sequences
from tramontane.types import Completion, Group


@dataclass(frozen=True)
class Rows:
    """Completions with their prompts in one packed row of M tokens, N of them generated.

    Args:
        packed: the row.
        keep: [N] int64, the positions whose logits predict the generated tokens.
        targets: [N] int64, the generated tokens.
        lengths: [n] int64, generated tokens of each completion.
    """

    packed: Packed
    keep: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {**self.packed.model_inputs, "logits_to_keep": self.keep}


def rows(completions: Sequence[Completion], device: torch.device) -> Rows:
    """Pack prompts and completions; the logits at i − 1 predict the token at i."""
    packed = pack([c.prompt_ids + c.token_ids for c in completions], device)
    keep, start = [], -1
    for c in completions:
        start += len(c.prompt_ids)
        keep.append(torch.arange(start, start + len(c.token_ids)))
        start += len(c.token_ids)
    return Rows(
        packed,
        torch.cat(keep).to(device),
        flat([c.token_ids for c in completions], torch.int64, device),
        torch.tensor([len(c.token_ids) for c in completions], device=device),
    )


def flat(
    lists: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[N]: the lists one after the other."""
    return torch.tensor([x for values in lists for x in values], dtype=dtype, device=device)


@dataclass(frozen=True)
class Micro:
    """The completions of one microbatch, as indices into its minibatch; not `live`, it only keeps
    this rank in step with ranks that have one more."""

    indices: list[int]
    live: bool = True


class Minibatch:
    """Whole groups, for one optimizer step: the same on every rank but for `microbatches`.

    Args:
        groups: in batch order.
        shares: for each rank, the indices of the completions that it computes.
        rank: this one.
        budget: tokens a microbatch.
    """

    def __init__(
        self, groups: Sequence[Group], shares: Sequence[Sequence[int]], rank: int, budget: int
    ) -> None:
        self.completions = [c for g in groups for c in g.completions]
        verdicts = [v for g in groups for v in g.verdicts]
        owners = [number for number, g in enumerate(groups) for _ in g.completions]
        self.sequences = Sequences(
            rewards=torch.tensor([v.reward for v in verdicts], dtype=torch.float64),
            groups=torch.tensor(owners),
            scored=torch.tensor([v.verdict != "unscorable" for v in verdicts]),
            lengths=torch.tensor([len(c.token_ids) for c in self.completions]),
        )
        self.lengths = [len(c.prompt_ids) + len(c.token_ids) for c in self.completions]
        # Every rank lays out every rank's microbatches: so all know how many forwards there are,
        # and what share of the budgets is unfilled, without asking.
        layouts = [
            [[share[i] for i in m] for m in collate([self.lengths[i] for i in share], budget)]
            for share in shares
        ]
        self.layout = [m for layout in layouts for m in layout]
        mine = [Micro(indices) for indices in layouts[rank]]
        shortest = min(shares[rank], key=lambda i: self.lengths[i])
        idle = max(map(len, layouts)) - len(mine)
        self.microbatches = mine + [Micro([shortest], live=False)] * idle

    def weights(self, normalization: Any, l_max: int) -> torch.Tensor:
        """[S] float64: see `advantages.loss_weights`."""
        s = self.sequences
        return loss_weights(s.lengths, s.groups, s.scored, normalization, l_max)
