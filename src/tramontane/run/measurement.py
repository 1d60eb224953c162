"""Evaluation of a run's weights, on its own generators, with the held-out problems and further
sets."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from tramontane.config import HELD_OUT
from tramontane.controller.generators import GeneratorPool
from tramontane.evaluation import EvaluationResult, summarize
from tramontane.evaluation.completions import CompletionsFile
from tramontane.evaluation.evaluate import Evaluation
from tramontane.evaluation.placed import generate, grade
from tramontane.run.session import Session, Verifiers
from tramontane.types import Completion
from tramontane.workplace import commit, read_log

ENDS = ("base", "before", "after")  # measurements on all sets; others use only `data.eval`


async def measure(
    session: Session, generators: GeneratorPool, verifiers: Verifiers, when: str, version: int
) -> dict[str, EvaluationResult]:
    """Evaluate the generators' weights; returns results by name of the set, empty if the config
    asks for none.

    The requests share the generators with whatever training has in flight. All tokens must come
    from weights `version`, so the caller must not send new weights until the end. A lost generator
    is replaced as in training, and its requests continue. The completions are written to
    `evaluation_WHEN.jsonl` (a further set's to `evaluation_WHEN_SET.jsonl`), the figures to
    `evaluations.jsonl`.

    Args:
        session: gives the problems, the settings and the folder.
        generators: have slots for the sets' longest completions.
        verifiers: grade the completions.
        when: `base` (before a cold start), `before`, `update_N` or `after`.
        version: version of the generators' weights.

    Raises:
        WorkerLost: a generator cannot be replaced.
        WorkerStalled: the verifiers returned no verdict within their timeout.
    """
    found = {}
    for name in sets_of(session, when):
        result = await asyncio.to_thread(_recorded, session, when, name)
        if result is None:
            began, measurement = time.time(), _Measurement(session, verifiers, version)
            result = await measurement.run(generators, when, name)
            for generator in generators:
                session.spent(generator.name, "evaluation", began)
        found[name] = result
    return found


def sets_of(session: Session, when: str) -> list[str]:
    """Names of the sets that a measurement uses."""
    if when in ("base", "before") and not session.config.evaluation.before:
        return []
    sets = session.prepared.sets
    return [name for name in sets if when in ENDS or name == HELD_OUT]


def recorded(session: Session, when: str) -> dict[str, EvaluationResult] | None:
    """The results of an earlier session of the run, if it measured all sets."""
    found = {name: _recorded(session, when, name) for name in sets_of(session, when)}
    results = {name: result for name, result in found.items() if result is not None}
    return results if len(results) == len(found) else None


def _recorded(session: Session, when: str, name: str) -> EvaluationResult | None:
    """The result of an earlier session of the run for the same weights."""
    file = _rows_file(session, when, name)
    if when not in ("base", "before") or not file.is_file():
        return None
    return summarize(list(read_log(file)))


def _rows_file(session: Session, when: str, name: str) -> Path:
    suffix = "" if name == HELD_OUT else f"_{name}"
    return session.folder.path / f"evaluation_{when}{suffix}.jsonl"


class _Measurement:
    """The evaluation of one set on a pool of generators."""

    def __init__(self, session: Session, verifiers: Verifiers, version: int) -> None:
        self.session, self.verifiers, self.version = session, verifiers, version

    async def run(self, generators: GeneratorPool, when: str, name: str) -> EvaluationResult:
        """Generate and grade the completions of the set `name`, and record the result."""
        folder, problems = self.session.folder, self.session.prepared.sets[name]
        rows_file = _rows_file(self.session, when, name)
        unfinished = rows_file.with_suffix(".partial")
        title = f"evaluation {when}" if name == HELD_OUT else f"evaluation {when}, {name}"
        progress = partial(self.session.screen.phase, title)
        encoder = self.session.prepared.encoder
        with folder.writing(unfinished):
            with CompletionsFile(unfinished) as record:
                evaluation = Evaluation(
                    problems.problems, problems.plan, self.verifiers, encoder, record, progress
                )
                await generate(evaluation, generators, self._check_version)
                await grade(evaluation, self.verifiers, self.session.config.timeouts)
                result = await asyncio.to_thread(summarize, evaluation.rows)
            commit(unfinished, rows_file)
        self.session.log_evaluation(
            {"when": when, "set": name, "version": self.version} | result.to_dict()
        )
        return result

    def _check_version(self, completion: Completion) -> None:
        if {*completion.versions} != {self.version}:
            raise AssertionError(
                f"an evaluation of weights {self.version} sampled under {completion.versions}"
            )
