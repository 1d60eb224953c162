"""Stage `review`: a model reviews the math problems that pass the format rules.

The stage is optional and belongs after `filter`. The model answers `ok` or one of the filter's
reasons; a problem is dropped if most votes name the same reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tramontane.asking import Answer, Prompt, conclusion
from tramontane.curation.rows import ModelStage, Row

REASONS = ("proof", "multi_part", "incomplete", "multiple_choice", "unverifiable")
QUESTION = """\
Below are a mathematical problem and its reference answer. Do not solve the problem. Judge only \
whether it can be set to somebody who will be graded by comparing one final answer with the \
reference. Choose one word:

proof: it asks for a proof or an explanation, and not for an answer
multi_part: it asks for several separate answers
incomplete: something that it needs is not there, such as a figure, a table, a definition or the \
end of the statement
multiple_choice: it cannot be answered without options to choose from
unverifiable: the reference answers something else, or is not an answer that can be compared
ok: none of these

<problem>
{problem}
</problem>
<answer>
{answer}
</answer>

End with a line that holds "Verdict:" and the word.
"""
_VERDICT = re.compile(rf"verdict\W+({'|'.join(REASONS)}|ok)\b", re.IGNORECASE)


class Review(ModelStage):
    """Drops math problems that `config.model` finds fault with; programming problems pass."""

    name = "review"

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        tasks = {i: row.task for i, row in enumerate(rows) if row.task.domain == "math"}
        prompts = {
            i: Prompt(t.id, QUESTION.format(problem=t.problem, answer=t.answer or "(none)"))
            for i, t in tasks.items()
        }
        decided = list(rows)
        for i, answers in self.ask(rows, prompts, self.config.votes):
            decided[i] = self._decide(rows[i], answers)
        return decided

    def _decide(self, row: Row, answers: Sequence[Answer]) -> Row:
        votes = Counter(map(_vote, answers))
        votes_text = ", ".join(f"{word} {n}" for word, n in votes.most_common())
        for word in REASONS:
            if 2 * votes[word] > len(answers):
                return row.drop(self.name, word, f"votes: {votes_text}")
        if 2 * sum(votes[word] for word in (*REASONS, "ok")) <= len(answers):
            return row.note(self.name, "unreviewed", f"votes: {votes_text}")
        return row


def _vote(answer: Answer) -> str:
    """One of `REASONS`, `ok`, or why the answer has no verdict."""
    if answer.fault:
        return answer.fault
    verdicts = _VERDICT.findall(conclusion(answer.text))
    return verdicts[-1].lower() if verdicts else "no verdict"
