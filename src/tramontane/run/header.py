"""The header of a run: what it trains, on what, for which reward, in at most twelve lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import groupby

from tramontane.config import HELD_OUT, Config, DomainConfig
from tramontane.config.device import number_types
from tramontane.config.running import PlacementConfig
from tramontane.controller.conversations import start_conversations
from tramontane.data.files import name_of
from tramontane.data.prompts import PromptEncoder
from tramontane.data.stream import ProblemStream
from tramontane.environments.loading import described, environment_of, load
from tramontane.evaluation.checkpoint import note, replaced
from tramontane.interrupt import Interrupt
from tramontane.models.shape import load_shape
from tramontane.placement.place import place
from tramontane.run.figures import shortened
from tramontane.run.prepare import Prepared
from tramontane.types import Problem

UNSEEN = 6  # columns that the model does not see that are named
PROMPT_CHARACTERS = 200  # of the prompt that the header shows, start and end


def header(prepared: Prepared, opening: Sequence[int] = ()) -> dict[str, str]:
    """The facts of a run by name: data, reward, objective, model, environment, and one prompt.

    Args:
        prepared: the run.
        opening: tokens of the prompt that its environment begins with, if known; see `opening_of`.
    """
    config = prepared.config
    lines = {
        "model": model_line(config),
        "train": _train_line(prepared),
        "held out": _held_out_line(prepared),
        "reward": reward_line(config, _domains(prepared)),
        "objective": _objective_line(prepared),
        "batch": _batch_line(config),
    }
    if config.converses:
        lines["environment"] = _environment_line(prepared)
    if effort := config.data.effort_shares:
        lines["effort"] = ", ".join(f"{name} × {share:g}" for name, share in effort.items())
    if config.stages:
        lines["stages"] = ", then ".join(
            f"{stage.name} (l_max {at.pipeline.l_max:,})"
            for stage, at in zip(config.stages, prepared.stages, strict=True)
        )
    lines["prompt"] = (
        shown_prompt(opening, prepared.encoder, PROMPT_CHARACTERS)
        if opening
        else prompt_line(prepared, PROMPT_CHARACTERS)
    )
    return lines


def opening_of(prepared: Prepared) -> list[int]:
    """Begin the conversation about the first problem, on this machine, and end it; returns its
    first prompt's tokens, empty for a run without an environment.

    Raises:
        InputError: the environment cannot begin.
    """
    if prepared.config.data.environment is None:
        return []
    config = prepared.config.model_copy(update={"placement": PlacementConfig()})
    problems, prompts = prepared.sample[:1], prepared.prompts
    of_prompts = prompts.encode, prepared.max_prompt, prompts.limit.room
    with (
        closing(place(config, note)) as placement,
        start_conversations(config, prepared.encoder, placement, replaced) as conversations,
        Interrupt() as interrupt,
    ):
        interrupt.run(conversations.fit(problems, *of_prompts))
    return conversations.opening


def reward_line(config: Config, domains: dict[str, DomainConfig]) -> str:
    """The parts of the reward that are not off, with their weights, and what judges correctness."""
    weights = config.verifier.reward
    judges = {
        name: domain.verifier if isinstance(domain.verifier, str) else "your function"
        for name, domain in domains.items()
        if domain.verifier
    }
    by = ", ".join(dict.fromkeys(f"{name} verifier" for name in judges.values()))
    if config.environment_rewards:
        by = f"the environment, {config.conversation.reward} of its turns"
    parts = []
    if weights.format and any(domain.format.has_conditions for domain in domains.values()):
        parts.append(f"format {weights.format:g}")
    if weights.correctness and by:
        parts.append(f"correctness {weights.correctness:g} ({by})")
    parts += [f"{c.name} {c.weight:g} (yours)" for c in weights.custom if c.weight]
    parts += [f"judge {weights.judge:g}"] if weights.judge else []
    parts += [f"language {weights.language:g}"] if weights.language else []
    parts += [f"length down to −{weights.length:g}"] if weights.length else []
    return " + ".join(parts) or "none"


def prompt_line(prepared: Prepared, characters: int | None = None) -> str:
    """The first training prompt as the chat template renders it; see `shown_prompt`."""
    if prepared.config.data.environment:
        return "written by the environment, and shown once the run has started it"
    tools, problem = described(prepared.config.data), next(iter(prepared.sample), None)
    if tools and problem:
        encoder = next(iter(prepared.encoder.levels.values()), prepared.encoder)
        return one_line(encoder.render(problem.prompt, problem.where, tools), characters)
    return shown_prompt(next(iter(prepared.probes), []), prepared.encoder, characters)


def shown_prompt(ids: Sequence[int], encoder: PromptEncoder, characters: int | None = None) -> str:
    """A prompt's tokens as text on one line, special tokens included, with a sign for each line
    break; its middle is left out above a number of characters."""
    return one_line(encoder.decode(ids), characters)


def one_line(text: str, characters: int | None) -> str:
    """A text on one line, without its middle above a number of characters."""
    return shortened(text.replace("\n", "⏎"), characters or len(text))


def model_line(config: Config) -> str:
    """Name, size and number type of the trained model, and how its rows are computed."""
    shape, types = load_shape(config.model), number_types(config)
    lora = f", LoRA of rank {config.trainer.lora.rank}" if config.trainer.lora else ""
    kind = types["trainer"].partition(" ")[0]
    rows = "; layers with state take one sequence a row" * shape.stateful
    size = f"{sized(shape.parameters)} parameters"
    weights = config.generator.weights
    eight = "" if weights == "full" else f"; sampled with {weights} weights (generator.weights)"
    return f"{config.model}, {size}{lora}; {kind} on {config.trainer.device}{eight}{rows}"


def sized(parameters: int) -> str:
    """A number of parameters as text."""
    millions = parameters / 1e6
    return f"{millions / 1e3:,.1f} billion" if millions >= 1e3 else f"{millions:,.1f} million"


def _train_line(prepared: Prepared) -> str:
    streams = prepared.problems.streams
    lines = [
        f"{name_of(stream.config.train)}, {_rows(stream)}{_dropped(stream, prepared)}"
        f"{_unseen(stream)}"
        for stream in streams
    ]
    selecting = [n for n, stage in enumerate(prepared.stages) if stage.data.selects]
    numbers = ", then ".join(f"{prepared.problems.selected(n):,}" for n in selecting)
    selected = f"; {numbers} within the pass rates" if selecting else ""
    return "; then ".join(name for name, _ in groupby(lines)) + selected


def _rows(stream: ProblemStream) -> str:
    return _count(len(stream.problems), "row") if stream.problems else "generated without end"


def _dropped(stream: ProblemStream, prepared: Prepared) -> str:
    if not (stream.problems and stream.dropped):
        return ""
    reasons = (f"{count:,} dropped: {reason}" for reason, count in stream.dropped.items())
    return f" ({'; '.join(reasons)})"


def _unseen(stream: ProblemStream) -> str:
    """Columns of a finite source that no prompt has, so that choices or a passage in one of them
    are missed."""
    names = {name: None for problem in stream.problems or () for name in problem.metadata}
    shown = ", ".join([*names][:UNSEEN]) + ", …" * (len(names) > UNSEEN)
    return f"; the model does not see {shown}" if names else ""


def _held_out_line(prepared: Prepared) -> str:
    sets = prepared.sets
    if not sets:
        return "none: nothing is measured before and after training (data.eval)"
    sources = {HELD_OUT: prepared.config.data.eval}
    sources |= {n: also.source for n, also in prepared.config.evaluation.also.items()}
    return "; ".join(
        f"{name_of(sources[name] or name)}, {_count(len(each.problems), 'row')} × "
        f"{each.sampling.samples}"
        for name, each in sets.items()
    )


def _objective_line(prepared: Prepared) -> str:
    config = prepared.config
    objective = config.trainer.objective
    added = "".join(f" + {weight:g} × {name}" for name, weight in objective.add.items())
    teacher = f", teacher {config.teacher.model}" if config.teacher else ""
    rate = prepared.rates["learning rate"]
    return f"{objective.name}{added}{teacher}; learning rate {rate}"


def _batch_line(config: Config) -> str:
    pipeline = config.pipeline
    return (
        f"{_count(pipeline.updates, 'update')} of {_count(pipeline.groups_per_batch, 'prompt')} × "
        f"{pipeline.group_size} completions of up to {pipeline.l_max:,} tokens"
    )


def _environment_line(prepared: Prepared) -> str:
    data = prepared.config.data
    paths = dict.fromkeys(environment_of(data, problem) for problem in prepared.sample)
    names = [load(path).__qualname__ for path in paths if path]
    tools = [load(path, "data.tools").__qualname__ for path in data.tools]
    given = [", ".join(names), f"tools {', '.join(tools)}" if tools else ""]
    return f"{'; '.join(filter(None, given))}; up to {prepared.config.conversation.turns} turns"


def _domains(prepared: Prepared) -> dict[str, DomainConfig]:
    """The domains of the run's problems."""
    known = prepared.config.verifier.domains
    return {name: known[name] for name in _domain_names(prepared.sample) if name in known}


def _domain_names(problems: Iterable[Problem]) -> dict[str, None]:
    return dict.fromkeys(problem.domain for problem in problems)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
