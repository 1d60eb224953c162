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
from tramontane.evaluation.evaluate import (
    EvaluationResult,
    Row,
    SamplingPlan,
    evaluate,
    summarize,
)
from tramontane.evaluation.placed import Work, converse, evaluate_placed, is_placed
from tramontane.evaluation.settings import Settings
from tramontane.models.names import with_tokenizer
from tramontane.temporary import temporary_folder
from tramontane.types import Completion, Problem, Prompt, Request
from tramontane.workplace import Journal, owned_file

if TYPE_CHECKING:
    from tramontane.data.prompts import PromptEncoder

ENDLESS_PROBLEMS = 256  # default number of problems from an endless source


def evaluate_checkpoint(
    settings: Settings,
    *,
    write_to: str | Path | None = None,
    resume: bool = False,
    split: Split = "test",
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint on the problems of `data.eval`.

    Args:
        settings: see `settings_for`.
        write_to: JSONL file for every completion.
        resume: continue the file of an earlier process with the same basis, which is recorded next
            to it; False: replace the file.
        split: problems to evaluate with, or to train on; no generated problem is in both.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: no such model or data, a prompt that does not fit, or completions with a
            different basis in the file; before any work is done.
    """
    with owned_file(write_to, "evaluated") if write_to is not None else nullcontext():
        work = prepare(settings, problems_of(settings, split))
        if write_to is None:
            return _measure(settings.config, work, None, on_progress)
        if resume:
            return continue_evaluation(settings, work, Path(write_to), on_progress)
        with Journal(Path(write_to), 0) as completions:
            return _measure(settings.config, work, completions, on_progress)


def problems_of(settings: Settings, split: Split = "test") -> list[Problem]:
    """The problems of `data.eval`.

    Raises:
        InputError: see `load_problems`.
    """
    config, sampling = settings.config, settings.sampling
    source = config.data.eval or config.data.train
    limit = sampling.problems or (ENDLESS_PROBLEMS if source.startswith(SCHEMES) else None)
    return load_problems(
        source,
        config.data,
        split=split,
        limit=limit,
        seed=sampling.seed,
        domains=config.verifier.domains,
    )


def prepare(settings: Settings, problems: Sequence[Problem]) -> Work:
    """Check that a checkpoint can be evaluated on problems, without reading its weights.

    Raises:
        InputError: no such model or device, or a prompt that does not fit.
    """
    from tramontane.data.lengths import PromptFilter, PromptLimit
    from tramontane.models import loading

    config, sampling = settings.config, settings.sampling
    if config.placement.kind != "ray":  # on a cluster, generators run on other machines
        loading.check_device(config.generator.device, "generator.device")
    encoder = encoder_of(config)
    context = loading.context_length(loading.load_config(config.model))
    limit = PromptLimit.of(config.data.max_prompt_tokens, context, sampling.max_tokens)
    prompts = PromptFilter(encoder, limit, drop=config.data.overlong_prompts == "drop")
    kept = prompts.keep(problems)
    plan = SamplingPlan(sampling.samples, sampling.params, sampling.seed)
    return Work(kept, plan, encoder, prompts.longest, sampling.slots)


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
    basis, samples = basis_of(settings, work.problems), work.plan.samples
    check_basis(basis, file)
    write_basis(basis, file, {})
    with Journal(file, group=samples) as completions:
        rows = list(completions)
        _check_rows(file, rows, work)
        if len(rows) == len(work.problems) * samples:
            result = summarize(rows)
        else:
            result = _measure(settings.config, work, completions, on_progress)
    write_basis(basis, file, {"result": result.to_dict()})
    return result


def _check_rows(file: Path, rows: Sequence[Row], work: Work) -> None:
    """Check that a file's rows belong to these problems, in order.

    Raises:
        InputError: a row belongs to a different problem.
    """
    due = [problem for problem in work.problems for _ in range(work.plan.samples)]
    for number, (row, problem) in enumerate(zip_longest(rows, due), 1):
        if row is None:
            return
        if problem is None or (row["problem_id"], row["problem"]) != (problem.id, problem.problem):
            raise InputError(
                f"{file}:{number}: a completion of problem {row['problem_id']!r}, but due is "
                f"{f'one of {problem.id!r}' if problem else 'no further one'}; name another place "
                f"(--out), or remove the file"
            )


def _measure(
    config: Config,
    work: Work,
    record: Journal | None,
    on_progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    """Evaluate with the config's placement, or with one generator in this process."""
    from tramontane.environments.loading import check as check_environments
    from tramontane.generator import load_generator
    from tramontane.verifier.pool import VerifierPool, try_functions

    verifier = config.verifier.model_copy(update={"thinking_tags": work.encoder.tags})
    config = config.model_copy(update={"verifier": verifier})
    check_environments(config.data, work.problems)
    try_functions(verifier, work.problems)
    if is_placed(config):
        return evaluate_placed(config, work, record, on_progress)
    sampling, encoder = work.plan.sampling, work.encoder
    generator = load_generator(
        with_tokenizer(config.model, config.tokenizer),
        config.generator,
        min(work.slots, len(work.problems) * work.plan.samples),
        work.longest_prompt + sampling.max_tokens,
        encoder.response,
    )
    with VerifierPool(verifier, sampling.max_tokens, 0) as pool:
        return evaluate(
            generator,
            pool,
            work.problems,
            work.plan,
            encoder=encoder,
            write_to=record,
            on_progress=on_progress,
        )


def sample_checkpoint(settings: Settings, prompt: Prompt, n: int) -> list[str]:
    """Complete one prompt `n` times. The texts are whole responses, as verifiers read them; of
    conversations, all messages behind the prompt, each below its role.

    Raises:
        InputError: no such model, a prompt that does not fit its context, or `n` below 1.
    """
    from tramontane.generator import load_generator
    from tramontane.models import loading

    if n < 1:
        raise InputError(f"n is {n}; it must be at least 1")
    config, sampling = settings.config, settings.sampling
    loading.check_device(config.generator.device, "generator.device")
    encoder = encoder_of(config)
    if config.converses:
        domain = config.data.domain or "math"
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        messages = None if isinstance(prompt, str) else prompt
        problem = Problem("prompt", domain, text, messages=messages)
        work = prepare(replace(settings, sampling=replace(sampling, samples=n)), [problem])
        return [transcript(completion) for completion in converse(config, work)]
    ids = encoder.encode(prompt)
    longest = len(ids) + sampling.max_tokens
    model = with_tokenizer(config.model, config.tokenizer)
    generator = load_generator(model, config.generator, n, longest, encoder.response)
    requests = [Request(0, i, ids, sampling.seed + i, sampling.params) for i in range(n)]
    generator.submit(requests)
    done: list[Completion] = []
    while len(done) < n:
        done += generator.step()
    return [completion.text for completion in sorted(done, key=lambda c: c.index)]


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
    return PromptEncoder(tokenizer, config.data, config.verifier.thinking_tags)
