"""Evaluation of a run's checkpoints on its held-out problems and on further sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tramontane.config import HELD_OUT
from tramontane.evaluation import EvaluationResult, evaluate, summarize
from tramontane.generator import Generator
from tramontane.placement import Limit
from tramontane.run.folder import read_log
from tramontane.run.session import Session, Verifiers

ENDS = ("base", "before", "after")  # measurements on all sets; other ones use `data.eval` alone


def measure(
    session: Session, verifiers: Verifiers, when: str, model: str | Path
) -> dict[str, EvaluationResult]:
    """Evaluate a checkpoint; the results by name of the set, empty if the config names none.

    The completions are written to `evaluation_WHEN.jsonl` (a further set's to
    `evaluation_WHEN_SET.jsonl`), the figures to `evaluations.jsonl`.

    Args:
        session: gives the problems, the settings and the folder.
        verifiers: grade the completions.
        when: `base` (before a cold start), `before`, `update_N` or `after`.
        model: folder or name of the checkpoint.
    """
    prepared, config = session.prepared, session.config
    names = prepared.sets if when in ENDS else prepared.sets.keys() & {HELD_OUT}
    found = {name: _recorded(session, when, name) for name in names}
    due = [name for name, result in found.items() if result is None]
    if due:
        sets = [prepared.sets[name] for name in due]
        max_len = prepared.max_prompt + max(s.plan.sampling.max_tokens for s in sets)
        slots = prepared.stages[-1].pipeline.n_async
        response = prepared.encoder.response
        generator = Generator.load(str(model), config.generator, slots, max_len, response)
        for name in due:
            found[name] = _evaluate(session, generator, verifiers, when, name)
    return {name: result for name, result in found.items() if result is not None}


def _evaluate(
    session: Session, generator: Generator, verifiers: Verifiers, when: str, name: str
) -> EvaluationResult:
    folder, problems = session.folder, session.prepared.sets[name]
    rows_file = _rows_file(session, when, name)
    unfinished = rows_file.with_suffix(".partial")
    work = max(verifiers.time_limit(p, problems.plan.samples) for p in problems.problems)
    title = f"evaluation {when}" if name == HELD_OUT else f"evaluation {when}, {name}"
    with folder.room_for(unfinished):
        result = evaluate(
            generator,
            verifiers,
            problems.problems,
            problems.plan,
            write_to=unfinished,
            on_progress=partial(session.screen.phase, title),
            timeout_s=work + Limit.of(session.config.timeouts, "verification", "start").seconds,
        )
        unfinished.replace(rows_file)
    folder.log_evaluation({"when": when, "set": name} | result.to_dict())
    return result


def _recorded(session: Session, when: str, name: str) -> EvaluationResult | None:
    """The result of an earlier session of the run, which measured the same weights."""
    file = _rows_file(session, when, name)
    if when not in ("base", "before") or not file.is_file():
        return None
    return summarize(list(read_log(file)))


def _rows_file(session: Session, when: str, name: str) -> Path:
    suffix = "" if name == HELD_OUT else f"_{name}"
    return session.folder.path / f"evaluation_{when}{suffix}.jsonl"
