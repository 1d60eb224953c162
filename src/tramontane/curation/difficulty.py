"""Stages `difficulty` and `regrade`: how often a model solves each problem (arXiv 2506.10910, 4.1).

The training generator or an endpoint gives `samples` answers to each problem, and the verifiers of
training grade them. Problems that are never solved, or too often, teach nothing. Every row gets
`pass_rate` and `samples`, also stored with the model as `difficulty_pass_rate`,
`difficulty_samples` and `difficulty_model`, which a second pass does not overwrite.

| reason | what |
|---|---|
| `unsolved` | solved no more often than `min_pass_rate` (by default: never) |
| `too_easy` | solved more often than `max_pass_rate` |
| `unanswered` | most answers never came |
| `unscorable` | most answers could not be judged, or the row has no answer and no tests |
| `label_disputed` | (`regrade` only) most answers agree with each other but not with the label |

`regrade` is the second pass, by a stronger model, over the input of the first pass. In the paper
the model was trained on the first pass's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tramontane.asking import Answer, Prompt
from tramontane.curation.config import DifficultyConfig
from tramontane.curation.judge import ReferenceJudge
from tramontane.curation.rows import ModelStage, Row
from tramontane.journals import Journal
from tramontane.statistics import grouped
from tramontane.types import PAPER_TAGS, Problem, Verdict
from tramontane.verifier.math.normalize import vote


class Sample(NamedTuple):
    """One graded answer; `outcome` is a `types.Outcome`, or `unanswered`."""

    outcome: str
    answer: str | None
    reason: str


class Difficulty(ModelStage):
    """Measures problems with `config.model`, and drops those that are too hard or too easy for
    it."""

    name = "difficulty"

    def __init__(self, config: DifficultyConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.judge = ReferenceJudge(config.verifier)

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        decided, asked = list(rows), []
        for i, row in enumerate(rows):
            needs = self.config.verifier.domains[row.task.domain].needs
            if lacking := [name for name in needs if not getattr(row.task, name)]:
                decided[i] = row.drop(self.name, "unscorable", f"no {' and no '.join(lacking)}")
            else:
                asked.append(i)
        for place, samples in self._graded(rows, [rows[i] for i in asked]).items():
            decided[asked[place]] = self._decide(rows[asked[place]], samples)
        return decided

    def finding(self, problem: Problem, judged: Sequence[Sample]) -> tuple[str, str] | None:
        """(reason, detail) for which to drop the problem with these judged answers, or None."""
        solved = sum(s.outcome == "right" for s in judged)
        detail = f"solved {solved} of {len(judged)}"
        if solved <= self.config.min_pass_rate * len(judged):
            return "unsolved", detail
        if solved > self.config.max_pass_rate * len(judged):
            return "too_easy", detail
        return None

    def close(self) -> None:
        self.judge.close()

    def _graded(self, chunk: Sequence[Row], rows: Sequence[Row]) -> dict[int, list[Sample]]:
        """The samples of each row, graded while other rows' answers are generated."""
        prompts = {i: Prompt(row.task.id, row.task.problem) for i, row in enumerate(rows)}
        graded: dict[int, list[Sample]] = {}
        waiting: dict[Future[list[Verdict]], tuple[int, list[Answer]]] = {}
        with Journal(self.record(chunk, "verdicts")) as journal:
            graded |= {place: [Sample(*s) for s in samples] for place, samples in journal}

            def collect(timeout_s: float | None) -> None:
                for future in wait(waiting, timeout_s, FIRST_COMPLETED).done:
                    place, answers = waiting.pop(future)
                    graded[place] = _samples(answers, future.result())
                    if not any(a.fault for a in answers):  # otherwise a restart must ask again
                        journal.add((place, graded[place]))

            for place, answers in self.ask(chunk, prompts, self.config.samples):
                if place not in graded:
                    responses = [(self._response(a), a.tokens) for a in answers if not a.fault]
                    future = self.judge.pool.score(rows[place].task, responses)
                    waiting[future] = (place, answers)
                collect(timeout_s=0)
            while waiting:
                collect(timeout_s=None)  # the pool kills late workers
        return graded

    def _response(self, answer: Answer) -> str:
        text = answer.text
        opening, closing = PAPER_TAGS
        if self.config.think_tags or text.startswith(opening):
            return text
        # Some templates write the opening tag into the prompt; some models write no tags.
        return opening + text if closing in text else opening + closing + text

    def _decide(self, row: Row, samples: Sequence[Sample]) -> Row:
        judged = [s for s in samples if s.outcome not in ("unanswered", "unscorable")]
        if 2 * len(judged) < len(samples):
            lacking = Counter(s[::2] for s in samples if s not in judged)
            (outcome, reason), count = lacking.most_common(1)[0]
            return row.drop(self.name, outcome, f"{count} of {len(samples)}: {reason}")
        solved = sum(s.outcome == "right" for s in judged)
        latest = {"pass_rate": solved / len(judged), "samples": len(judged)}
        measured = {**latest, "model": self.config.model.name}
        by_pass = {f"{self.name}_{key}": value for key, value in measured.items()}
        problem = replace(row.task, metadata={**row.task.metadata, **latest, **by_pass})
        row = replace(row, problem=problem)
        finding = self.finding(problem, judged)
        return row.drop(self.name, *finding) if finding else row


class Regrade(Difficulty):
    """Like `Difficulty`; also drops math problems whose label the majority contradicts."""

    name = "regrade"

    def finding(self, problem: Problem, judged: Sequence[Sample]) -> tuple[str, str] | None:
        wrong = [s.answer for s in judged if s.outcome == "wrong" and s.answer is not None]
        enough = self.config.dispute_share * len(judged)
        verifier = self.config.verifier.verifier_of(problem.domain)
        if verifier == "math" and len(wrong) > enough:
            answer, votes = self._most_frequent(wrong)
            if votes > enough:
                solved = sum(s.outcome == "right" for s in judged)
                label = f"{solved} the label {problem.answer}"
                detail = f"{votes} of {len(judged)} answer {answer}; {label}"
                return "label_disputed", detail
        return super().finding(problem, judged)

    def _most_frequent(self, answers: Sequence[str]) -> tuple[str, int]:
        """The most common answer in its most frequent spelling, and its number of votes.

        Answers that the verifier considers equal vote together: `x=2` votes with `2`.
        """
        spelt = {vote(answer): answer for answer in reversed(answers)}
        counts = Counter(map(vote, answers))
        classes = grouped(
            [key for key, _ in counts.most_common()],
            lambda one, other: self.judge.same(spelt[one], spelt[other]),
        )
        votes, first = max(
            ((sum(counts[key] for key in keys), keys[0]) for keys in classes),
            key=lambda found: found[0],
        )
        return spelt[first], votes


def _samples(answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> list[Sample]:
    remaining = iter(verdicts)
    return [
        Sample("unanswered", None, answer.fault)
        if answer.fault
        else Sample((v := next(remaining)).verdict, v.answer, v.reason)
        for answer in answers
    ]
