"""Warnings about settings that are valid, and yet hardly what was meant; shown before a run."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from tramontane.config import Config
from tramontane.config.verifier import AXES
from tramontane.data.curriculum import Curriculum
from tramontane.data.files import ENDINGS, name_of
from tramontane.data.stream import ProblemStream
from tramontane.trainer.optimizer import rate_warnings, warmup_warnings
from tramontane.types import Problem
from tramontane.verifier import references

WITHOUT_REWARDS = ("sft", "distill")  # objectives
MUCH = 2  # times what can be in flight


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
        _rates(config),
    )
    return [*chain.from_iterable(warnings), *_conversations(config, _machine())]


def _data(config: Config, problems: Curriculum) -> Iterator[str]:
    groups = config.pipeline.groups_per_batch
    for stream in problems.streams:
        source, split = stream.config.train, stream.config.split
        if split != "train" and source.endswith(ENDINGS):
            yield f"data.split {split!r} has no effect: {name_of(source)} is a file, without splits"
        yield from references.warnings(config.verifier, stream.problems or (), name_of(source))
        yield from _repeats(stream)
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
