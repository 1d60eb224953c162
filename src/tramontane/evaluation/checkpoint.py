"""Evaluate or sample a checkpoint as training would: implements `tramontane eval` and `tramontane
generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.config import Config
from tramontane.data.files import PYTHON_ROWS, SCHEMES
from tramontane.data.load import Split, load_problems
from tramontane.errors import InputError
from tramontane.evaluation.basis import basis_of, check_basis, write_basis
from tramontane.evaluation.conversed import transcript
from tramontane.evaluation.evaluate import EvaluationResult, Row, summarize
from tramontane.evaluation.placed import Work, evaluate_work, sample_work
from tramontane.evaluation.settings import Settings
from tramontane.models.names import with_tokenizer
from tramontane.temporary import temporary_folder
from tramontane.types import Problem, Prompt
from tramontane.workplace import Journal, owned_file

if TYPE_CHECKING:
    from tramontane.data.prompts import PromptEncoder

ENDLESS_PROBLEMS = 256  # default number of problems from an endless source


def evaluate_checkpoint(
    settings: Settings,
    *,
    write_to: str | Path | None = None,
    split: Split = "test",
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint on the problems of `data.eval`.

    Args:
        settings: see `settings_for`.
        write_to: JSONL file for every completion. A file of an earlier process with the same basis,
            which is recorded next to it, is continued.
        split: problems to evaluate with, or to train on; no generated problem is in both.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: no such model or data, a prompt that does not fit, or completions with a
            different basis in the file; before any work is done.
    """
    with owned_file(write_to, "evaluated") if write_to is not None else nullcontext():
        work = prepare(settings, problems_of(settings, split))
        if write_to is None:
            return evaluate_work(settings.config, work, None, on_progress)
        return continue_evaluation(settings, work, Path(write_to), on_progress)


def problems_of(settings: Settings, split: Split = "test") -> list[Problem]:
    """The problems of `data.eval`.

    Raises:
        InputError: see `load_problems`.
    """
    config, sampling = settings.config, settings.sampling
    source = config.data.eval or config.data.train
    limit = sampling.problems or (ENDLESS_PROBLEMS if source.startswith(SCHEMES) else None)
    problems = load_problems(
        source,
        config.data,
        split=split,
        limit=limit,
        seed=sampling.seed,
        domains=config.verifier.domains,
    )
    return config.data.at_efforts(problems, settings.efforts)


def prepare(settings: Settings, problems: Sequence[Problem]) -> Work:
    """Check that a checkpoint can be evaluated on problems, without reading its weights.

    Raises:
        InputError: no such model or device, or a prompt that does not fit.
    """
    from tramontane.data.lengths import PromptFilter, PromptLimit
    from tramontane.environments.loading import described
    from tramontane.models import loading

    config, sampling = settings.config, settings.sampling
    if config.placement.kind != "ray":  # on a cluster, generators run on other machines
        loading.check_device(config.generator.device, "generator.device")
    encoder = encoder_of(config)
    context = loading.context_length(loading.load_config(config.model))
    tools = encoder.tokens_of(described(config.data))
    limit = PromptLimit.of(config.data.max_prompt_tokens, context, sampling.max_tokens, tools)
    prompts = PromptFilter(encoder, limit, drop=config.data.overlong_prompts == "drop")
    kept = prompts.keep(problems)
    return Work(kept, sampling, encoder, prompts.longest)


def continue_evaluation(
    settings: Settings,
    work: Work,
    file: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint, resuming a partial evaluation: complete problems in the file are kept.

    Args:
        settings: see `settings_for`.
        work: from `prepare` with the same settings.
        file: JSONL of completions, which the caller owns; basis and results are written next to it.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: the file has completions with a different basis.
    """
    basis, samples = basis_of(settings, work.problems), work.sampling.samples
    check_basis(basis, file)
    write_basis(basis, file, {})
    with Journal(file, group=samples) as completions:
        rows = list(completions)
        _check_rows(file, rows, work)
        if len(rows) == len(work.problems) * samples:
            result = summarize(rows)
        else:
            result = evaluate_work(settings.config, work, completions, on_progress)
    write_basis(basis, file, {"result": result.to_dict()})
    return result


def _check_rows(file: Path, rows: Sequence[Row], work: Work) -> None:
    due = [problem for problem in work.problems for _ in range(work.sampling.samples)]
    for number, (row, problem) in enumerate(zip_longest(rows, due), 1):
        if row is None:
            return
        if problem is None or (row["problem_id"], row["problem"]) != (problem.id, problem.problem):
            raise InputError(
                f"{file}:{number}: a completion of problem {row['problem_id']!r}, but due is "
                f"{f'one of {problem.id!r}' if problem else 'no further one'}; name another place "
                f"(--out), or remove the file"
            )


def sample_checkpoint(settings: Settings, prompt: Prompt, n: int) -> list[str]:
    """Complete one prompt `n` times. The texts are whole responses, as verifiers read them; of
    conversations, all messages behind the prompt, each below its role.

    Raises:
        InputError: no such model, a prompt that does not fit its context, `n` below 1, or several
            levels of effort.
    """
    if len(settings.efforts) > 1:
        raise InputError(f"effort: choose one of {', '.join(settings.efforts)} (--effort)")
    if n < 1:
        raise InputError(f"n is {n}; it must be at least 1")
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    messages = None if isinstance(prompt, str) else prompt
    problem = Problem("prompt", settings.config.data.domain or "math", text, messages=messages)
    asked = settings.config.data.at_efforts([problem], settings.efforts)
    work = prepare(replace(settings, sampling=replace(settings.sampling, samples=n)), asked)
    found = sample_work(settings.config, work)
    return [transcript(c) if settings.config.converses else c.text for c in found]


@contextmanager
def as_source(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A temporary file with these rows."""
    with temporary_folder("eval") as folder:
        file = Path(folder) / f"data{PYTHON_ROWS}"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield str(file)


def encoder_of(config: Config) -> PromptEncoder:
    """The encoder of a config's prompts."""
    from tramontane.data.prompts import PromptEncoder
    from tramontane.models import loading

    tokenizer = loading.load_tokenizer(with_tokenizer(config.model, config.tokenizer))
    return PromptEncoder(tokenizer, config.data, config.verifier.thinking_tags, config.data.effort)
