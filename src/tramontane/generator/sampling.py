"""Drawing tokens, with random numbers that belong to a request alone.

The uniform for a token is a hash of the request's seed and the token's place in its completion
(a counter-based generator: no state to carry, nothing to restore). So a request draws the same
numbers whatever runs beside it, in whichever slot, and however often it is interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tramontane.types import SamplingParams

_MASK = (1 << 64) - 1
_BLOCK = 64
_FEW = 512  # tokens of a vocabulary that is not worth dividing into blocks


def _signed(x: int) -> int:
    """The int64 that has the bits of the unsigned 64-bit `x`."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


# splitmix64 (Steele, Lea, Flood 2014): a Weyl sequence through a 64-bit finalizer.
_WEYL = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own drags the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def streams(seeds: list[int]) -> torch.Tensor:
    """The start of each seed's random stream, [B] int64. Any Python integers will do as seeds."""
    return _mix(torch.tensor([_signed(s) for s in seeds], dtype=torch.int64) + _WEYL)


def uniforms(stream: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, with 53 random bits: [B], [B] int64 → [B] float64."""
    return _shift(_mix(stream + (position + 1) * _WEYL), 11).double() * 2.0**-53


@dataclass(frozen=True)
class Drawing:
    """Which of the ways to draw some row of a batch asks for. The others are left out, without a
    look at the rows: on a GPU a look waits for all that was launched before it."""

    scaled: bool = True  # a temperature that is not 1
    narrow: bool = True  # top-k or top-p
    greedy: bool = True
    fixed: bool = False  # shapes may not depend on values: what one row needs, all do

    @classmethod
    def of(cls, params: Sequence[SamplingParams], fixed: bool) -> Drawing:
        """What drawing for all of these takes."""
        return cls(
            any(p.temperature != 1 for p in params),
            any((p.top_p < 1 or p.top_k > 0) and p.temperature != 0 for p in params),
            any(p.temperature == 0 for p in params),
            fixed,
        )


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    drawing: Drawing = Drawing(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    What one row gets depends on that row alone: a neighbour's top-p does not change how it is
    drawn. Top-k is applied first, top-p to what it leaves.

    Args:
        logits: [B, V] float32.
        uniform: [B] float64 in [0, 1).
        temperature: [B]; 0 is greedy.
        top_p: [B]; 1 is off.
        top_k: [B] int64; 0 is off.
        drawing: what the rows may ask for; by default anything.

    Returns:
        Tokens [B] int64 and their log-probabilities [B] float32 under softmax(logits /
        temperature), before top-p and top-k; under softmax(logits) where greedy.
    """
    greedy = temperature == 0
    if drawing.scaled:
        logits = logits / temperature.masked_fill(greedy, 1.0)[:, None]
    probs = torch.softmax(logits, -1)
    tokens = invert(probs, uniform)
    if drawing.narrow:
        narrow = ((top_p < 1) | (top_k > 0)) & ~greedy
        if drawing.fixed:
            tokens = torch.where(narrow, _narrowed(probs, uniform, top_p, top_k), tokens)
        elif len(rows := narrow.nonzero()[:, 0]):
            tokens[rows] = _narrowed(probs[rows], uniform[rows], top_p[rows], top_k[rows])
    if drawing.greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def invert(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The inverse of each row's cumulative distribution at `uniform`: [B, V], [B] → [B].

    `mass` is non-negative and need not sum to 1; a token without mass is never drawn. In a large
    vocabulary, the block of 64 tokens is found first, then the token within it: only the blocks'
    sums are accumulated, in float64, so that a vocabulary of 100,000 costs no more than one pass
    over it, and its rare tokens keep their chances.
    """
    vocab = mass.shape[1]
    if vocab <= _FEW:
        edges = mass.cumsum(-1, dtype=torch.float64)
        target = (uniform[:, None] * edges[:, -1:]).clamp_max(edges[:, -1:] * (1 - 1e-12))
        return torch.searchsorted(edges, target, right=True)[:, 0]
    blocks = vocab // _BLOCK
    whole = mass[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).sum(-1)
    sums = torch.cat([whole, mass[:, blocks * _BLOCK :].sum(-1, keepdim=True)], 1).double()
    edges = sums.cumsum(-1)
    target = uniform[:, None] * edges[:, -1:]
    block = torch.searchsorted(edges, target, right=True).clamp_max(blocks)
    inside = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    part = mass.gather(1, inside.clamp_max(vocab - 1)).masked_fill(inside >= vocab, 0.0)
    within = part.cumsum(-1, dtype=torch.float64)
    rest = target - (edges.gather(1, block) - sums.gather(1, block))
    # The two sums of a block may differ by rounding; stay inside its last token that has mass.
    rest = torch.minimum(rest.clamp_min(0.0), within[:, -1:] * (1 - 1e-12))
    return (block * _BLOCK + torch.searchsorted(within, rest, right=True))[:, 0]


def _narrowed(
    probs: torch.Tensor, uniform: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Draw among the `top_k` likeliest tokens, and of those among the fewest whose mass reaches
    `top_p`; rows as in `sample`."""
    ordered, token = probs.sort(stable=True, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = ordered * ((rank < top_k[:, None]) | (top_k == 0)[:, None])
    mass = kept.cumsum(-1, dtype=torch.float64)
    before = mass - kept
    # The likeliest token always stays: nothing comes before it.
    kept = kept * ((before < top_p[:, None].double() * mass[:, -1:]) | (top_p >= 1)[:, None])
    return token.gather(1, invert(kept, uniform)[:, None])[:, 0]
