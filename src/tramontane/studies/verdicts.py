"""Verdicts: what the runs of a study say about a claim, when they are judged, and at what cost.

A study is judged at fixed numbers of seeds, `LOOKS`, and each look spends a fixed part of the 5 %
that a verdict may be wrong. The parts add up to 5 %, so that seeds can be added after a look
without making a false verdict more probable (Bonferroni's bound, which holds although the looks
share seeds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special

from tramontane.studies.measures import Measure
from tramontane.studies.study import LOOKS, Claim, look

Outcome = Literal["holds", "does not hold", "undecided", "no room", "changed"]
POWER = 0.8  # of the detectable effect, and of the seeds that a claim needs
FALSE_DISCOVERIES = 0.05  # share of false ones among verdicts with a q-value of at most this


@lru_cache
def quantile(degrees: float, share: float = 0.975) -> float:
    """Student's quantile by SciPy, whose last digits the published figures of studies have;
    infinite without degrees of freedom. Not from `scipy.stats`, which takes long to import."""
    return float(special.stdtrit(degrees, share)) if degrees else math.inf


@dataclass(frozen=True)
class ClaimVerdict:
    """The difference between two arms, and what it says about the claim.

    Args:
        outcome: `holds`, `does not hold` or `undecided`, by the interval and the estimate; `no
            room` if the arm compared with is closer to the measure's bound than the margin, so the
            claim could not be shown; `changed` if the claim is not the one that its runs were made
            for.
        difference: mean over seeds of `arm` less that of `against`, or less the number; NaN if no
            seed has both.
        low, high: interval of the difference at the look's level, 98 % at the first and 99 % at
            later ones; infinite with fewer than two seeds.
        error: standard error of the difference; infinite with fewer than two seeds.
        p: probability of such a difference or a clearer one if the verdict were wrong; for an
            undecided claim, if the claim were.
        detectable: detectable effect: smallest true difference that 80 % of studies with this
            spread would detect, from 0 or, for `equal`, beyond the margin.
        seeds: number of seeds that count (`look`).
    """

    outcome: Outcome
    difference: float
    low: float
    high: float
    error: float
    p: float
    detectable: float
    seeds: int


def finite(runs: Sequence[float]) -> np.ndarray:
    """The values that are numbers: a run may have none, e.g. no pass rate at a time that it did not
    reach."""
    values = np.asarray(runs, dtype=np.float64)
    return values[np.isfinite(values)]


def mean_and_interval(runs: Sequence[float]) -> tuple[float, float]:
    """(mean, half of Student's 95 % interval) over an arm's seeds.

    The mean is NaN without figures, the interval infinite with fewer than two.
    """
    values = finite(runs)
    if not len(values):
        return math.nan, math.inf
    half = quantile(len(values) - 1) * _error(values)
    return float(values.mean()), half


def error_of(seeds: int) -> float:
    """The error that the look at a number of seeds spends; before the first look, that look's."""
    return LOOKS.get(seeds, LOOKS[min(LOOKS)])


def judge(
    values: Mapping[str, Sequence[float]], claim: Claim, measure: Measure, samples: int = 0
) -> ClaimVerdict:
    """The verdict on one claim, by the differences of its arms' runs with the same seed, which
    start from the same weights and see the same data in the same order.

    `higher` and `lower` hold if the interval lies beyond 0 on that side and the estimate is at
    least the margin; they do not hold if the interval lies below the margin: no effect as large as
    it. `equal` holds if the interval lies within the margin on both sides, and does not hold if it
    lies beyond the margin. So at most one of `higher` and `equal` can hold.

    Args:
        values: the measure of each run, by arm, in order of the seeds.
        claim: arms, expectation and margin.
        measure: for the bounds of its values, and the last digit that it shows.
        samples: samples behind each figure of a share, whose own error the standard error of the
            difference is never below; 0: not known.
    """
    used = look(len(values[claim.arm]))
    first = np.asarray(values[claim.arm][:used], dtype=np.float64)
    if isinstance(claim.against, str):
        control = np.asarray(values[claim.against][:used], dtype=np.float64)
    else:
        control = np.full(used, claim.against, dtype=np.float64)
    both = np.isfinite(first) & np.isfinite(control)
    first, control = first[both], control[both]
    if not len(first):
        return ClaimVerdict("undecided", math.nan, -math.inf, math.inf, math.inf, 1.0, math.inf, 0)
    differences = first - control
    difference, degrees = float(differences.mean()), len(first) - 1
    spread, floor = _error(differences), _least_error(first, control, claim, measure, samples)
    if floor > spread:
        spread, degrees = floor, 10**6  # the samples' error is known, and not estimated
    half = quantile(degrees, 1 - error_of(used) / 2) * spread
    outcome = _outcome(difference, half, claim) if used in LOOKS else "undecided"
    if isinstance(claim.against, str) and not _has_room(float(control.mean()), claim, measure):
        outcome = "no room"
    return ClaimVerdict(
        outcome=outcome,
        difference=difference,
        low=difference - half,
        high=difference + half,
        error=spread,
        p=_p_value(outcome, difference, spread, degrees, claim) if degrees else 1.0,
        detectable=half
        + quantile(degrees, POWER) * spread
        + (claim.margin if claim.expect == "equal" else 0),
        seeds=used,
    )


def q_values(verdicts: Sequence[ClaimVerdict]) -> list[float]:
    """For each verdict, the share of false ones to expect among those at least as clear (Benjamini
    and Hochberg, over all claims of a page)."""
    from scipy.stats import false_discovery_control

    p = [verdict.p for verdict in verdicts]
    return [float(q) for q in false_discovery_control(p)] if p else []


def surviving(verdicts: Sequence[ClaimVerdict], outcome: Outcome) -> dict[str, int]:
    """Verdicts of one outcome that survive a correction for the number of all claims: none of them
    false with a probability of 95 % (`Holm`), or 5 % of them (`Benjamini–Hochberg`)."""
    order = np.argsort([v.p for v in verdicts], kind="stable")
    holm = set()
    for rank, index in enumerate(order):
        if verdicts[index].p > FALSE_DISCOVERIES / (len(verdicts) - rank):
            break
        holm.add(int(index))
    small = {i for i, q in enumerate(q_values(verdicts)) if q <= FALSE_DISCOVERIES}
    of = {i for i, v in enumerate(verdicts) if v.outcome == outcome}
    return {"Holm": len(holm & of), "Benjamini–Hochberg": len(small & of)}


def seeds_needed(verdict: ClaimVerdict, claim: Claim) -> float:
    """Number of seeds with which 80 % of studies with this spread would distinguish an effect of
    the margin's size from no effect; infinite without a spread."""
    spread = verdict.error * math.sqrt(verdict.seeds)
    clear = special.ndtri(1 - min(LOOKS.values()) / 2) + special.ndtri(POWER)
    return float((clear * spread / claim.margin) ** 2) if math.isfinite(spread) else math.inf


def _error(runs: np.ndarray) -> float:
    """Standard error of the mean; infinite for a single figure."""
    return float(runs.std(ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else math.inf


def _least_error(
    first: np.ndarray, control: np.ndarray, claim: Claim, measure: Measure, samples: int
) -> float:
    """Standard error below which the difference cannot be known: that of the samples behind each
    figure of a share, or of rounding to the digits shown."""
    arms = [first, control] if isinstance(claim.against, str) else [first]
    drawn = (measure.samples or samples) * len(first)
    if measure.bounds == (0.0, 1.0) and drawn:
        # Agresti and Coull's two successes and two failures: no variance is 0.
        shares = [(float(arm.mean()) * drawn + 2) / (drawn + 4) for arm in arms]
        return math.sqrt(sum(share * (1 - share) / drawn for share in shares))
    squares = [measure.rounding(float(arm.mean())) ** 2 for arm in arms]
    return math.sqrt(sum(squares) / len(first))


def _has_room(control: float, claim: Claim, measure: Measure) -> bool:
    """False if the arm compared with is closer to a bound than the margin."""
    if measure.bounds is None:
        return True
    low, high = measure.bounds
    below, above = control - claim.margin >= low, control + claim.margin <= high
    return {"higher": above, "lower": below, "equal": below and above}[claim.expect]


def _outcome(difference: float, half: float, claim: Claim) -> Outcome:
    margin = claim.margin
    if claim.expect == "equal":
        if abs(difference) + half < margin:
            return "holds"
        return "does not hold" if abs(difference) - half > margin else "undecided"
    estimate = -difference if claim.expect == "lower" else difference
    if estimate - half > 0 and estimate >= margin:
        return "holds"
    return "does not hold" if estimate + half < margin else "undecided"


def _p_value(
    outcome: Outcome, difference: float, error: float, degrees: float, claim: Claim
) -> float:
    refuted, margin = outcome == "does not hold", claim.margin
    if claim.expect == "equal":
        distance = (abs(difference) - margin) * (1 if refuted else -1)
    else:
        estimate = -difference if claim.expect == "lower" else difference
        distance = margin - estimate if refuted else estimate
    return float(special.stdtr(degrees, -distance / error))
