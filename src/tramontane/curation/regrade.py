"""Stage `regrade`: the second pass, by a stronger model, over the input of the first pass.

In the paper the model was trained on the first pass's result (arXiv 2506.10910, section 4.1). The
pass measures like the first one, and also questions labels: if most answers agree with each other
but not with the label, the label is probably wrong (`label_disputed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tramontane.curation.difficulty import Difficulty, Sample
from tramontane.types import Problem
from tramontane.verifier.math.normalize import vote


class Regrade(Difficulty):
    """Like `Difficulty`; also drops maths problems whose label the majority contradicts."""

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
        classes: list[tuple[str, int]] = []
        for key, count in Counter(map(vote, answers)).most_common():
            answer = spelt[key]
            for i, (known, votes) in enumerate(classes):
                if self.judge.same(known, answer):
                    classes[i] = known, votes + count
                    break
            else:
                classes.append((answer, count))
        return max(classes, key=lambda c: c[1])
