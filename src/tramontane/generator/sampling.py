"""Drawing tokens, with random numbers that depend only on the request.

The uniform for a token is a hash of the request's seed and the token's place in its completion
(a counter-based generator, which has no state to carry or restore). So a request draws the same
numbers in any slot, with any neighbors, and after any number of interruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int, Int64

from tramontane.types import SamplingParams

_MASK = (1 << 64) - 1
_BLOCK_TOKENS = 64
_UNDIVIDED_VOCAB = 512  # largest vocabulary not worth dividing into blocks
# Entries of the logits that are in float32 at once: rows are drawn in parts. Bytes that an entry
# takes meanwhile: float32 tensors of the logits; and for top-k and top-p, the sorted ones.
DRAWN_ENTRIES, DRAWN_BYTES, SORTED_BYTES = 1 << 24, 12, 48
# Temperatures below it are greedy: float32 has them as 0 or, where devices keep them at all, as
# subnormal numbers.
_COLDEST = torch.finfo(torch.float32).tiny


def _signed(x: int) -> int:
    """The int64 with the bits of the unsigned 64-bit integer `x`."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


# splitmix64 (Steele, Lea, Flood 2014): a Weyl sequence through a 64-bit finalizer.
_WEYL = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; the shift of int64 is arithmetic and copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def streams(seeds: list[int]) -> Int64[torch.Tensor, " B"]:
    """Start of each seed's random stream, [B] int64. Seeds may be any Python integers."""
    return _mix(torch.tensor([_signed(s) for s in seeds], dtype=torch.int64) + _WEYL)


def uniforms(
    stream: Int64[torch.Tensor, " B"], position: Int[torch.Tensor, " B"]
) -> Float64[torch.Tensor, " B"]:
    """One number in [0, 1) per row, with 53 random bits.

    Args:
        stream: [B] int64, from `streams`.
        position: [B] int64, the token's place in its completion, from 0.

    Returns:
        [B] float64.
    """
    return _shift(_mix(stream + (position + 1) * _WEYL), 11).double() * 2.0**-53


@dataclass(frozen=True)
class DrawPlan:
    """Operations that some row of a batch requires. Others are skipped without reading the rows'
    parameters, since on a GPU, reading a value waits for everything launched before.

    Attributes:
        scaled: a temperature other than 1.
        truncated: top-k or top-p.
        greedy: a temperature of 0, or too small for float32.
        static_shapes: no shape may depend on values, so every row gets the operations that any row
            requires; there are only two such plans, with truncation and without, for each
            `recorded`.
        recorded: largest number of allowed tokens that is recorded for a row; 0: none are.
    """

    scaled: bool = True
    truncated: bool = True
    greedy: bool = True
    static_shapes: bool = False
    recorded: int = 0

    @classmethod
    def of(cls, params: Collection[SamplingParams], static_shapes: bool) -> DrawPlan:
        """The plan for a batch of these sampling parameters."""
        return cls(
            scaled=static_shapes or any(p.temperature != 1 for p in params),
            truncated=any(
                (p.top_p < 1 or p.top_k > 0) and p.temperature >= _COLDEST for p in params
            ),
            greedy=static_shapes or any(p.temperature < _COLDEST for p in params),
            recorded=max((p.recorded for p in params), default=0),
            static_shapes=static_shapes,
        )


class Draws(NamedTuple):
    """One token drawn for each row."""

    tokens: torch.Tensor  # [B] int64
    logprobs: torch.Tensor  # [B] float32, nats
    # [B, `DrawPlan.recorded`] int32, the tokens that top-p and top-k allowed, the likeliest first,
    # followed by −1; only −1 in a row without either.
    allowed: torch.Tensor


def draw(
    logits: Float[torch.Tensor, "B V"],
    uniform: Float64[torch.Tensor, " B"],
    temperature: Float[torch.Tensor, " B"],
    top_p: Float[torch.Tensor, " B"],
    top_k: Int[torch.Tensor, " B"],
    plan: DrawPlan,
) -> Draws:
    """`sample` for all rows at once: `logits` [B, V], all other tensors [B]."""
    greedy = temperature < _COLDEST
    logits = logits.float()
    if plan.scaled:  # the maximum is subtracted first: a quotient may be beyond float32's range
        logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / temperature.masked_fill(greedy, 1.0)[:, None]
    probs = torch.softmax(logits, -1)
    tokens = invert(probs, uniform)
    if plan.greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    del logits
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
    allowed = tokens.new_empty((len(tokens), plan.recorded), dtype=torch.int32)
    if plan.recorded:
        allowed.fill_(-1)
    drawn = Draws(tokens, logprobs, allowed)
    if plan.truncated:
        truncated = ((top_p < 1) | (top_k > 0)) & ~greedy
        if plan.static_shapes:
            others = _draw_truncated(probs, uniform, top_p, top_k, plan.recorded)
            pairs = zip(others, drawn, strict=True)
            masks = truncated, truncated, truncated[:, None]
            return Draws(*(torch.where(m, *pair) for m, pair in zip(masks, pairs, strict=True)))
        if len(rows := truncated.nonzero()[:, 0]):
            others = _draw_truncated(
                probs[rows], uniform[rows], top_p[rows], top_k[rows], plan.recorded
            )
            for column, values in zip(drawn, others, strict=True):
                column[rows] = values
    return drawn


