"""A judge's process: `python -m tramontane.asking.judge FD`.

Started by the verifiers' pool like a grading process, it answers one group at a time. An endpoint
gets all requests of a group at once; a checkpoint or reward model gets them in batches.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tramontane.asking import Answer, Prompt
from tramontane.asking.model import open_model
from tramontane.config import VerifierConfig
from tramontane.config.judge import JudgeConfig
from tramontane.errors import importing
from tramontane.placement.process import serve
from tramontane.types import Problem
from tramontane.verifier import judge
from tramontane.verifier.custom import Answered, GroupResult
from tramontane.verifier.judge import Question, Reading, Spending

Score = Callable[[Problem, list[Answered]], GroupResult]


def prepare(config: VerifierConfig, folder: Path) -> Callable[[Any], Iterator[GroupResult]]:
    """Load the model; see `serve`."""
    assert config.judge
    score = _opened(config.judge, Spending(folder.parent, config.judge.max_requests))

    def results(task: Any) -> Iterator[GroupResult]:
        problem, calls, *_ = task
        for call in calls:
            distinct = list(dict.fromkeys(a for a in call.answers if a is not None))
            try:
                found = score(problem, distinct)
            except Exception as error:  # the stated boundary: never silently a zero
                yield GroupResult([], f"judge: {type(error).__name__}: {error}"[:300])
                continue
            places = [None if a is None else distinct.index(a) for a in call.answers]
            yield found._replace(
                values=[None if i is None else found.values[i] for i in places],
                notes=["" if i is None else found.notes[i] for i in places],
            )

    return results


def _opened(config: JudgeConfig, spending: Spending) -> Score:
    if config.reward_model:
        with importing():
            from tramontane.asking.classifier import Classifier

        return Classifier(config.reward_model).score
    model = open_model(config, spending.add)

    def ask(prompts: list[Prompt]) -> list[Answer]:
        if config.checkpoint:
            spending.add(len(prompts))
        with tempfile.TemporaryDirectory() as folder:
            found = dict(model.answers(prompts, 1, Path(folder) / "answers.jsonl"))
        return [found[place][0] for place in range(len(prompts))]

    def score(problem: Problem, answers: list[Answered]) -> GroupResult:
        asked = judge.questions(problem, answers, config)
        return judge.result(asked, _readings(problem, asked, config.tries, ask), len(answers))

    return score


def _readings(
    problem: Problem,
    asked: Sequence[Question],
    tries: int,
    ask: Callable[[list[Prompt]], list[Answer]],
) -> list[Reading | str]:
    """What the judge says to each question, or why it says nothing."""
    found: dict[int, Reading | str] = {}
    pending = list(range(len(asked)))
    for attempt in range(tries):
        texts = [asked[i].text + judge.REMINDER * bool(attempt) for i in pending]
        # The key is of the problem alone: a greedy judge grades equal answers alike.
        key, images = f"{problem.id}/{attempt}", tuple(problem.images)
        prompts = [Prompt(key, text, images) for text in texts]
        unread = []
        for i, answer in zip(pending, ask(prompts) if prompts else [], strict=True):
            if answer.fault:  # after the endpoint's own retries
                found[i] = f"judge: {answer.fault}"
            elif answer.cut or answer.tokens >= asked[i].config.max_tokens:
                unread.append(i)
                limit = asked[i].config.max_tokens
                found[i] = f"judge: its answer was cut at {limit} tokens (max_tokens)"
            elif reading := asked[i].read(answer.text):
                found[i] = reading
            else:
                unread.append(i)
                shown = " ".join(answer.text.split())[-80:]
                found[i] = f"judge: its answer cannot be read: {shown!r}"
        pending = unread
    return [found[i] for i in range(len(asked))]


if __name__ == "__main__":
    serve(int(sys.argv[1]), prepare)
