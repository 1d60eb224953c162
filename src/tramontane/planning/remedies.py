"""Changes of a config that make a run fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from tramontane.config import Config, Section
from tramontane.config.device import number_type
from tramontane.controller.generators import slots

S = TypeVar("S", bound=Section)
# Kinds of workers, and what the workers on a GPU keep on their host.
GENERATOR, RANK = "generator", "trainer rank"
STAGED, OFFLOADED = "staged weights", "offloaded inputs"
MAX_RANKS = 1 << 14
SHARES = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3)


class Change(NamedTuple):
    """A key, its value now, and values to try in this order."""

    key: str
    now: Any
    values: tuple[Any, ...]


def remedies(
    stages: Sequence[Config],
    longest: int,
    workers: Collection[str],
    fits: Callable[[Sequence[Config]], bool],
) -> str:
    """Human-readable advice: single changes that suffice, or else all of them together.

    Args:
        stages: the config of each stage.
        longest: tokens of the longest prompt and completion together.
        workers: names of the workers on the device that is too small.
        fits: returns whether changed stages fit.
    """
    # A key at its last value has none left.
    changes = [change for change in _changes(stages, longest, workers) if change.values]
    single = [text for change in changes if (text := _first(stages, [change], fits))]
    if single:
        return f"set {' or '.join(single)}"
    if together := _first(stages, changes, fits):
        return f"set {together}"
    keys = ", ".join(change.key for change in changes)
    return (
        f"no other value of {keys or 'the config'} is enough; lower pipeline.l_max, or take "
        f"devices with more memory"
    )


def _first(
    stages: Sequence[Config], changes: Sequence[Change], fits: Callable[[Sequence[Config]], bool]
) -> str | None:
    """The first values with which the run fits, as text; all values of the last change are tried,
    with the last values of the others. None if none fits."""
    if not changes:
        return None
    *others, last = changes
    settled = [(change, change.values[-1]) for change in others]
    for value in last.values:
        chosen = [*settled, (last, value)]
        changed = stages
        for change, new in chosen:
            changed = [with_key(stage, change.key, new) for stage in changed]
        if fits(changed):
            return ", ".join(f"{c.key}={_text(new)} (now {_text(c.now)})" for c, new in chosen)
    return None


def _changes(stages: Sequence[Config], longest: int, workers: Collection[str]) -> Iterator[Change]:
    """Changes that lower these workers' memory, the cheapest first."""
    generator, trainer = stages[0].generator, stages[0].trainer
    if GENERATOR in workers and generator.dtype == "float32" and _is_fast(generator.device):
        yield Change("generator.dtype", "float32", ("bfloat16",))
    vllm = generator.kind == "vllm"
    if GENERATOR in workers and not vllm and generator.device == "cpu":
        now = generator.slots or max(slots(stage) for stage in stages)
        fewer = tuple(now >> n for n in range(1, now.bit_length()))
        yield Change("generator.slots", now, fewer)
    if GENERATOR in workers and vllm:
        now = generator.vllm.tensor_parallel
        more = tuple(gpus for gpus in (2, 4, 8, 16) if gpus > now)
        yield Change("generator.vllm.tensor_parallel", now, more)
    elif GENERATOR in workers and generator.device != "cpu" and generator.staging == "device":
        yield Change("generator.staging", "device", ("host",))
    if GENERATOR in workers and generator.gpu_memory_utilization is not None:
        share = generator.gpu_memory_utilization
        lower = tuple(s for s in SHARES if s < share)
        yield Change("generator.gpu_memory_utilization", share, lower)
    if STAGED in workers:
        yield Change("generator.staging", "host", ("device",))
    if OFFLOADED in workers:
        yield Change("trainer.activation_offload", True, (False,))
    if RANK in workers:
        if trainer.threads > 1:
            yield Change("trainer.threads", trainer.threads, (1,))
        if trainer.ranks > 1 and trainer.reduce_gradients == "step":
            yield Change("trainer.reduce_gradients", "step", ("microbatch",))
        if trainer.dtype == "float32" and _is_fast(trainer.device):
            yield Change("trainer.dtype", "float32", ("bfloat16",))
        if trainer.microbatch_tokens > longest:
            yield Change("trainer.microbatch_tokens", trainer.microbatch_tokens, (longest,))
        if not trainer.gradient_checkpointing:
            yield Change("trainer.gradient_checkpointing", False, (True,))
        elif not trainer.activation_offload and trainer.device != "cpu":
            if trainer.keeps_attention:
                yield Change("trainer.gradient_checkpointing", True, ("full",))
            yield Change("trainer.activation_offload", False, (True,))
        minibatches = [stage.pipeline.minibatch for stage in stages]
        ranks = [trainer.ranks * 2**n for n in range(1, MAX_RANKS.bit_length())]
        sharing = trainer.context_parallel
        more = tuple(r for r in ranks if all(m % (r // sharing) == 0 for m in minibatches))
        if more and trainer.device != "cpu":
            yield Change("trainer.ranks", trainer.ranks, more)


def _is_fast(device: str) -> bool:
    """True if bfloat16 is not slower than float32 on a device."""
    return number_type(device).dtype == "bfloat16"


def with_key(section: S, key: str, value: Any) -> S:
    """A copy of a section with one dotted key changed, unchecked."""
    name, _, rest = key.partition(".")
    new = with_key(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: new})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
