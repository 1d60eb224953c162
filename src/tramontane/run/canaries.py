"""Canaries: worthless answers that the judge grades during a run. If they win, the reward no longer
measures what it should, and the run ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from tramontane.config import Config
from tramontane.config.domains import JUDGE
from tramontane.controller.observer import Update
from tramontane.controller.verifiers import Grading, Verifiers
from tramontane.controller.waits import in_background
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.types import Group
from tramontane.verifier.custom import Answered, GroupResult, Response
from tramontane.verifier.judge import answer_of


class JudgeFooled(InputError):
    """The judge has preferred a worthless answer too often."""


class Canaries:
    """Has the run's judge grade the canaries as answers to the problems of some groups.

    Args:
        config: the run's config, with a `verifier.judge`.
        verifiers: those of the run.
        folder: the run's folder, named in messages.
    """

    def __init__(self, config: Config, verifiers: Verifiers, folder: Path) -> None:
        assert config.verifier.judge
        self.config, self.folder, self.judge = config, folder, config.verifier.judge
        self._verifiers, self._grading = verifiers, Grading(verifiers, config.timeouts)
        self._earned = config.environment_rewards
        self._wins: Counter[str] = Counter()  # in a row
        self._under_way: list[tuple[Group, asyncio.Task[GroupResult]]] = []

    def begin(self, update: Update) -> None:
        """Have the canaries graded along with judged groups of the update, if they are due."""
        canaries = self.judge.canaries
        groups = [group for group in update.batch.groups if group.sampled and self._scores(group)]
        if not canaries.every or update.number % canaries.every:
            return
        for group in groups[: canaries.groups]:
            answers: list[Answered] = [*canaries.texts.values()]
            if self.judge.compares:
                shown = [Response.of(group.completions[place]) for place in self._scores(group)]
                answers += [answer_of(response, self.config.verifier.tags) for response in shown]
            scores = self._verifiers.judge(group.problem, answers)
            grading = self._grading.wait(scores, group.problem, len(answers))
            task = in_background(grading, f"canaries of update {update.number}")
            self._under_way.append((group, task))

    async def figures(self) -> dict[str, Any]:
        """The scores of the last canaries, by name, and of the groups' own `answers`: means over
        the groups; empty if none were graded.

        Raises:
            JudgeFooled: one has won `max_wins` times in a row.
        """
        under_way, self._under_way = self._under_way, []
        results = [(group, await task) for group, task in under_way]
        graded: dict[str, list[float]] = {}
        for answers, scores in [self._graded(group, result) for group, result in results]:
            for name, score in scores.items():
                self._wins[name] = self._wins[name] + 1 if score >= max(answers, 0.5) else 0
                if self._wins[name] >= self.judge.canaries.max_wins:
                    raise JudgeFooled(self._end(name, score, answers))
            if scores:
                for name, score in ({"answers": answers} | scores).items():
                    graded.setdefault(name, []).append(score)
        means = {name: fmean(scores) for name, scores in graded.items()}
        return {"canaries": means} if means else {}

    def _graded(self, group: Group, found: GroupResult) -> tuple[float, dict[str, float]]:
        """The mean score of a group's own answers, and the canaries' scores by name; no scores if
        the judge failed."""
        names = [*self.judge.canaries.texts]
        given = [*self._scores(group).values()]
        if self.judge.compares:
            given = [score for score in found.values[len(names) :] if score is not None]
        if found.reason or not given:
            return 0.0, {}
        pairs = zip(names, found.values, strict=False)
        return fmean(given), {name: score for name, score in pairs if score is not None}

    def _scores(self, group: Group) -> dict[int, float]:
        """The judge's scores by place in the group, of those completions that have one."""
        weights = self.config.verifier.reward
        part, weight = "judge", weights.judge
        if self.config.verifier.verifier_of(group.problem.domain) == JUDGE:
            part, weight = "correctness", 0.0 if self._earned else weights.correctness
        return {
            place: verdict.parts[part] / weight
            for place, verdict in enumerate(group.verdicts)
            if weight and verdict.verdict in ("right", "wrong")
        }

    def _end(self, name: str, score: float, answers: float) -> str:
        text = " ".join(self.judge.canaries.texts[name].split())
        return (
            f"{self.folder}: the judge is fooled: it gives the worthless answer {name!r} "
            f"({text[:80]!r}) {score:.2f}, and the model's own answers {answers:.2f}; it has won "
            f"{self._wins[name]} times in a row (verifier.judge.canaries.max_wins)\n"
            f"More training would teach such answers. Change the criteria or the judge and begin a "
            f"new run; or, if this answer is worth its score, remove it from canaries.texts: "
            f"{RunFolder(self.folder).resume_command}"
        )
