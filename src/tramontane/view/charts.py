"""The charts of runs: which metrics share one, and their labels. The page draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Chart:
    """One chart over updates.

    Args:
        title, unit, note: texts around it.
        keys: metrics, and their labels.
        prefix: further metrics whose names start with it belong here, unless another chart has
            them.
        kind: `lines`; `bars`, stacked; or `histogram`, the sum over updates of one metric that
            counts things by a whole number, as shares.
        percent, log: form of the values' axis.
        from_zero: the values' axis begins at 0 unless all values are far from it.
        evaluated: the evaluations of the held-out problems are shown too, with their intervals.
    """

    title: str
    unit: str
    keys: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    note: str = ""
    kind: Literal["lines", "bars", "histogram"] = "lines"
    percent: bool = False
    log: bool = False
    from_zero: bool = True
    evaluated: bool = False


LEARNING = [
    Chart(
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
    Chart("Custom rewards", "mean over a batch", prefix="reward_"),
    Chart(
        "Judge",
        "score of the model's answers, and of worthless ones",
        {"canaries.answers": "the model's"},
        prefix="canaries.",
    ),
    Chart(
        "Pass rate",
        "share of completions that are right",
        {"pass_rate": "training"},
        note="Bars: pass@1 on the evaluation problems, 95 %.",
        percent=True,
        evaluated=True,
    ),
    Chart(
        "Length",
        "tokens a completion",
        {"completion_tokens": "completion", "thinking_tokens": "thinking"},
    ),
    Chart(
        "Pass rate by effort",
        "share of completions that are right",
        prefix="effort_pass_rate.",
        percent=True,
    ),
    Chart("Length by effort", "tokens a completion", prefix="effort_completion_tokens."),
    Chart("Entropy", "nats a token", {"entropy": "entropy"}),
    Chart(
        "Clipped tokens",
        "share of trained tokens",
        {"clip_fraction_high": "above 1 + ε high", "clip_fraction_low": "below 1 − ε low"},
        percent=True,
    ),
    Chart("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Chart("Loss", "", {"loss": "loss"}, from_zero=False),
    Chart(
        "Problems",
        "by their record in this run",
        {
            "problems_visited": "visited",
            "problems_retired": "retired",
            "problems_resting": "resting",
        },
    ),
    Chart(
        "Groups",
        "an update",
        {"groups_kept": "kept", "groups_filtered": "dropped"},
        kind="bars",
    ),
    Chart("Could not be judged", "completions, by the reason", prefix="failures.", kind="bars"),
]
CONVERSATIONS = [
    Chart("Turns and calls", "a conversation", {"turns": "turns", "calls": "calls"}),
    Chart(
        "Tokens of conversations",
        "a conversation",
        {"sampled_tokens": "sampled", "inserted_tokens": "inserted"},
    ),
    Chart("Endings", "share of conversations", prefix="endings.", kind="bars", percent=True),
    Chart(
        "Calls",
        "share of calls",
        {"calls_parsed": "parsed", "calls_failed": "answered with an error"},
        percent=True,
    ),
    Chart("Seconds of steps", "mean of a step or call", prefix="step_seconds."),
    Chart("Longest steps", "seconds", prefix="step_seconds_max."),
    Chart("Trainer's waits for steps", "seconds an update, by tool", prefix="waited_for."),
]
WORKERS = [
    Chart(
        "Throughput",
        "tokens a second",
        {"generator_tokens_per_second": "generator", "trainer_tokens_per_second": "trainer"},
    ),
    Chart("Verdicts", "a second", {"verifier_verdicts_per_second": "verifier"}),
    Chart(
        "Idle share",
        "of the time since the last update",
        {
            "generator_idle_fraction": "generator",
            "trainer_idle_fraction": "trainer",
            "verifier_idle_fraction": "verifier",
        },
        percent=True,
    ),
    Chart(
        "Padding", "share of the trainer's tokens", {"padding_fraction": "padding"}, percent=True
    ),
]
ASYNCHRONY = [
    Chart(
        "Staleness",
        "share of trained tokens, by the versions they are old",
        {"staleness_histogram": "share"},
        kind="histogram",
        percent=True,
    ),
    Chart(
        "Weight-update pause",
        "milliseconds that generation stood still",
        {"weight_update_pause_ms": "pause"},
    ),
    Chart(
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


def sections() -> list[dict[str, Any]]:
    """The charts in the page's order, by section, in JSON types."""
    found = {
        "Learning": LEARNING,
        "Conversations": CONVERSATIONS,
        "Asynchrony": ASYNCHRONY,
        "Workers": WORKERS,
    }
    return [{"title": t, "charts": [asdict(chart) for chart in c]} for t, c in found.items()]
