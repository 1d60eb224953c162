"""The figures of one update: rewards, staleness, and the throughput of the workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import Update
from tramontane.evaluation.thinking import ThinkingCounter
from tramontane.run.session import Verifiers
from tramontane.types import Batch, Group


def reward_metrics(
    groups: Sequence[Group], parts: Sequence[str], thinking: ThinkingCounter
) -> dict[str, float]:
    """Means over all completions of the groups; empty without groups.

    Args:
        groups: every group sampled and graded since the last update, including filtered groups.
        parts: names of the reward's parts.
        thinking: counts the thinking tokens.
    """
    completions = [c for g in groups for c in g.completions]
    verdicts = [v for g in groups for v in g.verdicts]
    n = len(verdicts)
    if not n:
        return {}
    return {
        "reward": sum(v.reward for v in verdicts) / n,
        **{f"reward_{part}": sum(v.parts[part] for v in verdicts) / n for part in parts},
        "pass_rate": sum(v.verdict == "right" for v in verdicts) / n,
        "format_rate": sum(v.verdict != "malformed" for v in verdicts) / n,
        "language_rate": sum(v.parts["language"] > 0 for v in verdicts) / n,
        "unscorable_rate": sum(v.verdict == "unscorable" for v in verdicts) / n,
        "completion_tokens": sum(len(c.token_ids) for c in completions) / n,
        "thinking_tokens": sum(map(thinking.count, completions)) / n,
    }


def trajectory_metrics(batch: Batch) -> dict[str, float]:
    """Number, tokens and mean reward of the batch's recorded trajectories; empty without any."""
    groups = [group for group in batch.groups if not group.sampled]
    rewards = [v.reward for g in groups for v in g.verdicts]
    if not rewards:
        return {}
    return {
        "trajectories": float(len(rewards)),
        "trajectory_tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions)),
        "trajectory_reward": sum(rewards) / len(rewards),
    }


def staleness_histogram(batch: Batch) -> dict[str, int]:
    """Number of trained tokens that the run sampled, by age in weight versions."""
    counts: Counter[int] = Counter()
    for completion in batch.completions:
        versions = np.array(completion.versions)
        tokens = np.bincount(batch.version - versions[versions >= 0])
        ages = np.flatnonzero(tokens)
        counts.update(dict(zip(ages.tolist(), tokens[ages].tolist(), strict=True)))
    return {str(age): counts[age] for age in sorted(counts)}


class Throughput:
    """Tokens per second and idle share of each kind of worker, from one update to the next."""

    def __init__(self, generators: GeneratorPool, verifiers: Verifiers, workers: int) -> None:
        self.generators, self.verifiers, self.workers = generators, verifiers, workers
        self._time, self._totals = time.monotonic(), self._count(0.0)

    def restart(self, update: Update) -> None:
        """Count from now on."""
        self._time, self._totals = time.monotonic(), self._count(update.busy_seconds)

    def metrics(self, update: Update) -> dict[str, float]:
        """The rates since the last call, or since `restart`."""
        then, before = self._time, self._totals
        self.restart(update)
        seconds = self._time - then
        done = {key: self._totals[key] - before[key] for key in before}
        return {
            "generator_tokens_per_second": done["generated"] / seconds,
            "generator_idle_fraction": max(0.0, 1 - done["generating"] / seconds),
            "generator_held_fraction": min(1.0, done["without_work"] / seconds),
            "trainer_tokens_per_second": update.metrics["computed_tokens"] / seconds,
            "trainer_idle_fraction": max(0.0, 1 - done["training"] / seconds),
            "verifier_verdicts_per_second": done["verdicts"] / seconds,
            "verifier_idle_fraction": max(0.0, 1 - done["verifying"] / (seconds * self.workers)),
        }

    def _count(self, training: float) -> dict[str, float]:
        """Totals so far: tokens and verdicts, and seconds; `training` are the trainer's."""
        verifiers = self.verifiers.stats()
        return {
            "generated": self.generators.generated_tokens,
            "generating": self.generators.busy_seconds,
            "without_work": self.generators.seconds_without_work,
            "training": training,
            "verdicts": verifiers.verdicts,
            "verifying": verifiers.busy_seconds,
        }
