"""A scorer of Inspect (`inspect_ai`): `Task(..., scorer=verdict())`."""

from __future__ import annotations

from typing import Any

from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Score,
    Scorer,
    Target,
    accuracy,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState

from tramontane.verdicts.grader import Grader, Kind, Sample
from tramontane.verdicts.reasons import reason_of


@scorer(metrics=[accuracy(), stderr()], name="tramontane")
def verdict(kind: Kind = "math", **options: Any) -> Scorer:
    """Correct if the output is right by one of the targets; of `code`, `metadata["tests"]`.

    An output that cannot be judged is unscored, and no metric counts it.

    Args:
        kind: what is graded; see `tramontane.verdicts.grader`.
        options: the other arguments of `Grader`.
    """
    grader = Grader(kind, **options)

    async def score(state: TaskState, target: Target) -> Score:
        text, metadata = state.output.completion, state.metadata
        found = await grader.grade_async(
            [
                Sample(text, answer, metadata.get("tests"), state.input_text)
                for answer in ([*target] or [None])
            ]
        )
        right = [v for v in found if v.verdict == "right"]
        best = (right or [v for v in found if v.verdict != "unscorable"] or found)[0]
        if best.verdict == "unscorable":
            return Score.unscored(explanation=best.reason)
        return Score(
            value=CORRECT if right else INCORRECT,
            answer=best.answer,
            explanation=best.reason,
            metadata={"reward": best.reward, "reason": reason_of(best).value},
        )

    return score