def sample(
    logits: Float[torch.Tensor, "B V"],
    uniform: Float64[torch.Tensor, " B"],
    temperature: Float[torch.Tensor, " B"],
    top_p: Float[torch.Tensor, " B"],
    top_k: Int[torch.Tensor, " B"],
    plan: DrawPlan = DrawPlan(),
    draw: Callable[..., Draws] = draw,
) -> Draws:
    """Draw one token per row.

    A row's draw depends only on that row: a neighbor's top-p does not affect it. Top-k is applied
    first, then top-p to the tokens that top-k kept. Computed in float32, for `DRAWN_ENTRIES` logits
    at a time: all rows of a large batch and vocabulary would take gigabytes.

    Args:
        logits: [B, V].
        uniform: [B] float64 in [0, 1).
        temperature: [B] float32; 0 is greedy, as is any below the smallest normal number (1.2e-38).
        top_p: [B] float32; 1 is off. The likeliest token is kept at any value.
        top_k: [B] int64; 0 is off.
        plan: operations that the rows may require; by default all.
        draw: the function `draw`, or a compiled version of it.

    Returns:
        The tokens, and their log-probabilities under the distribution that they are drawn from:
        softmax(logits / temperature), renormalized over the tokens that top-p and top-k allow;
        softmax(logits) where greedy. Of a row whose logits are not finite, the log-probability is
        NaN.
    """
    columns = logits, uniform, temperature, top_p, top_k
    size = max(1, DRAWN_ENTRIES // logits.shape[1])
    if len(logits) <= size:
        return draw(*columns, plan)
    parts = zip(*(column.split(size) for column in columns), strict=True)
    return Draws(*map(torch.cat, zip(*(draw(*part, plan) for part in parts), strict=True)))


def invert(
    mass: Float[torch.Tensor, "B V"], uniform: Float64[torch.Tensor, " B"]
) -> Int64[torch.Tensor, " B"]:
    """The inverse of each row's cumulative distribution.

    A large vocabulary is searched in two stages: for the block of 64 tokens, then for the token
    within the block. Only the blocks' sums are accumulated, in float64, so a vocabulary of 100,000
    costs one pass over it, and rare tokens keep their probabilities.

    Args:
        mass: [B, V] float32, non-negative; a row need not sum to 1. A token of mass 0 is never
            drawn.
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64: the first token at which the row's cumulative mass exceeds `uniform` · its total;
        some token in a row of NaN.
    """
    vocab = mass.shape[1]
    if vocab <= _UNDIVIDED_VOCAB:
        edges = mass.cumsum(-1, dtype=torch.float64)
        # Below the last edge, even for the largest double below 1.
        target = uniform[:, None] * edges[:, -1:]
        return torch.searchsorted(edges, target, right=True)[:, 0].clamp_max(vocab - 1)
    # The last block has the remaining tokens, possibly none.
    blocks = vocab // _BLOCK_TOKENS
    divided = blocks * _BLOCK_TOKENS
    whole = mass[:, :divided].unflatten(1, (blocks, _BLOCK_TOKENS)).sum(-1)
    sums = torch.cat([whole, mass[:, divided:].sum(-1, keepdim=True)], 1).double()
    edges = sums.cumsum(-1)
    target = uniform[:, None] * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp_max(blocks)
    inside = block * _BLOCK_TOKENS + torch.arange(_BLOCK_TOKENS, device=mass.device)
    part = mass.gather(1, inside.clamp_max(vocab - 1)).masked_fill(inside >= vocab, 0.0)
    within = part.cumsum(-1, dtype=torch.float64)
    rest = target - (edges.gather(1, block) - sums.gather(1, block))
    # The block's sum in float32 and its cumulative sum in float64 differ by rounding: stay inside
    # the last token that has mass.
    rest = torch.minimum(rest.clamp_min(0.0), within[:, -1:] * (1 - 1e-12))
    found = block * _BLOCK_TOKENS + torch.searchsorted(within, rest, right=True)
    return found[:, 0].clamp_max(vocab - 1)


# Not compiled: torch 2.11 cannot compile cumulative sums that it splits, as over 152k tokens.
@torch.compiler.disable
def _draw_truncated(
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    recorded: int,
) -> Draws:
    """Draw among the `top_k` likeliest tokens, limited to the fewest whose mass reaches `top_p`;
    shapes as in `sample`."""
    ordered, token = probs.sort(stable=True, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = ordered * ((rank < top_k[:, None]) | (top_k == 0)[:, None])
    # The mass from each token on, summed from the rarest: this is exact enough in float32. A token
    # stays if what comes before it is less than top-p; so does the likeliest, for which rounding
    # may say otherwise: 1 - top-p is 1 below 6e-8.
    mass = kept.flip(-1).cumsum(-1).flip(-1)
    kept = kept * ((rank == 0) | (mass > (1 - top_p[:, None]) * mass[:, :1]))
    drawn = invert(kept, uniform)[:, None]
    logprobs = kept.gather(1, drawn)[:, 0].log() - kept.sum(-1).log()
    allowed = token[:, :recorded].int().masked_fill(kept[:, :recorded] == 0, -1)
    allowed = torch.nn.functional.pad(allowed, (0, recorded - allowed.shape[1]), value=-1)
    return Draws(token.gather(1, drawn)[:, 0], logprobs, allowed)
