"""The result of a run: the content of `summary.json`, and the object returned by `train`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tramontane.config import HELD_OUT, Config
from tramontane.evaluation import Estimate, EvaluationResult

# Evaluations of a run by the time (`base`, `before`, `after`) and the name of the problem set.
Measured = Mapping[str, Mapping[str, EvaluationResult]]


class BeforeAfter(NamedTuple):
    """An estimate before and after training; None if not measured."""

    before: Estimate | None
    after: Estimate | None

    @classmethod
    def of(cls, measured: Measured) -> BeforeAfter:
        results = (measured.get(when, {}).get(HELD_OUT) for when in ("before", "after"))
        return cls(*(result.pass_at_1 if result else None for result in results))


@dataclass(frozen=True)
class TrainResult:
    """A run that has finished or was interrupted.

    Args:
        run_dir: the run's folder.
        weights: the newest weights, a checkpoint in the Hugging Face layout.
        updates: updates done, over all sessions of the run.
        finished: False after an interruption; `train(resume=run_dir)` continues the run.
        pass_at_1: on the held-out problems.
        summary: the content of `summary.json`; empty unless `finished`.
        report: path of `report.html`; None if not requested.
    """

    run_dir: Path
    weights: Path
    updates: int
    finished: bool
    pass_at_1: BeforeAfter
    summary: dict[str, Any]
    report: Path | None = None


def summarize_run(
    metrics: list[dict[str, Any]], measured: Measured, wall_seconds: float, config: Config
) -> dict[str, Any]:
    """Summarize a run from the metrics of its updates and its evaluations.

    Shares and rates are means over time: updates are weighted by their duration. The first
    update's, which includes the start, is replaced by the mean of the others. Rates that the config
    does not reward are left out: they would be 0 or 1 whatever the model writes.
    """
    pauses = [m["weight_update_pause_ms"] for m in metrics]
    sampled = sum(sum(m["staleness_histogram"].values()) for m in metrics)
    tokens = sampled + int(sum(m.get("trajectory_tokens", 0) for m in metrics))
    ages = [(int(age), count) for m in metrics for age, count in m["staleness_histogram"].items()]
    seconds = np.diff([0.0, *(m["wall_seconds"] for m in metrics)])
    seconds[:1] = seconds[1:].mean() if len(seconds) > 1 else seconds[:1]

    def mean(key: str) -> float:
        return float(np.average([m[key] for m in metrics], weights=seconds))

    summary = _models(measured, config)
    if HELD_OUT in measured["after"]:
        ends = ("before", "after")
        pairs = {when: measured[when][HELD_OUT] for when in ends if measured[when]}
        summary["pass_at_1"] = {k: r.pass_at_1.to_dict() for k, r in pairs.items()}
        for name in config.evaluated_rates:
            summary[name] = {k: getattr(r, name) for k, r in pairs.items()}
        summary["evaluation"] = {k: r.to_dict() for k, r in pairs.items()}
    for when in ("before", "after"):
        for name, result in measured.get(when, {}).items():
            if talked := result.conversations:
                figures = {"calls": talked.mean_calls, "calls_parsed": talked.parsed_rate}
                if talked.right_by_turn and not talked.mean_calls:
                    figures["first_turn"] = talked.right_by_turn[0]
                for key, figure in figures.items():
                    summary.setdefault(key, {}).setdefault(name, {})[when] = figure
    if not metrics:  # they are lost
        return summary
    return summary | {
        "updates": len(metrics),
        "groups_unscorable": sum(m["groups_unscorable"] for m in metrics),
        "unscorable_trained": sum(m["unscorable_trained"] for m in metrics),
        "failures": dict(_failures(metrics).most_common()),
        "skipped_steps": int(sum(m["skipped_steps"] for m in metrics)),
        "training_seconds": float(seconds.sum()),
        "trained_completion_tokens": tokens,
        "trained_tokens_per_second": tokens / float(seconds.sum()),
        "generator_idle_fraction": mean("generator_idle_fraction"),
        "generator_held_fraction": mean("generator_held_fraction"),
        "trainer_idle_fraction": mean("trainer_idle_fraction"),
        "verifier_idle_fraction": mean("verifier_idle_fraction"),
        "padding_fraction": mean("padding_fraction"),
        "weight_update_pause_ms": {
            "p50": float(np.percentile(pauses, 50)),
            "p99": float(np.percentile(pauses, 99)),
        },
        # Of the tokens that the run sampled; None if all were recorded trajectories.
        "staleness": {
            "mean": sum(age * count for age, count in ages) / sampled,
            "max": max(age for age, _ in ages),
        }
        if sampled
        else None,
        "wall_seconds": round(wall_seconds, 2),
        "minutes": round(wall_seconds / 60, 1),
    }


def _failures(metrics: list[dict[str, Any]]) -> Counter[str]:
    """Completions that could not be judged, by the kind of the reason, over all updates."""
    counts = Counter[str]()
    for row in metrics:
        counts.update(row.get("failures", {}))
    return counts


def _models(measured: Measured, config: Config) -> dict[str, Any]:
    """Figures of each model that was measured: `base`, `sft` (after a cold start), `rl`. Each has
    `pass_at_1` and `format_rate` on the held-out problems, and pass@1 on further sets by name."""
    names = {"base": "base", "before": "sft", "after": "rl"}
    if "base" not in measured:
        names["before"] = "base"
    models: dict[str, Any] = {}
    for when, results in measured.items():
        if not results:
            continue
        figures = models[names[when]] = {}
        for name, result in results.items():
            if name == HELD_OUT:
                figures["pass_at_1"] = result.pass_at_1.to_dict()
                if "format_rate" in config.evaluated_rates:
                    figures["format_rate"] = result.format_rate
            else:
                figures[name] = result.pass_at_1.to_dict()
    return models
