"""`trainer.objective.mask`: tokens that the loss leaves out."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from tramontane.config.resume import Fixed
from tramontane.config.section import Section

_LOSS = Fixed("a different loss is a different run")


def _around_one(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not 0 <= low < 1 < high:
        raise ValueError(
            f"[{low:g}, {high:g}] must begin at 0 or above and below 1, the ratio of equal "
            f"policies, and end above 1"
        )
    return bounds


Bounds = Annotated[Annotated[tuple[float, float], AfterValidator(_around_one)] | None, _LOSS]
Limit = Annotated[float | None, Field(gt=0), _LOSS]


class MaskConfig(Section):
    """Sampled tokens that weigh 0 in the objective and leave its normalizers, because the trainer's
    policy π is too far from the policy μ that sampled them. π is the policy before the optimizer
    step, for which all keys but `truncated` take one more forward. Added terms keep all tokens.
    See docs/off-policy.md. The paper leaves out none."""

    token_ratio: Bounds = None
    """Bounds of each token's π/μ (IcePop, arXiv 2510.18855: [0.5, 5])."""
    sequence_ratio: Bounds = None
    """Bounds of π/μ of a whole completion, the product over its tokens."""
    geometric_ratio: Bounds = None
    """Bounds of the geometric mean of a completion's π/μ."""
    off_policy: Limit = None
    """δ: completions with a negative advantage are left out if the mean of log μ/π over their
    tokens is above δ (DeepSeek-V3.2, arXiv 2512.02556)."""
    token_tv: Limit = None
    """Limit of |π − μ| of each token, beyond which it is left out if its advantage would move π
    further from μ (DPPO, arXiv 2602.04879, with its binary total variation)."""
    token_kl: Limit = None
    """The same with the KL divergence, in nats, of the sampled token against all others (DPPO's
    binary KL)."""
    truncated: Annotated[bool, _LOSS] = False
    """Leave out completions that were cut at their longest length, or have no room left for what an
    environment answers."""

    @property
    def enabled(self) -> bool:
        """True if any mask is set."""
        return self.of_policy or self.truncated

    @property
    def of_policy(self) -> bool:
        """True if a mask compares π with μ."""
        return any(self.model_dump(exclude={"truncated"}).values())

    @property
    def of_completions(self) -> bool:
        """True if a mask is of a completion's tokens together."""
        return any((self.sequence_ratio, self.geometric_ratio, self.off_policy))
