"""Evaluate or sample a checkpoint as training would: implements `tramontane eval` and `tramontane
generate`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.config import Config, Resources, TrainerConfig
from tramontane.controller.images import check_images
from tramontane.data.files import GENERATED
from tramontane.data.images import Album, placed
from tramontane.data.load import Split, load_problems
from tramontane.errors import InputError
from tramontane.evaluation.basis import another, basis_of, check_basis, write_basis
from tramontane.evaluation.conversed import transcript
from tramontane.evaluation.evaluate import (
    Complete,
    Evaluation,
    EvaluationResult,
    Row,
    requests_of,
    side_by_side,
    summarize,
)
from tramontane.evaluation.settings import Sampling, Settings
from tramontane.journals import Journal
from tramontane.models.names import with_tokenizer
from tramontane.types import Completion, Message, Problem
from tramontane.workplace import owned_file

if TYPE_CHECKING:
    from tramontane.controller.conversations import Conversations
    from tramontane.controller.generators import GeneratorPool
    from tramontane.data.prompts import PromptEncoder
    from tramontane.placement import WorkerLost
    from tramontane.placement.place import Placement

logger = logging.getLogger("tramontane")

ENDLESS_PROBLEMS = 256  # default number of problems from an endless source


@dataclass(frozen=True)
class Work:
    """The problems of an evaluation, and their sampling settings.

    Args:
        problems: at least one.
        sampling: how they are sampled.
        encoder: makes the prompts.
        longest_prompt: upper bound of all prompts, in tokens.
        room: tokens that the model's context leaves for the first prompt of a conversation.
    """

    problems: Sequence[Problem]
    sampling: Sampling
    encoder: PromptEncoder
    longest_prompt: int
    room: int


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
            return _evaluate(settings.config, work, None, on_progress)
        return continue_evaluation(settings, work, Path(write_to), on_progress)


def problems_of(settings: Settings, split: Split = "test") -> list[Problem]:
    """The problems of `data.eval`.

    Raises:
        InputError: there is no `data.eval`; or see `load_problems`.
    """
    config, sampling = settings.config, settings.sampling
    source = config.data.eval
    if source is None:
        raise InputError("no problems to evaluate on: name their source, or set data.eval")
    problems_seed = config.evaluation.problems_seed
    limit = sampling.problems or (ENDLESS_PROBLEMS if source.startswith(GENERATED) else None)
    problems = load_problems(
        source,
        config.data,
        split=split,
        limit=limit,
        seed=sampling.seed if problems_seed is None else problems_seed,
        domains=config.verifier.domains,
    )
    return config.data.at_efforts(problems, settings.efforts)


def prepare(settings: Settings, problems: Sequence[Problem]) -> Work:
    """Check that a checkpoint can be evaluated on problems, without reading its weights.

    Raises:
        InputError: no such model or device, or a prompt that does not fit.
    """
    from tramontane.data.lengths import PromptFilter, PromptLimit
    from tramontane.environments.loading import checked_tools
    from tramontane.models import loading

    config, sampling = settings.config, settings.sampling
    if config.placement.kind != "ray":  # on a cluster, generators run on other machines
        loading.check_device(config.generator.device, "generator.device")
    encoder = encoder_of(config)
    check_images(config, encoder, problems)
    context = loading.context_length(loading.load_config(config.model))
    tools = checked_tools(config, encoder)
    limit = PromptLimit.of(config.data.max_prompt_tokens, context, sampling.max_tokens, tools)
    prompts = PromptFilter(encoder, limit, drop=config.data.overlong_prompts == "drop")
    kept = prompts.keep(problems)
    return Work(kept, sampling, encoder, prompts.longest, limit.room)


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
    check_basis(basis, file, another(file))
    write_basis(basis, file, {})
    with Journal(file, group=samples) as completions:
        rows = list(completions)
        _check_rows(file, rows, work)
        if len(rows) == len(work.problems) * samples:
            result = summarize(rows)
        else:
            result = _evaluate(settings.config, work, completions, on_progress)
    write_basis(basis, file, {"result": result.to_dict()})
    return result


def _check_rows(file: Path, rows: Sequence[Row], work: Work) -> None:
    due = [problem for problem in work.problems for _ in range(work.sampling.samples)]
    for number, (row, problem) in enumerate(zip_longest(rows, due), 1):
        if row is None:
            return
        if problem is None or (row["problem_id"], row["problem"]) != (problem.id, problem.problem):
            raise InputError(
                f"{file}:{number}: a completion of problem {row['problem_id']!r}, but expected "
                f"{f'one of {problem.id!r}' if problem else 'no more rows'}; name another place "
                f"(--out), or remove the file"
            )


def sample_checkpoint(
    settings: Settings, prompt: str | list[Message], n: int, images: Sequence[str] = ()
) -> list[str]:
    """Complete one prompt `n` times, with images given as paths or data URIs.

    The texts are whole responses, as verifiers read them; for conversations, all messages after
    the prompt, each below its role.

    Raises:
        InputError: no such model, a prompt that does not fit its context, `n` below 1, or several
            levels of effort.
    """
    if len(settings.efforts) > 1:
        raise InputError(f"effort: choose one of {', '.join(settings.efforts)} (--effort)")
    if n < 1:
        raise InputError(f"n is {n}; it must be at least 1")
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    ):
        raise InputError(f"prompt {prompt!r}: give a text, or a list of messages of one chat")
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if isinstance(text, str) and not text.strip() and not images:
        raise InputError("prompt: it is empty; give a text, in quotes if it has spaces")
    messages = None if isinstance(prompt, str) else prompt
    data = settings.config.data
    album = Album(Path(), data.images.limits)
    shown = placed(messages or text, images, (), "prompt")
    problem = Problem(
        "prompt",
        data.domain or "math",
        text,
        messages=messages,
        images=[album.read(image, "prompt") for image in shown],
    )
    asked = settings.config.data.at_efforts([problem], settings.efforts)
    work = prepare(replace(settings, sampling=replace(settings.sampling, samples=n)), asked)
    texts = _sample(settings.config, work)
    return [transcript(c) if settings.config.converses else c.text for c in texts]


def encoder_of(config: Config) -> PromptEncoder:
    """The encoder of a config's prompts."""
    from tramontane.data.prompts import PromptEncoder
    from tramontane.models import loading
    from tramontane.models.image_tokens import ImageProcessor

    tokenizer = loading.load_tokenizer(with_tokenizer(config.model, config.tokenizer))
    data, images = config.data, ImageProcessor(config.model)
    tags = config.verifier.thinking_tags
    return PromptEncoder(tokenizer, data, tags, data.effort, images=images)


