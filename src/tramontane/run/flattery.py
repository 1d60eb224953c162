"""Detects a flattered judge: its scores rise during a run, and the verdicts of a verifier on the
same completions do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from tramontane.config import VerifierConfig
from tramontane.config.domains import JUDGE
from tramontane.errors import InputError
from tramontane.statistics import Estimate, Z


class Graded(Protocol):
    """A completion with a verdict."""

    @property
    def problem_id(self) -> str: ...
    @property
    def verdict(self) -> str: ...


G = TypeVar("G", bound=Graded)


class _Recorded(NamedTuple):
    problem_id: str
    verdict: str


def score_of(config: VerifierConfig, domain: str, verdict: str, part: float | None) -> float | None:
    """The judge's score, from its part of the reward, of a completion that another verifier has
    graded too; None if either is missing."""
    weight = 0.0 if config.verifier_of(domain) in (None, JUDGE) else config.reward.judge
    graded = verdict in ("right", "wrong")
    return part / weight if weight and graded and part is not None else None


def flattered(judged: Sequence[tuple[float, G]]) -> tuple[list[tuple[float, G]], str]:
    """Find the completions of the last third that their verifier calls wrong and the judge gives at
    least 0.5. None are returned unless the judge's scores rise from the first third to the last and
    the verdicts do not. Also returns both rises in words.

    Args:
        judged: the judge's score and the completion, in the order of the run.
    """
    third = len(judged) // 3
    first, last = judged[:third], judged[len(judged) - third :]
    scores = _rise(*([(g, score) for score, g in part] for part in (first, last)))
    rights = _rise(*([(g, float(g.verdict == "right")) for _, g in part] for part in (first, last)))
    if scores is None or rights is None or scores.low <= 0 or rights.low > 0:
        return [], ""
    wrong = [(score, g) for score, g in last if score >= 0.5 and g.verdict == "wrong"]
    return wrong, f"from the first third to the last, judge {scores}, verdicts {rights}"


def flattery_warning(run: Path, config: VerifierConfig) -> str:
    """A warning if a run's rollouts show that its judge was flattered; otherwise empty."""
    found, detail = flattered([*_judged(run, config)] if config.reward.judge else [])
    if not found:
        return ""
    return (
        f"verifier.judge: its scores rise in the run, and verdicts do not ({detail}): it likes "
        f"{len(found):,} late completions that are wrong. See them: tramontane audit {run}"
    )


def _judged(run: Path, config: VerifierConfig) -> Iterator[tuple[float, _Recorded]]:
    from tramontane.run.rollouts import files, read_rollouts  # Arrow

    for file in files(run / "rollouts"):
        with suppress(InputError):  # damaged; the audit names it
            for row in read_rollouts(file, ["problem_id", "domain", "verdict", "parts"]):
                part = row["parts"].get("judge")
                score = score_of(config, row["domain"], row["verdict"], part)
                if score is not None:
                    yield score, _Recorded(row["problem_id"], row["verdict"])


def _rise(*parts: Sequence[tuple[Graded, float]]) -> Estimate | None:
    """The difference of two means and its 95 % interval, each problem of a part counting as one
    observation; None with fewer than two problems."""
    means = []
    for part in parts:
        by_problem = defaultdict(list)
        for graded, value in part:
            by_problem[graded.problem_id].append(value)
        means.append(np.array([np.mean(values) for values in by_problem.values()]))
    first, last = means
    if min(len(first), len(last)) < 2:
        return None
    value = float(last.mean() - first.mean())
    half = Z * math.sqrt(sum(x.var(ddof=1) / len(x) for x in means))
    return Estimate(value, value - half, value + half)
