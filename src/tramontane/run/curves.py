"""The curves of a run over its updates: which metrics share a plot, and their labels.

The report draws them with matplotlib, the page of `tramontane view` in the browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lines:
    """One plot over updates: metrics keys and their labels."""

    title: str
    unit: str
    keys: Mapping[str, str]
    note: str = ""
    percent: bool = False
    log: bool = False
    from_zero: bool = True


LEARNING = [
    Lines(
        "Reward",
        "mean over a batch",
        {
            "reward": "total",
            "reward_correctness": "correctness",
            "reward_format": "format",
            "reward_language": "language",
            "reward_length": "length",
        },
    ),
    Lines(
        "Pass rate",
        "share of completions that are right",
        {"pass_rate": "training"},
        note="Points with bars: pass@1 on the evaluation problems, with its 95 % interval.",
        percent=True,
    ),
    Lines(
        "Length",
        "tokens a completion",
        {"completion_tokens": "completion", "thinking_tokens": "thinking"},
    ),
    Lines("Entropy", "nats a token", {"entropy": "entropy"}),
    Lines(
        "Clipped tokens",
        "share of trained tokens",
        {"clip_fraction_high": "above 1 + ε high", "clip_fraction_low": "below 1 − ε low"},
        percent=True,
    ),
    Lines("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Lines("Loss", "", {"loss": "loss"}, from_zero=False),
    Lines(
        "Problems",
        "by their record in this run",
        {
            "problems_visited": "visited",
            "problems_retired": "retired",
            "problems_resting": "resting",
        },
    ),
]
WORKERS = [
    Lines(
        "Throughput",
        "tokens a second",
        {"generator_tokens_per_second": "generator", "trainer_tokens_per_second": "trainer"},
    ),
    Lines("Verdicts", "a second", {"verifier_verdicts_per_second": "verifier"}),
    Lines(
        "Idle share",
        "of the time since the last update",
        {
            "generator_idle_fraction": "generator",
            "trainer_idle_fraction": "trainer",
            "verifier_idle_fraction": "verifier",
        },
        percent=True,
    ),
    Lines(
        "Padding", "share of the trainer's tokens", {"padding_fraction": "padding"}, percent=True
    ),
]
ASYNCHRONY = [
    Lines(
        "Weight-update pause",
        "milliseconds that generation stood still",
        {"weight_update_pause_ms": "pause"},
    ),
    Lines(
        "Generator against trainer",
        "mean |Δ log-prob| of trained tokens",
        {
            "mismatch_age_0": "current weights",
            "mismatch_age_1": "1 version old",
            "mismatch_age_2plus": "2 or more",
        },
        log=True,
    ),
]

SECTIONS = {"Learning": LEARNING, "Asynchrony": ASYNCHRONY, "Workers": WORKERS}
