"""Evaluation of a run's checkpoints on its held-out problems."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tramontane.evaluation import EvaluationResult, SamplingPlan, evaluate, summarize
from tramontane.generator import Generator
from tramontane.placement import Limit
from tramontane.run.folder import read_log
from tramontane.run.session import Session, Verifiers
from tramontane.types import SamplingParams


def measure(
    session: Session, verifiers: Verifiers, name: str, model: str | Path
) -> EvaluationResult | None:
    """Evaluate a checkpoint on the held-out problems; None where the config names none.

    The completions are written to `evaluation_NAME.jsonl`, the figures to `evaluations.jsonl`.

    Args:
        session: gives the problems, the settings and the folder.
        verifiers: grade the completions.
        name: `before`, `after`, or `update_N`.
        model: folder or name of the checkpoint.
    """
    prepared, folder, config = session.prepared, session.folder, session.config
    if not prepared.held_out:
        return None
    rows_file = folder.path / f"evaluation_{name}.jsonl"
    unfinished = rows_file.with_suffix(".partial")
    if name == "before" and rows_file.is_file():  # measured by an earlier session of the run
        return summarize(list(read_log(rows_file)))
    # Always at the sizes of the last stage: `before` and `after` must be comparable.
    sizes, settings = prepared.stages[-1].pipeline, config.evaluation
    sampling = SamplingParams(sizes.l_max, settings.temperature, settings.top_p)
    plan = SamplingPlan(settings.samples, sampling, config.seed, config.data.system_prompt)
    max_len = prepared.max_prompt + sizes.l_max
    generator = Generator.load(str(model), config.generator, sizes.n_async, max_len)
    with folder.room_for(unfinished):
        result = evaluate(
            generator,
            verifiers,
            prepared.held_out,
            plan,
            write_to=unfinished,
            on_progress=partial(session.screen.phase, f"evaluation {name}"),
            timeout_s=Limit.of(config.timeouts, "verification", "start").seconds,
        )
        unfinished.replace(rows_file)
    folder.log_evaluation({"when": name} | result.to_dict())
    return result
