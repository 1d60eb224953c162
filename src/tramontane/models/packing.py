"""*Packed* rows: several sequences of different lengths are concatenated in a single row, so that
linear layers, which are nearly all of the cost, see no padding. Only attention is padded, in
blocks, which are laid out here and computed in `attention.py`.
"""

from __future__ import annotations

import copy
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from tramontane.models.exchange import HeadExchange

# On a CPU, attention of up to this many tokens is computed by plain matrix products.
SHORT = 512
# An additional attention block costs about as much as this many scores of one head.
SPLIT_COST = 4096
# Blocks of attention on a CPU are rounded up to a multiple of this number of tokens: a softmax
# takes half the time over such rows, and fewer shapes require fewer kernels.
BLOCK_MULTIPLE = 32


def recurring(n: int, per_octave: int = 32) -> int:
    """Round up to one of a few sizes that recur: in each octave, `per_octave` to twice as many.

    On a CPU, kernels for bfloat16 are built per shape, in a millisecond each: building them took a
    tenth of a trainer's step, and an eighth of a decode step, when every row had its own size.
    """
    step = max(1, (1 << n.bit_length()) // (2 * per_octave))
    return -(-n // step) * step


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`. A GPU takes it from pinned memory, in the order of its stream:
    the CPU does not wait for it, and the GPU does not run out of work meanwhile."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def pack(
    sequences: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    continues: Sequence[int | None] | None = None,
) -> dict[str, Any]:
    """Concatenate token sequences in one row; returns the arguments of the model's forward.

    A sequence may continue an earlier one (which itself continues none): it sees the earlier tokens
    as if they came before its own. So a prefix shared by several sequences is computed once.

    Args:
        sequences: token ids.
        device: device of the row.
        continues: for each sequence, the index of the sequence it continues, or None if it starts
            at position 0; None: all do.

    Returns:
        `input_ids` [1, N]; `position_ids` [1, N], from 0 in every sequence that does not continue
        another; `packing`; and `use_cache`.
    """
    continues = [None] * len(sequences) if continues is None else continues
    lengths = [len(s) for s in sequences]
    starts = [0 if c is None else lengths[c] for c in continues]
    ends = np.cumsum(lengths)
    # Places in the row, minus the place of each sequence's position 0.
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
    ids = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    row = upload(torch.from_numpy(np.stack([ids, positions])), torch.device(device))
    packing = Packing(lengths, continues, row.device)
    return {"input_ids": row[:1], "position_ids": row[1:], "packing": packing, "use_cache": False}


class Packing:
    """The blocks of a row, made once per forward: neighbors of similar length that continue the
    same sequence.

    Args:
        lengths: lengths of the sequences, summing to N.
        continues: as in `pack`.
        device: device of the row.
        mutual: by sequence, spans (start, end) of its own tokens that see each other in both
            directions.
        in_windows: they do so only in layers with a sliding window.

    Attributes:
        blocks: in the order of the row.
        sizes: tokens of each block, summing to N.
        short: (index, block) of the blocks for plain matrix products.
        long: (index, block) of the others.
        exchange: the ranks that share the row's tokens, if several do.
        added: for each of the first layers, places of the row [n] and what is added to the layer's
            output there, [n, hidden].
    """

    exchange: HeadExchange | None = None
    added: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def __init__(
        self,
        lengths: Sequence[int],
        continues: Sequence[int | None],
        device: torch.device | str = "cpu",
        mutual: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        in_windows: bool = False,
    ) -> None:
        self.lengths, self.continues, self.device = lengths, continues, torch.device(device)
        self.mutual, self.in_windows = mutual or {}, in_windows
        self._in_chunks: dict[int, Packing] = {}
        self.blocks: list[Block] = []
        self.sizes: list[int] = []
        # A sequence that others continue gets its own block.
        block_of: dict[int, int] = {}  # first sequence of a block → the block's index
        for run in _runs(lengths, continues, self.mutual):
            context = continues[run[0]]
            run_lengths = [lengths[i] for i in run]
            block_of[run[0]] = len(self.blocks)
            self.blocks.append(
                Block(run_lengths, self.device)
                if context is None
                else Block(run_lengths, self.device, block_of[context], lengths[context])
            )
            self.blocks[-1].mutual = self.mutual.get(run[0], ())
            self.blocks[-1].in_windows = in_windows
            self.sizes.append(sum(run_lengths))
        self.short = [(i, block) for i, block in enumerate(self.blocks) if block.short]
        self.long = [(i, block) for i, block in enumerate(self.blocks) if not block.short]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with those that it continues."""
        before = (0 if c is None else self.lengths[c] for c in self.continues)
        return max(map(operator.add, self.lengths, before))

    def shared_by(self, exchange: HeadExchange) -> Packing:
        """The same row for a forward of several ranks, each of which has a part of its tokens."""
        shared = copy.copy(self)
        shared.exchange = exchange
        return shared

    def seeing(self, spans: Sequence[tuple[int, int]], in_windows: bool = False) -> Packing:
        """The same row with spans (start, end) of its places that see each other in both
        directions, each within one sequence; `in_windows`: only in layers with a sliding window."""
        mutual: dict[int, list[tuple[int, int]]] = {}
        ends = [*accumulate(self.lengths)]
        for start, end in spans:
            owner = bisect_right(ends, start)
            first = ends[owner] - self.lengths[owner]
            mutual.setdefault(owner, []).append((start - first, end - first))
        return Packing(self.lengths, self.continues, self.device, mutual, in_windows)

    def in_chunks(self, size: int) -> Packing:
        """The same row in chunks of `size` positions, for attention within each chunk: a sequence
        that continues another sees only what is before it in its first chunk."""
        if size not in self._in_chunks:
            self._in_chunks[size] = self._split(size)
        return self._in_chunks[size]

    def _split(self, size: int) -> Packing:
        lengths: list[int] = []
        continues: list[int | None] = []
        last: list[int] = []  # chunk of each sequence
        for n, context in zip(self.lengths, self.continues, strict=True):
            inside = 0 if context is None else self.lengths[context] % size
            first = min(n, size - inside)
            parts = [first, *(min(size, n - start) for start in range(first, n, size))]
            continues += [last[context] if context is not None and inside else None]
            continues += [None] * (len(parts) - 1)
            lengths += parts
            last.append(len(lengths) - 1)
        return Packing(lengths, continues, self.device)

    @cached_property
    def varlen(self) -> VarlenLayout:
        """The same row for kernels that take sequences of different lengths."""
        return VarlenLayout(self.lengths, self.continues, self.device)


class VarlenLayout:
    """A packed row for kernels that take sequences of different lengths, without padding.

    Args:
        lengths, continues, device: as in `Packing`.
        cached: for each sequence, the number of keys before its own that are not in the row.

    Attributes:
        keys: [K] int64, the row's tokens that are keys, for each sequence in order: those of the
            sequence it continues, then its own. None: every token once, in order.
        query_ends: [sequences + 1] int32: 0, then the end of each sequence's queries in the row.
        key_ends: [sequences + 1] int32: 0, then the end of each sequence's keys in `keys`.
        longest_query: maximum number of queries of a sequence.
        longest_key: maximum number of keys of a sequence.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        continues: Sequence[int | None],
        device: torch.device,
        cached: Sequence[int] | None = None,
    ) -> None:
        starts = [0, *accumulate(lengths)]
        rows = [
            [*(range(starts[c], starts[c + 1]) if c is not None else ()), *range(start, start + n)]
            for start, n, c in zip(starts, lengths, continues, strict=False)
        ]
        widths = [len(row) + n for row, n in zip(rows, cached or [0] * len(rows), strict=True)]
        self.keys = None
        if any(c is not None for c in continues):
            self.keys = upload(torch.tensor(list(chain(*rows))), device)
        ends = torch.tensor([starts, [0, *accumulate(widths)]], dtype=torch.int32)
        self.query_ends, self.key_ends = upload(ends, device)
        self.longest_query, self.longest_key = max(lengths), max(widths)


def _runs(
    lengths: Sequence[int], continues: Sequence[int | None], mutual: Iterable[int]
) -> Iterator[list[int]]:
    """Indices of neighbors that form a block, for each block; those that others continue, or that
    are `mutual`, get one of their own."""
    shared = {*continues, *mutual} - {None}
    run: list[int] = []
    longest = 0
    for index, (n, context) in enumerate(zip(lengths, continues, strict=True)):
        before = 0 if context is None else lengths[context]
        grown = max(longest, n)
        # Additional attention scores if this sequence is padded together with the run.
        width = before + grown
        extra = len(run) * (grown * width - longest * (before + longest)) + (
            grown * width - n * (before + n)
        )
        apart = index in shared or (run and (run[0] in shared or continues[run[0]] != context))
        if run and (apart or extra > SPLIT_COST + n * (before + n) // 8):
            yield run
            run, longest = [], 0
        run.append(index)
        longest = max(longest, n)
    yield run


class Block:
    """A padded [B, L] rectangle of sequences, which may all continue one other sequence and then
    see its keys before their own. Padding follows a row's last token, where causal attention does
    not see it; L is the longest length, rounded up. A block of one sequence may have spans of it
    that are `mutual`, all of it or `in_windows`, as in `Packing`.

    Args:
        lengths: lengths of the B sequences.
        device: device of the row.
        context: index of the block of the sequence that they continue.
        before: length of the sequence that they continue.
    """

    mutual: Sequence[tuple[int, int]] = ()
    in_windows = False

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        context: int | None = None,
        before: int = 0,
    ) -> None:
        self.lengths, self.device = lengths, device
        self.batch, self.longest = len(lengths), max(lengths)
        self.context, self.before = context, before
        self.keys = before + self.longest
        self.short = device.type == "cpu" and self.keys <= SHORT
        if self.short:
            self.longest = -(-self.longest // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
            self.keys = -(-(before + self.longest) // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        self._places: dict[tuple[int, bool], PaddingIndex] = {}
        self._biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def query_places(self, heads: int) -> PaddingIndex:
        """Places of the block's n tokens in [B, heads, L]."""
        return self._cached(heads, False)

    def key_places(self, heads: int) -> PaddingIndex:
        """Places of the context's and then the block's tokens in [B, heads, keys]."""
        return self._cached(heads, True)

    def _cached(self, heads: int, keys: bool) -> PaddingIndex:
        if (heads, keys) not in self._places:
            before, width = (self.before, self.keys) if keys else (0, self.longest)
            places = PaddingIndex(self.lengths, before, width, heads, self.device)
            self._places[heads, keys] = places
        return self._places[heads, keys]

    def mask(self, window: int | None) -> torch.Tensor:
        """[L, keys] bool, True where a query sees a key."""
        query = torch.arange(self.longest, device=self.device) + self.before
        distance = query[:, None] - torch.arange(self.keys, device=self.device)
        seen = distance >= 0
        for start, end in self.mutual if window or not self.in_windows else ():
            seen[start:end, : self.before + end] = True
        return seen & (distance < (window or self.keys))

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[L, keys]: 0 where `mask` is True, −∞ elsewhere; made once for all layers."""
        if (window, dtype) not in self._biases:
            zeros = torch.zeros(self.longest, self.keys, dtype=dtype, device=self.device)
            bias = zeros.masked_fill_(~self.mask(window), float("-inf"))
            self._biases[window, dtype] = bias
        return self._biases[window, dtype]


class PaddingIndex:
    """Maps tokens [before + n, heads, d] to places in a rectangle [B, heads, width, d] whose rows
    all start with the same `before` tokens. Tokens are only moved by index: padding repeats a
    sequence's last token.

    Args:
        lengths: lengths of the B sequences, summing to n.
        before: number of shared tokens before each sequence.
        width: width of the rectangle.
        heads: number of heads.
        device: device of the tokens.
    """

    def __init__(
        self, lengths: Sequence[int], before: int, width: int, heads: int, device: torch.device
    ) -> None:
        self.shape = (len(lengths), heads, width)
        self.before = before
        self._lengths = torch.tensor(lengths)[:, None]
        self._starts = before + self._lengths.cumsum(0) - self._lengths
        self._device = device

    @cached_property
    def _sources(self) -> torch.Tensor:
        """[B · heads · width] int64: the row in flat [(before + n) · heads, d] at each place."""
        _, heads, width = self.shape
        column = torch.arange(width)
        unshared = self._starts + torch.minimum(column - self.before, self._lengths - 1)
        token = torch.where(column < self.before, column, unshared)
        head = torch.arange(heads)[:, None]
        return (token[:, None] * heads + head).flatten().to(self._device)

    @cached_property
    def _token_places(self) -> torch.Tensor:
        """[n · heads] int64: place of each of the n tokens, head by head."""
        batch, heads, width = self.shape
        place = torch.arange(batch * heads * width).view(self.shape).transpose(1, 2)
        return place[self._inside].flatten().to(self._device)

    @cached_property
    def _padding_places(self) -> torch.Tensor:
        """Places that hold none of the n tokens: shared tokens and padding."""
        batch, heads, width = self.shape
        place = torch.arange(batch * heads * width).view(self.shape).transpose(1, 2)
        return place[~self._inside].flatten().to(self._device)

    @property
    def _inside(self) -> torch.Tensor:
        """[B, width] bool: True at the n tokens."""
        column = torch.arange(self.shape[2]) - self.before
        return (column >= 0) & (column < self._lengths)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[before + n, heads, d] → [B, heads, width, d]."""
        return rows.flatten(0, 1).index_select(0, self._sources).view(*self.shape, -1)

    def clear(self, x: torch.Tensor) -> torch.Tensor:
        """Zero all but the n tokens, in place."""
        x.view(-1, x.shape[-1]).index_fill_(0, self._padding_places, 0.0)
        return x

    def unpad(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[B, heads, width, d] → [n, heads, d], into `out` if given."""
        rows, d = x.reshape(-1, x.shape[-1]), x.shape[-1]
        if out is not None:
            torch.index_select(rows, 0, self._token_places, out=out.view(-1, d))
            return out
        return rows.index_select(0, self._token_places).view(-1, self.shape[1], d)
