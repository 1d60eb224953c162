"""Metrics of an update's groups: rewards, effort, conversations, waits, trajectories, staleness."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from tramontane.batches import Batch
from tramontane.controller.conversations import Step
from tramontane.evaluation.conversed import ConversationFigures, conversation_row
from tramontane.evaluation.thinking import ThinkingCounter
from tramontane.types import Ending, Group, Verdict
from tramontane.verifier.functions import failures


def reward_metrics(
    groups: Sequence[Group],
    shown: Sequence[str],
    thinking: Mapping[str | None, ThinkingCounter],
) -> dict[str, Any]:
    """Means over all completions of the groups; empty without groups. `failures` counts the
    completions that could not be judged, by the kind of the reason.

    The reward, its parts, `pass_rate`, `format_rate` and `language_rate` are means over the
    completions that could be judged, and absent if there are none.

    Args:
        groups: every group sampled and graded since the last update, including filtered groups.
        shown: names of the parts and rates that this run rewards (`RewardConfig.rewarded`,
            `rates`). Any other would be 0 or 1 whatever the model writes.
        thinking: counts the thinking tokens of completions at each level of effort.
    """
    completions = [c for g in groups for c in g.completions]
    verdicts = [v for g in groups for v in g.verdicts]
    n = len(verdicts)
    if not n:
        return {}
    judged = [v for v in verdicts if v.verdict != "unscorable"]
    return _means_of_judged(judged, shown) | {
        "unscorable_rate": 1 - len(judged) / n,
        "failures": failures(v.reason for v in verdicts if v.verdict == "unscorable"),
        "completion_tokens": sum(c.n_tokens for c in completions) / n,
        "length_limited_rate": sum(c.finish_reason == "length" for c in completions) / n,
        "thinking_tokens": sum(
            thinking[g.problem.effort].count(c) for g in groups for c in g.completions
        )
        / n,
    }


def _means_of_judged(verdicts: Sequence[Verdict], shown: Sequence[str]) -> dict[str, float]:
    n = len(verdicts)
    if not n:
        return {}
    rates = {
        "format_rate": sum(v.verdict != "malformed" for v in verdicts) / n,
        "language_rate": sum(v.parts["language"] > 0 for v in verdicts) / n,
    }
    parts = [part for part in verdicts[0].parts if part in shown]
    return {
        "reward": sum(v.reward for v in verdicts) / n,
        **{f"reward_{part}": sum(v.parts[part] for v in verdicts) / n for part in parts},
        "pass_rate": sum(v.verdict == "right" for v in verdicts) / n,
        **{name: rate for name, rate in rates.items() if name in shown},
    }


def effort_metrics(
    groups: Sequence[Group], thinking: Mapping[str | None, ThinkingCounter]
) -> dict[str, dict[str, Any]]:
    """`reward_metrics` by level of effort; empty without levels."""
    at: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.problem.effort is not None:
            at[group.problem.effort].append(group)
    by_level = {name: reward_metrics(at[name], (), thinking) for name in sorted(at)}
    keys = ("pass_rate", "completion_tokens") if by_level else ()
    return {
        f"effort_{key}": {name: by_level[name][key] for name in by_level if key in by_level[name]}
        for key in keys
    }


def conversation_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Figures of the conversations of all groups graded since the last update: means, shares of the
    endings, and each tool's mean and longest call in seconds; `environment` stands for whole steps.
    Empty without groups.
    """
    conversations = [c for group in groups for c in group.completions]
    figures = ConversationFigures.of([conversation_row(c) for c in conversations])
    if figures is None:
        return {}
    turns = [turn for c in conversations for turn in c.turns]
    calls = [made for turn in turns for made in turn.calls]
    tokens = sum(c.n_tokens for c in conversations) / len(conversations)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for name, taken in [("environment", t.seconds) for t in turns] + [
        (made.name, made.seconds) for made in calls if made.name
    ]:
        seconds[name].append(taken)
    return {
        "turns": figures.mean_turns,
        "sampled_tokens": tokens - figures.mean_inserted_tokens,
        "inserted_tokens": figures.mean_inserted_tokens,
        "calls": figures.mean_calls,
        "calls_parsed": figures.parsed_rate,
        "calls_failed": figures.failed_rate,
        "forked_rate": sum(bool(c.earlier) for c in conversations) / len(conversations),
        "endings": {ending: figures.endings.get(ending, 0.0) for ending in get_args(Ending)},
        "step_seconds": {name: sum(times) / len(times) for name, times in seconds.items()},
        "step_seconds_max": {name: max(times) for name, times in seconds.items()},
    }


def waited_for(wait: tuple[float, float], steps: Iterable[Step]) -> dict[str, float]:
    """Seconds of a wait for a batch during which steps of its conversations were under way, by
    tool; simultaneous steps count once."""
    seconds: defaultdict[str, float] = defaultdict(float)
    reached: dict[str, float] = {}
    for began, ended, tool in sorted(steps):
        start, end = max(began, wait[0], reached.get(tool, 0.0)), min(ended, wait[1])
        if end > start:
            seconds[tool] += end - start
            reached[tool] = end
    return dict(seconds)


def trajectory_metrics(batch: Batch) -> dict[str, float]:
    """Number, tokens and mean reward of the batch's recorded trajectories; empty without any."""
    groups = [group for group in batch.groups if not group.sampled]
    verdicts = [v for g in groups for v in g.verdicts]
    if not verdicts:
        return {}
    rewards = [v.reward for v in verdicts if v.verdict != "unscorable"]
    mean = {"trajectory_reward": sum(rewards) / len(rewards)} if rewards else {}
    return mean | {
        "trajectories": float(len(verdicts)),
        "trajectory_tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions)),
    }


def staleness_histogram(batch: Batch) -> dict[str, int]:
    """Number of trained tokens that the run sampled, by age in weight versions."""
    counts: Counter[int] = Counter()
    for sequence in (s for completion in batch.completions for s in completion.sequences):
        versions = np.array(sequence.versions)
        tokens = np.bincount(batch.version - versions[versions >= 0])
        ages = np.flatnonzero(tokens)
        counts.update(dict(zip(ages.tolist(), tokens[ages].tolist(), strict=True)))
    return {str(age): counts[age] for age in sorted(counts)}
