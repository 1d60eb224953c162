"""The parity gate: generator and trainer must agree on the log-probs of the same tokens.

They compute the same model by different code (a KV cache, another dtype, other kernels). If they
disagree, π_θ/μ is not 1 on fresh completions and the objective learns from noise. If weights did
not arrive, it learns from another model's completions. The functions are pure: the caller fetches
log-probs and, only after a mismatch, evidence for a diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.trainer.ratios import effective_sample_size

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
EIGHT_BITS = 0.1  # with quantized weights, whose policy is measured by `distance`


class ParityError(InputError):
    """Generator and trainer disagree on log-probs; the message holds a diagnosis."""


@dataclass(frozen=True)
class Mismatch:
    """|Δ log-prob| over `tokens` tokens, in nats; the maximum is at `position` of `completion`."""

    mean: float
    maximum: float
    tokens: int
    completion: int
    position: int


@dataclass(frozen=True)
class Distance:
    """How far a generator's policy μ is from the trainer's π, over samples of μ."""

    kl: float  # KL(μ‖π) of a token, nats
    size: float  # effective sample size, as a share, of the completions weighted by π/μ
    largest: float  # π/μ of a token, or its inverse
    tokens: int
    completions: int

    def __str__(self) -> str:
        return (
            f"KL(μ‖π) {self.kl:.1e} nats a token, effective sample size {self.size:.2f}, largest "
            f"ratio {self.largest:.3g}, over {self.completions} completions of "
            f"{self.tokens / self.completions:.0f} tokens"
        )


def distance(recorded: Sequence[Sequence[float]], computed: Sequence[Sequence[float]]) -> Distance:
    """Compare policies over the same tokens by the generator's recorded log-probs, completion by
    completion, and those that the trainer computed. The KL divergence is the mean of
    π/μ − 1 − log π/μ, which is unbiased and never negative."""
    pairs = zip(recorded, computed, strict=True)
    drifts = [torch.tensor(ours).double() - torch.tensor(theirs) for theirs, ours in pairs]
    d = torch.cat(drifts)
    return Distance(
        kl=float((d.expm1() - d).mean()),
        size=effective_sample_size(torch.stack([x.sum() for x in drifts])),
        largest=float(d.abs().max().exp()),
        tokens=len(d),
        completions=len(drifts),
    )


def check_distance(quantized: str, found: Distance, most_kl: float, least_size: float) -> None:
    """Raise an error if the policies are too far apart.

    Args:
        quantized: the key that quantizes, with its value.
        found: from `distance`.
        most_kl: the largest KL(μ‖π), in nats a token.
        least_size: the smallest effective sample size.

    Raises:
        ParityError: a figure is beyond its limit, or a log-prob is not a number.
    """
    if not (found.kl <= most_kl and found.size >= least_size):
        raise ParityError(
            f"{quantized}: with quantized weights the generator's policy μ is too far from the "
            f"trainer's π: {found}; trainer.parity_kl allows {most_kl:g}, and "
            f"trainer.parity_sample_size {least_size:g}. Leave it out"
        )


def tolerance(trainer: TrainerConfig, generator: GeneratorConfig) -> float:
    """The largest mean |Δ| that a run may start with: `parity_tolerance`, or that of the coarser
    number type."""
    if generator.quantized:
        return trainer.parity_tolerance or EIGHT_BITS
    return trainer.parity_tolerance or max(TOLERANCE[trainer.dtype], TOLERANCE[generator.dtype])


def compare(recorded: Sequence[Sequence[float]], computed: Sequence[Sequence[float]]) -> Mismatch:
    """Compare the generator's recorded log-probs, completion by completion, with those that the
    trainer computed for the same tokens."""
    delta = [
        (abs(ours - theirs), completion, position)
        for completion, pair in enumerate(zip(recorded, computed, strict=True))
        for position, (theirs, ours) in enumerate(zip(*pair, strict=True))
    ]
    # NaN is neither larger nor smaller than a number; it counts as the largest.
    worst = max(delta, key=lambda d: math.inf if math.isnan(d[0]) else d[0])
    return Mismatch(sum(d[0] for d in delta) / len(delta), worst[0], len(delta), *worst[1:])


def check(
    mismatch: Mismatch,
    limit: float,
    weights: tuple[Mapping[str, float], Mapping[str, float]] | None = None,
    hidden: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
    settings: Mapping[str, tuple[object, object]] | None = None,
    replayed: bool = True,
) -> None:
    """Raise an error if the mismatch is above `limit`.

    Args:
        mismatch: from `compare`.
        limit: the largest mean |Δ|; see `tolerance`.
        weights: fingerprints of the generator's and of the trainer's weights.
        hidden: hidden states of both, per layer, of the same tokens.
        settings: values of generator and trainer by the setting's name (dtype, temperature, …).
        replayed: the trainer uses the experts that the generator chose, or there are none.

    Raises:
        ParityError: the mean is above the limit or NaN; the message holds a diagnosis.
    """
    if mismatch.mean <= limit:
        return
    lines = [_headline(mismatch, limit)]
    settings = settings or {}
    # Small differences in the evidence are then normal.
    coarse = "bfloat16" in settings.get("dtype", ())
    if not replayed:
        lines.append(
            "the model has experts, and where sums round differently its routers choose others: "
            "set trainer.router_replay to true"
        )
    if weights:
        lines.append(_about_weights(*weights, 1e-2 if coarse else 1e-4))
    if hidden:
        lines.append(_about_hidden(*hidden, 0.1 if coarse else 1e-3))
    for name, (generator, trainer) in settings.items():
        if generator != trainer:
            lines.append(f"{name} differs: generator {generator}, trainer {trainer}")
    if coarse:
        lines.append(
            "to tell rounding from a fault, set generator.dtype and trainer.dtype to float32"
        )
    raise ParityError("\n- ".join(lines))


def check_long(mismatch: Mismatch, limit: float, before: int) -> None:
    """Raise an error if the mismatch of a long sequence is above `limit`, given that short
    sequences agree.

    Args:
        mismatch: of the sequence's last tokens, from `compare`.
        limit: the largest mean |Δ|; see `tolerance`.
        before: number of tokens before those that were compared.

    Raises:
        ParityError: the mean is above the limit, or not a number.
    """
    if mismatch.mean <= limit:
        return
    raise ParityError(
        f"{_headline(mismatch, limit)}\n- these tokens come after {before:,} others, and short "
        f"sequences agree: look at what depends on length (sliding windows, scaled rotary "
        f"positions, the cache of keys and values), or lower pipeline.l_max"
    )


def _headline(mismatch: Mismatch, limit: float) -> str:
    return (
        f"generator and trainer disagree on log-probs: mean |Δ| {mismatch.mean:.2g} over "
        f"{mismatch.tokens} tokens, above the tolerance of {limit:g} (largest "
        f"{mismatch.maximum:.2g}, completion {mismatch.completion}, token {mismatch.position})"
    )


def fingerprint(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """One number per tensor: log ‖w‖ plus the projection of w/‖w‖ on fixed signs.

    A relative change ε of the weights, in any direction, changes the number by about ε.
    """
    found = {}
    for name, tensor in weights.items():
        flat = tensor.detach().flatten().double().cpu()
        norm = flat.norm()
        # Signs without a pattern (multiplicative hashing), the same on every machine.
        signs = 1 - 2 * ((torch.arange(len(flat)) * 2654435761 >> 15) & 1)
        found[name] = float(norm.log() + flat @ signs.double() / norm) if norm else 0.0
    return found


def differing_parameters(
    generator: Mapping[str, float], trainer: Mapping[str, float], limit: float
) -> list[str]:
    """Names whose fingerprints differ by more than `limit`, or that only one side has.

    Tied weights may be listed under one name or two, so a name that one side lacks counts only if
    no tensor of that side has its fingerprint.
    """

    def lacking(name: str, value: float, other: Mapping[str, float]) -> bool:
        candidates = [other[name]] if name in other else list(other.values())
        return not any(abs(value - c) <= limit for c in candidates)

    names = [n for n, v in trainer.items() if lacking(n, v, generator)]
    return names + [n for n, v in generator.items() if n not in trainer and lacking(n, v, trainer)]


def first_deviating_layer(
    generator: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor], limit: float
) -> int | None:
    """The first layer with ‖Δ‖ above `limit` · ‖h‖; 0: the embeddings, k: the output of block k."""
    for layer, (theirs, ours) in enumerate(zip(generator, trainer, strict=True)):
        if not (theirs - ours).norm() <= limit * ours.norm():
            return layer
    return None


def _about_weights(
    generator: Mapping[str, float], trainer: Mapping[str, float], limit: float
) -> str:
    names = differing_parameters(generator, trainer, limit)
    if not names:
        return "the weights agree: look at settings and kernels, not at the weight transfer"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"weights differ in {', '.join(names[:5])}{more} ({len(names)} of {len(trainer)}): "
        f"look at how weights reach the generator; a tied output head may have kept its old copy"
    )


def _about_hidden(
    generator: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor], limit: float
) -> str:
    layer = first_deviating_layer(generator, trainer, limit)
    if layer is None:
        return "the hidden states agree in all layers: look at the output head and the temperature"
    if layer == 0:
        return "the hidden states deviate from the embeddings on: look at weights and token ids"
    return (
        f"the hidden states deviate first after block {layer} of {len(trainer) - 1}: look at its "
        f"attention (mask, positions, KV cache) and weights"
    )
