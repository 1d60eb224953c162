"""Evaluation of a run's weights, on its own generators, with the held-out problems and further
sets."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tramontane.config import HELD_OUT
from tramontane.controller.conversations import Conversations
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.sampling import Sampler
from tramontane.controller.verifiers import Grading, Verifiers
from tramontane.evaluation import EvaluationResult, summarize
from tramontane.evaluation.evaluate import Evaluation
from tramontane.journals import Journal, read_log
from tramontane.run.session import Session
from tramontane.tokens import INSERTED
from tramontane.types import Completion, Problem
from tramontane.workplace import commit


class Judges(NamedTuple):
    """What determines a completion's course and reward, besides the generators."""

    verifiers: Verifiers
    conversations: Conversations


ENDS = ("base", "before", "after")  # measurements on all sets; others use only `data.eval`


async def measure(
    session: Session, generators: GeneratorPool, judges: Judges, when: str, version: int
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
        judges: the verifiers, and the environments of conversations.
        when: `base` (before a cold start), `before`, `update_N` or `after`.
        version: version of the generators' weights.

    Raises:
        WorkerLost: a generator cannot be replaced.
        WaitTimeout: the verifiers returned no verdict within their timeout.
    """
    results = {}
    for name in sets_of(session, when):
        result = await asyncio.to_thread(_recorded, session, when, name)
        if result is None:
            began = time.time()
            result = await _measure(session, generators, judges, when, name, version)
            for generator in generators:
                session.spent(generator.name, "evaluation", began)
        results[name] = result
    return results


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


async def _measure(
    session: Session,
    generators: GeneratorPool,
    judges: Judges,
    when: str,
    name: str,
    version: int,
) -> EvaluationResult:
    config, rows_file = session.config, _rows_file(session, when, name)
    problems, encoder = session.prepared.sets[name], session.prepared.encoder
    unfinished = rows_file.with_suffix(".partial")
    title = f"evaluation {when}" if name == HELD_OUT else f"evaluation {when}, {name}"
    progress = partial(session.screen.phase, title)
    grading = Grading(judges.verifiers, config.timeouts, config.conversation.reward)

    async def complete(problem: Problem, requests: list[Completion]) -> list[Completion]:
        completions = await sampler.complete(problem, requests, judges.conversations)
        sequences = [sequence for c in completions for sequence in c.sequences]
        sampled = {v for sequence in sequences for v in sequence.versions} - {INSERTED}
        if sampled - {version}:
            raise AssertionError(f"an evaluation of weights {version} sampled under {sampled}")
        return completions

    with session.folder.writing(unfinished):
        with Journal(unfinished, 0) as record:
            evaluation = Evaluation(problems.problems, problems.sampling, encoder, record, progress)
            async with aclosing(Sampler(generators)) as sampler:
                await evaluation.run(complete, grading)
            result = await asyncio.to_thread(summarize, evaluation.rows)
        commit(unfinished, rows_file)
    session.log_evaluation({"when": when, "set": name, "version": version} | result.to_dict())
    return result
