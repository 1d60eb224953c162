"""Warnings about settings that are valid, and yet hardly what was meant; shown before a run."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from tramontane.config import Config
from tramontane.config.verifier import AXES
from tramontane.data.curriculum import Curriculum
from tramontane.data.files import ENDINGS, name_of
from tramontane.data.prompts import PromptEncoder
from tramontane.data.stream import ProblemStream
from tramontane.evaluation.settings import alike
from tramontane.trainer.optimizer import rate_warnings, warmup_warnings
from tramontane.types import Problem
from tramontane.verifier import references

WITHOUT_REWARDS = ("sft", "distill")  # objectives
MUCH = 2  # times what can be in flight
MANY = 8  # problems; if as many share one reference, a column was mistaken
# A chat as text: in JSON, or as Python prints it.
_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


def forewarnings(
    config: Config, problems: Curriculum, measured: Mapping[str, Sequence[Problem]]
) -> list[str]:
    """The warnings about a run, each with its keys.

    Args:
        config: the run's, with its learning rate filled in.
        problems: its training problems.
        measured: its evaluation problems by the name of their set.
    """
    warnings = (
        _data(config, problems),
        *(references.warnings(config.verifier, found, name) for name, found in measured.items()),
        _rewards(config),
        _unjudged(config, problems),
        _in_flight(config),
        _rehearsed(config),
        _greedy(config),
        _rates(config),
    )
    return [*chain.from_iterable(warnings), *_conversations(config, _machine())]


def _rehearsed(config: Config) -> Iterator[str]:
    """Weights of eight bits where they gain nothing."""
    generator = config.generator
    if generator.weights == "fp8" and generator.device == "cpu":
        yield (
            "generator.weights: fp8 gains nothing on a CPU: it rehearses a run on a GPU, and "
            "measures the policy's distance; leave it out for anything else"
        )


def _data(config: Config, problems: Curriculum) -> Iterator[str]:
    groups = config.pipeline.groups_per_batch
    for stream in problems.streams:
        source, split = stream.config.train, stream.config.split
        if split != "train" and source.endswith(ENDINGS):
            yield f"data.split {split!r} has no effect: {name_of(source)} is a file, without splits"
        yield from references.warnings(config.verifier, stream.problems or (), name_of(source))
        yield from _repeats(stream)
        yield from _one_answer(stream)
        rows = len({_asked(problem) for problem in stream.problems or ()})
        if stream.problems is not None and MUCH * rows <= groups:
            noun = "a single problem" if rows == 1 else f"{rows:,} different problems"
            yield (
                f"data {name_of(stream.config.train)!r} has {noun}, and each update trains on "
                f"{groups:,} groups (pipeline.n_batch / group_size), so that the same ones come "
                f"again in every batch: give more rows, or lower pipeline.n_batch"
            )


def _repeats(stream: ProblemStream) -> Iterator[str]:
    """Rows that ask the same and expect different answers."""
    first: dict[tuple[str, ...], Problem] = {}
    differing = []
    for problem in stream.problems or ():
        asked = (*_asked(problem), problem.domain)
        if (known := first.setdefault(asked, problem)).answer != problem.answer:
            differing.append((known, problem))
    if differing:
        known, problem = differing[0]
        yield (
            f"data {name_of(stream.config.train)!r}: {len(differing):,} of "
            f"{len(stream.problems or ()):,} rows repeat a problem with another answer, the first "
            f"at {known.where or known.id} ({known.answer!r}) and "
            f"{problem.where or problem.id} ({problem.answer!r}): what is "
            f"right for one is wrong for the other. Correct them, or remove them"
        )


def _one_answer(stream: ProblemStream) -> Iterator[str]:
    """One reference for all rows, as of a column that was mistaken for the answer's."""
    problems = stream.problems or ()
    answers = {problem.answer for problem in problems}
    if len(answers) == 1 and len({*map(_asked, problems)}) >= MANY and (answer := answers.pop()):
        yield (
            f"data {name_of(stream.config.train)!r}: all {len(problems):,} problems have the same "
            f"reference answer, {answer:.60}, which a model learns to write whatever is asked: "
            f"name the right column in data.fields"
        )


def rendered_twice(problems: Curriculum, encoder: PromptEncoder) -> Iterator[str]:
    """Warnings about statements that are chats as text, or were put into a chat template before."""
    for stream in problems.streams:
        rows = stream.problems or ()
        chats = [p for p in rows if p.messages is None and _CHAT.match(p.problem)]
        marked = [p for p in rows if encoder.has_special_tokens(p.prompt)]
        for found, what, remedy in (
            (chats, "a chat written as text", "write the messages as a list"),
            (marked, "special tokens of the model", "leave the chat template to the run"),
        ):
            if found:
                yield (
                    f"data {name_of(stream.config.train)!r}: {len(found):,} of {len(rows):,} "
                    f"problems hold {what}, the first at {found[0].where or found[0].id}, which "
                    f"the model reads as it stands, within the chat template: {remedy}"
                )


