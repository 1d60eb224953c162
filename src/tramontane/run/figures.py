"""Figures of a run as text: numbers, durations, sparklines, and the facts of a finished run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tramontane.config import HELD_OUT
from tramontane.placement.printed import printable

Metrics: TypeAlias = Mapping[str, Any]

FAILURES_SHOWN = 3  # kinds of failures named at the end of a run
MESSAGE_CHARACTERS = 600  # of each message of a sample on plain lines
BLOCKS = "▁▂▃▄▅▆▇█"
# What is measured beside pass@1: name, key in the summary, and how it is written.
MEASURES: list[tuple[str, str, Callable[[float], str]]] = [
    ("reward", "mean_reward", "{:.3f}".format),
    ("format", "format_rate", "{:.3f}".format),
    ("language", "language_rate", "{:.3f}".format),
    ("thinking tokens", "mean_thinking_tokens", "{:.1f}".format),
]


def number(value: float) -> str:
    """Three significant digits below a hundred, thousands separators above."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"


def share(value: float) -> str:
    return f"{value:.0%}" if value == 0 or value >= 0.01 else f"{value:.2%}"


def clock(seconds: float) -> str:
    """`1:05` or `2:03:04`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def sparkline(values: list[float]) -> str:
    """A line of block characters for the values that are numbers, scaled to their range."""
    values = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((v - low) / (high - low) * (len(BLOCKS) - 1))] for v in values)


def shortened(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """A text without its middle, if it is longer."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} … {text[-half:]}"


def known(m: Metrics, key: str, form: str) -> str:
    return "" if m.get(key) is None else form.format(m[key])


def before_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(measure, before, after, change) of all measurements; a dash where one is missing."""
    passed = summary.get("pass_at_1") or {}
    rows = [_estimates("pass@1", passed.get("before"), passed.get("after"))]
    first, last = summary.get("sft") or summary.get("base") or {}, summary.get("rl") or {}
    for name in (first | last).keys() - {"pass_at_1", "format_rate"}:  # further sets of problems
        rows.append(_estimates(f"pass@1, {name}", first.get(name), last.get(name)))
    measures = [(name, summary.get(key) or {}, show) for name, key, show in MEASURES]
    results = summary.get("evaluation") or {}
    levels = {when: result.get("by_effort") or {} for when, result in results.items()}
    for level in dict.fromkeys(name for found in levels.values() for name in found):
        at = {when: found[level] for when, found in levels.items() if level in found}
        ends = [at.get(when, {}).get("pass_at_1") for when in ("before", "after")]
        rows.append(_estimates(f"pass@1, {level} effort", *ends))
        tokens = {when: part["mean_completion_tokens"] for when, part in at.items()}
        measures.append((f"tokens, {level} effort", tokens, "{:.1f}".format))
    called = [name for name, made in (summary.get("calls") or {}).items() if any(made.values())]
    for key, title in (("calls", "calls"), ("calls_parsed", "calls that parse")):
        for name in called:
            label = title if name == HELD_OUT else f"{title}, {name}"
            measures.append((label, summary.get(key, {}).get(name, {}), "{:.3f}".format))
    alone = (summary.get("first_turn") or {}).get(HELD_OUT, {})
    measures.insert(0, ("pass@1, first turn", alone, "{:.3f}".format))
    for name, measure, show in measures:
        before, after = measure.get("before"), measure.get("after")
        change = "" if before is None or after is None else show(after - before)
        sign = "" if not change or change.startswith("-") else "+"
        texts = ["–" if x is None else show(x) for x in (before, after)]
        rows.append((name, texts[0], texts[1], sign + change))
    return [row for row in rows if row[1:3] != ("–", "–")]


def _estimates(name: str, before: Any, after: Any) -> tuple[str, str, str, str]:
    ends = (before, after)
    texts = [f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" if e else "–" for e in ends]
    change = f"{after['value'] - before['value']:+.3f}" if before and after else ""
    return name, texts[0], texts[1], change


def _failures(counts: Mapping[str, int]) -> str:
    """The most frequent kinds of failures, with their numbers of completions."""
    shown = [f"{count:,} × {kind}" for kind, count in [*counts.items()][:FAILURES_SHOWN]]
    more = [f"{len(counts) - FAILURES_SHOWN} other kinds"] if len(counts) > FAILURES_SHOWN else []
    return printable("; ".join(shown + more))


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts of a finished run by name, as text, from the content of its `summary.json`."""
    pause = summary.get("weight_update_pause_ms")
    stale, types = summary.get("staleness"), summary.get("number_types")
    base = summary["base"].get("pass_at_1") if "sft" in summary else None  # else it is `before`
    found = [
        ("pass@1 of the base model", f"{base['value']:.3f}" if base else ""),
        ("wall time", clock(summary.get("wall_seconds") or 0)),
        ("updates", known(summary, "updates", "{}")),
        ("trained tokens/s", known(summary, "trained_tokens_per_second", "{:,.0f}")),
        ("generator idle", known(summary, "generator_idle_fraction", "{:.1%}")),
        ("held by the staleness bound", known(summary, "generator_held_fraction", "{:.1%}")),
        ("padding", known(summary, "padding_fraction", "{:.1%}")),
        ("weight-update pause", pause and f"{pause['p50']:.1f} ms (p99 {pause['p99']:.1f})"),
        ("staleness", stale and f"{stale['mean']:.2f} versions (max {stale['max']})"),
        ("number type", types and types["trainer"].partition(" ")[0]),
        ("optimizer steps skipped", known(summary, "skipped_steps", "{:,}")),
        ("unscorable groups dropped", known(summary, "groups_unscorable", "{:,}")),
        ("unscorable trained on as wrong", known(summary, "unscorable_trained", "{:,}")),
        ("could not be judged", _failures(summary.get("failures") or {})),
    ]
    return [(name, text) for name, text in found if text not in (None, "", "0", "0:00")]
