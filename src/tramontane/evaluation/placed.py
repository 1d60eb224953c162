"""Evaluation and sampling by the workers of a placement. Training runs measure with the same
`generate` and `grade`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tramontane.config import Config, Resources, TimeoutsConfig, TrainerConfig
from tramontane.evaluation.evaluate import (
    Evaluation,
    EvaluationResult,
    requests_of,
    summarize,
)
from tramontane.evaluation.settings import Sampling
from tramontane.placement.handle import Limit, WaitTimeout, WorkerLost
from tramontane.types import Completion, Problem, Request
from tramontane.workplace import Journal

if TYPE_CHECKING:
    from tramontane.controller.conversations import Conversations
    from tramontane.controller.generators import GeneratorPool, PooledGenerator
    from tramontane.controller.verifiers import Verifiers
    from tramontane.data.prompts import PromptEncoder
    from tramontane.placement import Folder, GeneratorHandle
    from tramontane.placement.place import Placement

logger = logging.getLogger("tramontane")


@dataclass(frozen=True)
class Work:
    """The problems of an evaluation, and their sampling settings.

    Args:
        problems: at least one.
        sampling: how they are sampled.
        encoder: makes the prompts.
        longest_prompt: upper bound of all prompts, in tokens.
    """

    problems: Sequence[Problem]
    sampling: Sampling
    encoder: PromptEncoder
    longest_prompt: int


def evaluate_work(
    config: Config,
    work: Work,
    record: Journal | None,
    on_progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    """Start the generators and verifiers of the config's placement, evaluate, and end them.

    A lost worker is replaced, as in training.

    Raises:
        InputError: a user-defined function fails, or no cluster, or one that is too small.
        WorkerLost: a worker cannot be replaced.
        WaitTimeout: a wait exceeded its timeout.
    """
    from tramontane.controller.verifiers import start_verifiers
    from tramontane.environments.loading import check as check_environments
    from tramontane.interrupt import Interrupt
    from tramontane.verifier.pool import try_functions

    verifier = config.verifier.model_copy(update={"thinking_tags": work.encoder.tags})
    check_environments(config.data, work.problems, config.conversation.reward_is_set)
    try_functions(verifier, work.problems)
    config = _sized(config.model_copy(update={"verifier": verifier}), work)
    with (
        _workers(config, work.encoder) as (placement, conversations),
        closing(start_verifiers(config, placement, replaced)) as verifiers,
    ):
        args = work.problems, work.sampling, verifiers, work.encoder, record, on_progress
        evaluation = Evaluation(*args)

        async def measure(generators: GeneratorPool) -> None:
            await generate(evaluation, generators, conversations=conversations)
            await grade(evaluation, verifiers, config.timeouts)

        with Interrupt() as interrupt:
            interrupt.run(_with_generators(config, work, placement, conversations, measure))
            return summarize(evaluation.rows)


def sample_work(config: Config, work: Work) -> list[Completion]:
    """All completions, in order, without verdicts.

    Raises:
        InputError, WorkerLost, WaitTimeout: see `evaluate_work`.
    """
    from tramontane.interrupt import Interrupt

    config, found = _sized(config, work), list[Completion]()
    with (
        _workers(config, work.encoder) as (placement, conversations),
        Interrupt() as interrupt,
    ):

        async def sample(generators: GeneratorPool) -> None:
            async def keep(completions: list[Completion]) -> None:
                found.extend(completions)

            requests = requests_of(work.problems, work.sampling, work.encoder)
            await complete(work.problems, requests, generators, keep, conversations)

        interrupt.run(_with_generators(config, work, placement, conversations, sample))
    return sorted(found, key=lambda c: (-c.group, c.index))


@contextmanager
def _workers(
    config: Config, encoder: PromptEncoder
) -> Iterator[tuple[Placement, Conversations | None]]:
    """The config's placement, and its conversations if it has any."""
    import torch

    from tramontane.controller.conversations import start_conversations
    from tramontane.placement.place import place
    from tramontane.placement.thread import torch_threads

    with (
        torch_threads(max(1, torch.get_num_threads() // config.generator.workers)),
        closing(place(config, note)) as placement,
        start_conversations(config, encoder, placement, replaced) as conversations,
    ):
        yield placement, conversations if config.converses else None


async def _with_generators(
    config: Config,
    work: Work,
    placement: Placement,
    conversations: Conversations | None,
    use: Callable[[GeneratorPool], Awaitable[None]],
) -> None:
    """Start generators with room for the longest prompt, use them, and end them."""
    if conversations is not None:
        encode = partial(_encode, work.encoder)
        longest = await conversations.fit(work.problems, encode, work.longest_prompt)
        work = replace(work, longest_prompt=longest)
    generators = generators_of(config, work.encoder, placement, work.longest_prompt)
    try:
        await generators.started()
        await use(generators)
    finally:
        generators.close()


def _encode(encoder: PromptEncoder, problem: Problem) -> list[int]:
    return encoder.at(problem.effort).encode(problem.prompt, problem.where)


async def generate(
    evaluation: Evaluation,
    generators: GeneratorPool,
    check: Callable[[Completion], None] = lambda completion: None,
    conversations: Conversations | None = None,
) -> None:
    """Have the generators complete all requests; verdicts are taken as they arrive.

    Args:
        evaluation: used by one thread at a time; rows are made outside the event loop.
        generators: have slots for the longest completion.
        check: called with every completion.
        conversations: answer the turns of completions with environments, if any.

    Raises:
        WorkerLost: a generator, or a process of environments, cannot be replaced.
    """
    taking = asyncio.Lock()

    async def take(completions: list[Completion]) -> None:
        for completion in completions:
            check(completion)
        async with taking:
            await asyncio.to_thread(evaluation.advance, completions)

    if conversations is not None:
        evaluation.reward = conversations.reward
    requests = evaluation.requests()
    await complete(evaluation.problems, requests, generators, take, conversations)


async def complete(
    problems: Sequence[Problem],
    requests: Sequence[Request],
    generators: GeneratorPool,
    take: Callable[[list[Completion]], Awaitable[None]],
    conversations: Conversations | None = None,
) -> None:
    """Have the generators complete requests.

    Args:
        problems: those of the requests.
        requests: as of `requests_of`.
        generators: have slots for the longest completion.
        take: called with the completions that ended.
        conversations: answer the turns of completions with environments, if any.

    Raises:
        WorkerLost: a generator, or a process of environments, cannot be replaced.
    """
    from tramontane.controller.generators import EVALUATION

    tasks = set[asyncio.Task[None]]()
    polls: dict[PooledGenerator, asyncio.Task[None]] = {}
    begun: dict[tuple[int, int], Request] = {}  # conversations under way

    async def poll(generator: PooledGenerator) -> None:
        """Wait for one generator, whose polls this task shares with the pipeline."""
        while generator.has(EVALUATION):
            ended = await generator.poll(EVALUATION)
            if conversations is None:
                await take(ended)
                continue
            for c in ended:
                start(go_on(begun[c.group, c.index].turn_ended(c)))

    async def go_on(request: Request) -> None:
        assert conversations
        problem = problems[-1 - request.group]
        found = await conversations.answer(problem.longest(l_max), problem, request)
        if isinstance(found, Request):
            submit([found])
        else:
            await take([found])

    def submit(requests: Sequence[Request]) -> None:
        begun.update({(r.group, r.index): r for r in requests})
        generators.submit([*requests])
        for generator in generators:
            if generator.has(EVALUATION) and (generator not in polls or polls[generator].done()):
                polls[generator] = start(poll(generator))

    def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        return task

    l_max = max((request.sampling.max_tokens for request in requests), default=0)
    if conversations is None:
        submit(requests)
    else:
        seeds = {r.group: r.seed for r in requests if r.index == 0}
        for r in requests:  # environments of one problem begin alike
            start(go_on(replace(r, prompt_ids=[], seed=seeds[r.group] + r.index)))
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
            for task in done:
                task.result()
    finally:  # if one fails, the others must stop
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def grade(evaluation: Evaluation, verifiers: Verifiers, timeouts: TimeoutsConfig) -> None:
    """Wait for the pending verdicts.

    Raises:
        WaitTimeout: the verifiers returned no verdict within their timeout.
    """
    limit = Limit.of(timeouts, "verification", "start")
    samples, problems = evaluation.sampling.samples, evaluation.problems
    seconds = limit.seconds + max(verifiers.time_limit(p, samples) for p in problems)
    graded_before = -1
    while waiting := [asyncio.wrap_future(future) for future in evaluation.grading]:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not await asyncio.to_thread(evaluation.collect):
            # A problem's verdicts arrive together, so a wait may end while others are graded.
            if (graded := verifiers.stats().progress) == graded_before:
                raise WaitTimeout(f"no verdict within {seconds:g} s ({limit.key} + work)")
            graded_before = graded


def _sized(config: Config, work: Work) -> Config:
    workers, samples = max(1, config.generator.workers), work.sampling.samples
    n_async = max(samples, min(work.sampling.slots * workers, len(work.problems) * samples))
    generator = config.generator.model_copy(update={"workers": workers})  # a run may have had none
    config = config.model_copy(update={"generator": generator})
    return without_trainer(config, work.sampling.max_tokens, samples, n_async)


def without_trainer(config: Config, l_max: int, group_size: int, n_async: int) -> Config:
    """The config with other sizes, and no memory reserved for a trainer."""
    sizes = {"l_max": l_max, "l_cache": 0, "group_size": group_size, "n_async": n_async}
    pipeline = config.pipeline.model_copy(update=sizes)
    placement = config.placement.model_copy(update={"trainer": Resources()})
    trainer = TrainerConfig(device="cpu")
    return config.model_copy(
        update={"pipeline": pipeline, "placement": placement, "trainer": trainer}
    )


def generators_of(
    config: Config, encoder: PromptEncoder, placement: Placement, longest_prompt: int
) -> GeneratorPool:
    """The generators of the config's model."""
    from tramontane.controller.generators import GeneratorPool
    from tramontane.models.names import with_tokenizer

    model = with_tokenizer(config.model, config.tokenizer)
    make = generator_maker(config, model, encoder, placement)
    return GeneratorPool(make, config, replaced, note, longest_prompt)


def generator_maker(
    config: Config, model: str, encoder: PromptEncoder, placement: Placement
) -> Callable[[int, int, int], GeneratorHandle]:
    """A function that starts a generator of a model, by its number, slots and maximum length."""
    import torch

    from tramontane.generator import load_generator
    from tramontane.placement.seats import seats

    portable: Any = model_for_workers(config, model)
    response, beat = encoder.response, config.timeouts.heartbeat
    devices = seats(config, torch.cuda.device_count()).generators

    def make(number: int, slots: int, max_len: int) -> GeneratorHandle:
        own = config.generator.model_copy(update={"device": devices[number]})
        load = partial(load_generator, portable, own, slots, max_len, response, beat)
        return placement.generator(number, load)

    return make


def model_for_workers(config: Config, model: str) -> str | Folder:
    """A model as an argument for workers, whose machines may lack its files.

    A name that is not in this machine's cache remains a name, to be downloaded by each machine.
    """
    from tramontane.models.loading import local_folder
    from tramontane.placement import Folder

    if config.placement.kind != "ray":
        return model
    folder = local_folder(model)
    return model if folder is None else Folder.of(folder, "model")


def replaced(lost: WorkerLost) -> None:
    """Log the loss of a worker that is replaced."""
    logger.warning("replaced: %s", lost)


def note(worker: str, **facts: Any) -> None:
    """Ignore facts about workers, which only a run logs."""