def _evaluate(
    config: Config,
    work: Work,
    record: Journal | None,
    on_progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    """Start the config's generators and verifiers, evaluate, and stop them. A lost worker is
    replaced, as in training."""
    from tramontane.controller.verifiers import Grading, start_verifiers
    from tramontane.environments.loading import check as check_environments
    from tramontane.interrupt import Interrupt
    from tramontane.verifier import references
    from tramontane.verifier.pool import try_functions

    verifier = config.verifier.model_copy(update={"thinking_tags": work.encoder.tags})
    check_environments(config.data, work.problems, config.conversation.reward_is_set)
    try_functions(verifier, work.problems)
    for warning in references.warnings(verifier, work.problems, "evaluation"):
        logger.warning(warning)
    config = _sized(config.model_copy(update={"verifier": verifier}), work)
    with (
        _workers(config, work.encoder) as (placement, conversations),
        closing(start_verifiers(config, placement, replaced)) as verifiers,
        Interrupt() as interrupt,
    ):
        evaluation = Evaluation(work.problems, work.sampling, work.encoder, record, on_progress)
        grading = Grading(verifiers, config.timeouts, config.conversation.reward)

        async def measure() -> None:
            async with _completing(config, work, placement, conversations) as complete:
                await evaluation.run(complete, grading)

        interrupt.run(measure())
        return summarize(evaluation.rows)


def _sample(config: Config, work: Work) -> list[Completion]:
    """All completions, in order, without verdicts."""
    from tramontane.interrupt import Interrupt

    config = _sized(config, work)

    async def sample() -> list[list[Completion]]:
        async with _completing(config, work, placement, conversations) as complete:
            return await side_by_side(
                complete(problem, requests_of(problem, place, work.sampling, work.encoder))
                for place, problem in enumerate(work.problems)
            )

    with (
        _workers(config, work.encoder) as (placement, conversations),
        Interrupt() as interrupt,
    ):
        return [*chain(*interrupt.run(sample()))]


@contextmanager
def _workers(config: Config, encoder: PromptEncoder) -> Iterator[tuple[Placement, Conversations]]:
    """The config's placement, and its conversations."""
    import torch

    from tramontane.controller.conversations import start_conversations
    from tramontane.placement.place import place
    from tramontane.placement.thread import torch_threads

    with (
        torch_threads(max(1, torch.get_num_threads() // config.generator.workers)),
        closing(place(config, note)) as placement,
        start_conversations(config, encoder, placement, replaced) as conversations,
    ):
        yield placement, conversations


@asynccontextmanager
async def _completing(
    config: Config, work: Work, placement: Placement, conversations: Conversations
) -> AsyncIterator[Complete]:
    """Start generators with room for the longest prompt; yields a function that completes requests
    with them."""
    from tramontane.controller.sampling import Sampler

    def encode(problem: Problem) -> list[int]:
        return work.encoder.at(problem.effort).encode(problem.prompt, problem.where)

    longest = await conversations.fit(work.problems, encode, work.longest_prompt, work.room)
    with closing(generators_of(config, work.encoder, placement, longest)) as generators:
        await generators.started()
        async with aclosing(Sampler(generators)) as sampler:
            yield partial(sampler.complete, conversations=conversations)


def _sized(config: Config, work: Work) -> Config:
    workers, samples = max(1, config.generator.workers), work.sampling.samples
    n_async = max(samples, min(work.sampling.slots * workers, len(work.problems) * samples))
    generator = config.generator.model_copy(update={"workers": workers})  # a run may have had none
    config = config.model_copy(update={"generator": generator})
    return without_trainer(config, work.sampling.max_tokens, samples, n_async)


def without_trainer(config: Config, l_max: int, group_size: int, n_async: int) -> Config:
    """The config with these sizes, and no memory reserved for a trainer."""
    sizes = {"l_max": l_max, "l_cache": 0, "group_size": group_size}
    sizes |= {"n_async": n_async, "n_batch": n_async}
    update = {
        "pipeline": config.pipeline.model_copy(update=sizes),
        "placement": config.placement.model_copy(update={"trainer": Resources()}),
        "trainer": TrainerConfig(device="cpu"),
    }
    return config.model_copy(update=update)


def generators_of(
    config: Config, encoder: PromptEncoder, placement: Placement, longest_prompt: int
) -> GeneratorPool:
    """The generators of the config's model."""
    from tramontane.controller.generators import GeneratorPool, generator_maker

    model = with_tokenizer(config.model, config.tokenizer)
    make = generator_maker(config, model, encoder, placement)
    return GeneratorPool(make, config, replaced, note, longest_prompt)


def replaced(lost: WorkerLost) -> None:
    """Log the loss of a worker that is replaced."""
    logger.warning("replaced: %s", lost)


def note(worker: str, **facts: Any) -> None:
    """Ignore facts about workers, which only a run logs."""
