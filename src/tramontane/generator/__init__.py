"""Prompts → completions: a slot engine whose weights can change while sequences are in flight, and
vLLM behind the same interface."""

from tramontane.config import GeneratorConfig
from tramontane.generator.engine import SlotEngine
from tramontane.generator.generator import Generator
from tramontane.generator.interface import AnyGenerator
from tramontane.generator.vllm import HEARTBEAT, VllmGenerator
from tramontane.types import ResponseText


def load_generator(
    model: str,
    config: GeneratorConfig,
    slots: int,
    max_len: int,
    response: ResponseText = ResponseText(),  # noqa: B008 (immutable)
    heartbeat: float = HEARTBEAT,
) -> AnyGenerator:
    """The generator of `config.kind` with the weights of a checkpoint.

    Args:
        model: checkpoint folder, Hugging Face name or `tiny`.
        config: its `kind` chooses the engine.
        slots: maximum number of completions decoded at once.
        max_len: maximum length of a prompt plus its `max_tokens`, in tokens.
        response: thinking tags, and the beginning of every response, for the completions' text.
        heartbeat: longest silence before vLLM's process counts as hung, in seconds.

    Raises:
        InputError: see `Generator.load` and `VllmGenerator`.
    """
    if config.kind == "vllm":
        return VllmGenerator(model, config, slots, max_len, response, heartbeat)
    return Generator.load(model, config, slots, max_len, response)