def _greedy(config: Config) -> Iterator[str]:
    sets = {"evaluation": config.evaluation} | {
        f"evaluation.also.{name}": also for name, also in config.evaluation.also.items()
    }
    for key, chosen in sets.items():
        warning = alike(chosen.samples, chosen.temperature, f"{key}.")
        if warning and not config.converses:
            yield warning
    if config.generator.top_k == 1 and config.pipeline.group_size > 1 and not config.converses:
        yield (
            "generator.top_k 1: only the likeliest token is sampled, so that a group's completions "
            "are all alike and nothing is learned from them: raise it, or set 0 for all tokens"
        )


def _asked(problem: Problem) -> tuple[str, ...]:
    return (problem.problem, *(message["content"] for message in problem.messages or ()))


def _rewards(config: Config) -> Iterator[str]:
    weights = config.verifier.reward
    given = [getattr(weights, name) for name in (*AXES, "judge")]
    given += [custom.weight for custom in weights.custom]
    if not any(given) and config.trainer.objective.name not in WITHOUT_REWARDS:
        yield (
            "verifier.reward: every weight is 0, so that all completions have the same reward, and "
            "nothing can be learned from them: set one, or give a reward of your own (custom)"
        )


def _unjudged(config: Config, problems: Curriculum) -> Iterator[str]:
    """Domains in which format, language and length alone are rewarded."""
    weights, objective = config.verifier.reward, config.trainer.objective.name
    judged = weights.judge or any(custom.weight for custom in weights.custom)
    if judged or config.environment_rewards or objective in WITHOUT_REWARDS:
        return
    domains = {p.domain: None for s in problems.streams for p in s.problems or ()}
    for domain in domains:
        if config.verifier.domains[domain].verifier is None:
            yield (
                f"nothing judges the answers of domain {domain!r}: it has no verifier "
                f"(verifier.domains.{domain}.verifier), and there is no reward of your own (custom)"
            )


def _in_flight(config: Config) -> Iterator[str]:
    for stage in config.by_stage():
        sizes = stage.pipeline
        if sizes.n_async > MUCH * sizes.in_flight:
            yield (
                f"pipeline.n_async {sizes.n_async:,}: only {sizes.in_flight:,} completions can be "
                f"in flight, n_batch × (max_staleness + 1); the rest has no effect. Lower it, or "
                f"raise max_staleness"
            )


def _machine() -> dict[str, float]:
    """What a process of environments may have of this machine, by name."""
    (threads, _), (_, files) = map(
        resource.getrlimit, (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE)
    )
    limits = {"threads (ulimit -u)": threads, "open files (ulimit -Hn)": files}
    machine = {name: math.inf if n == resource.RLIM_INFINITY else n for name, n in limits.items()}
    group = Path("/sys/fs/cgroup/pids.max")
    if group.exists() and (most := group.read_text().strip()).isdigit():
        machine["threads (pids.max)"] = float(most)
    return machine


def _conversations(config: Config, machine: dict[str, float]) -> Iterator[str]:
    """Conversations at once that a process of environments has no room for: each may need a thread,
    a second one for tools, and two open files."""
    if not config.converses or config.placement.kind == "ray":  # on other machines
        return
    most = max(stage.pipeline.in_flight for stage in config.by_stage())
    at_once = -(-most // config.conversation.workers)
    needed = {"threads": (1 + bool(config.data.tools)) * at_once, "open files": 2 * at_once}
    for name, limit in machine.items():
        count = needed[name.partition(" (")[0]]
        if count > limit:
            yield (
                f"conversation.workers {config.conversation.workers}: {at_once:,} conversations at "
                f"once in a process may need {count:,} {name}, and there are {limit:,.0f}, so some "
                f"will fail: give more workers, raise the limit, or lower pipeline.n_async"
            )


def _rates(config: Config) -> Iterator[str]:
    schedule = ("pipeline.updates", config.pipeline.updates)
    yield from rate_warnings("trainer.", config.trainer, config.model)
    yield from warmup_warnings("trainer.warmup_updates", config.trainer.warmup_updates, *schedule)
    if start := config.cold_start:
        schedule = ("cold_start.steps", start.steps)
        yield from rate_warnings("cold_start.", start.trainer, config.model)
        yield from warmup_warnings("cold_start.warmup_steps", start.warmup_steps, *schedule)
