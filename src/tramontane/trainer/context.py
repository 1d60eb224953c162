"""Context parallelism (`trainer.context_parallel`): neighboring ranks share each row of tokens.

Each rank computes its part of the row (`models.exchange`), and then the predictions of all parts
are gathered, a few numbers for each token. So every rank has those of the whole row, and all that
follows, such as losses, masks and metrics, is the same as for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.exchange import HeadExchange, check_heads
from tramontane.models.families import SAME, deviation, short_sequences
from tramontane.models.packing import pack, upload
from tramontane.models.shape import ModelShape
from tramontane.models.states import stateful_layers
from tramontane.trainer import sharding
from tramontane.trainer.rows import PackedRow, padded


def check_sharing(ranks: int, shape: ModelShape) -> None:
    """Check that this number of ranks can share the rows of a model, as far as its sizes tell.

    Raises:
        InputError: they cannot.
    """
    if ranks > 1:
        _check_stateless(shape.stateful, shape.name)
        check_heads(shape.heads, ranks)


def _check_stateless(stateful: bool, name: str) -> None:
    if stateful:
        raise InputError(
            f"trainer.context_parallel: layers of {name} carry state from token to token, which a "
            f"rank does not hand on to the next; set it to 1"
        )


def exchange_of(ranks: int, device: torch.device) -> HeadExchange | None:
    """The ranks that share rows with this one; None if none does. Collective.

    Args:
        ranks: how many share a row.
        device: device of this rank.
    """
    if ranks == 1:
        return None
    neighbors, _ = dist.new_subgroups(ranks, timeout=sharding.time_limit(device))
    return HeadExchange(neighbors)


@dataclass(frozen=True)
class RowPart:
    """What this rank computes of a row.

    Args:
        row: its tokens and targets; the last targets may be repeated ones.
        exchange: the ranks that share the row.
        places: [N] int64, the place of each of the row's targets among those of all parts.
    """

    row: PackedRow
    exchange: HeadExchange | None = None
    places: torch.Tensor | None = None

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """What all parts have computed for the whole row's targets: [targets, …] → [N, …]; see
        `HeadExchange.gather`. Collective."""
        if self.exchange is None or self.places is None:
            return values
        return self.exchange.gather(values).index_select(0, self.places)


def part_of(row: PackedRow, exchange: HeadExchange | None) -> RowPart:
    """This rank's part of a row, whose length the number of ranks must divide."""
    if exchange is None:
        return RowPart(row)
    device = row.targets.device
    size = row.inputs["input_ids"].shape[1] // exchange.size
    owners, inside = np.divmod(row.places, size)
    most = padded(int(np.bincount(owners, minlength=exchange.size).max()), device)
    places = np.empty_like(owners)
    for part in range(exchange.size):
        found = np.flatnonzero(owners == part)
        places[found] = part * most + np.arange(len(found))
    own = np.resize(np.flatnonzero(owners == exchange.rank), most)  # repeated; 0 without any
    chosen, keep = upload(torch.from_numpy(np.stack([own, inside[own]])), device)
    part_row = replace(
        row,
        inputs=_own_inputs(row.inputs, exchange) | {"logits_to_keep": keep},
        targets=row.targets[chosen],
        candidates=None if row.candidates is None else row.candidates[chosen],
        experts=None if row.experts is None else row.experts.chunk(exchange.size)[exchange.rank],
    )
    return RowPart(part_row, exchange, upload(torch.from_numpy(places), device))


def _own_inputs(inputs: dict[str, Any], exchange: HeadExchange) -> dict[str, Any]:
    """This rank's part of the arguments of a forward of a whole row."""
    names = ("input_ids", "position_ids")
    own = {name: inputs[name].chunk(exchange.size, 1)[exchange.rank] for name in names}
    return inputs | own | {"packing": inputs["packing"].shared_by(exchange)}


@torch.no_grad()
def check_parts(model: PreTrainedModel, exchange: HeadExchange, dtype: torch.dtype) -> None:
    """Check by two forwards that a model computes the same for a row that the ranks share as for
    one that each computes alone. Collective.

    Args:
        model: its attention is `packed`.
        exchange: the ranks.
        dtype: what it computes in.

    Raises:
        InputError: the logits differ, layers carry state, or the ranks cannot share the heads of
            one.
    """
    _check_stateless(bool(stateful_layers(model)), type(model).__name__)
    first, *others = short_sequences(model)
    filler = -sum(map(len, [first, *others])) % exchange.size
    row = pack([(first * exchange.size)[: len(first) + filler], *others], model.device)
    expected = model(**row).logits[0].float().chunk(exchange.size)[exchange.rank]
    own = model(**_own_inputs(row, exchange)).logits[0].float()
    errors = deviation(own, expected)
    # A mixture of experts may choose other experts for a few tokens in bfloat16.
    found = errors.max() if dtype == torch.float32 else errors.median()
    error = float(sharding.total(found, dist.ReduceOp.MAX))
    if error > SAME.get(dtype, SAME[torch.bfloat16]):  # not so for NaN, of broken weights
        raise InputError(
            f"trainer.context_parallel: {type(model).__name__} computes other logits for tokens "
            f"that {exchange.size} ranks share than for those of one (they differ by {error:.2g} "
            f"standard deviations): something in it looks at other tokens outside of attention; "
            f"set it to 1"
        )
